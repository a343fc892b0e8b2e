"""The cheap checks of one architecture: our class, loaded from a checkpoint of the reference, against the reference.

The reference is transformers' own class. Families that transformers does not have use a plain implementation in this
repository, which may share a bug with our class. For those, only paths that do not share it count: a forward without a
cache for cached steps and generation, and `independent` if there is an independent implementation.

The modules of this folder import only names from `nrl_models` that commit 7d8db461 has, because they also run on older
checkouts.
"""

from __future__ import annotations

import inspect
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from nrl_models import registry
from nrl_models.errors import NRLModelsError
from nrl_models.inputs.audio import AUDIO
from nrl_models.inputs.images import PIXELS, ImageInputsError
from nrl_models.logprobs import token_logprobs
from tools.release_check.cached_steps import CacheIgnoredError
from tools.release_check.failing_function import failing_function
from tools.release_check.sweep.class_under_test import (
    PROMPT,
    ClassUnderTest,
    MediaInputsError,
    NotApplicableError,
    fp8_checkpoint,
)
from tools.release_check.sweep.comparisons import (
    Comparison,
    Comparisons,
    ReferenceFailedError,
    compare_cached_steps,
    compare_call,
    compare_dtypes,
    compare_greedy,
    compare_logits,
    compare_tensors,
    difference,
)
from tools.release_check.sweep.independent import independent_gradients
from tools.release_check.sweep.outcomes import Check, Outcome, Reference, SweepOutcome

TOLERANCE = 1e-4
"""Largest difference in fp32. Relative if the reference is larger than one."""

UNUSED_BELOW = 1e-6
"""If logits change by less without images or audio, these were not used."""


def _text(case: ClassUnderTest) -> dict[str, Any]:
    if case.why_no_text:
        raise NotApplicableError(case.why_no_text)
    return case.text()


def _media(case: ClassUnderTest) -> dict[str, Any]:
    if not case.takes_media:
        raise NotApplicableError("takes neither images nor audio")
    return case.media()


def _check_load(case: ClassUnderTest) -> Comparisons:
    loaded = case.model
    expected = case.reference_class.from_pretrained(case.checkpoint, dtype=torch.float32)
    yield from compare_tensors(loaded.state_dict(), expected.state_dict())


def _check_dtypes(case: ClassUnderTest) -> Comparisons:
    try:
        with_auto, fp16 = case.dtypes_with_auto, case.reference_dtypes(case.checkpoint, torch.float16)
    except Exception as error:  # any error of transformers' loading code
        raise ReferenceFailedError from error
    yield from compare_dtypes(case.load(case.bf16_checkpoint_without_dtype, dtype="auto").state_dict(), with_auto)
    yield from compare_dtypes(case.load(case.checkpoint, dtype=torch.float16).state_dict(), fp16)


def _check_dequantized(case: ClassUnderTest) -> Comparisons:
    path = fp8_checkpoint(case)
    yield from compare_dtypes(case.load(path, dtype="auto").state_dict(), case.dtypes_with_auto)


def _check_logits(case: ClassUnderTest) -> Comparisons:
    yield from compare_logits(case, _text(case))


def _check_media_logits(case: ClassUnderTest) -> Comparisons:
    inputs = _media(case)
    yield from compare_logits(case, inputs)
    for name in (*PIXELS, *AUDIO):
        if name in inputs and not _uses(case, inputs, name):
            raise MediaInputsError(f"the logits are the same without {name}: the inputs lack tokens for it")


def _uses(case: ClassUnderTest, inputs: dict[str, Any], name: str) -> bool:
    """Return True if the reference has other logits without this input, or requires it."""
    with torch.no_grad():
        expected = case.reference()(**inputs).logits
        try:
            without = case.reference()(**{key: value for key, value in inputs.items() if key != name}).logits
        except Exception:
            return True
    return difference(without, expected) > UNUSED_BELOW


def _check_cached_steps(case: ClassUnderTest) -> Comparisons:
    if not case.generates():
        raise NotApplicableError("does not generate")
    yield from compare_cached_steps(case, _text(case))


