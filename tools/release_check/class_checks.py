"""The cheap checks of one architecture: our class, loaded from a checkpoint of the reference, against the reference.

The reference is transformers' own class. A family that transformers lacks has a plain implementation in this
repository, which may share a mistake with our class. There, only paths that do not share it count: a forward without a
cache for cached steps and generation, and `tools.release_check.independent` where an independent implementation exists.

This module imports from `nrl_models` only names that commit 7d8db461 has, because it also runs on older checkouts.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from nrl_models import registry
from nrl_models.errors import NRLModelsError
from nrl_models.inputs.audio import AUDIO, takes_audio
from nrl_models.inputs.images import PIXELS, ImageInputsError, takes_images
from nrl_models.logprobs import token_logprobs
from nrl_models.testing.case import FamilyCase
from tools.release_check.cached_steps import (
    CacheIgnoredError,
    NoCacheError,
    cache_argument,
    cached_logits,
    full_logits,
)
from tools.release_check.failing_function import failing_function
from tools.release_check.independent import independent_logits
from tools.release_check.number_cases import stored_tensors
from tools.release_check.sweep_outcome import Check, Outcome, Reference, SweepOutcome

TOLERANCE = 1e-4
"""Largest difference in fp32, relative where the reference is larger than one."""

MASKED_ABOVE = 1e30
"""Some models set logits of tokens that they never generate to the lowest number of the dtype."""

UNUSED_BELOW = 1e-6
"""Images or audio without which logits move by less were not used."""

PROMPT, COMPLETION = 12, 4
FP8_LIMIT = 448.0


class MediaInputsError(Exception):
    """No form of images or audio is known for a class that takes them."""


@dataclass(frozen=True)
class Comparison:
    """A result of ours and the reference's.

    Args:
        reference: which one.
        max_diff: the largest difference.
        detail: where it is, for people.
    """

    reference: Reference
    max_diff: float
    detail: str = ""


class ClassUnderTest:
    """One architecture, with the models and inputs that its checks share.

    Args:
        architecture: a name in the registry.
        folder: an empty folder for checkpoints.
    """

    def __init__(self, architecture: str, folder: Path) -> None:
        model_class: Any = registry.model_class(architecture)
        self.case = FamilyCase(model_class, device=torch.device("cpu"))
        self.folder = folder

    @property
    def reference_class(self) -> type[PreTrainedModel]:
        """The class that ours must equal."""
        return self.case.reference_class

    @property
    def is_transformers(self) -> bool:
        """Whether the reference is transformers' own class."""
        return self.reference_class.__module__.startswith("transformers.")

    @cached_property
    def _reference(self) -> PreTrainedModel:
        return copy.deepcopy(self.case.reference())

    def reference(self) -> PreTrainedModel:
        """A new copy of the reference: some keep state of their last forward."""
        return copy.deepcopy(self._reference)

    @cached_property
    def checkpoint(self) -> Path:
        """The reference in fp32, as transformers writes it."""
        path = self.folder / "fp32"
        self._reference.save_pretrained(path)
        return path

    @cached_property
    def bf16_checkpoint(self) -> Path:
        """The reference in bf16, as transformers writes it."""
        path = self.folder / "bf16"
        self.case.reference(torch.bfloat16).save_pretrained(path)
        return path

    @cached_property
    def bf16_checkpoint_without_dtype(self) -> Path:
        """`bf16_checkpoint` with a configuration that names no dtype."""
        return _without_dtype(self.bf16_checkpoint, self.folder / "bf16-no-dtype")

    def load(self, path: Path, **options: Any) -> Any:
        """Our class, loaded strictly."""
        return self.case.model_class.from_pretrained(path, **options).eval()

    @cached_property
    def model(self) -> Any:
        """Our class with the reference's weights. One model for all checks, as in use."""
        return self.load(self.checkpoint, dtype=torch.float32)

    @cached_property
    def takes_media(self) -> bool:
        """Whether the class takes images or audio."""
        return takes_images(self._reference) or takes_audio(self._reference)

    def text(self) -> dict[str, Any]:
        """Text only."""
        return self.case.inputs(length=PROMPT, images=False)

    def media(self) -> dict[str, Any]:
        """Text with an image, a clip or both in each sequence.

        Raises:
            ImageInputsError, MediaInputsError: the form is unknown.
        """
        inputs = self.case.inputs(length=PROMPT)
        for takes, names in ((takes_images, PIXELS), (takes_audio, AUDIO)):
            if takes(self._reference) and not any(name in inputs for name in names):
                raise MediaInputsError(f"no input among {', '.join(names)} for {self.reference_class.__name__}")
        return inputs

    def generates(self) -> bool:
        """Whether the class has `generate`."""
        return self.case.model_class.can_generate()

    @cached_property
    def why_no_text(self) -> str:
        """Why the class takes no text alone; empty if it does."""
        if "input_ids" not in inspect.signature(self.reference_class.forward).parameters:
            return "takes no tokens"
        if self.takes_media and self.is_transformers:
            try:
                with torch.no_grad():
                    self.reference()(**self.text())
            except Exception as error:
                return f"takes no text without an image or a clip: {error}"
        return ""


