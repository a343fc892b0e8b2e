"""Check that new weights arrive: start an engine on random weights, refit it twice, and compare after each refit.

The first refit verifies that every weight of the engine is sent and written. The second follows a training step. It
verifies that a running engine accepts new weights and discards results of the old ones (its caches).
The training step is in `weight_change`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from nrl_models.auto import auto_class_for
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.documents.rope_lengths import rope_switch
from nrl_models.common.switches import quirks_off
from nrl_models.common.trust.servers import require_engine
from nrl_models.common.value_checks import finite_or_none
from nrl_models.consistency import Data, Mode
from nrl_models.consistency.cells import THRESHOLD, Settings
from nrl_models.consistency.consistency_report import CellResult
from nrl_models.consistency.judge import Judge
from nrl_models.consistency.measure import Comparison, Measurement, Meter
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.references import References
from nrl_models.consistency.verdict import Verdict
from nrl_models.consistency.weight_change import WeightChange
from nrl_models.engines import start_engine
from nrl_models.engines.digests import digested, refit_problems
from nrl_models.engines.engine_types import NamedTensor, RefitReport
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.start import engine_keywords, longest_sequence, room_to_score
from nrl_models.errors import ConsistencyError, RefitUnsupportedError, listed
from nrl_models.family import FamilyModel
from nrl_models.loading.read_config import read_config
from nrl_models.logprobs.metrics import shown_error
from nrl_models.parity.parity_report import Outcome, Unit, passed_line
from nrl_models.parity.result_table import ResultTable

Tensors = Iterable[NamedTensor]

LENGTH = 100
"""Default number of tokens of compared sequences, unless the model's limit is lower."""

FLOOR_FACTOR = 3.0
"""Maximum distance of the second refit's error from 1, as a multiple of the first refit's."""

SMALLEST_EXCESS = 1e-5
"""Minimum distance of a bound from 1. Two sides in fp32 differ by less, but the difference varies."""

FP32_BOUND = 1.001
"""Bound of an error in fp32, for which there is no measurement."""


def unmeasured_bound(dtype: torch.dtype) -> float:
    """Return the bound of `token_mult_prob_error` if both sides compute in `dtype`, without a measurement of errors."""
    return FP32_BOUND if dtype.itemsize >= 4 else THRESHOLD


@dataclass(frozen=True)
class RefitStep:
    """A refit and the comparison after it.

    Args:
        name: Name of the step in reports.
        report: The engine's report.
        problems: Problems during the refit; empty if there are none.
        result: The comparison after the refit.
        before: `token_mult_prob_error` before the refit, with the engine's old weights.
        is_narrowed: Whether its bound follows from the error of an earlier refit.
    """

    name: str
    report: RefitReport
    problems: tuple[str, ...]
    result: CellResult
    before: float
    is_narrowed: bool = False

    @property
    def passed(self) -> bool:
        """Whether all tensors arrived and the log-probabilities agree."""
        return not self.problems and self.result.passed

    @property
    def faults(self) -> list[str]:
        """All problems; empty if only rounding explains them. An earlier refit had the same rounding."""
        is_rounding = not self.problems and self.result.is_rounding and not self.is_narrowed
        return [] if is_rounding else [*self.problems, *self.result.problems]


