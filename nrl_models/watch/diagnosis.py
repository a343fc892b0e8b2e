"""Finds the cause of a difference: each explanation is tested against the engine's numbers, the certain ones first.

After a sync, trainer and engine score the same tokens. If these probes differ, the cause is in the weights or in a
module. If they agree and the rollouts differ, the cause is in the loop's own log-probabilities, in the sampling
parameters, or in decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from nrl_models.common.dtypes import dtype_name
from nrl_models.logprobs.sampling import Sampling
from nrl_models.parity.worst import last_if_nan, worst_of
from nrl_models.watch.finding import Cause, Finding, Severity
from nrl_models.watch.measured import Measured
from nrl_models.watch.probes import error, explains
from nrl_models.watch.step_metrics import StepMetrics
from nrl_models.watch.syncs import Sync

TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0)
"""Temperatures to try instead of the trainer's."""

ROUNDING_FACTOR = 4.0
"""Largest error that precision explains, as a multiple of the noise floor of the engine's dtype."""

ROUTER_ROUNDING = 8e-2
"""Largest difference of a router that rounding explains, relative to its scale. Above it, the weights differ."""

ADAPTER_SCALES: Mapping[float | None, str] = {
    None: "adapters at scale 1, not lora_alpha / r",
    2.0: "adapters at twice their scale, as if they were merged twice",
    0.5: "adapters at half their scale",
}
"""Factors of the adapters' scale to try instead of the trainer's."""

TOP_P = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
TOP_K = (1, 5, 10, 20, 40, 50, 64, 100)
"""Truncations to try instead of the trainer's."""


@dataclass(frozen=True, kw_only=True)
class DriftEvidence:
    """Facts about a difference, and measurements.

    Args:
        measured: further measurements.
        sampling: sampling parameters of the trainer's log-probabilities.
        sync: the last sync.
        steps_since_sync: steps since then, including this one.
        agreed_at: version of the weights at the last comparison that agreed; None if none did.
        history: metrics of earlier steps.
        metrics: metrics of this step; None if probes differ and no step was made.
        trainer, engine: log-probabilities of the completions of samples that can be scored again, the worst first,
            padded with NaN; None if there are none.
    """

    measured: Measured
    sampling: Sampling
    sync: Sync
    steps_since_sync: int = 0
    agreed_at: int | None = None
    history: Sequence[StepMetrics] = ()
    metrics: StepMetrics | None = None
    trainer: torch.Tensor | None = None
    engine: torch.Tensor | None = None


def diagnose_probes(evidence: DriftEvidence, probe_error: float) -> Finding:
    """Return the cause of a difference of the probes.

    Args:
        evidence: facts and measurements. Its probes were scored just now.
        probe_error: `token_mult_prob_error` of the probes.
    """
    steps: tuple[Callable[[DriftEvidence, float], Finding | None], ...] = (
        _stale,
        _unmerged,
        _rescaled,
        _reported_precision,
        _routing,
        _lost,
        _module,
        _rounding,
    )
    for step in steps:
        if (finding := step(evidence, probe_error)) is not None:
            return replace(finding, values={"token_mult_prob_error": probe_error, **finding.values})
    return _by_history(evidence, probe_error)


def _stale(evidence: DriftEvidence, probe_error: float) -> Finding | None:
    measured = evidence.measured
    for version, scores in sorted(measured.trainer_probes().items(), reverse=True):
        if version < evidence.sync.version and explains(scores, measured.engine_probes, probe_error):
            message = f"the engine computes with the weights of version {version} and not {evidence.sync.version}"
            divergence = measured.divergence()
            names = () if divergence is None else (divergence.module,)
            return Finding(cause=Cause.STALE_WEIGHTS, message=message, names=names, values={"engine_version": version})
    return None


def _unmerged(evidence: DriftEvidence, probe_error: float) -> Finding | None:
    if explains(evidence.measured.without_adapters(), evidence.measured.engine_probes, probe_error):
        message = "the engine's log-probabilities are those of the trainer with its adapters disabled"
        return Finding(cause=Cause.UNMERGED_ADAPTER, message=message)
    return None


def _rescaled(evidence: DriftEvidence, probe_error: float) -> Finding | None:
    measured = evidence.measured
    for factor, words in ADAPTER_SCALES.items():
        if explains(measured.with_adapter_scale(factor), measured.engine_probes, probe_error):
            message = f"the engine's log-probabilities are those of the trainer with its {words}"
            values = {"adapter_scale": 1.0} if factor is None else {"adapter_factor": factor}
            return Finding(cause=Cause.ADAPTER_SCALE, message=message, values=values)
    return None


