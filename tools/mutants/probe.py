"""Detect whether a bug changes a model's outputs, on longer and more varied inputs than the generated tests use."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nrl_models.common.documents.packing import token_positions
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.suite.test_sequences import decoded_steps

LENGTH = 40
"""Longer than the suite's sequences, and than any window of a tiny model."""


def probe(case: FamilyCase) -> list[torch.Tensor]:
    """Return logits of an unpadded batch with images, a padded batch, packed documents and decoded tokens.

    The result is empty for inputs that a model does not support.
    """
    results = []
    for outputs in (_plain, _padded, _packed, _decoded):
        try:
            with torch.no_grad():
                results.append(outputs(case))
        except Exception:  # not every model supports all of these inputs
            results.append(torch.empty(0))
    return results


def same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Return True if the results agree up to rounding in fp32. A shift of relative positions, for example, changes no
    more.

    Results that are empty for the correct model are ignored.
    """
    return all(
        found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-6, atol=3e-6 * float(wanted.abs().max()))
        for found, wanted in zip(actual, expected, strict=True)
        if wanted.numel()
    )


def _plain(case: FamilyCase) -> torch.Tensor:
    return case.model()(**case.inputs(length=LENGTH, seed=7), use_cache=False).logits


def _padded(case: FamilyCase) -> torch.Tensor:
    input_ids = case.inputs(length=LENGTH, images=False, seed=8)["input_ids"]
    mask = torch.ones_like(input_ids)
    mask[0, : LENGTH // 2] = 0
    positions = token_positions(mask)
    logits = case.model()(input_ids=input_ids, attention_mask=mask, position_ids=positions).logits
    return logits[mask.bool()] if logits.ndim == 3 else logits


def _packed(case: FamilyCase) -> torch.Tensor:
    if case.architecture.endswith("SequenceClassification"):
        return torch.empty(0)  # one score per sequence
    input_ids = case.inputs(batch=1, length=LENGTH, images=False, seed=9)["input_ids"]
    positions = torch.cat([torch.arange(LENGTH // 2)] * 2)[None].to(case.device)
    mask = torch.ones_like(input_ids)
    return case.model()(input_ids=input_ids, attention_mask=mask, position_ids=positions).logits


def _decoded(case: FamilyCase) -> torch.Tensor:
    model = case.model()
    if not model.can_generate():
        return torch.empty(0)
    steps = decoded_steps(model, case.inputs(length=LENGTH - 2, images=False, seed=10), steps=2)
    return torch.cat(steps[1:], dim=1)
