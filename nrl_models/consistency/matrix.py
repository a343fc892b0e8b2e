"""Run the complete check: all cells of the matrix, then verdicts for failing cells. Results are saved on the way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from nrl_models.auto import auto_class_for
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.logs import get_logger
from nrl_models.common.switches import quirks_off
from nrl_models.common.trust.own_folder import default_folder
from nrl_models.common.trust.servers import (
    TRANSFORMERS_BACKEND,
    VLLMS,
    is_secret,
    is_server,
    require_engine,
    shown_argument,
)
from nrl_models.consistency.capsule.capsule_file import Limits
from nrl_models.consistency.capsule.consistency_capsule import write_consistency
from nrl_models.consistency.capsule.package_versions import versions
from nrl_models.consistency.cells import Cell, Settings
from nrl_models.consistency.consistency_report import CellResult, ConsistencyReport
from nrl_models.consistency.judge import Judge
from nrl_models.consistency.measure import Comparison, Measurement, Meter
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.references import References
from nrl_models.consistency.store import Store
from nrl_models.consistency.verdict import Verdict
from nrl_models.engines import start_engine
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.start import engine_keywords, longest_sequence, room_to_score
from nrl_models.errors import ConsistencyError, EngineError
from nrl_models.logprobs.sampling import Sampling
from nrl_models.parity.worst import worst_of

logger = get_logger(__name__)

MAX_VERDICTS = 3
"""Maximum number of failing cells to judge, besides those that only rounding explains.

A verdict takes a few times as long as a measurement.
"""

FORMAT = 3
"""Format of saved measurements. Increased whenever older measurements can no longer be read."""

_MAY_CHANGE = ("lengths", "data", "modes", "batches", "repeats", "strict", "threshold", "noise_factor")
"""Settings that do not affect the measurement of a cell, so that a resumed run may change them."""


def check_consistency(
    path: str | Path,
    *,
    engine: str = "vllm",
    settings: Settings | None = None,
    out: Path | None = None,
    dtype: torch.dtype | None = None,
    trainer_dtype: torch.dtype | None = None,
    device: str = "cpu",
    text_file: Path | None = None,
    fresh: bool = False,
    load_format: str = "auto",
    engine_options: dict[str, Any] | None = None,
    skip_too_long: bool = False,
    witness: str = "",
    second_trainer: str = "",
    capsule: Path | None = None,
    capsule_limits: Limits | None = None,
    progress: Callable[[ConsistencyReport], None] = lambda report: None,
) -> ConsistencyReport:
    """Check that a checkpoint's trainer and an engine compute the same log-probabilities.

    Args:
        path: Directory of the checkpoint.
        engine: Name from `nrl_models.engines.ENGINES`.
        settings: Settings of the check.
        out: Directory of the measurements. A run with the same settings, engine, versions and device resumes from it.
            Default: see `default_out`.
        dtype: Dtype of the engine; default: the checkpoint's.
        trainer_dtype: Dtype of the trainer; default: the engine's.
        device: Device of the trainer.
        text_file: File with real text; default: Python's reference manual.
        fresh: Whether to discard earlier measurements.
        load_format: `auto`, or `dummy` for an engine that starts on random weights and is refitted by the trainer.
        engine_options: Options of the engine.
        skip_too_long: Whether to skip and report lengths above the model's limit, instead of raising. If none is left,
            the longest possible length is checked.
        witness: Another engine to use for cells that fail; empty for none. `vllm-transformers` gets the precision and
            options of the `vllm` under test, and the verdict recommends it if it is right.
        second_trainer: Another engine in the trainer's precision, which is compared with the engine in every cell;
            empty for none.
        capsule: File for the capsule of the worst failing cell, see `nrl_models.consistency.capsule`; None for none.
        capsule_limits: Size of the capsule.
        progress: Called at every step with the report so far.

    Returns:
        The report. If the engine failed, it has the failure and the results up to then.

    Raises:
        EngineError: If the engine does not start.
        ConsistencyError: If the check cannot run with these arguments, or `out` has measurements with other settings.
        CheckpointError, UnknownArchitectureError, ...: See `from_pretrained`.

    Examples:
        >>> from nrl_models import check_consistency
        >>> from nrl_models.consistency.cells import Settings
        >>> settings = Settings(lengths=(64,), batches=(2,), data=("dummy",), modes=("sampling",))
        >>> report = check_consistency("demo/checkpoint", engine="hf-generate", settings=settings)
        >>> report.passed
        True
    """
    require_engine(engine)
    for role, name in (("witness", witness), ("second trainer", second_trainer)):
        if name:
            require_engine(name)
        if name == engine:
            raise ConsistencyError(f"the {role} is also {name}: expected another engine than the one that is checked")
    settings = settings or Settings()
    folder = resolve_folder(path)
    settings, skipped = _fitting(folder, settings, engine, skip_too_long)
    longest = max(settings.lengths) + room_to_score(engine) if engine in VLLMS else None
    command_keywords = {"dtype": dtype, "load_format": load_format, "seed": settings.seed, "max_length": longest}
    keywords = engine_keywords(engine_options, **command_keywords)
    decisive = {
        "format": FORMAT,
        "checkpoint": fingerprint(folder),
        "engine": engine,
        "engine_options": {key: str(value) for key, value in (engine_options or {}).items() if not is_secret(key)},
        "load_format": load_format,
        "dtype": str(dtype),
        "trainer_dtype": str(trainer_dtype or dtype),
        "device": _described_device(device),
        "versions": versions(),
        **({"second_trainer": second_trainer} if second_trainer else {}),
        "text": None if text_file is None else str(text_file.resolve()),
        **{key: value for key, value in asdict(settings).items() if key not in _MAY_CHANGE},
    }
    store = Store(out or default_out(path, decisive), decisive, fresh=fresh)
    dummy = load_format == "dummy"
    try:
        model = auto_class_for(path).from_pretrained(path, dtype=trainer_dtype or dtype or "auto", device=device)
        trainer = HFEngine(model, "trainer")
        prompts = Prompts.of_checkpoint(folder, trainer.capabilities().vocabulary or 0, text_file)
        with quirks_off("engine-dummy-buffers"):  # random weights were requested explicitly
            started = start_engine(engine, path, **keywords)
    except BaseException:
        store.delete_if_empty()
        raise
    with started:
        if store.has_measurements:
            advice = "To measure again, pass fresh=True (--fresh)"
            if is_server(engine):
                advice = "A server does not report its version or a restart: discard them if it has changed (--fresh)"
            logger.warning(
                f"{store.folder} has measurements of {shown_argument(engine)} with the same settings, which are "
                f"reused. {advice}"
            )
        store.note_engine(started.describe())
        if dummy:
            started.refit(model.state_dict_adapter.iter_export(model))
        options = _witness_options(witness, settings, keywords if engine == "vllm" else {})
        references = References(path, device=device, witness=witness, witness_options=options)
        beside = start_engine(second_trainer, path, dtype=model.dtype) if second_trainer else None
        with beside or nullcontext():
            meter = Meter(started, trainer, prompts, settings, store, references, beside)
            return run_matrix(
                str(path),
                meter,
                references,
                skipped=skipped,
                random_weights=dummy,
                capsule=capsule,
                capsule_limits=capsule_limits,
                progress=progress,
            )


def _described_device(device: str) -> str:
    """Return the trainer's device, with the name of the GPU."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if torch.device(device).type == "cuda" else device