Comparisons = Iterator[Comparison]


class NotApplicableError(Exception):
    """The class has nothing that the check compares."""


class ReferenceFailedError(Exception):
    """The reference raised an error, given as the cause, and ours raised the same."""


def _check_load(case: ClassUnderTest) -> Comparisons:
    loaded = case.model
    expected = case.reference_class.from_pretrained(case.checkpoint, dtype=torch.float32)
    yield from _equal_tensors(loaded.state_dict(), expected.state_dict())


def _check_dtypes(case: ClassUnderTest) -> Comparisons:
    yield from _equal_dtypes(case, case.bf16_checkpoint_without_dtype, "auto")
    yield from _equal_dtypes(case, case.checkpoint, torch.float16)


def _check_dequantized(case: ClassUnderTest) -> Comparisons:
    path = _fp8_checkpoint(case)
    expected = case.reference_class.from_pretrained(case.bf16_checkpoint_without_dtype, dtype="auto")
    yield from _same_dtypes(case.load(path, dtype="auto").state_dict(), expected.state_dict())


def _check_logits(case: ClassUnderTest) -> Comparisons:
    yield from _logits(case, _text(case))


def _check_media_logits(case: ClassUnderTest) -> Comparisons:
    inputs = _media(case)
    yield from _logits(case, inputs)
    for name in (*PIXELS, *AUDIO):
        if name in inputs and not _uses(case, inputs, name):
            raise MediaInputsError(f"the logits are the same without {name}: the inputs lack tokens for it")


def _uses(case: ClassUnderTest, inputs: dict[str, Any], name: str) -> bool:
    """Whether the reference has other logits without this input, or needs it."""
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
    yield from _cached_steps(case, _text(case))


def _check_media_cached_steps(case: ClassUnderTest) -> Comparisons:
    if not case.generates():
        raise NotApplicableError("does not generate")
    yield from _cached_steps(case, _media(case))


def _check_greedy(case: ClassUnderTest) -> Comparisons:
    if not case.generates():
        raise NotApplicableError("does not generate")
    yield from _greedy(case, _text(case))


def _check_media_greedy(case: ClassUnderTest) -> Comparisons:
    if not case.generates():
        raise NotApplicableError("does not generate")
    yield from _greedy(case, _media(case))


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

    yield from _same_call(case, run)


def _check_token_logprobs(case: ClassUnderTest) -> Comparisons:
    if not case.generates():
        raise NotApplicableError("does not generate")
    inputs = case.media() if case.takes_media else _text(case)
    if "input_ids" not in inputs or "decoder_input_ids" in inputs:
        raise NotApplicableError("takes no tokens, or has an encoder for the prompt")
    ids = inputs.pop("input_ids")

    @torch.no_grad()
    def run(model: PreTrainedModel) -> dict[str, torch.Tensor]:
        if model is case.model:
            ones = torch.ones_like(ids)
            found = token_logprobs(model, ids, attention_mask=ones, chunk_size=None, **inputs).logprobs[:, 1:]
        else:
            logs = model(input_ids=ids, use_cache=False, **inputs).logits.float().log_softmax(-1)
            found = logs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        return {"ones": found} | _logits_with_holes(case, model)

    yield from _same_call(case, run)


