"""Compare tiny models of an architecture with a real engine."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from nrl_models import registry
from nrl_models.common.dtypes import dtype_name
from nrl_models.common.switches import quirks_off
from nrl_models.consistency.cells import Settings, is_conclusive
from nrl_models.consistency.matrix import run_matrix
from nrl_models.consistency.measure import Meter
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.references import References
from nrl_models.consistency.refit import RefitChecker, RefitStep
from nrl_models.consistency.store import Store
from nrl_models.engines.base import Engine
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import EngineError, UnmetRequirementError, one_line
from nrl_models.logprobs import Sampling, token_logprobs
from nrl_models.testing.case import randomize
from nrl_models.testing.sizes import FIRST_SPECIAL
from nrl_models.testing.tiny import tiny_config
from tests.engine.coverage_page import ORDER
from tests.engine.facts import Facts
from tests.engine.image_processors import save_processor
from tests.engine.obstacles import Stage
from tests.engine.published import BF16, BOUND, LATENT, OPTIONS, OVERRIDES, PROCESSORS
from tools.variants import split_variant, with_variants

Start = Callable[..., Engine]

ExtraCheck = Callable[[Engine, HFEngine, Prompts, Settings], str]
"""An additional check of a refitted engine. Returns a description of the problem, or an empty string."""

SETTINGS = Settings(lengths=(64,), data=("dummy",), modes=("sampling",), batches=(2,), new_tokens=24, threshold=BOUND)

BATCHES_ROUNDED = (8,)
"""Batch size in lower precision. Some sequences choose other experts on one of the sides. Error and noise floor are
means, and with a small batch either could contain most of those sequences.
"""

AGREES, AS_LOADED, NOT_DECIDED, DISAGREES, NOT_RUN = ORDER
"""The possible outcomes, best first."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one architecture.

    Args:
        architecture: The architecture, or one of its variants.
        status: `agrees` (after a refit from random weights and after another), `agrees as loaded` (with weights read
            from files, but refits do not work), `not decided` (see `decided`), `disagrees` or `not run`.
        refitted: `token_mult_prob_error` after the first refit. None without a refit.
        stepped: The error after a training step and another refit.
        loaded: The error with weights read from files. Measured only if a refit fails.
        stage: The stage that failed, if the status is `not run`.
        reason: The verdict or the error message.
        dtype: Dtype of both sides.
        bounds: Limit of the error after each refit: `BOUND`, or more if the noise floor of `dtype` explains more.
        options: vLLM options in addition to those of all architectures.
        facts: Facts about a comparison that fails; None without one.
    """

    architecture: str
    status: str
    refitted: float | None = None
    stepped: float | None = None
    loaded: float | None = None
    stage: str = ""
    reason: str = ""
    dtype: str = "float32"
    bounds: tuple[float, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    facts: Facts | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def decided(status: str, *errors: float | None) -> str:
    """Return the status of errors within their bounds, or explained by rounding: `not decided` if one shows nothing.

    `nrl-models certify` uses the same rule.
    """
    return status if all(error is None or is_conclusive(error) for error in errors) else NOT_DECIDED


def shared_architectures() -> list[str]:
    """List every text generation architecture that both the installed engine and the registry have.

    The names are the engine's. An alias is included only if it is the engine's name. Variants follow their class.
    """
    from vllm import ModelRegistry

    shared = set(ModelRegistry.get_supported_archs()) & set(registry.architectures())
    return with_variants(
        architecture
        for architecture in sorted(shared)
        if not architecture.endswith("Classification") and registry.ALIASES.get(architecture) not in shared
    )


def tiny_model(
    name: str, overrides: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Build our model at tiny size with random values in every tensor.

    Args:
        name: The architecture, or one of its variants.
        overrides: Configuration values in addition to those that the model and the engine need.
        dtype: Dtype of its parameters.

    Raises:
        FamilyImportError: The family needs other package versions.
        TinyModelError: No tiny model can be built.
    """
    architecture, variant = split_variant(name)
    model_class = registry.model_class(architecture)
    reference = model_class.reference_class()
    default = reference.config_class()
    text_config = default.get_text_config()
    latent: dict[str, Any] = {}
    if hasattr(text_config, "kv_lora_rank"):
        part = next((key for key in default.sub_configs if getattr(default, key) is text_config), None)
        latent = {part: LATENT} if part else LATENT
    values = {**model_class.tiny, **variant, **latent, **OVERRIDES.get(architecture, {}), **(overrides or {})}
    config = tiny_config(reference.config_class, values, reference)
    torch.manual_seed(0)
    model = model_class.from_config(config, dtype=dtype, device="cpu").eval()
    randomize(model)
    return model


def compare_architecture(name: str, start: Start, folder: Path, overrides: dict[str, Any] | None = None) -> Outcome:
    """Refit an engine from random weights, and again after a training step. If that fails, load the weights from files.

    Args:
        name: The architecture, or one of its variants.
        start: Starts an engine on a checkpoint, and stops the previous one.
        folder: An empty folder for the checkpoint and measurements.
        overrides: Configuration values.
    """
    architecture, _ = split_variant(name)
    dtype = torch.bfloat16 if architecture in BF16 else torch.float32
    options = OPTIONS.get(architecture, {})
    try:
        model = tiny_model(name, overrides, dtype)
    except Exception as error:  # any exception of the model's code
        return without_model(name, error)
    settings = SETTINGS if dtype == torch.float32 else replace(SETTINGS, batches=BATCHES_ROUNDED)
    outcome = compared(name, model, partial(start, dtype=dtype, **options), folder, settings)
    return replace(outcome, dtype=dtype_name(dtype), options=options)


