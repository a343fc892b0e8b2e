"""`token_logprobs` on every registered language model, parametrized like the equivalence tests."""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import Any

import pytest
import torch

from nrl_models.common.documents.packing import token_positions
from nrl_models.common.upstream import computes_positions, has_reached
from nrl_models.errors import HeadError
from nrl_models.logprobs import TokenLogprobs, token_logprobs
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

UNSUPPORTED_IMAGES = {"GitForCausalLM": "expected one column for each token"}
"""Architectures with logits of image patches that have no token, with the message."""

if not has_reached("5.24"):  # its head had padding rows in the vocabulary, which it removed
    UNSUPPORTED |= dict.fromkeys(
        ("Inkling2ForCausalLM", "Inkling2ForConditionalGeneration"), "are not those of its output embedding"
    )


@applies_to(generates, takes_text)
def test_token_logprobs_match_reference_logits(family_case: FamilyCase) -> None:
    ids = family_case.inputs(images=False, length=14)["input_ids"]
    logits = reference_logits(family_case, ids)
    result = result_or_error(family_case, logits, ids, chunk_size=5, entropy=True)
    if isinstance(logits, Exception) or result is None:
        assert isinstance(logits, Exception) or family_case.architecture in UNSUPPORTED
        return
    assert family_case.architecture not in UNSUPPORTED
    logs = logits.log_softmax(-1)[:, :-1]
    expected = logs.gather(-1, ids[:, 1:, None])[..., 0]
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
    logits = reference_logits(family_case, ids, **inputs)
    # IDs of image placeholders may be larger than the vocabulary.
    scored = torch.ones_like(ids, dtype=torch.bool) if isinstance(logits, Exception) else ids < logits.shape[-1]
    masks: list[dict[str, Any]] = [
        {},
        *({"attention_mask": torch.ones_like(ids, dtype=dtype)} for dtype in (torch.long, torch.bool)),
    ]
    for mask in masks:
        result = result_or_error(family_case, logits, ids, images=images, score=scored, **inputs, **mask)
        if isinstance(logits, Exception) or result is None:
            continue
        shown = ids[:, 1:, None].clamp_max(logits.shape[-1] - 1)
        expected = logits.log_softmax(-1)[:, :-1].gather(-1, shown)[..., 0]
        assert torch.equal(result.mask[:, 1:], scored[:, 1:])
        torch.testing.assert_close(result.logprobs[:, 1:], expected * scored[:, 1:], rtol=0, atol=1e-4)


@applies_to(generates, reads_what_it_writes, takes_text)
def test_mask_with_holes_gives_logprobs_of_reference(family_case: FamilyCase) -> None:
    """Positions count tokens, as in `generate`, unless the model computes them from token IDs."""
    ids = family_case.inputs(images=False, length=14)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 1] = mask[0, 4:6] = mask[0, -2:] = mask[1, 3::2] = 0
    inputs: dict[str, Any] = {"attention_mask": mask}
    takes_positions = "position_ids" in inspect.signature(family_case.reference_class.forward).parameters
    if takes_positions and not computes_positions(family_case.reference(), media=False):
        inputs["position_ids"] = token_positions(mask)
    logits = reference_logits(family_case, ids, **inputs)
    scored = mask[:, 1:].bool() & mask[:, :-1].bool()
    for dtype in (torch.long, torch.bool, torch.float32):
        result = result_or_error(family_case, logits, ids, attention_mask=mask.to(dtype))
        if isinstance(logits, Exception) or result is None:
            continue
        expected = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        assert torch.equal(result.mask[:, 1:], scored)
        torch.testing.assert_close(result.logprobs[:, 1:], expected * scored, rtol=0, atol=1e-4)


@torch.no_grad()
def reference_logits(case: FamilyCase, ids: torch.Tensor, **inputs: Any) -> torch.Tensor | Exception:
    """Return the logits of transformers' class, or its error for inputs that it does not accept."""
    try:
        logits: torch.Tensor = case.reference()(input_ids=ids, use_cache=False, **inputs).logits
    except Exception as error:
        return error
    return logits


@torch.no_grad()
def result_or_error(
    case: FamilyCase,
    reference: torch.Tensor | Exception,
    ids: torch.Tensor,
    *,
    images: bool = False,
    chunk_size: int | None = None,
    **arguments: Any,
) -> TokenLogprobs | None:
    """Return the result of `token_logprobs`. None if it raised as transformers' class did, or a declared error."""
    run = partial(token_logprobs, case.model(), ids, chunk_size=chunk_size, **arguments)
    if isinstance(reference, Exception):
        with pytest.raises((type(reference), HeadError)):
            run()
        return None
    declared = UNSUPPORTED | (UNSUPPORTED_IMAGES if images else {})
    try:
        return run()
    except HeadError as error:
        if not re.search(declared.get(case.architecture, "$^"), str(error)):
            raise
        return None
