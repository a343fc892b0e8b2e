"""`Watch`: compares trainer and engine after each weight sync and before each update."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nrl_models.common.state_dict.merged import export_adapter
from nrl_models.consistency.capsule.capsule_file import Limits
from nrl_models.engines.base import Engine
from nrl_models.engines.digests import digested
from nrl_models.engines.engine_types import NamedTensor, RefitReport, Sample
from nrl_models.errors import UnknownArgumentError
from nrl_models.logprobs import TokenLogprobs
from nrl_models.logprobs.microbatches import ranks_of
from nrl_models.logprobs.sampling import Sampling
from nrl_models.watch.allowance import Allowance
from nrl_models.watch.diagnosis import DriftEvidence
from nrl_models.watch.drift_capsule import CapsuleWriter
from nrl_models.watch.event import Event, EventKind, StepReport
from nrl_models.watch.measured import Measured, Running
from nrl_models.watch.probes import Probes
from nrl_models.watch.record import Log, Recorder
from nrl_models.watch.rollout_tensors import RolloutStep, draft_names, require_options, require_sides, whole_numbers
from nrl_models.watch.step_metrics import Bars, StepMetrics, step_metrics
from nrl_models.watch.syncs import Sync, Transfer, require_sync, warn_without_digests
from nrl_models.watch.trainer_changes import TrainerChanges
from nrl_models.watch.watch_results import WatchResults

HISTORY = 64
"""Steps whose metrics are kept."""

KEPT_PROMPTS = 4_096
"""Prompts that are known to have been sampled from before."""


class Watch:
    """Checks during training that trainer and engine are still the same model.

    Args:
        model: the trainer's model; it may be wrapped (PEFT, DDP, FSDP). None if this process has none.
        engine: the engine; None if the trainer owns it, see `after_sync`.
        sampling: sampling parameters of the log-probabilities.
        fail: raise `DriftError` for failures. Otherwise they are logged.
        max_staleness: number of syncs by which samples may be older than the trainer's weights. Such rows are allowed,
            but not compared. See `versions` of `before_update`.
        probe_every: syncs from one run of the probes to the next. Probes are fixed sequences whose log-probabilities
            both sides compute. 0: only if rollouts differ.
        probes: token IDs of the probes, all of one length. Default: random text tokens, 4 rows of 64.
        optimizer: with it, weights that change at learning rate 0 are a failure.
        tokenizer: with it, a changed vocabulary or chat template is a failure.
        compute: dtype of the trainer's autocast; None for none.
        bars: published bounds. A difference that the noise floor explains is a warning above them.
        log: a file for JSON lines, or a function of `(values, step)` such as `accelerator.log`; or a list of them.
        capsule: a file for the evidence of the first failure, or a directory with a file per failure; None for none.
        capsule_limits: size of a capsule.

    With several ranks, create a watch on every rank. If one rank finds a failure at a sync or in `before_update`, all
    ranks raise `DriftError` in `before_update`. Probes and scoring samples again are off, because every rank would have
    to take part.

    Attributes:
        findings: all findings so far.
        history: metrics of the last steps.

    Raises:
        UnknownArgumentError: An argument has a wrong type or value, or probes have different lengths or unknown tokens.
        SaveError: `log` or `capsule` cannot be written.

    Examples:
        >>> from nrl_models import AutoModelForCausalLM, Sampling, rollout_logprobs, start_engine
        >>> from nrl_models.watch import Watch
        >>> model = AutoModelForCausalLM.from_pretrained("demo/checkpoint")
        >>> engine = start_engine("hf-generate", "demo/checkpoint")
        >>> watch = Watch(model, engine)
        >>> samples = engine.generate([[11, 12, 13]], Sampling(), max_new_tokens=16)
        >>> result = rollout_logprobs(model, [samples[0].sequence])
        >>> step = watch.before_update(samples, result)  # raises DriftError if trainer and engine differ
        >>> report = watch.refit()  # after optimizer.step(); compares sent and received tensors
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        engine: Engine | None = None,
        *,
        sampling: Sampling | None = None,
        fail: bool = True,
        max_staleness: int = 0,
        probe_every: int = 1,
        probes: Sequence[Sequence[int]] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        tokenizer: Any = None,
        compute: torch.dtype | None = None,
        bars: Bars | None = None,
        log: Log | Sequence[Log] = (),
        capsule: str | Path | None = None,
        capsule_limits: Limits | None = None,
    ) -> None:
        require_sides(model, engine, sampling, bars)
        require_options(fail, max_staleness, probe_every, probes, compute)
        self.model, self.engine = model, engine
        self.sampling, self.fail, self.probe_every = sampling or Sampling(), fail, probe_every
        self.max_staleness = max_staleness
        self.bars = bars or Bars()
        self.history: deque[StepMetrics] = deque(maxlen=HISTORY)
        self._ranks = ranks_of(None)
        self._compute, self._changes = compute, TrainerChanges(optimizer, tokenizer)
        writer = None if capsule is None else CapsuleWriter(capsule, capsule_limits)
        self._results = WatchResults(Recorder(log), writer, self._ranks)
        self.findings = self._results.findings
        version = 0 if engine is None else engine.version
        self._last, self._frozen_syncs = Sync(version=version), 0
        self._draft_names = () if model is None else tuple(draft_names(model))
        self._probes = None
        can_probe = engine is not None and engine.capabilities().score and self._ranks == 1
        if model is not None and engine is not None and can_probe:
            self._probes = Probes(model, engine, probes, compute)
        self._step = self._steps_since_sync = 0
        self._probe_error = math.nan
        self._agreed_at: int | None = None
        self._prompts: deque[int] = deque(maxlen=KEPT_PROMPTS)
        self._seen_prompts: frozenset[int] = frozenset()
        self._allowed = Allowance(None, self.bars.token_mult_prob_error)
        self._allowed_in_probes = Allowance(None, self.bars.token_mult_prob_error)
        if self._probes is not None:
            self._measure_floor(self._probes)
            # Before the first sync the engine may have other weights, for example random ones.
            if self._probes.score(version) <= self._allowed_in_probes.bound(Sampling()):
                self._agreed_at = version

    @property
    def version(self) -> int:
        """Number of the weights. Before the first sync: the engine's version, or 0 without an engine."""
        return self._last.version

    @property
    def last_sync(self) -> Sync:
        """The last sync."""
        return self._last

    def follow_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Report weights that change at learning rate 0 of this optimizer, which was made after the watch.

        Args:
            optimizer: as `optimizer` of `Watch`. With several, the largest learning rate counts.
        """
        self._changes.follow(optimizer)

    def refit(
        self,
        tensors: Iterable[NamedTensor] | None = None,
        *,
        digests: bool = True,
        partial: bool = False,
        **options: Any,
    ) -> RefitReport:
        """Refit the engine and compare received tensors with sent ones.

        Args:
            tensors: weights by Hub name. Default: all of the model's, adapters merged.
            digests: hash every tensor on both sides. Without, only the engine's report and probes show a fault.
            partial: tensors that are not sent keep their values in the engine, which is not a failure.
            options: further options of `Engine.refit`.

        Raises:
            DriftError: something is wrong, and `fail`. With several ranks, `before_update` raises it.
            EngineError: as `Engine.refit`.
        """
        if self.engine is None:
            raise UnknownArgumentError("this watch has no engine to refit: pass engine=, or call after_sync")
        if self.model is None and tensors is None:
            raise UnknownArgumentError("this watch has no model to export: pass model= or tensors=")
        sent: dict[str, str] = {}
        if self.model is not None and tensors is None:
            tensors = export_adapter(self.model).iter_export(self.model)
        assert tensors is not None
        stream = digested(tensors, sent) if digests else tensors
        report = self.engine.refit(stream, digests=digests, partial=partial, **options)
        self.after_sync(sent, report, partial=partial)
        return report

    def after_sync(
        self,
        sent: Mapping[str, str] | None = None,
        report: RefitReport | None = None,
        *,
        version: int | None = None,
        partial: bool = False,
    ) -> None:
        """Check a weight sync that the trainer made itself.

        Args:
            sent: digest of each sent tensor by Hub name (`nrl_models.engines.digests.tensor_digest`).
            report: the engine's report, with digests of received tensors.
            version: number of the weights that the engine reports.
            partial: tensors that are not sent keep their values in the engine, which is not a failure.

        Raises:
            DriftError: something is wrong, and `fail`. With several ranks, `before_update` raises it.
        """
        require_sync(sent, report)
        version = report.version if version is None and report is not None else version
        transfer = Transfer(
            before=self._last,
            draft_names=self._draft_names,
            frozen_syncs=self._frozen_syncs,
            sent=dict(sent or {}),
            report=report,
            version=version,
            learning_rate=self._changes.take_learning_rate(),
            partial=partial,
        )
        self._last, self._frozen_syncs = transfer.after, transfer.frozen_syncs_after
        warn_without_digests(self._last, probed=self._probes is not None and self.probe_every > 0)
        self._steps_since_sync = 0
        self._seen_prompts = frozenset(self._prompts)
        event = self._event(
            EventKind.SYNC, self._is_probe_due(), transfer=transfer, tokenizer=tuple(self._changes.of_tokenizer())
        )
        evidence = self._evidence()
        findings = event.findings(evidence)
        values: dict[str, float] = {}
        if self._probes is not None and event.probe_bound is not None:
            self._probe_error = values["probe_error"] = evidence.measured.probe_error()
            if self._probe_error <= event.probe_bound:
                self._allowed_in_probes.learn(self._probe_error, self._probes.tokens[:, 1:].numel())
                self._agreed_at = self.version
        self._results.add(event, evidence, findings, values, step=self._step, fail=self.fail)

    def before_update(
        self,
        samples: Sequence[Sample] | None = None,
        trainer: torch.Tensor | TokenLogprobs | None = None,
        *,
        engine: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        tokens: Sequence[Sequence[int]] | None = None,
        versions: Sequence[int] | None = None,
    ) -> StepReport:
        """Compare log-probabilities of a step's rollouts. Call it before the optimizer step.

        Args:
            samples: the engine's samples. With them, the watch can score the samples again to test causes.
            trainer: the trainer's log-probabilities `(rows, length)`, computed with the weights that generated the
                samples; or the result of `token_logprobs` or `rollout_logprobs`. Then only tokens of its mask are
                compared, which leaves out tokens that the trainer's `top_k` or `top_p` excludes.
            engine: the engine's log-probabilities `(rows, length)`. Default: those of `samples`.
            mask: True for tokens to compare, `(rows, length)`. Default: the completions of `samples`, each row being
                prompt and completion without padding on the left; without samples, the mask of `trainer`.
            attention_mask: True for tokens that are not padding, `(rows, any length)`.
            tokens: token IDs of prompt and completion that the trainer used, without padding.
            versions: for each row, the version of the weights that generated it.

        Raises:
            DriftError: something is wrong, and `fail`.
            UnknownArgumentError: neither `samples` nor `engine` and `mask`; no `trainer`; or a wrong type.
            ValueError: the shapes or numbers of rows differ.
        """
        versions = whole_numbers(versions)
        step = RolloutStep.of(samples, trainer, engine, mask, attention_mask)
        if versions is not None:
            step = step.of_version(versions, self.version)
        metrics = step_metrics(step.trainer, step.engine, step.mask, attention_mask)
        self._step += 1
        self._steps_since_sync += 1
        self._prompts += [hash(sample.prompt) for sample in step.samples]
        event = self._event(
            EventKind.STEP,
            self._probes is not None,
            other_tokens=None if tokens is None or not step.samples else step.other_tokens(tokens),
            versions=tuple(versions or ()),
            oldest=self.version - self.max_staleness,
            newest=self.version,
        )
        evidence = self._evidence(step, metrics)
        findings = event.findings(evidence)
        if not findings:
            self._allowed.learn(metrics.token_mult_prob_error, metrics.tokens)
            self._agreed_at = self.version
        report = StepReport(step=self._step, version=self.version, metrics=metrics, findings=tuple(findings))
        self.history.append(metrics)
        self._results.add(
            event,
            evidence,
            findings,
            metrics.values(),
            step=self._step,
            fail=self.fail,
            versions=versions,
            rollouts=step,
        )
        return report

    # Probes

    def _is_probe_due(self) -> bool:
        count = self.last_sync.count
        return self.probe_every > 0 and (count == 1 or count % self.probe_every == 0)

    def _measure_floor(self, probes: Probes) -> None:
        dtype = probes.engine.capabilities().dtype or probes.dtype
        floor = probes.rounding(dtype if dtype.is_floating_point else probes.dtype)
        bar = self.bars.token_mult_prob_error
        self._allowed, self._allowed_in_probes = Allowance(floor, bar), Allowance(floor, bar)

    # Findings

    def _event(self, kind: EventKind, with_probes: bool, **more: Any) -> Event:
        return Event(
            kind=kind,
            bars=self.bars,
            bound=self._allowed.bound(self.sampling),
            probe_bound=self._allowed_in_probes.bound(Sampling()) if with_probes and self._probes else None,
            **more,
        )

    def _evidence(self, step: RolloutStep | None = None, metrics: StepMetrics | None = None) -> DriftEvidence:
        """Return the facts so far, and the sides to measure."""
        can_score = step is not None and self._ranks == 1 and self.model is not None
        samples, trainer, engine = step.worst() if step is not None and can_score else ([], None, None)
        running = Running(
            model=self.model,
            engine=self.engine,
            compute=self._compute,
            sampling=self.sampling,
            probes=self._probes,
            version=self.version,
            samples=samples,
            seen_prompts=self._seen_prompts,
        )
        return DriftEvidence(
            measured=Measured(running),
            sampling=self.sampling,
            sync=self._last,
            steps_since_sync=self._steps_since_sync,
            agreed_at=self._agreed_at,
            history=tuple(self.history),
            metrics=metrics,
            trainer=trainer,
            engine=engine,
        )