def _logits_with_holes(case: ClassUnderTest, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Logits of text with padding between tokens, with positions that count tokens, as `generate` makes them."""
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

    yield from _same_call(case, run)


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
    """Run every check of an architecture; yields one outcome per check, in the order of `Check`."""
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
    """Run one check of an architecture; errors become outcomes."""
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
    # The same call is compared first; a difference that only the full forward shows is upstream's.
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


# Ways to compare


def _text(case: ClassUnderTest) -> dict[str, Any]:
    if case.why_no_text:
        raise NotApplicableError(case.why_no_text)
    return case.text()


def _media(case: ClassUnderTest) -> dict[str, Any]:
    if not case.takes_media:
        raise NotApplicableError("takes neither images nor audio")
    return case.media()


def _logits(case: ClassUnderTest, inputs: dict[str, Any]) -> Comparisons:
    @torch.no_grad()
    def run(model: PreTrainedModel) -> torch.Tensor:
        return model(**inputs, use_cache=False).logits

    yield from _same_call(case, run)
    if not case.is_transformers:
        expected = independent_logits(case.reference(), inputs)
        if expected is not None:
            yield Comparison(Reference.INDEPENDENT, difference(run(case.model), expected))


def _same_call(case: ClassUnderTest, run: Callable[[PreTrainedModel], Any]) -> Comparisons:
    """Compare what `run` returns for our class and for the reference.

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
    """Run our class where the reference raised `error`; raise its error if that is of another type."""
    try:
        run(case.model)
    except Exception as own:
        if type(own) is not type(error):
            raise


def _cached_steps(case: ClassUnderTest, inputs: dict[str, Any]) -> Comparisons:
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


def _greedy(case: ClassUnderTest, inputs: dict[str, Any]) -> Comparisons:
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

    A cached call of a plain implementation is not a reference: it may share its mistake with our class.
    """
    if case.is_transformers:
        yield from _same_call(case, cached)
    try:
        expected = full(case.reference())
    except Exception:
        if not case.is_transformers:
            raise
        return  # some classes cannot run without a cache; the same call was equal
    kind = Reference.FULL_FORWARD if case.is_transformers else Reference.PLAIN_FORWARD
    yield Comparison(kind, difference(cached(case.model), expected))


@torch.no_grad()
def generated_logits(model: PreTrainedModel, inputs: Mapping[str, Any], *, use_cache: bool) -> torch.Tensor:
    """The logits `(batch, COMPLETION, vocabulary)` from which `generate` picks its tokens."""
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
    """The largest difference of two tensors or of two dicts of tensors, relative where `expected` is above one.

    Infinite where names, shapes or the places of NaNs differ.
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


def _equal_tensors(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> Comparisons:
    if names := sorted(actual.keys() ^ expected.keys()):
        yield Comparison(Reference.SAME_CALL, float("inf"), f"only in one of the models: {', '.join(names[:4])}")
        return
    for name, tensor in expected.items():
        yield Comparison(Reference.SAME_CALL, difference(actual[name], tensor), name)


# Dtypes


def _equal_dtypes(case: ClassUnderTest, path: Path, dtype: str | torch.dtype) -> Comparisons:
    try:
        expected = case.reference_class.from_pretrained(path, dtype=dtype).state_dict()
    except Exception as error:
        raise ReferenceFailedError from error
    yield from _same_dtypes(case.load(path, dtype=dtype).state_dict(), expected)


def _same_dtypes(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> Comparisons:
    for name, tensor in expected.items():
        own = actual[name].dtype if name in actual else None
        found = f"{name} is {own}, expected {tensor.dtype}"
        yield Comparison(Reference.SAME_CALL, 0.0 if own == tensor.dtype else float("inf"), found)


def _without_dtype(source: Path, path: Path) -> Path:
    """A copy of a checkpoint whose configuration names no dtype."""
    path.mkdir()
    for file in source.iterdir():
        if file.name != "config.json":
            (path / file.name).symlink_to(file)
    config = _drop(json.loads((source / "config.json").read_text()), ("dtype", "torch_dtype"))
    (path / "config.json").write_text(json.dumps(config))
    return path


def _drop(values: Any, keys: tuple[str, ...]) -> Any:
    if isinstance(values, dict):
        return {key: _drop(value, keys) for key, value in values.items() if key not in keys}
    return [_drop(value, keys) for value in values] if isinstance(values, list) else values


def _fp8_checkpoint(case: ClassUnderTest) -> Path:
    """The bf16 checkpoint with FP8 linears in blocks of 128 and no dtype in its configuration.

    Raises:
        NotApplicableError: the class is not one that publishes FP8 in this form: it has no routed experts.
    """
    source, path = case.bf16_checkpoint, case.folder / "fp8"
    tensors = stored_tensors(source)
    if not any("e_score_correction_bias" in name for name in tensors):
        raise NotApplicableError("is not published in FP8 with blocks")
    _without_dtype(source, path)
    for file in path.glob("*.safetensors*"):
        file.unlink()
    quantized: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        quantized[name] = tensor
        if name.endswith("proj.weight") and tensor.ndim == 2:
            scale = tensor.float().abs().max() / FP8_LIMIT
            blocks = [-(-size // 128) for size in tensor.shape]
            quantized[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            quantized[f"{name}_scale_inv"] = scale.expand(blocks).clone()
    save_file(quantized, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@contextmanager
def quiet() -> Iterator[None]:
    """While open, transformers and nrl_models log no warnings, and no progress bars are shown."""
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
