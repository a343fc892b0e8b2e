"""Sequences: padded, packed, reordered, decoded one by one."""

from __future__ import annotations

import pytest
import torch

from nrl_models.testing.case import FamilyCase
from nrl_models.testing.features import proves
from nrl_models.testing.suite.asserts import assert_close


@proves("padding")
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(family_case: FamilyCase, side: str) -> None:
    """A sequence has the same logits alone and padded in a batch, on either side."""
    if side == "left" and family_case.architecture.endswith("SequenceClassification"):
        pytest.skip("transformers' classification heads take the last token that is not padding")
    model = family_case.model()
    documents = _documents(family_case)
    length = max(len(document) for document in documents)
    input_ids = torch.zeros(len(documents), length, dtype=torch.long, device=family_case.device)
    mask = torch.zeros_like(input_ids)
    for row, document in enumerate(documents):
        place = slice(length - len(document), None) if side == "left" else slice(len(document))
        input_ids[row, place], mask[row, place] = document, 1
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=input_ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits
        alone = [model(input_ids=document[None], use_cache=False).logits[0] for document in documents]
    for row, expected in enumerate(alone):
        actual = logits[row] if logits.ndim == 2 else logits[row][mask[row].bool()]
        assert_close(actual, expected, scale=10)  # matmuls of other shapes add up in another order


@proves("packed sequences")
def test_packing(family_case: FamilyCase) -> None:
    """Sequences packed into one row, told apart by their positions, have the logits they have alone."""
    if family_case.architecture.endswith("SequenceClassification"):
        pytest.skip("a sequence classifier has one score a row")
    model = family_case.model()
    documents = _documents(family_case)
    position_ids = torch.cat([torch.arange(len(document)) for document in documents])[None].to(family_case.device)
    with torch.no_grad():
        packed = model(input_ids=torch.cat(documents)[None], position_ids=position_ids, use_cache=False).logits[0]
        alone = torch.cat([model(input_ids=document[None], use_cache=False).logits[0] for document in documents])
    assert_close(packed, alone, scale=10)


def _documents(case: FamilyCase) -> list[torch.Tensor]:
    rows = case.inputs(batch=3, length=13, images=False, seed=3)["input_ids"]
    return [row[:size] for row, size in zip(rows, (7, 13, 10), strict=True)]


@proves("generate")
def test_cached_decode(family_case: FamilyCase) -> None:
    """Decoding token by token with a cache gives the logits of one full forward."""
    if not family_case.model().can_generate():
        pytest.skip("does not generate")
    model = family_case.model()
    input_ids = family_case.inputs(length=14, images=False)["input_ids"]
    with torch.no_grad():
        full = model(input_ids=input_ids, use_cache=False).logits
        output = model(input_ids=input_ids[:, :10], use_cache=True)
        steps = [output.logits]
        for token in range(10, 14):
            output = model(
                input_ids=input_ids[:, token : token + 1], past_key_values=output.past_key_values, use_cache=True
            )
            steps.append(output.logits)
    assert_close(torch.cat(steps, dim=1), full, scale=10)


@proves("generate")
def test_greedy_generation(family_case: FamilyCase) -> None:
    """`generate` picks the reference's tokens."""
    if not family_case.model().can_generate():
        pytest.skip("does not generate")
    inputs = family_case.inputs(length=12)
    options = {"max_new_tokens": 8, "do_sample": False, "min_new_tokens": 8}
    actual = family_case.model().generate(**inputs, **options)
    assert torch.equal(actual, family_case.reference().generate(**inputs, **options))
    assert actual.shape[1] == inputs["input_ids"].shape[1] + 8
