"""Run all checks that apply to a checkpoint and an engine, the cheapest first."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nrl_models.certify import in_loop, layer_checks, lora, running_engine, with_engine, without_engine
from nrl_models.certify.certificate import Certificate, json_digest
from nrl_models.certify.certified import CheckpointUnderTest, Options, file_hashes, hardware
from nrl_models.certify.check_result import LOGPROBS, OTHER_CELLS, CheckResult, Side, Status, answer_of
from nrl_models.certify.first_layers import write_first_layers
from nrl_models.certify.sides import shows_fault, side_of_error
from nrl_models.common.checkpoint.json_reading import parsed
from nrl_models.common.checkpoint.writing import write_whole
from nrl_models.common.trust.own_folder import claim, default_folder, why_not_claimed
from nrl_models.common.trust.servers import is_server
from nrl_models.consistency.capsule.package_versions import versions
from nrl_models.errors import (
    ConsistencyError,
    EngineOptionError,
    NRLModelsError,
    RefitUnsupportedError,
    UnknownArgumentError,
    did_you_mean,
    one_line,
)

PURPOSE = "results of nrl-models certify"
RESULTS = "results.jsonl"
CERTIFICATE = "certificate.json"
FIRST_LAYERS = "first-layers"
"""Directory of the checkpoint that `layers` selects."""

ENGINE_START = "engine start"


@dataclass(frozen=True)
class Check:
    """A function that yields results.

    Args:
        names: names of its results.
        run: the function.
        loads: estimated time, in multiples of the time that `files` takes to load the checkpoint.
        seconds: estimated time that does not depend on the checkpoint.
        needs_engine: it starts the engine.
        extra: names of results that it does not always have.
        copies: number of copies of the weights in fp32 that it holds, activations aside.
    """

    names: tuple[str, ...]
    run: Callable[[CheckpointUnderTest], Iterator[CheckResult]]
    loads: float
    seconds: float = 1.0
    needs_engine: bool = False
    extra: tuple[str, ...] = ()
    copies: int = 1


CHECKS = (
    Check(("files",), without_engine.files, 1),
    Check(("tokenizer",), without_engine.tokenizer, 0),
    Check(("values",), without_engine.values, 0),
    Check(("embeddings",), without_engine.embeddings, 1),
    Check(("padding", "packing"), without_engine.batches, 2),
    Check(("saved files",), without_engine.saved_files, 2, copies=2),
    Check(("draft layers",), layer_checks.draft_layers, 2, copies=2),
    Check(("router replay",), layer_checks.router_replay, 2),
    Check(("sharding",), without_engine.sharding, 1, 10.0, copies=0),
    Check(("weights", "layers", "logits", "gradients"), without_engine.parity, 12, 5.0, copies=4),
    Check((ENGINE_START,), running_engine.engine_start, 3, 5.0, needs_engine=True, copies=2),
    Check(("routed experts",), running_engine.routed_experts, 2, needs_engine=True, copies=2),
    Check(("images",), running_engine.images, 5, needs_engine=True, copies=2),
    Check(("prefix caching",), running_engine.prefix_caching, 5, 5.0, needs_engine=True, copies=2),
    Check(("longest length",), running_engine.longest_length, 10, 10.0, needs_engine=True, copies=2),
    Check((lora.MERGED,), lora.merged, 8, 5.0, needs_engine=True, copies=3),
    Check((lora.SERVED,), lora.served, 8, 10.0, needs_engine=True, copies=3),
    Check(with_engine.REFITS, with_engine.refits, 20, 30.0, needs_engine=True, copies=4),
    Check(
        (LOGPROBS, "decode against prefill"),
        with_engine.log_probabilities,
        20,
        40.0,
        needs_engine=True,
        extra=(OTHER_CELLS,),
        copies=2,
    ),
    Check(in_loop.NAMES, in_loop.controls, 12, 20.0, copies=4),
)
"""All checks, the cheapest first."""

NAMES = tuple(name for check in CHECKS for name in check.names)
"""Names of all checks."""

NOT_COVERED = (
    "whether the weights are the intended ones: trainer and engine read the same files",
    "how often the engine accepts tokens of draft layers",
    "the trainer's own training loop (see `nrl_models.watch`)",
    "behavior on a GPU, unless engine and trainer ran on one",
)
"""Properties that no check covers."""


def certify(
    path: str | Path,
    *,
    engine: str | None = None,
    engine_options: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    budget: float | None = None,
    full: bool = False,
    seed: int = 0,
    out: Path | None = None,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    fresh: bool = False,
    loop_mesh: Mapping[str, int] | None = None,
    layers: int | None = None,
    progress: Callable[[str, list[CheckResult]], None] = lambda name, results: None,
) -> Certificate:
    """Run all checks that apply to a checkpoint, and return the result as a certificate.

    Results are saved as they come. The same call resumes an interrupted run; so does a call with a larger budget.

    Args:
        path: checkpoint directory, GGUF file or Hub repository.
        engine: name of the engine, or a server URL. Without an engine the answer is at best "not decided".
        engine_options: options passed to the engine.
        dtype: compute dtype of engine and trainer; the checkpoint's by default.
        device: device of the trainer.
        budget: seconds. Checks that are estimated not to end in time are left out.
        full: check the 36 cells of NeMo RL's guide, instead of 8.
        seed: random seed for inputs.
        out: directory for results; `certify/MODEL-DIGEST` by default.
        only: names of checks to run; all by default.
        skip: names of checks not to run.
        fresh: discard earlier results.
        loop_mesh: also run a training loop at learning rate 0 over this mesh, such as `{"fsdp": 2}`. `{}` runs it in
            one process, None runs none.
        layers: check only this many first layers of the model. The certificate says so, and is narrower.
        progress: called with the name of each check before it runs, and the results so far.

    Raises:
        UnknownArgumentError: an unknown name in `only` or `skip`, or see `require_loop`.
        ConsistencyError: `out` has other files.
        CheckpointError: the checkpoint does not exist, or `layers` cannot be selected from its files.
        ConfigurationError: the model has no more than `layers` layers.
    """
    if unknown := sorted({*only, *skip} - {*NAMES}):
        shown = ", ".join(name + did_you_mean(name, NAMES) for name in unknown)
        raise UnknownArgumentError(f"unknown checks {shown}: expected some of {', '.join(NAMES)}")
    in_loop.require_loop(loop_mesh, only)
    options = Options(engine, engine_options or {}, dtype, device, full, seed, loop_mesh, layers)
    subject = CheckpointUnderTest(path, options, Path(), fresh=fresh)
    hashes, installed = file_hashes(subject.folder), versions()
    key = subject.key = json_digest({"files": hashes, "versions": installed, "options": options.to_json()})
    subject.out = out or default_folder("certify", subject.path, key)
    saved = _Saved(subject.out, key, fresh=fresh)
    subject.delete_plotted({*NAMES} - saved.results.keys())
    if layers is not None:
        subject.folder = _first_layers(subject, layers, key, fresh=fresh)
    subject.deadline = None if budget is None else time.monotonic() + budget
    try:
        results = _run_all(subject, saved, only, skip, progress)
    finally:
        subject.release_engine()
    progress("", results)
    certificate = Certificate.of(
        name=subject.name,
        answer=answer_of(results),
        files=hashes,
        options=options.to_json(),
        versions=installed,
        hardware=hardware(),
        results=tuple(results),
        not_covered=NOT_COVERED,
    )
    certificate.save(subject.out / CERTIFICATE)
    return replace(certificate, folder=subject.out)


def _first_layers(subject: CheckpointUnderTest, layers: int, key: str, *, fresh: bool) -> Path:
    """Write the checkpoint of the first layers, unless an earlier run with the same key wrote it and it is intact."""
    target, record = subject.out / FIRST_LAYERS, subject.out / f"{FIRST_LAYERS}.json"
    try:
        earlier = json.loads(record.read_text())
    except (OSError, ValueError):
        earlier = None
    if not fresh and earlier == {"key": key, "files": file_hashes(target)}:
        return target
    record.unlink(missing_ok=True)
    write_first_layers(subject.folder, layers, target)
    write_whole(record, json.dumps({"key": key, "files": file_hashes(target)}, indent=1) + "\n")
    return target


def _run_all(
    subject: CheckpointUnderTest,
    saved: _Saved,
    only: Collection[str],
    skip: Collection[str],
    progress: Callable[[str, list[CheckResult]], None],
) -> list[CheckResult]:
    """Run the checks that are not saved. Returns all results."""
    results: list[CheckResult] = []
    is_started, load_seconds = True, 0.0
    for check in CHECKS:
        if check.names == in_loop.NAMES and subject.options.in_loop is None:
            continue
        done = [saved.results[name] for name in (*check.names, *check.extra) if name in saved.results]
        is_complete = len(done) >= len(check.names)
        # A server may have been started again, with other options or weights.
        is_stale = check.needs_engine and is_server(subject.options.engine) and _is_selected(check, only, skip)
        if not is_complete or is_stale or not all(result.is_final for result in done):
            reason = _reason_to_leave_out(check, subject, only, skip, load_seconds)
            if check.needs_engine and not is_started:
                reason = "the engine does not start"
            if not reason:
                progress(", ".join(check.names), results)
                subject.delete_plotted(check.names)
                done = _run(check, subject)
            elif not is_complete or is_stale or all(result.status is Status.LEFT_OUT for result in done):
                done = [CheckResult(name, Status.LEFT_OUT, reason) for name in check.names]
            saved.add(done, replacing=(*check.names, *check.extra))
        results += done
        if check.names == (ENGINE_START,):
            is_started = results[-1].status in (Status.PASSED, Status.LEFT_OUT)
        if check.names == ("files",):
            load_seconds = results[0].seconds
            if results[0].status not in (Status.PASSED, Status.LEFT_OUT):  # nothing else can run
                results += [
                    CheckResult(name, Status.LEFT_OUT, "the checkpoint does not load")
                    for other in CHECKS[1:]
                    for name in other.names
                    if name not in in_loop.NAMES
                ]
                break
    return results


def _is_selected(check: Check, only: Collection[str], skip: Collection[str]) -> bool:
    names = set(check.names)
    return (not only or not names.isdisjoint(only)) and names.isdisjoint(skip)


def _reason_to_leave_out(
    check: Check,
    subject: CheckpointUnderTest,
    only: Collection[str],
    skip: Collection[str],
    load_seconds: float,
) -> str:
    options = subject.options
    if not _is_selected(check, only, skip):
        return "not selected"
    if check.needs_engine and options.engine is None:
        return "no engine: pass --engine"
    if missing := subject.missing_memory(check.copies):
        return missing
    expected = check.seconds + check.loads * load_seconds
    if subject.deadline is not None and time.monotonic() + expected > subject.deadline:
        return f"no time left: would take about {expected:.0f} s"
    return ""


def _run(check: Check, subject: CheckpointUnderTest) -> list[CheckResult]:
    """Run a check. Errors of the checkpoint and the engine fail it; others leave it undecided, with the error."""
    started = time.monotonic()
    results: list[CheckResult] = []
    try:
        with with_engine.interrupting(subject.deadline):
            results += check.run(subject)
    except with_engine.OutOfTimeError as error:
        results += _unreached(check, results, Status.LEFT_OUT, str(error))
    except EngineOptionError:
        raise
    except RefitUnsupportedError as error:
        results += _unreached(check, results, Status.LEFT_OUT, one_line(error))
    except (NRLModelsError, OSError) as error:
        is_failure = shows_fault(error) or check.names == ("files",)
        side = side_of_error(error)
        if check.names != ("files",) and side is not Side.ENGINE:
            side = Side.MODEL  # the files have loaded
        status = Status.FAILED if is_failure else Status.NOT_DECIDED
        results += _unreached(check, results, status, one_line(error), side if is_failure else None)
    except Exception as error:  # one check must not end the others, whatever it calls
        results += _unreached(check, results, Status.NOT_DECIDED, one_line(error))
    seconds = round((time.monotonic() - started) / max(len(results), 1), 3)
    return [replace(result, seconds=seconds) for result in results]


def _unreached(
    check: Check, results: list[CheckResult], status: Status, summary: str, side: Side | None = None
) -> list[CheckResult]:
    done = {result.name for result in results}
    is_error = status is not Status.LEFT_OUT
    return [
        CheckResult(name, status, summary, side=side, is_error=is_error) for name in check.names if name not in done
    ]


class _Saved:
    """Results on disk, one JSON object per line.

    Args:
        folder: directory of the results.
        key: digest of everything that results depend on. Results with another key are discarded.
        fresh: discard all results.

    Raises:
        ConsistencyError: the directory has other files.
    """

    def __init__(self, folder: Path, key: str, *, fresh: bool) -> None:
        if not claim(folder, PURPOSE):
            raise ConsistencyError(why_not_claimed(folder))
        self.file, self.key = folder / RESULTS, key
        self.results: dict[str, CheckResult] = {}
        if not fresh and self.file.is_file():
            for line in self.file.read_text().splitlines():
                try:
                    values = json.loads(line)
                    if values.pop("key") == key:
                        result = parsed(CheckResult, values, strict=True)
                        self.results[result.name] = result
                except (ValueError, KeyError, TypeError):  # a line cut off by an interruption
                    continue
        self._write()

    def add(self, results: list[CheckResult], *, replacing: Collection[str]) -> None:
        """Save results in place of those with the names `replacing`."""
        self.results = {name: result for name, result in self.results.items() if name not in replacing}
        self.results |= {result.name: result for result in results}
        self._write()

    def _write(self) -> None:
        lines = (json.dumps({"key": self.key, **result.to_json()}) + "\n" for result in self.results.values())
        write_whole(self.file, "".join(lines))
