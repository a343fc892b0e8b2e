"""Checks that a LoRA adapter reaches rollouts: merged into the engine's weights, or served by the engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from nrl_models.certify.certified import CheckpointUnderTest
from nrl_models.certify.check_result import CheckResult, Side, Status, status_of, token_error
from nrl_models.common.dtypes import dtype_name
from nrl_models.common.state_dict.merged import export_adapter
from nrl_models.consistency import Data, Mode
from nrl_models.consistency.cells import NOISE_FACTOR, THRESHOLD, Cell, is_conclusive, largest_error
from nrl_models.consistency.refit import unmeasured_bound
from nrl_models.engines.base import Engine
from nrl_models.engines.digests import digested, refit_problems
from nrl_models.engines.engine_types import Sample
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.scores import final_scores, padded
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.errors import EngineError, StateDictError, one_line
from nrl_models.logprobs.metrics import shown_error, token_mult_prob_error
from nrl_models.logprobs.sampling import Sampling
from nrl_models.parity.noise import rounded_otherwise

MERGED, SERVED = "LoRA merged into weights", "LoRA served by the engine"
"""Names of the checks."""

RANK = 8

SCALES = (1 / 64, 1 / 16, 1 / 4, 1.0)
"""Scales of the random adapter, tried in order until it changes log-probabilities by `MIN_EFFECT`."""

MIN_EFFECT = 1.2
"""Minimum `token_mult_prob_error` between the model with and without the adapter. An engine that drops the adapter then
exceeds the bound."""

BATCH, NEW_TOKENS = 4, 32


def merged(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Refit the engine with merged weights of a random adapter, and compare log-probabilities.

    Changes the weights of `subject.engine` and `subject.trainer`.
    """
    engine = subject.engine
    if reason := _not_possible(subject) or ("" if engine.capabilities().refit else f"{engine.name} takes no weights"):
        yield CheckResult(MERGED, Status.NOT_COVERED, reason)
        return
    try:
        adapted = _with_adapter(subject)
        adapter = export_adapter(adapted)
    except (ValueError, StateDictError) as error:  # PEFT or the export does not support the model's layers
        yield CheckResult(MERGED, Status.NOT_COVERED, one_line(error))
        return
    sent: dict[str, str] = {}
    report = engine.refit(digested(adapter.iter_export(adapted), sent), partial=True)
    yield _compared(subject, MERGED, engine, adapted, refit_problems(report, sent, adapter.export_plan()))
    subject.release_engine()  # the next check gets the checkpoint's weights


def served(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Load a random adapter into vLLM, and compare log-probabilities."""
    if subject.options.engine != "vllm":
        yield CheckResult(SERVED, Status.NOT_APPLICABLE, "the engine serves no adapters")
        return
    other = "vLLM in another environment (python=) serves no adapters here"
    reason = _not_possible(subject) or (other if "python" in subject.options.engine_options else "")
    if reason:
        yield CheckResult(SERVED, Status.NOT_COVERED, reason)
        return
    subject.release_engine()
    adapted = _with_adapter(subject)
    with tempfile.TemporaryDirectory() as folder:
        adapted.save_pretrained(folder)
        try:
            engine = subject.start_engine(enable_lora=True, max_lora_rank=RANK)
        except EngineError as error:  # vLLM has no LoRA for this model
            yield CheckResult(SERVED, Status.NOT_COVERED, one_line(error))
            return
        with engine:
            if not isinstance(engine, VLLMEngine):
                yield CheckResult(SERVED, Status.NOT_COVERED, f"{engine.name} serves no adapters")
                return
            try:
                engine.use_adapter(Path(folder))
            except EngineError as error:
                yield CheckResult(SERVED, Status.NOT_COVERED, one_line(error))
                return
            yield _compared(subject, SERVED, engine, adapted, [])
    subject.release_engine()


def _not_possible(subject: CheckpointUnderTest) -> str:
    if find_spec("peft") is None:
        return "peft is not installed: pip install '.[peft]' in a checkout"
    return "" if subject.trainer.model.can_generate() else "the model does not generate"


def _with_adapter(subject: CheckpointUnderTest) -> Any:
    """Put a random adapter on the trainer's model that changes log-probabilities by at least `MIN_EFFECT`."""
    import peft

    torch.manual_seed(subject.options.seed)
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(subject.trainer.model, config).eval()
    tokens = torch.tensor(_prompts(subject, 2 * NEW_TOKENS))
    trainer = HFEngine(model.get_base_model(), "trainer")
    with model.disable_adapter():
        without = final_scores(trainer, tokens, NEW_TOKENS, Sampling())
    layers: list[Any] = [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    for scale in SCALES:
        for layer in layers:
            layer.set_scale("default", scale)
        if token_mult_prob_error(final_scores(trainer, tokens, NEW_TOKENS, Sampling()), without) >= MIN_EFFECT:
            break
    for layer in layers:  # the saved adapter has no scale other than alpha / r
        layer.lora_B["default"].weight.data.mul_(scale)
        layer.set_scale("default", 1.0)
    return model


def _prompts(subject: CheckpointUnderTest, length: int) -> list[list[int]]:
    cell = Cell(length, Data.DUMMY, Mode.SAMPLING, BATCH)
    return subject.prompts.make(cell, length, subject.options.seed)


def _compared(
    subject: CheckpointUnderTest, name: str, engine: Engine, adapted: Any, problems: list[str]
) -> CheckResult:
    """Compare the engine's log-probabilities with those of the model with and without its adapter."""
    samples = engine.generate(
        _prompts(subject, NEW_TOKENS), Sampling(), max_new_tokens=NEW_TOKENS, seed=subject.options.seed
    )
    trainer = HFEngine(adapted.get_base_model(), "trainer")
    if not any(sample.tokens for sample in samples):
        return CheckResult(name, Status.NOT_DECIDED, "the engine sampled nothing", compared=0)
    scores, decode = _scores(trainer, samples), padded([sample.logprobs for sample in samples])
    with adapted.disable_adapter():
        without = _scores(trainer, samples)
    with rounded_otherwise(trainer.model):
        noise = token_mult_prob_error(_scores(trainer, samples, full_logits=True), scores)
    error, base, effect = (
        token_mult_prob_error(*pair) for pair in ((scores, decode), (without, decode), (scores, without))
    )
    bound = largest_error(unmeasured_bound(trainer.model.dtype), NOISE_FACTOR, noise)
    if not error <= bound:
        problems = [*problems, f"token_mult_prob_error {shown_error(error)} between trainer and engine"]
        problems += ["the engine computes without the adapter"] if base <= bound else []
    is_wide = bound >= effect or not is_conclusive(error)
    compared = sum(len(sample.tokens) for sample in samples)
    status = Status.NOT_DECIDED if is_wide and not problems else status_of(failed=bool(problems), compared=compared)
    summary = f"token_mult_prob_error {shown_error(error)}, and {shown_error(effect)} without the adapter"
    if status is Status.NOT_DECIDED:
        summary += f": the noise floor of {dtype_name(trainer.model.dtype)} is {shown_error(noise)}"
    return CheckResult(
        name,
        status,
        "; ".join(problems) or summary,
        **token_error(error, min(bound, THRESHOLD)),
        compared=compared,
        side=Side.ENGINE if problems else None,
        advice="Rollouts would not use the adapter as it is trained." if problems else "",
    )


def _scores(trainer: HFEngine, samples: list[Sample], **options: bool) -> torch.Tensor:
    tokens = torch.tensor([sample.sequence for sample in samples])
    return final_scores(trainer, tokens, NEW_TOKENS, Sampling(), **options)