def default_out(path: str | Path, decisive: Mapping[str, Any]) -> Path:
    """Return `consistency/NAME-DIGEST`, which git ignores.

    Args:
        path: Checkpoint; NAME is the last part of its path.
        decisive: Settings that affect measurements, including the checkpoint's files; DIGEST is their hash.
    """
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True, default=str).encode()).hexdigest()
    return default_folder("consistency", path, digest)


def run_matrix(
    path: str,
    meter: Meter,
    references: References,
    *,
    skipped: dict[Cell, str] | None = None,
    random_weights: bool = False,
    capsule: Path | None = None,
    capsule_limits: Limits | None = None,
    progress: Callable[[ConsistencyReport], None] = lambda report: None,
) -> ConsistencyReport:
    """Measure all cells with a running engine and trainer, and judge failing ones.

    Args:
        path: The checkpoint, for the report.
        meter: Measures cells. It must have a store.
        references: Models to compare with in verdicts.
        skipped: Cells that cannot be checked, with the reason, for the report.
        random_weights: Whether the engine was started on random weights.
        capsule: File for the capsule of the worst failing cell; None for none.
        capsule_limits: Size of the capsule.
        progress: Called at each step with the report so far.

    Returns:
        The report. If the engine fails, the run ends, and the report has the error.
    """
    settings, store = meter.settings, meter.store
    assert store is not None
    descriptions = meter.engine.describe(), meter.trainer.describe()
    report = ConsistencyReport(path, settings, *descriptions, skipped=skipped or {}, out=store.folder)
    report.second = {} if meter.second is None else meter.second.describe()
    judge = Judge(meter, references, random_weights=random_weights)
    report.running = dict.fromkeys(settings.cells(), "waiting")
    try:
        for cell in settings.cells():

            def note(step: str, cell: Cell = cell) -> None:
                report.running[cell] = step
                progress(report)

            repeats = tuple(meter.measure(cell, repeat, note) for repeat in range(settings.repeats))
            result = CellResult.of(cell, repeats, settings)
            judged = sum(earlier.verdict is not None and not earlier.is_rounding for earlier in report.results)
            if not result.passed and judged < MAX_VERDICTS:
                note("judging")
                result = replace(result, verdict=_verdict(judge, result, store))
            del report.running[cell]
            report.results.append(result)
            progress(report)
        failing = [result for result in report.results if not result.passed]
        if capsule is not None and failing:
            worst = max(
                failing, key=lambda result: worst_of(_badness(repeat, result.sampling) for repeat in result.repeats)
            )
            report.running[worst.cell] = "writing the capsule"
            progress(report)
            judgment = judge.judged(worst.cell, _worst_repeat(worst), with_tensors=True)
            write_consistency(capsule, judgment, meter.engine, meter.trainer, capsule_limits or Limits())
            with_verdict = replace(worst, verdict=judgment.verdict)
            report.results = [with_verdict if result is worst else result for result in report.results]
            report.capsule = capsule
    except EngineError as error:
        report.error = str(error)
    finally:  # save the report in any case
        report.running.clear()
        store.save_note("report", report.to_json())
    return report


