"""Positions with planes (M-RoPE) in `token_logprobs`: `(3, batch, seq_len)` and `(4, batch, seq_len)`."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from nrl_models import registry, token_logprobs
from nrl_models.testing.case import FamilyCase

M_ROPE = cast(Any, registry.model_class("Qwen2_5_VLForConditionalGeneration"))

IDS = torch.randint(20, 300, (2, 9), generator=torch.Generator().manual_seed(0))


def planes_of_images() -> tuple[FamilyCase, dict[str, Any], torch.Tensor, torch.Tensor]:
    """Return a case of M-RoPE, its inputs with an image, positions with 3 planes, and transformers' log-probabilities.

    The positions are doubled, so that they are not those that the model computes.
    """
    case = FamilyCase(M_ROPE)
    inputs, reference = case.inputs(images=True, batch=1), case.reference()
    inputs.pop("attention_mask", None)
    types = {"mm_token_type_ids": inputs["mm_token_type_ids"], "image_grid_thw": inputs["image_grid_thw"]}
    planes = 2 * reference.model.get_rope_index(input_ids=inputs["input_ids"], **types)[0]
    with torch.no_grad():
        logits = reference(**inputs, position_ids=planes, use_cache=False).logits
    return case, inputs, planes, logits


def logprobs_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None].clamp_max(logits.shape[-1] - 1))[..., 0]
    return logprobs * (ids < 400)[:, 1:]


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "transformers"])
@pytest.mark.parametrize("with_text", [False, True], ids=["3 planes", "4 planes"])
def test_positions_with_planes_are_those_of_transformers(ours: bool, with_text: bool) -> None:
    case, inputs, planes, logits = planes_of_images()
    ids = inputs.pop("input_ids")
    positions = torch.cat([torch.arange(ids.shape[1]).expand(1, 1, -1), planes]) if with_text else planes
    model = case.model() if ours else case.reference()
    found = token_logprobs(model, ids, position_ids=positions, score=ids < 400, **inputs).logprobs
    torch.testing.assert_close(found[:, 1:], logprobs_of(logits, ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("boundaries", [False, True], ids=["4 planes", "3 planes and cu_seq_lens_q"])
@pytest.mark.parametrize("padding", [0, 3])
def test_documents_with_planes_stay_apart(boundaries: bool, padding: int) -> None:
    case, inputs, planes, logits = planes_of_images()
    ids, text = inputs.pop("input_ids"), IDS[:1]
    counted = torch.arange(text.shape[1])
    packed = torch.nn.functional.pad(torch.cat([text, ids], 1), (0, padding))
    sizes = [text.shape[1], ids.shape[1], *([padding] if padding else [])]
    starting = torch.cat([torch.arange(size) for size in sizes])
    more: dict[str, Any] = {"attention_mask": (torch.arange(sum(sizes)) < sum(sizes[:2])).long()[None]}
    positions = torch.cat([3 * counted.expand(3, 1, -1), planes, torch.zeros(3, 1, padding).long()], 2)
    if boundaries:
        more["cu_seq_lens_q"] = torch.tensor([0, *sizes]).cumsum(0).int()
    else:
        positions = torch.cat([starting.expand(1, 1, -1), positions])
    inputs["mm_token_type_ids"] = torch.cat(
        [torch.zeros_like(text), inputs["mm_token_type_ids"], torch.zeros(1, padding).long()], 1
    )
    model = case.model()
    found = token_logprobs(model, packed, position_ids=positions, score=packed < 400, **inputs, **more).logprobs
    with torch.no_grad():
        alone = case.reference()(input_ids=text, position_ids=3 * counted.expand(3, 1, -1), use_cache=False).logits
    torch.testing.assert_close(found[:, 1 : len(counted)], logprobs_of(alone, text), rtol=0, atol=1e-5)
    images = slice(len(counted) + 1, sum(sizes[:2]))
    torch.testing.assert_close(found[:, images], logprobs_of(logits, ids), rtol=0, atol=1e-5)
    assert found[0, len(counted)] == 0
    assert not found[0, sum(sizes[:2]) :].any()


@pytest.mark.parametrize("count", [3, 4])
def test_planes_move_with_left_padding(count: int) -> None:
    case = FamilyCase(M_ROPE)
    ids, planes = IDS[:2], torch.stack([step * torch.arange(IDS.shape[1]).expand(2, -1) for step in (2, 3, 5)])
    with torch.no_grad():
        logits = case.reference()(input_ids=ids, position_ids=planes, use_cache=False).logits
    counted = torch.arange(IDS.shape[1]).expand(1, 2, -1)
    positions = planes if count == 3 else torch.cat([counted, planes])
    pad = torch.nn.functional.pad
    mask = pad(torch.ones_like(ids), (2, 0))
    found = token_logprobs(case.model(), pad(ids, (2, 0)), attention_mask=mask, position_ids=pad(positions, (2, 0)))
    torch.testing.assert_close(found.logprobs[:, 3:], logprobs_of(logits, ids), rtol=0, atol=1e-5)
    assert not found.logprobs[:, :3].any()


@pytest.mark.parametrize(
    ("architecture", "count", "message"),
    [
        ("LlamaForCausalLM", 3, r"LlamaForCausalLM expects \(batch, seq_len\)$"),
        ("Qwen2_5_VLForConditionalGeneration", 2, r"expects \(batch, seq_len\), or 3 or 4 planes of them"),
    ],
)
def test_models_do_not_take_other_planes(architecture: str, count: int, message: str) -> None:
    model = FamilyCase(cast(Any, registry.model_class(architecture))).model()
    with pytest.raises(ValueError, match=message):
        token_logprobs(model, IDS, position_ids=torch.arange(IDS.shape[1]).expand(count, *IDS.shape))