def without_model(name: str, error: Exception) -> Outcome:
    """Return the outcome of an architecture without a tiny model."""
    stage = Stage.REQUIREMENT if isinstance(error, UnmetRequirementError) else Stage.MODEL
    return Outcome(name, NOT_RUN, stage=stage, reason=f"no tiny model: {one_line(error)}")


def compared(
    architecture: str,
    model: PreTrainedModel,
    start: Start,
    folder: Path,
    settings: Settings = SETTINGS,
    extra_check: ExtraCheck = lambda *_: "",
) -> Outcome:
    """Return the outcome of a model, see `compare_architecture`.

    Args:
        architecture: The architecture, or one of its variants.
        model: The trainer's model. It is trained.
        start, folder: As for `compare_architecture`.
        settings: The comparison settings, except for the temperature, which is determined here.
        extra_check: An additional check after both refits.
    """
    outcome = _compared(architecture, model, start, folder, settings, extra_check)
    # Remove the temporary checkpoint's path from the reason.
    return replace(outcome, reason=outcome.reason.replace(f"{folder}/", ""))


def _compared(
    architecture: str, model: PreTrainedModel, start: Start, folder: Path, settings: Settings, extra_check: ExtraCheck
) -> Outcome:
    checkpoint = folder / "checkpoint"
    try:
        model.save_pretrained(checkpoint)
        tokenizer(checkpoint, model.config.get_text_config().vocab_size)
        if split_variant(architecture)[0] in PROCESSORS:
            save_processor(model.config, checkpoint)
        temperature, untrained = spreading_temperature(model), copy.deepcopy(model)
    except Exception as error:  # any exception of the model's code
        return without_model(architecture, error)
    trainer = HFEngine(model, "trainer")
    prompts = Prompts(None, min(FIRST_SPECIAL, trainer.capabilities().vocabulary))  # excludes image tokens
    settings = replace(settings, sampling=Sampling(temperature))
    try:
        with quirks_off("engine-dummy-buffers"):
            engine = start(checkpoint, load_format="dummy", seed=1)
    except EngineError as error:
        # the rest of the message depends on the machine
        return Outcome(architecture, NOT_RUN, stage=Stage.START, reason=str(error.args[0]))
    steps: list[RefitStep] = []
    try:
        checker = RefitChecker(str(checkpoint), Meter(engine, trainer, prompts, settings))
        steps.append(checker.refit("from random weights"))
        if not steps[-1].faults:
            checker.train()
            steps.append(checker.refit("after a training step"))
        problem = "; ".join(problem_of(step) for step in steps if step.faults)
        problem = problem or extra_check(engine, trainer, prompts, settings)
    except Exception as error:  # any exception of the engine or the model
        problem = one_line(error)
    measured = [_error(step) for step in steps] + [None, None]
    bounds = tuple(step.result.bound for step in steps)
    numbers: dict[str, Any] = {"refitted": measured[0], "stepped": measured[1], "bounds": bounds}
    if not problem:
        return Outcome(architecture, decided(AGREES, *measured), **numbers)
    failed_status = DISAGREES if steps else NOT_RUN  # without a measurement the status is "not run"
    numbers["stage"] = "" if steps else Stage.RUN
    failed = steps[-1] if steps and not steps[-1].passed else None
    numbers["facts"] = Facts.of(failed.result, failed.report.unwritten) if failed else None
    try:
        engine = start(checkpoint)
        store = Store(folder / "measured", {})
        meter = Meter(engine, HFEngine(untrained, "trainer"), prompts, settings, store)
        report = run_matrix(str(checkpoint), meter, References(checkpoint))
    except Exception as error:
        return Outcome(architecture, failed_status, **numbers, reason=f"{problem}; from files: {one_line(error)}")
    if report.error:
        return Outcome(architecture, failed_status, **numbers, reason=f"{problem}; from files: {report.error}")
    result = report.results[0]
    loaded = max(comparison.token_mult_prob_error for several in result.comparisons.values() for comparison in several)
    numbers["stage"] = ""
    if not result.faults:
        return Outcome(architecture, decided(AS_LOADED, loaded), **numbers, loaded=loaded, reason=problem)
    numbers |= {"loaded": loaded if math.isfinite(loaded) else None, "facts": Facts.of(result)}
    return Outcome(architecture, DISAGREES, **numbers, reason="; ".join(result.explanation))


def tokenizer(checkpoint: Path, vocabulary: int) -> None:
    """Save a tokenizer with this many tokens, because engines require one for models with images or audio."""
    words = Tokenizer(models.WordLevel({f"<{token}>": token for token in range(vocabulary)}, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<0>").save_pretrained(checkpoint)


def problem_of(step: RefitStep) -> str:
    """Describe the problem of a refit, followed by the verdict."""
    verdict = step.result.verdict
    return "; ".join([*step.problems, *step.result.problems, *([verdict.summary] if verdict else [])])


def _error(step: RefitStep) -> float | None:
    comparisons = [comparison for several in step.result.comparisons.values() for comparison in several]
    worst = max(comparison.token_mult_prob_error for comparison in comparisons)
    return worst if math.isfinite(worst) else None


@torch.no_grad()
def spreading_temperature(model: PreTrainedModel) -> float:
    """Find the temperature at which the model's entropy is half of the maximum.

    Wrong hidden states are not visible near a uniform distribution, or if one token has all the probability.
    """
    tokens = torch.randint(16, 200, (2, 32), generator=torch.Generator().manual_seed(0))
    half = 0.5 * math.log(model.config.get_text_config().vocab_size)
    low, high = 0.01, 100.0
    for _ in range(20):
        temperature = (low * high) ** 0.5
        entropy = token_logprobs(model, tokens, temperature=temperature, entropy=True).entropy.mean().item()
        low, high = (temperature, high) if entropy < half else (low, temperature)
    return temperature