def _lost(evidence: DriftEvidence, probe_error: float) -> Finding | None:
    """Return a finding if the engine agreed after the last sync, but differs now."""
    if evidence.agreed_at != evidence.sync.version:
        return None
    divergence = evidence.measured.divergence()
    names = () if divergence is None else (divergence.module,)
    message = f"the engine agreed after sync {evidence.sync.version}, and differs at a later step"
    return Finding(cause=Cause.LOST_WEIGHTS, message=message, names=names)


def _reported_precision(evidence: DriftEvidence, probe_error: float) -> Finding | None:
    dtype, trainer_dtype = evidence.measured.dtypes()
    if dtype is None or torch.finfo(dtype).eps <= torch.finfo(trainer_dtype).eps:
        return None
    message = f"the engine computes in {dtype_name(dtype)}, the trainer in {dtype_name(trainer_dtype)}"
    return _within_rounding(evidence, probe_error, dtype, message)


def _rounding(evidence: DriftEvidence, probe_error: float) -> Finding | None:
    """Return a finding if a lower precision explains the error, and no earlier comparison agreed."""
    if evidence.agreed_at is not None:
        return None
    _, trainer_dtype = evidence.measured.dtypes()
    for dtype in (torch.float16, torch.bfloat16):
        if torch.finfo(dtype).eps > torch.finfo(trainer_dtype).eps:
            message = (
                f"the error is that of {dtype_name(dtype)}, and the trainer computes in {dtype_name(trainer_dtype)}"
            )
            if (finding := _within_rounding(evidence, probe_error, dtype, message)) is not None:
                return finding
    return None


def _within_rounding(evidence: DriftEvidence, probe_error: float, dtype: torch.dtype, message: str) -> Finding | None:
    floor = evidence.measured.rounding(dtype)
    excess, rounding = probe_error - 1.0, floor - 1.0
    if not rounding / ROUNDING_FACTOR <= excess <= ROUNDING_FACTOR * rounding:
        return None
    return Finding(cause=Cause.PRECISION, message=message, values={"noise_floor": floor})


def _routing(evidence: DriftEvidence, probe_error: float) -> Finding | None:
    """Return a finding if the first module that differs is a router, by at most `ROUTER_ROUNDING`."""
    divergence = evidence.measured.divergence()
    if divergence is None or divergence.error > ROUTER_ROUNDING:
        return None
    if divergence.module not in evidence.measured.routers():
        return None
    message, values = f"the first difference is {divergence}", {"module_error": divergence.error}
    return Finding(cause=Cause.ROUTING, message=message, names=(divergence.module,), values=values)


def _module(evidence: DriftEvidence, probe_error: float) -> Finding | None:
    divergence = evidence.measured.divergence()
    if divergence is None:
        return None
    names, values = (divergence.module,), {"module_error": divergence.error}
    if evidence.agreed_at is not None:
        message = f"trainer and engine differ since sync {evidence.sync.version}, first {divergence}"
        return Finding(cause=Cause.MISSING_WEIGHTS, message=message, names=names, values=values)
    return Finding(cause=Cause.ENGINE, message=f"the first difference is {divergence}", names=names, values=values)


def _by_history(evidence: DriftEvidence, probe_error: float) -> Finding:
    values = {"token_mult_prob_error": probe_error}
    if evidence.agreed_at is not None:
        message = f"trainer and engine agreed before sync {evidence.sync.version}, and differ since"
        return Finding(cause=Cause.MISSING_WEIGHTS, message=message, values=values)
    return Finding(cause=Cause.ENGINE, message="trainer and engine score the same tokens differently", values=values)


def diagnose_step(evidence: DriftEvidence) -> Finding:
    """Return the cause of a difference of a step's rollouts, if probes agree or there are none."""
    metrics = evidence.metrics
    assert metrics is not None
    for finding in (*_of_samples(evidence), *_of_metrics(evidence, metrics)):
        return replace(finding, values={**metrics.values(), **finding.values})
    return Finding(cause=Cause.UNKNOWN, message="log-probabilities of sampled tokens differ", values=metrics.values())


