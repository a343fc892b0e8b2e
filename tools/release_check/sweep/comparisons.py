"""Compare the results of our class with those of the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from tools.release_check.cached_steps import NoCacheError, cache_argument, cached_logits, full_logits
from tools.release_check.sweep.class_under_test import ClassUnderTest, NotApplicableError
from tools.release_check.sweep.independent import independent_logits
from tools.release_check.sweep.outcomes import Reference

MASKED_ABOVE = 1e30
"""Some models set logits of tokens they never generate to the lowest number of the dtype."""

COMPLETION = 4
"""Number of generated tokens."""


class ReferenceFailedError(Exception):
    """The reference raised an error (the cause), and ours raised the same."""


@dataclass(frozen=True)
class Comparison:
    """A result of our class and of the reference.

    Args:
        reference: The reference.
        max_diff: The largest difference.
        detail: The location of the difference.
    """

    reference: Reference
    max_diff: float
    detail: str = ""


Comparisons = Iterator[Comparison]


def compare_logits(case: ClassUnderTest, inputs: dict[str, Any]) -> Comparisons:
    """Compare logits of one forward. Also uses an independent implementation if transformers has no such family."""

    @torch.no_grad()
    def run(model: PreTrainedModel) -> torch.Tensor:
        return model(**inputs, use_cache=False).logits

    yield from compare_call(case, run)
    if not case.is_transformers:
        expected = independent_logits(case.reference(), inputs)
        if expected is not None:
            yield Comparison(Reference.INDEPENDENT, difference(run(case.model), expected))


def compare_call(case: ClassUnderTest, run: Callable[[PreTrainedModel], Any]) -> Comparisons:
    """Compare the results of `run` for our class and for the reference.

    Raises:
        ReferenceFailedError: transformers' class raises an error of the same type as ours.
    """
    try:
        expected = run(case.reference())
    except Exception as error:
        if not case.is_transformers:
            raise
        _raise_unless_alike(case, run, error)
        raise ReferenceFailedError from error
    kind = Reference.SAME_CALL if case.is_transformers else Reference.PLAIN_FORWARD
    yield Comparison(kind, difference(run(case.model), expected))


def _raise_unless_alike(case: ClassUnderTest, run: Callable[[PreTrainedModel], Any], error: Exception) -> None:
    """Run our class after the reference raised `error`. Raises our error if its type differs."""
    try:
        run(case.model)
    except Exception as own:
        if type(own) is not type(error):
            raise


def compare_cached_steps(case: ClassUnderTest, inputs: dict[str, Any]) -> Comparisons:
    """Compare logits of single steps with a cache."""
    try:
        name = cache_argument(case.reference(), reference_class=case.reference_class)
    except NoCacheError as error:
        raise NotApplicableError(str(error)) from error
    own_name = cache_argument(case.model, reference_class=case.reference_class)
    yield from _against_same_call_and_full_forward(
        case,
        lambda model: cached_logits(model, inputs, own_name if model is case.model else name),
        lambda model: full_logits(model, inputs),
    )


def compare_greedy(case: ClassUnderTest, inputs: dict[str, Any]) -> Comparisons:
    """Compare the logits of greedy generation with a cache."""
    yield from _against_same_call_and_full_forward(
        case,
        lambda model: generated_logits(model, inputs, use_cache=True),
        lambda model: generated_logits(model, inputs, use_cache=False),
    )


def _against_same_call_and_full_forward(
    case: ClassUnderTest,
    cached: Callable[[PreTrainedModel], torch.Tensor],
    full: Callable[[PreTrainedModel], torch.Tensor],
) -> Comparisons:
    """Compare with transformers' class in the same call, then with the reference without a cache.

    A cached call of a plain implementation is not a reference, because it may share its bug with our class.
    """
    if case.is_transformers:
        yield from compare_call(case, cached)
    try:
        expected = full(case.reference())
    except Exception:
        if not case.is_transformers:
            raise
        return  # some classes cannot run without a cache; the same call agreed
    kind = Reference.FULL_FORWARD if case.is_transformers else Reference.PLAIN_FORWARD
    yield Comparison(kind, difference(cached(case.model), expected))


@torch.no_grad()
def generated_logits(model: PreTrainedModel, inputs: Mapping[str, Any], *, use_cache: bool) -> torch.Tensor:
    """Return the logits `(batch, COMPLETION, vocabulary)` from which `generate` selects its tokens."""
    output: Any = model.generate(  # type: ignore[operator]
        **inputs,
        max_new_tokens=COMPLETION,
        min_new_tokens=COMPLETION,
        do_sample=False,
        use_cache=use_cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(output.logits, dim=1)


def difference(actual: Any, expected: Any) -> float:
    """Return the largest difference of two tensors or dicts of tensors, relative if `expected` is above one.

    Returns infinity if names, shapes or positions of NaNs differ.
    """
    if isinstance(expected, Mapping):
        if actual.keys() != expected.keys():
            return float("inf")
        return max((difference(actual[name], expected[name]) for name in expected), default=0.0)
    if actual.shape != expected.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    first, second = actual.double(), expected.double()
    same = (first == second) | (first.isnan() & second.isnan())
    finite = second[second.abs() < MASKED_ABOVE]
    scale = max(1.0, finite.abs().max().item()) if finite.numel() else 1.0
    found = torch.where(same, 0.0, (first - second).abs()).nan_to_num(nan=float("inf"), posinf=float("inf"))
    return found.max().item() / scale


def compare_tensors(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> Comparisons:
    """Compare names and values."""
    if names := sorted(actual.keys() ^ expected.keys()):
        yield Comparison(Reference.SAME_CALL, float("inf"), f"only in one of the models: {', '.join(names[:4])}")
        return
    for name, tensor in expected.items():
        yield Comparison(Reference.SAME_CALL, difference(actual[name], tensor), name)


def compare_dtypes(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.dtype]) -> Comparisons:
    """Compare the dtype of each expected tensor."""
    for name, dtype in expected.items():
        own = actual[name].dtype if name in actual else None
        yield Comparison(
            Reference.SAME_CALL, 0.0 if own == dtype else float("inf"), f"{name} is {own}, expected {dtype}"
        )
