"""Findings of a watch: cause, evidence, and advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from nrl_models.common.modules import device_of
from nrl_models.common.value_checks import finite_or_none
from nrl_models.errors import DriftError, listed
from nrl_models.logprobs.microbatches import largest


class Severity(StrEnum):
    """How serious a finding is."""

    WARNING = "warning"
    """Logged once. Training continues."""
    FAILURE = "failure"
    """Trainer and engine are not the same model. With `fail=True` it raises `DriftError`."""


class Cause(StrEnum):
    """Why trainer and engine differ."""

    MISSING_WEIGHTS = "missing weights"
    """Tensors of a weight sync did not arrive, arrived changed, or were not written."""
    STALE_WEIGHTS = "stale weights"
    """The engine has the weights of an earlier sync, or samples come from it."""
    LOST_WEIGHTS = "lost weights"
    """The engine's weights changed after the sync, for example in sleep mode."""
    UNMERGED_ADAPTER = "unmerged adapter"
    """The engine computes without the trainer's adapters."""
    ADAPTER_SCALE = "adapter scale"
    """The engine computes with the trainer's adapters at another scale."""
    FROZEN_DRAFT = "frozen draft layers"
    """Draft (MTP) layers stay the same while the model changes."""
    UNEXPECTED_UPDATE = "unexpected update"
    """Weights changed although the learning rate is 0."""
    SAMPLING = "sampling parameters"
    """Trainer and engine use different temperatures, `top_k` or `top_p`."""
    SHIFTED = "shifted log-probabilities"
    """The engine's log-probabilities belong to the token before or after."""
    TOKENS = "tokens"
    """Trainer and engine have different token IDs, or the tokenizer changed."""
    CACHE = "cache"
    """The engine decodes differently from its own prefill: stale keys and values, or wrong positions."""
    PADDING = "padding"
    """Only rows with padding differ: positions or the attention mask count padding."""
    ROUTING = "routing"
    """Routers choose other experts."""
    PRECISION = "precision"
    """The difference is as large as the rounding errors of the engine's dtype."""
    ENGINE = "engine"
    """A module of the engine computes something else, or its error grows while weights stay the same."""
    TRAINER = "trainer"
    """The loop's log-probabilities are not those of its model."""
    NOT_FINITE = "values that are not finite"
    NOTHING_COMPARED = "nothing compared"
    """A step without a single token to compare."""
    LAGGING = "lagging samples"
    """A step in which every row was sampled by earlier weights, as `max_staleness` allows."""
    UNKNOWN = "unknown"


ADVICE: Mapping[Cause, str] = {
    Cause.MISSING_WEIGHTS: "sync all tensors again; `nrl-models refit-check` tests the path of a refit",
    Cause.STALE_WEIGHTS: "sync before sampling; with asynchronous rollouts, pass the version of each row",
    Cause.LOST_WEIGHTS: "sync after waking the engine, before sampling",
    Cause.UNMERGED_ADAPTER: "send merged weights, `export_adapter(model).iter_export(model)`, or load the adapter in "
    "the engine",
    Cause.ADAPTER_SCALE: "merge adapters once, with lora_alpha / r; `export_adapter(model).iter_export(model)` does",
    Cause.FROZEN_DRAFT: "train the draft layers (MTPLayer), or start the engine without speculative decoding",
    Cause.UNEXPECTED_UPDATE: "look for a second optimizer, weight decay, or an export that rounds",
    Cause.SAMPLING: "pass the engine's Sampling to the trainer's log-probabilities",
    Cause.SHIFTED: "compare each token with its own log-probability: the logits of a position belong to the next token",
    Cause.TOKENS: "train on the sampled token IDs; do not tokenize the completion's text again",
    Cause.CACHE: "reset the prefix cache after each sync, and compare without it",
    Cause.PADDING: "pass an attention mask, or compute log-probabilities with `rollout_logprobs`, which does not pad",
    Cause.ROUTING: "compute routers in fp32 in the engine, or replay the engine's routing",
    Cause.PRECISION: "use the trainer's dtype in the engine, or correct with importance weights; faults below the "
    "noise floor are visible only if both sides compute in fp32",
    Cause.ENGINE: "run `nrl-models consistency` with this engine",
    Cause.TRAINER: "compute them in evaluation mode on the sampled tokens, as `rollout_logprobs` does",
    Cause.NOT_FINITE: "do not update: a loss with these values destroys the weights",
    Cause.NOTHING_COMPARED: "pass the engine's log-probabilities and the mask of sampled tokens",
    Cause.LAGGING: "pass model and engine to the watch, so that probes compare the weights after each sync",
    Cause.UNKNOWN: "run `nrl-models consistency` with this engine",
}
"""Advice for each cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem.

    Args:
        cause: why trainer and engine differ.
        level: how serious it is.
        message: the evidence in one sentence.
        names: tensors or modules that differ.
        values: measured numbers.
    """

    cause: Cause
    message: str
    level: Severity = Severity.FAILURE
    names: tuple[str, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        names = f" ({listed(self.names)})" if self.names else ""
        return f"{self.cause}: {self.message}{names}. To fix it: {ADVICE[self.cause]}"

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "cause": self.cause,
            "level": self.level,
            "message": self.message,
            "names": list(self.names),
            "values": finite_or_none(self.values),
            "advice": ADVICE[self.cause],
        }


def fails_elsewhere(failures: Sequence[Finding], model: Any) -> bool:
    """Return whether any rank has failures. Every rank calls this.

    Args:
        failures: This rank's failures.
        model: The model, or None.
    """
    device = torch.device("cpu") if model is None else device_of(model)
    (most,) = largest([len(failures)], None, device)
    return most > 0


def raise_failures(failures: Sequence[Finding], step: int, version: int, *, elsewhere: bool) -> None:
    """Raise an error for failures; nothing happens without any.

    Args:
        failures: This rank's failures.
        step: Number of the step.
        version: Number of the weights' version.
        elsewhere: Whether another rank has failures.

    Raises:
        DriftError: If there are failures.
    """
    if failures:
        raise DriftError(f"trainer and engine differ at step {step}, version {version} of the weights", failures)
    if elsewhere:
        raise DriftError(f"trainer and engine differ on another rank at step {step}: see its error", ())