def check_refit(
    path: str | Path,
    *,
    engine: str = "vllm",
    dtype: torch.dtype | None = None,
    trainer_dtype: torch.dtype | None = None,
    device: str = "cpu",
    settings: Settings | None = None,
    bucket_bytes: int | None = None,
    engine_options: dict[str, Any] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> RefitChecker:
    """Refit an engine that starts on random weights, train a step, and refit it again; compare after each refit.

    Args:
        path: Directory of the checkpoint.
        engine: Name from `nrl_models.engines.ENGINES`. It must support new weights.
        dtype: Dtype of the engine; default: the checkpoint's.
        trainer_dtype: Dtype of the trainer; default: the engine's.
        device: Device of the trainer.
        settings: Settings of the comparison; its first cell and its threshold are used. Default: `refit_settings`. With
            LongRoPE, the engine's maximum length exceeds `original_max_position_embeddings`, as for rollouts of full
            length, because vLLM then uses the long factors for all sequences. The engine option `max_length` sets
            another length.
        bucket_bytes: Maximum bytes per bucket. By default, one bucket if that needs no copy.
        engine_options: Options of the engine.
        note: Called with the name of each step.

    Raises:
        EngineError: If the engine does not start, or fails.
        RefitUnsupportedError: If the engine does not support new weights.
        ConsistencyError: If the sequences are too long for the model.
        CheckpointError, UnknownArchitectureError, ...: See `from_pretrained`.
    """
    require_engine(engine)
    settings = settings or refit_settings(path, engine)
    length, longest = settings.cells()[0].length, longest_sequence(path, engine)
    if longest is not None and length > longest:
        raise ConsistencyError(f"a length of {length:,} is requested, but this model and engine support {longest:,}")
    max_length, switch = length + room_to_score(engine), rope_switch(read_config(resolve_folder(path)))
    if switch is not None and longest is not None and max_length <= switch <= longest:
        max_length = switch + 1  # the default of rollouts
    command_keywords = {"dtype": dtype, "load_format": "dummy", "seed": settings.seed + 1, "max_length": max_length}
    keywords = engine_keywords(engine_options, **command_keywords)
    note("loading the trainer")
    model = auto_class_for(path).from_pretrained(path, dtype=trainer_dtype or dtype or "auto", device=device)
    trainer = HFEngine(model, "trainer")
    prompts = Prompts.of_checkpoint(resolve_folder(path), trainer.capabilities().vocabulary or 0)
    note("starting the engine on random weights")
    with quirks_off("engine-dummy-buffers"):  # start on random weights; the check reports those that no refit reaches
        started = start_engine(engine, path, **keywords)
    with started:
        if not started.capabilities().refit:
            raise RefitUnsupportedError(f"{engine} does not support new weights here, so there is nothing to check")
        checker = RefitChecker(str(path), Meter(started, trainer, prompts, settings), device)
        note("refitting from random weights")
        checker.refit("from random weights", bucket_bytes=bucket_bytes)
        note("training one step")
        checker.train()
        note("refitting with the new weights")
        checker.refit("after a training step", bucket_bytes=bucket_bytes)
    return checker


def refit_settings(
    path: str | Path, engine: str, length: int | None = None, batch: int = 4, threshold: float = THRESHOLD
) -> Settings:
    """Return settings for comparing refits: sampled dummy data of `LENGTH` tokens, or fewer if the model needs it.

    The threshold is an upper limit. The bound itself is derived from measurements, see `RefitChecker.threshold`.
    """
    longest = longest_sequence(path, engine)
    length = length or (LENGTH if longest is None else min(LENGTH, longest))
    return Settings((length,), (Data.DUMMY,), (Mode.SAMPLING,), (batch,), threshold=threshold)


@dataclass
class RefitChecker:
    """Refits an engine from a trainer, and compares them.

    Args:
        path: The checkpoint.
        meter: Compares them, on the first cell of its settings.
        device: Device of reference models.

    Attributes:
        steps: The refits, in order.
        not_observable: Hub names of tensors that could be stale after the second refit without an effect above the
            bound: integer tensors, weights of multi-token prediction, experts that no token chose, and tensors not
            tried in time. If the engine's weights can be read, only the first two.
    """

    path: str
    meter: Meter
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.cell = self.meter.settings.cells()[0]
        self.steps: list[RefitStep] = []
        self._described = {"engine": self.meter.engine.describe(), "trainer": self.meter.trainer.describe()}
        self._max_length = self.meter.engine.capabilities().max_length  # the engine is closed before the report
        self._previous: dict[str, torch.Tensor] | None = None
        self._sent: dict[str, str] = {}
        self.not_observable: tuple[str, ...] = ()
        self.change = WeightChange(self.meter, self.cell)

    @property
    def threshold(self) -> float:
        """Bound of the next refit's `token_mult_prob_error`, unless the noise floor explains more.

        Derived from the first refit's error; for the first refit, from the precision. At most the settings' threshold.
        """
        if not self.is_narrowed:
            return min(self.meter.settings.threshold, unmeasured_bound(self.meter.noise_dtype))
        floor = max(SMALLEST_EXCESS, FLOOR_FACTOR * (self.steps[0].result.worst[1] - 1.0))
        return min(self.meter.settings.threshold, 1.0 + floor)

    @property
    def is_narrowed(self) -> bool:
        """Whether the bound of the next refit follows from the first refit's error."""
        return bool(self.steps) and self.steps[0].passed

    def refit(
        self,
        name: str,
        *,
        bucket_bytes: int | None = None,
        change: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    ) -> RefitStep:
        """Refit, compare, and record the step.

        Args:
            name: Name of the step in reports.
            bucket_bytes: Maximum bytes per bucket.
            change: Function applied to the tensors before they are sent, for tests.
        """
        model: FamilyModel = self.meter.trainer.model
        adapter = model.state_dict_adapter
        self.meter.references = self._references()
        before = self.meter.measure(self.cell)
        sent: dict[str, str] = {}
        exported = adapter.iter_export(model, max_bytes=bucket_bytes)
        # Unwritten tensors are reported, and the comparison shows their effect.
        report = self.meter.engine.refit(change(digested(exported, sent)), bucket_bytes=bucket_bytes, partial=True)
        problems = (*refit_problems(report, sent, adapter.export_plan()), *self._stale(sent))
        after = self.meter.measure(self.cell)
        self.not_observable = tuple(self.change.unseen(after, self.threshold))
        self.change = WeightChange(self.meter, self.cell)
        result = replace(CellResult.of(self.cell, (after,), self.meter.settings), threshold=self.threshold)
        if not result.passed or problems:
            result = replace(result, verdict=self._judge(after))
        error_before = before.metrics[Comparison.DECODE].token_mult_prob_error
        step = RefitStep(name, report, problems, result, error_before, is_narrowed=self.is_narrowed)
        self.steps.append(step)
        self._previous = {key: tensor.detach().clone() for key, tensor in adapter.iter_export(model)}
        self._sent = sent
        return step

    def train(self) -> float:
        """Train a step on new prompts; returns how far it moves the trainer (`token_mult_prob_error`)."""
        return self.change.train(self.threshold)

    def _stale(self, sent: Mapping[str, str]) -> Iterable[str]:
        """Yield problems if sent or engine weights are unchanged after the training step, which moved all weights."""
        if self._sent and self._sent == sent:
            yield "the same weights were sent as last time: the training step changed nothing"
        if self.change.old and (names := self.meter.engine.unchanged_weights()):
            yield f"weights of the engine did not change: {listed(names)}"

    def _judge(self, measurement: Measurement) -> Verdict:
        assert self.meter.references is not None
        return Judge(self.meter, self.meter.references, random_weights=True).judge(self.cell, measurement)

    def _references(self) -> References:
        """Create reference models with the trainer's current weights."""
        model: FamilyModel = self.meter.trainer.model
        previous = self._previous
        return References(
            self.path,
            device=self.device,
            weights=lambda: model.state_dict_adapter.iter_export(model),
            previous=None if previous is None else lambda: previous.items(),
        )

    @property
    def passed(self) -> bool:
        """Whether there was at least one refit, and all passed."""
        return bool(self.steps) and all(step.passed for step in self.steps)

    @property
    def title(self) -> str:
        """Checkpoint, engine and its maximum length."""
        length = "" if self._max_length is None else f", maximum length {self._max_length:,}"
        return f"{self.path}: refit of {self._described['engine'].get('engine')}{length}"

    @property
    def summary(self) -> str:
        """The result in one line: the number of refits that passed."""
        passed = sum(step.passed for step in self.steps)
        return f"{passed_line(self.passed, passed, len(self.steps), 'refits')}: {self.title}"

    def to_json(self) -> dict[str, Any]:
        """Return `{"verdict", "refits": [{"name", "token_mult_prob_error", ...}], ...}`."""
        return {
            "verdict": Outcome.of(self.passed),
            "checkpoint": self.path,
            **self._described,
            "threshold": self.meter.settings.threshold,
            "max_length": self._max_length,
            "not_observable": list(self.not_observable),
            "refits": [
                {
                    "name": step.name,
                    "verdict": Outcome.of(step.passed),
                    "value": finite_or_none(step.result.worst[1]),
                    "bound": step.result.bound,
                    "unit": Unit.TOKEN_MULT_PROB_ERROR,
                    "token_mult_prob_error": step.result.to_json()["token_mult_prob_error"],
                    "before": finite_or_none(step.before),
                    "problems": [*step.problems, *step.result.problems],
                    "notes": step.result.notes,
                    "report": asdict(replace(step.report, digests={})) | {"digests": len(step.report.digests)},
                    "comparison": step.result.to_json(),
                }
                for step in self.steps
            ],
        }

    @property
    def unseen(self) -> str:
        """Names the tensors whose old values would have no effect above the bound; empty if there are none."""
        names = listed(self.not_observable)
        return f"Old values would not show in: {names}" if names else ""

    def table(self) -> ResultTable:
        """Return a table with a row for each refit."""
        sides = (Comparison.DECODE, Comparison.PREFILL)
        table = ResultTable("refit", title=escape(". ".join(filter(None, (self.title, self.unseen)))))
        for name in ("tensors", "MB", "seconds", "largest bucket, MB", "before the refit", *sides):
            table.add_column(name, justify="right")
        table.add_column("verdict")
        for step in self.steps:
            comparisons = step.result.comparisons
            errors = [comparisons[side][0].token_mult_prob_error if side in comparisons else None for side in sides]
            table.add_row(
                escape(step.name),
                f"{step.report.tensors:,}",
                f"{step.report.nbytes / 1e6:.1f}",
                f"{step.report.seconds:.2f}",
                f"{step.report.largest_bucket / 1e6:.1f}",
                *("-" if error is None else shown_error(error, aligned=True) for error in (step.before, *errors)),
                Outcome.of(step.passed).markup,
            )
        return table