def _verdict(judge: Judge, result: CellResult, store: Store) -> Verdict:
    name, witness = f"verdict-{result.cell.key}", judge.references.witness
    if (content := store.load_note(name)) is not None:
        saved_verdict = Verdict.from_json(content)
        # A verdict against a side that was made without this witness lacks the witness's vote.
        if not (witness and saved_verdict.at_fault) or (
            saved_verdict.witness and saved_verdict.witness.vote and saved_verdict.witness.engine == witness
        ):
            return saved_verdict
    verdict = judge.judge(result.cell, _worst_repeat(result))
    store.save_note(name, verdict.to_json())
    return verdict


def _witness_options(witness: str, settings: Settings, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the witness engine.

    Args:
        witness: Name of the witness.
        settings: Settings of the check.
        engine: Keywords of the vLLM under test; empty for another engine.
    """
    if witness not in VLLMS:
        return {}
    options: dict[str, Any] = {"max_length": max(settings.lengths) + room_to_score(witness)}
    if witness == TRANSFORMERS_BACKEND and "python" not in engine:  # another environment has another vLLM
        decided = ("load_format", "seed", "multiprocessing", "model_impl")
        options |= {key: value for key, value in engine.items() if key not in decided}
    return options


def _worst_repeat(result: CellResult) -> Measurement:
    """Return the measurement of a cell with the largest error."""
    return max(result.repeats, key=lambda repeat: _badness(repeat, result.sampling))


def _badness(measurement: Measurement, sampling: Sampling) -> float:
    """Return a number that orders measurements by their errors."""
    return worst_of(
        metrics.impossible(sampling) * 1e6 + (metrics.token_mult_prob_error if metrics.tokens else 1e6)
        for name, metrics in measurement.metrics.items()
        if name in (Comparison.DECODE, Comparison.PREFILL, Comparison.SECOND)
    )


def _fitting(folder: Path, settings: Settings, engine: str, skip: bool) -> tuple[Settings, dict[Cell, str]]:
    """Return settings without lengths that exceed the model's limit, and the cells that are then skipped."""
    longest = longest_sequence(folder, engine)
    too_long = [length for length in settings.lengths if longest is not None and length > longest]
    if longest is None or not too_long:
        return settings, {}
    fitting = tuple(length for length in settings.lengths if length not in too_long) or (longest,)
    room = room_to_score(engine)
    reason = f"the model takes {longest + room:,} tokens"
    reason += f", of which {engine} needs {room} to score" if room else ""
    if not skip:
        raise ConsistencyError(
            f"{reason}, but a length of {', '.join(f'{length:,}' for length in too_long)} is requested: leave it out, "
            f"or use --length {' --length '.join(map(str, fitting))}"
        )
    left_out = replace(settings, lengths=tuple(too_long)).cells()
    return replace(settings, lengths=fitting), dict.fromkeys(left_out, reason)


def fingerprint(folder: Path) -> dict[str, Any]:
    """Return names, sizes and times of a checkpoint's files, to detect changes."""
    return {
        file.name: [file.stat().st_size, file.stat().st_mtime_ns]
        for file in (sorted(folder.iterdir()) if folder.is_dir() else [folder])
        if file.is_file() and file.suffix in (".json", ".safetensors", ".model", ".gguf")
    }