def _of_samples(evidence: DriftEvidence) -> Iterator[Finding]:
    """Yield explanations that need the samples, because the trainer scores them again."""
    trainer, engine, measured = evidence.trainer, evidence.engine, evidence.measured
    if trainer is None or engine is None:
        return
    sample_error = error(trainer, engine, ~engine.isnan())
    width = trainer.shape[1]
    if explains(measured.scored(evidence.sampling, width), engine, sample_error):
        loop_sampling = _other_sampling(evidence, trainer, sample_error)
        if loop_sampling is not None:
            message = f"the loop's log-probabilities are those of {loop_sampling}, the engine's of {evidence.sampling}"
            yield Finding(cause=Cause.SAMPLING, message=message, values=asdict(loop_sampling))
        metrics = evidence.metrics
        if metrics is not None and metrics.only_padded:
            yield _padding(metrics)
        yield Finding(
            cause=Cause.TRAINER, message="the model, scored without padding, agrees with the engine; the loop does not"
        )
    other = _other_sampling(evidence, engine, sample_error)
    if other is not None:
        message = f"the engine samples with {other}, the trainer computes {evidence.sampling}"
        yield Finding(cause=Cause.SAMPLING, message=message, values=asdict(other))
    if (where := _shift(trainer, engine, sample_error)) is not None:
        yield Finding(cause=Cause.SHIFTED, message=f"the engine's log-probabilities are those of the token {where}")
    if explains(measured.prefill(width), trainer, sample_error):
        yield _decoding(evidence)


def _shift(trainer: torch.Tensor, engine: torch.Tensor, sample_error: float) -> str | None:
    """Return where the engine's log-probabilities belong. None if it is their token, or too few tokens show it."""
    preceding, following = slice(None, -1), slice(1, None)
    for where, ours, theirs in (("before", preceding, following), ("after", following, preceding)):
        candidate, wanted = trainer[:, ours], engine[:, theirs].masked_fill(trainer[:, ours].isnan(), torch.nan)
        if int((~wanted.isnan()).sum()) > 1 and explains(candidate, wanted, sample_error):
            return where
    return None


def _decoding(evidence: DriftEvidence) -> Finding:
    seen = evidence.measured.seen()
    message = "the engine's prefill of the samples agrees with the trainer, its decoding does not"
    if any(seen) and evidence.sync.count > 0:
        message += f"; {sum(seen)} of {len(seen)} prompts were sampled from before sync {evidence.sync.version}"
    return Finding(cause=Cause.CACHE, message=message)


def _other_sampling(evidence: DriftEvidence, wanted: torch.Tensor, sample_error: float) -> Sampling | None:
    """Return other sampling parameters with which the trainer's log-probabilities are `wanted`, or None."""
    params = evidence.sampling
    candidates = [Sampling(params.temperature), Sampling(1.0, params.top_k, params.top_p)]
    candidates += [replace(params, temperature=temperature) for temperature in TEMPERATURES]
    candidates += [replace(params, top_p=top_p) for top_p in TOP_P] + [replace(params, top_k=top_k) for top_k in TOP_K]
    errors = {
        candidate: error(evidence.measured.scored(candidate, wanted.shape[1]), wanted, ~wanted.isnan())
        for candidate in dict.fromkeys(candidates)
        if candidate != params
    }
    best = min(errors, key=lambda candidate: last_if_nan(errors[candidate]))
    return best if errors[best] - 1.0 < 0.1 * (sample_error - 1.0) else None


def _padding(metrics: StepMetrics) -> Finding:
    message = f"rows with padding differ by {metrics.padded_ratio:.3g} times as much as rows without"
    return Finding(cause=Cause.PADDING, message=message, values={"padded_ratio": metrics.padded_ratio})


def _of_metrics(evidence: DriftEvidence, metrics: StepMetrics) -> Iterator[Finding]:
    """Yield explanations that follow from where and when the error is large."""
    sync = evidence.sync
    if metrics.only_padded:
        yield _padding(metrics)
    before = [step.excess for step in evidence.history]
    if before and evidence.steps_since_sync > 1 and sync.count > 0:
        message = f"the error grew from {worst_of(before):.3g} to {metrics.excess:.3g} with the weights of one sync"
        yield Finding(cause=Cause.ENGINE, message=message)
    if before and sync.same_weights:
        message = (
            f"the error grew from {worst_of(before):.3g} to {metrics.excess:.3g} while the weights stayed the same"
        )
        yield Finding(cause=Cause.ENGINE, message=message)
    if metrics.grows:
        message = f"the error of the last quarter of positions is {metrics.growth:.3g} times that of the first"
        yield Finding(cause=Cause.CACHE, message=message, values={"growth": metrics.growth})
    if before and sync.count > 0:
        message = f"the error jumped from {worst_of(before):.3g} to {metrics.excess:.3g} at sync {sync.version}"
        yield Finding(cause=Cause.MISSING_WEIGHTS, message=message)


WARNING_CAUSES = frozenset({Cause.PRECISION, Cause.FROZEN_DRAFT, Cause.NOTHING_COMPARED, Cause.LAGGING})
"""Causes that do not stop a run."""


def with_level(finding: Finding, is_above_bars: bool) -> Finding:
    """Make findings about precision warnings while the published bars hold."""
    is_warning = finding.cause in WARNING_CAUSES and not is_above_bars
    return replace(finding, level=Severity.WARNING if is_warning else finding.level)
