"""Measurements that explain a difference: taken from the running sides, or recorded in a capsule."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nrl_models.common.dtypes import dtype_name
from nrl_models.common.forward.evaluation import autocast, evaluating
from nrl_models.common.model_components.routers import routers_of
from nrl_models.common.modules import device_of, innermost
from nrl_models.consistency.capsule.module_comparison import ComparedSide, ModuleComparison
from nrl_models.consistency.capsule.observations import Observations
from nrl_models.consistency.divergence import Divergence
from nrl_models.engines.base import Engine
from nrl_models.engines.engine_types import Sample
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.scores import padded
from nrl_models.errors import CapsuleError, NRLModelsError
from nrl_models.logprobs import rollout_logprobs
from nrl_models.logprobs.sampling import Sampling
from nrl_models.watch.probes import Probes, error

MODULES = "modules.engine"
"""Name of the comparison of modules."""


@dataclass(kw_only=True)
class Running:
    """The running sides.

    Args:
        model: the trainer's model.
        engine: the engine; None if only its log-probabilities are known.
        compute: dtype of the trainer's autocast; None for none.
        sampling: sampling parameters of the trainer's log-probabilities.
        probes: fixed sequences that both sides score; None if they cannot.
        version: version of the weights.
        samples: samples to score again, the worst first.
        seen_prompts: hashes of prompts that were sampled from before the last sync.
    """

    model: Any
    engine: Engine | None
    compute: torch.dtype | None
    sampling: Sampling
    probes: Probes | None = None
    version: int = 0
    samples: Sequence[Sample] = ()
    seen_prompts: Collection[int] = frozenset()

    @property
    def scored_probes(self) -> Probes:
        """The probes, which exist."""
        assert self.probes is not None
        return self.probes


@dataclass
class Measured:
    """Reads measurements by name, see `Observations`.

    Args:
        running: the running sides; None in a replay.
        observed: recorded measurements.
    """

    running: Running | None = None
    observed: Observations = field(default_factory=Observations)

    @property
    def sides(self) -> Running:
        """The running sides.

        Raises:
            CapsuleError: in a replay, which has none.
        """
        if self.running is None:
            raise CapsuleError(
                "the capsule lacks a measurement that its findings need: replay it with the nrl_models that wrote it"
            )
        return self.running

    # Probes

    def probe_error(self) -> float:
        """Score the probes on both sides, and return `token_mult_prob_error`."""
        if "probe versions" not in self.observed.values:
            probes = self.sides.scored_probes
            probes.score(self.sides.version)
            self.observed.values |= {"probe versions": sorted(probes.trainer), "probe version": self.sides.version}
            self.observed.tensors |= {f"probe.{version}": scores for version, scores in probes.trainer.items()}
            self.observed.tensors["probe.engine"] = probes.engine_scores[self.sides.version]
        version = self.observed.values["probe version"]
        return error(self.observed.tensors[f"probe.{version}"], self.engine_probes)

    @property
    def engine_probes(self) -> torch.Tensor:
        """The engine's log-probabilities of the probes."""
        return self.observed.tensors["probe.engine"]

    def trainer_probes(self) -> dict[int, torch.Tensor]:
        """Return the trainer's log-probabilities of the probes, by version of the weights."""
        return {
            version: self.observed.tensors[f"probe.{version}"] for version in self.observed.values["probe versions"]
        }

    def without_adapters(self) -> torch.Tensor | None:
        """Return the trainer's log-probabilities of the probes with its adapters disabled; None without adapters."""
        return self.observed.optional("without adapters", lambda: self.sides.scored_probes.without_adapters())

    def with_adapter_scale(self, factor: float | None) -> torch.Tensor | None:
        """Return the trainer's log-probabilities of the probes with scaled adapters; None without LoRA adapters."""
        return self.observed.optional(
            f"adapter scale.{factor}", lambda: self.sides.scored_probes.with_adapter_scale(factor)
        )

    def rounding(self, dtype: torch.dtype) -> float:
        """Return the noise floor of a dtype, see `Probes.rounding`."""
        names = [f"rounding.{dtype_name(dtype)}.{which}" for which in ("own", "other")]
        if names[0] not in self.observed.tensors:
            pair = self.sides.scored_probes.rounded(dtype)
            self.observed.tensors |= dict(zip(names, pair, strict=True))
        return error(*(self.observed.tensors[name] for name in names))

    def dtypes(self) -> tuple[torch.dtype | None, torch.dtype]:
        """Return the dtypes that engine and trainer compute in; None if the engine reports none."""

        def names() -> list[str | None]:
            probes = self.sides.scored_probes
            dtype = probes.engine.capabilities().dtype
            return [None if dtype is None else dtype_name(dtype), dtype_name(probes.dtype)]

        engine, trainer = self.observed.value("dtypes", names)
        return None if engine is None else getattr(torch, engine), getattr(torch, trainer)

    # Modules

    def divergence(self) -> Divergence | None:
        """Return the first module that the engine computes differently; None if modules cannot be compared."""
        if not self.observed.value("records modules", lambda: self.sides.scored_probes.engine.capabilities().modules):
            return None
        comparison = self.observed.comparison(MODULES, self._compare_modules)
        return None if isinstance(comparison, str) else comparison.divergence()

    def _compare_modules(self) -> ModuleComparison:
        probes = self.sides.scored_probes
        tokens = probes.tokens[0].tolist()
        dtype = probes.engine.capabilities().dtype or torch.float32
        actual = probes.engine.module_calls(tokens)
        expected = HFEngine(innermost(probes.model), "trainer").module_calls(tokens)
        return ModuleComparison.of_engine(ComparedSide.ENGINE, actual, expected, dtype)

    def routers(self) -> list[str]:
        """Return the names of the trainer's routers."""

        def names() -> list[str]:
            inner = innermost(self.sides.model)
            routers = {id(module) for module in routers_of(inner, inner.get_decoder())}
            return [name for name, module in inner.named_modules() if id(module) in routers]

        router_names: list[str] = self.observed.value("routers", names)
        return router_names

    # Samples

    def scored(self, sampling: Sampling, width: int) -> torch.Tensor:
        """Return the trainer's log-probabilities of the samples' completions, `(samples, width)`, padded with NaN."""
        name = f"scored.{sampling.temperature:g}.{sampling.top_k}.{sampling.top_p:g}"
        return self.observed.tensor(name, lambda: self._scored(sampling, width))

    def _scored(self, sampling: Sampling, width: int) -> torch.Tensor:
        processing, model, samples = sampling.processing, self.sides.model, self.sides.samples
        sampled = [[False] * len(sample.prompt) + [True] * len(sample.tokens) for sample in samples]
        inputs: Any = [sample.sequence_inputs for sample in samples]
        device = device_of(model)
        with torch.no_grad(), evaluating(model), autocast(device, self.sides.compute):
            result = rollout_logprobs(
                model,
                [sample.sequence for sample in samples],
                score=sampled,
                temperature=processing.temperature,
                top_k=processing.top_k,
                top_p=processing.top_p,
                model_inputs=inputs if any(inputs) else None,
            )
        rows = []
        for row, mask, sample in zip(result.logprobs.double().cpu(), result.mask.cpu(), samples, strict=True):
            completion = slice(len(sample.prompt), len(sample.sequence))
            rows.append(torch.where(mask[completion], row[completion], torch.nan).tolist())
        return _padded_to(rows, width)

    def prefill(self, width: int) -> torch.Tensor | None:
        """Return the engine's log-probabilities of the samples' completions in one prefill; None if it cannot score."""
        return self.observed.optional("prefill", lambda: self._prefill(width))

    def _prefill(self, width: int) -> torch.Tensor | None:
        engine, sampling, samples = self.sides.engine, self.sides.sampling, self.sides.samples
        if engine is None:
            return None
        known = engine.capabilities()
        if not known.score or not (known.processed_scores or sampling.is_identity):
            return None
        try:
            scores = engine.score([sample.sequence for sample in samples], sampling)
        except NRLModelsError:
            return None
        return _padded_to([row[len(sample.prompt) :] for row, sample in zip(scores, samples, strict=True)], width)

    def seen(self) -> list[bool]:
        """Return for each sample whether its prompt was sampled from before the last sync."""
        seen_flags: list[bool] = self.observed.value(
            "seen", lambda: [hash(sample.prompt) in self.sides.seen_prompts for sample in self.sides.samples]
        )
        return seen_flags


def _padded_to(rows: Sequence[Sequence[float]], width: int) -> torch.Tensor:
    return padded([*rows, [0.0] * width])[:-1, :width]
