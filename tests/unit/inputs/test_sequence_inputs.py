"""Inputs of a prompt, continued for its completion."""

from __future__ import annotations

import pytest
import torch

from nrl_models import Sampling, registry, rollout_logprobs
from nrl_models.engines.hf import HFEngine
from nrl_models.testing.case import FamilyCase


@pytest.mark.parametrize("name", ["PaliGemmaForConditionalGeneration"])
def test_completion_has_the_same_logprobs_in_engine_and_trainer(name: str) -> None:
    case = FamilyCase(registry.model_class(name))
    inputs, model = case.inputs(images=True, batch=1), case.new_pair()[0].eval()
    prompt = inputs.pop("input_ids")[0].tolist()
    inputs |= {kind: torch.zeros(1, len(prompt), dtype=torch.long) for kind in inputs if kind == "token_type_ids"}
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            parameter.mul_(2)
    engine = HFEngine(model)
    (sample,) = engine.generate([prompt], Sampling(), max_new_tokens=6, model_inputs=[inputs], seed=1)
    count, given = len(sample.tokens), [sample.sequence_inputs]
    assert count > 1
    score = [[False] * len(prompt) + [True] * count]
    found = rollout_logprobs(model, [sample.sequence], score=score, model_inputs=given).logprobs[0, -count:]
    assert found.tolist() == pytest.approx(sample.logprobs, abs=1e-4)
    (scores,) = engine.score([sample.sequence], Sampling(), last=count, model_inputs=given)
    assert scores[-count:] == pytest.approx(sample.logprobs, abs=1e-4)
