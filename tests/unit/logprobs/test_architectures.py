"""`token_logprobs` on every registered language model, parametrized like the equivalence tests."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

from nrl_models.common.documents.packing import token_positions
from nrl_models.common.upstream import computes_positions, has_reached
from nrl_models.errors import HeadError
from nrl_models.logprobs import token_logprobs
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.features import applies_to
from nrl_models.testing.suite.conditions import generates, reads_what_it_writes, takes_text

UNSUPPORTED = {
    "BlipForConditionalGeneration": "has no output embedding",
    "ChameleonForConditionalGeneration": "fails after its output embedding",  # it masks tokens by position
    "CpmAntForCausalLM": "attends in both directions",  # transformers' class makes every token context
    "Florence2ForConditionalGeneration": "has an encoder",
    "NemotronH_Omni_Reasoning_V3": "has no output embedding",  # the language model inside has it
    "PaliGemmaForConditionalGeneration": "attends in both directions without token_type_ids",
    "ProphetNetForCausalLM": "calls its output embedding",  # it calls it on several token streams
}
"""Architectures whose logits are not an output embedding of states that see earlier tokens only, with the message."""

if not has_reached("5.24"):  # its head had padding rows in the vocabulary, which it removed
    UNSUPPORTED |= dict.fromkeys(
        ("Inkling2ForCausalLM", "Inkling2ForConditionalGeneration"), "are not those of its output embedding"
    )


@applies_to(generates, takes_text)
def test_token_logprobs_match_reference_logits(family_case: FamilyCase) -> None:
    input_ids = family_case.inputs(images=False, length=14)["input_ids"]
    if message := UNSUPPORTED.get(family_case.architecture):
        with pytest.raises(HeadError, match=message):
            token_logprobs(family_case.model(), input_ids, chunk_size=5)
        return
    with torch.no_grad():
        try:
            logits = family_case.reference()(input_ids=input_ids, use_cache=False).logits
        except Exception as error:  # transformers' class does not run on text only
            with pytest.raises(type(error), match=re.escape(str(error))):
                token_logprobs(family_case.model(), input_ids, chunk_size=5, entropy=True)
            return
        result = token_logprobs(family_case.model(), input_ids, chunk_size=5, entropy=True)
        logs = logits.log_softmax(-1)[:, :-1]
    expected = logs.gather(-1, input_ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(result.logprobs[:, 1:], expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(result.entropy[:, 1:], -(logs.exp() * logs).sum(-1), rtol=1e-4, atol=1e-4)


@applies_to(generates, reads_what_it_writes, takes_text)
@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
def test_mask_of_ones_does_not_change_logprobs(family_case: FamilyCase, images: bool) -> None:
    """The model computes its positions from token IDs or images, with a mask of ones as without a mask."""
    inputs: dict[str, Any] = dict(family_case.inputs(images=images, length=14))
    ids = inputs.pop("input_ids")
    inputs.pop("attention_mask", None)
    if images and not inputs:
        return  # the class takes only text
    masks: list[dict[str, Any]] = [
        {},
        *({"attention_mask": torch.ones_like(ids, dtype=dtype)} for dtype in (torch.long, torch.bool)),
    ]
    with torch.no_grad():
        try:
            logits = family_case.reference()(input_ids=ids, use_cache=False, **inputs).logits
            scored = ids < logits.shape[-1]  # IDs of image placeholders may be larger than the vocabulary
            results = [
                token_logprobs(family_case.model(), ids, score=scored, chunk_size=None, **inputs, **mask)
                for mask in masks
            ]
        except Exception as error:  # transformers' class does not run on text only, or ours does not support it
            for mask in masks:
                with pytest.raises((type(error), HeadError)):
                    token_logprobs(family_case.model(), ids, chunk_size=None, **inputs, **mask)
            return
    expected = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None].clamp_max(logits.shape[-1] - 1))[..., 0]
    for result in results:
        assert torch.equal(result.mask[:, 1:], scored[:, 1:])
        torch.testing.assert_close(result.logprobs[:, 1:], expected * scored[:, 1:], rtol=0, atol=1e-4)


@applies_to(generates, reads_what_it_writes, takes_text)
def test_mask_with_holes_gives_logprobs_of_reference(family_case: FamilyCase) -> None:
    """Positions count tokens, as in `generate`, unless the model computes them from token IDs."""
    ids = family_case.inputs(images=False, length=14)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 1] = mask[0, 4:6] = mask[0, -2:] = mask[1, 3::2] = 0
    inputs: dict[str, Any] = {"attention_mask": mask, "use_cache": False}
    takes_positions = "position_ids" in inspect.signature(family_case.reference_class.forward).parameters
    if takes_positions and not computes_positions(family_case.reference(), media=False):
        inputs["position_ids"] = token_positions(mask)
    with torch.no_grad():
        try:
            logits = family_case.reference()(input_ids=ids, **inputs).logits
            results = [
                token_logprobs(family_case.model(), ids, attention_mask=mask.to(dtype), chunk_size=None)
                for dtype in (torch.long, torch.bool, torch.float32)
            ]
        except Exception as error:  # transformers' class does not run on text only, or ours does not support it
            with pytest.raises((type(error), HeadError)):
                token_logprobs(family_case.model(), ids, chunk_size=None)
            return
    expected = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    scored = mask[:, 1:].bool() & mask[:, :-1].bool()
    for result in results:
        assert torch.equal(result.mask[:, 1:], scored)
        torch.testing.assert_close(result.logprobs[:, 1:], expected * scored, rtol=0, atol=1e-4)