def _check_media_cached_steps(case: ClassUnderTest) -> Comparisons:
    if not case.generates():
        raise NotApplicableError("does not generate")
    yield from compare_cached_steps(case, _media(case))


def _check_greedy(case: ClassUnderTest) -> Comparisons:
    if not case.generates():
        raise NotApplicableError("does not generate")
    yield from compare_greedy(case, _text(case))


def _check_media_greedy(case: ClassUnderTest) -> Comparisons:
    if not case.generates():
        raise NotApplicableError("does not generate")
    yield from compare_greedy(case, _media(case))


def _check_left_padding(case: ClassUnderTest) -> Comparisons:
    if case.reference_class.__name__.endswith("SequenceClassification"):
        raise NotApplicableError("has no logits for each token")
    inputs = _text(case)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, :5] = 0
    padded = inputs | {"attention_mask": mask, "input_ids": inputs["input_ids"] * mask}
    words = ... if "decoder_input_ids" in inputs else mask.bool()

    @torch.no_grad()
    def run(model: PreTrainedModel) -> torch.Tensor:
        return model(**padded).logits[words]

    yield from compare_call(case, run)


@torch.no_grad()
def _looks_ahead(case: ClassUnderTest, ids: torch.Tensor, inputs: dict[str, Any]) -> bool:
    """Whether the last token changes the reference's logits of earlier positions."""
    changed = ids.clone()
    changed[:, -1] = ids[:, -2]
    first, second = (case.reference()(input_ids=tokens, use_cache=False, **inputs).logits for tokens in (ids, changed))
    return difference(first[:, :-1], second[:, :-1]) > TOLERANCE


def _check_token_logprobs(case: ClassUnderTest) -> Comparisons:
    if not case.generates():
        raise NotApplicableError("does not generate")
    inputs = case.media() if case.takes_media else _text(case)
    if "input_ids" not in inputs or "decoder_input_ids" in inputs:
        raise NotApplicableError("takes no tokens, or has an encoder for the prompt")
    ids = inputs.pop("input_ids")
    if _looks_ahead(case, ids, inputs):
        raise NotApplicableError("logits of a position depend on later tokens")

    @torch.no_grad()
    def run(model: PreTrainedModel) -> dict[str, torch.Tensor]:
        logits = model(input_ids=ids, use_cache=False, **inputs).logits
        if logits.shape[1] != ids.shape[1]:  # columns of images before the tokens, which `token_logprobs` refuses
            return _logits_with_holes(case, model)
        if model is case.model:
            ones = torch.ones_like(ids)
            found = token_logprobs(model, ids, attention_mask=ones, chunk_size=None, **inputs).logprobs[:, 1:]
        else:
            found = logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        return {"ones": found} | _logits_with_holes(case, model)

    yield from compare_call(case, run)


