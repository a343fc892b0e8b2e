"""Inputs of a prompt, continued for its completion."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from nrl_models import Sampling, registry, rollout_logprobs
from nrl_models.engines import Sample
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import EngineError, UnknownArgumentError
from nrl_models.logprobs.token_inputs import LeftPadding
from nrl_models.testing.case import FamilyCase


@pytest.mark.parametrize("name", ["PaliGemmaForConditionalGeneration", "MllamaForConditionalGeneration"])
def test_completion_logprobs_match_in_engine_and_trainer(name: str) -> None:
    case = FamilyCase(registry.model_class(name))
    inputs, model = case.inputs(images=True, batch=1), case.new_pair()[0].eval()
    prompt = inputs.pop("input_ids")[0].tolist()
    inputs |= {kind: torch.zeros(1, len(prompt), dtype=torch.long) for kind in inputs if kind == "token_type_ids"}
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            parameter.mul_(2)
    engine = HFEngine(model)
    (sample,) = engine.generate([prompt], Sampling(), max_new_tokens=6, model_inputs=[inputs], seed=1)
    count, sequence_inputs_ = len(sample.tokens), [sample.sequence_inputs]
    assert count > 1
    score = [[False] * len(prompt) + [True] * count]
    logprobs_ = rollout_logprobs(model, [sample.sequence], score=score, model_inputs=sequence_inputs_).logprobs[
        0, -count:
    ]
    assert logprobs_.tolist() == pytest.approx(sample.logprobs, abs=1e-4)
    (scores,) = engine.score([sample.sequence], Sampling(), last=count, model_inputs=sequence_inputs_)
    assert scores[-count:] == pytest.approx(sample.logprobs, abs=1e-4)


def test_arguments_are_continued_by_name() -> None:
    mask = torch.tensor([[[1, 0], [0, 1], [1, 1]]])
    values = {
        "mm_token_type_ids": torch.tensor([[0, 1, 1]]),
        "image_attention_mask": mask,
        "cross_attention_mask": mask[..., None],
        "image_embeds_position_mask": torch.tensor([[False, True, True]]),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "feature_attention_mask": torch.ones(1, 3),
    }
    continued = Sample((5, 6, 7), (8, 9), (0.0, 0.0), model_inputs=values).sequence_inputs
    assert continued["mm_token_type_ids"].tolist() == [[0, 1, 1, 0, 0]]
    assert continued["image_attention_mask"].tolist() == [[[1, 0], [0, 1], [1, 1], [1, 1], [1, 1]]]
    assert torch.equal(continued["cross_attention_mask"], continued["image_attention_mask"][..., None])
    assert continued["image_embeds_position_mask"].tolist() == [[False, True, True, False, False]]
    for name in ("image_grid_thw", "feature_attention_mask"):
        assert continued[name] is values[name]


def test_left_padding_moves_arguments_by_name() -> None:
    padding = LeftPadding(torch.tensor([[1, 2, 0]]))
    features, mask = torch.ones(1, 4), torch.tensor([[[[0]], [[1]], [[2]]]])
    moved = padding.moved_inputs({"cross_attention_mask": mask, "input_features": features})
    assert moved["cross_attention_mask"].flatten().tolist() == [1, 2, 0]
    assert moved["input_features"] is features
    with pytest.raises(UnknownArgumentError, match=r"feature_attention_mask \(1, 3\) may have .* padding on the right"):
        padding.moved_inputs({"feature_attention_mask": torch.ones(1, 3)})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"mm_token_type_ids": torch.zeros(1, 12)},
            r"has mm_token_type_ids \(1, 12\): expected \(1, 24\), a value for",
        ),
        ({"mm_token_type_ids": torch.zeros(24)}, r"has mm_token_type_ids \(24,\): expected \(1, 24\)"),
        ({"mm_token_type_ids": 0}, "has mm_token_type_ids=0: expected a tensor"),
        (
            {"image_grid_thw": [[1, 4, 4]]},
            r"has image_grid_thw=\[\[1, 4, 4\]\]: expected a tensor, as with return_tensors",
        ),
        ({"pixel_values": numpy.zeros((16, 3))}, "has pixel_values=array"),
    ],
)
def test_invalid_model_inputs_raise(wrong: dict[str, Any], message: str) -> None:
    case = FamilyCase(registry.model_class("Qwen2_5_VLForConditionalGeneration"))
    inputs, model = case.inputs(images=True, batch=1), case.new_pair()[0].eval()
    ids = inputs.pop("input_ids")[0].tolist()
    expected = rollout_logprobs(model, [ids], model_inputs=[inputs]).logprobs
    same = inputs | {"video_grid_thw": None, "output_hidden_states": False}
    assert torch.equal(rollout_logprobs(model, [ids], model_inputs=[same]).logprobs, expected)
    engine = HFEngine(model)
    assert engine.score([ids], Sampling(), model_inputs=[same])[0][1:] == pytest.approx(
        expected[0, 1:].tolist(), abs=1e-4
    )
    for call, kind in (
        (lambda model_inputs_: rollout_logprobs(model, [ids], model_inputs=model_inputs_), ValueError),
        (lambda model_inputs_: engine.score([ids], Sampling(), model_inputs=model_inputs_), EngineError),
    ):
        with pytest.raises(kind, match=f"model_inputs of sequence 0 {message}"):
            call([inputs | wrong])