def _logits_with_holes(case: ClassUnderTest, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return logits of text with padding between tokens. Positions count tokens, as in `generate`."""
    if case.why_no_text or "position_ids" not in inspect.signature(case.reference_class.forward).parameters:
        return {}
    inputs = case.text()
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, 1] = mask[1, 4:6] = 0
    positions = (mask.cumsum(-1) - 1) * mask
    logits = model(**inputs, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return {"holes": logits[mask.bool()]}


def _check_gradients(case: ClassUnderTest) -> Comparisons:
    inputs = case.case.inputs(length=PROMPT, labels=True)

    def run(model: PreTrainedModel) -> dict[str, torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(0)
        with torch.enable_grad():
            model(**inputs, use_cache=False).loss.backward()
        found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        model.zero_grad()
        return found

    yield from compare_call(case, run)
    if not case.is_transformers and (expected := independent_gradients(case.reference(), inputs)) is not None:
        yield Comparison(Reference.INDEPENDENT, difference(run(case.model), expected))


CHECKS: Mapping[Check, Callable[[ClassUnderTest], Comparisons]] = {
    Check.LOAD: _check_load,
    Check.DTYPES: _check_dtypes,
    Check.DEQUANTIZED: _check_dequantized,
    Check.LOGITS: _check_logits,
    Check.MEDIA_LOGITS: _check_media_logits,
    Check.CACHED_STEPS: _check_cached_steps,
    Check.MEDIA_CACHED_STEPS: _check_media_cached_steps,
    Check.GREEDY: _check_greedy,
    Check.MEDIA_GREEDY: _check_media_greedy,
    Check.LEFT_PADDING: _check_left_padding,
    Check.TOKEN_LOGPROBS: _check_token_logprobs,
    Check.GRADIENTS: _check_gradients,
}


def run_checks(architecture: str) -> Iterator[SweepOutcome]:
    """Run every check of an architecture. Yields one outcome per check, in the order of `Check`."""
    if unmet := registry.unmet_requirement(architecture):
        yield from (SweepOutcome(architecture, check, Outcome.UNMET, message=unmet) for check in CHECKS)
        return
    with quiet(), tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        try:
            case = ClassUnderTest(architecture, Path(folder))
            case.reference()
        except Exception as error:
            outcome = _from_error(architecture, Check.LOAD, error)
            yield from (replace(outcome, check=check) for check in CHECKS)
            return
        for check in CHECKS:
            outcome = run_one(architecture, check, case)
            yield replace(outcome, seconds=round(time.monotonic() - started, 3))
            started = time.monotonic()


def run_one(architecture: str, check: Check, case: ClassUnderTest) -> SweepOutcome:
    """Run one check of an architecture. Errors become outcomes."""
    worst: Comparison | None = None
    try:
        for comparison in CHECKS[check](case):
            if worst is None or not comparison.max_diff <= worst.max_diff:
                worst = comparison
            if not comparison.max_diff <= TOLERANCE:
                break
    except Exception as error:
        return _from_error(architecture, check, error)
    if worst is None:
        return SweepOutcome(architecture, check, Outcome.NOT_APPLICABLE, message="nothing to compare")
    if worst.max_diff <= TOLERANCE:
        return SweepOutcome(architecture, check, Outcome.EQUAL, worst.reference, worst.max_diff)
    # Compare the same call first. A difference that only the full forward shows comes from upstream.
    own = worst.reference is Reference.FULL_FORWARD
    outcome = Outcome.REFERENCE_INCONSISTENT if own else Outcome.DIFFERENT
    return SweepOutcome(architecture, check, outcome, worst.reference, worst.max_diff, message=worst.detail)


def _from_error(architecture: str, check: Check, error: Exception) -> SweepOutcome:
    kinds: dict[type[Exception], Outcome] = {
        NotApplicableError: Outcome.NOT_APPLICABLE,
        CacheIgnoredError: Outcome.CACHE_IGNORED,
        MediaInputsError: Outcome.NO_INPUTS,
        ImageInputsError: Outcome.NO_INPUTS,
        ReferenceFailedError: Outcome.REFERENCE_ERROR,
        NRLModelsError: Outcome.TYPED_ERROR,
    }
    outcome = next((found for kind, found in kinds.items() if isinstance(error, kind)), Outcome.RAW_ERROR)
    if outcome is Outcome.NOT_APPLICABLE:
        return SweepOutcome(architecture, check, outcome, message=str(error))
    cause = error.__cause__ if isinstance(error, ReferenceFailedError) and error.__cause__ else error
    message = " ".join(str(cause).split())[:600]
    function = failing_function(cause)
    return SweepOutcome(
        architecture, check, outcome, error_type=type(cause).__name__, message=message, function=function
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Disable warnings of transformers and nrl_models and progress bars within a `with` block."""
    logger = logging.getLogger("nrl_models")
    level, verbosity = logger.level, transformers_logging.get_verbosity()
    shows_bars = transformers_logging.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        transformers_logging.set_verbosity(verbosity)
        if shows_bars:
            transformers_logging.enable_progress_bar()
