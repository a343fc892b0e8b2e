"""Run the GPU kit: `make gpu`, or `python -m benchmarks.gpu`. docs/gpu.md describes the options.

Exit status: 0 if every case passed, 1 if one failed or did not run, 2 if there is no GPU or an option is invalid.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import hardware, wheels
from benchmarks.gpu.outcomes import ROOT, Outcome, Results, digest
from benchmarks.gpu.page import write_page
from benchmarks.gpu.sections import SECTIONS, Section
from benchmarks.reporting import RESULTS

BUILD = ROOT / "build"
JSON, PAGE = RESULTS / "gpu.json", ROOT / "docs" / "gpu.md"
NO_GPU = 2

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
"""Variables of all subprocesses."""

CPU_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
"""Variables of subprocesses with `--cpu`. Threads cost more than they save at tiny sizes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections. Return the exit status."""
    options = parse(arguments)
    folder = options.out or (BUILD / "gpu" if options.cpu else None)
    file, page, log = (
        (JSON, PAGE, BUILD / "gpu.log")
        if folder is None
        else (folder / name for name in ("gpu.json", "gpu.md", "gpu.log"))
    )
    if options.page:
        write_page(page, Results(file))
        return 0
    if not options.cpu and (reason := hardware.why_no_gpu()):
        print(f"no GPU: {reason}; `make gpu CPU=1` runs the same program on a CPU at tiny sizes", file=sys.stderr)
        return NO_GPU
    add_wheels(options.wheels)
    if absent := wheels.missing():
        print(
            f"not installed: {', '.join(absent)}; run `make gpu-wheels` where there is a package index", file=sys.stderr
        )
        return NO_GPU
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the subprocess
    results = Results(file, hardware.describe(options.cpu, options.peak), "tiny" if options.cpu else "full")
    wanted = options.only or [section.name for section in SECTIONS]
    resume(results, wanted, fresh=options.fresh, again=bool(options.only))
    results.save()
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    deadline = time.monotonic() + options.limit
    for section in (section for section in SECTIONS if section.name in wanted):
        results = run_section(section, results, log, deadline, options)
        write_page(page, results)
    return summarize(results, wanted, file, log)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="run on a CPU at tiny sizes")
    parser.add_argument("--only", nargs="+", choices=names, metavar="SECTION", help=f"sections: {', '.join(names)}")
    parser.add_argument("--limit", type=float, default=570, help="seconds after which the run stops")
    parser.add_argument("--peak", type=float, help="dense bf16 peak of the GPU in TFLOPS")
    parser.add_argument("--out", type=Path, help="folder for gpu.json, gpu.md and gpu.log")
    parser.add_argument("--wheels", type=Path, default=BUILD / "gpu-wheels", help="folder of wheels")
    parser.add_argument("--fresh", action="store_true", help="discard the outcomes of an interrupted run")
    parser.add_argument("--page", action="store_true", help="only write the page from the saved outcomes")
    return parser.parse_args(arguments)


def add_wheels(folder: Path) -> None:
    """Put missing packages from wheels on the Python path of this process and of subprocesses."""
    target = BUILD / "gpu-site"
    shutil.rmtree(target, ignore_errors=True)  # another interpreter may lack other packages
    if wheels.unpack(folder, target):
        sys.path.append(str(target))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(target))))


def resume(results: Results, wanted: Sequence[str], *, fresh: bool = False, again: bool = False) -> None:
    """Discard stored outcomes, unless they belong to an interrupted run of the same sources.

    Args:
        results: The stored outcomes; modified in place.
        wanted: Sections that will run. The outcomes of others stay.
        fresh: Discard those of an interrupted run also.
        again: Discard finished sections also.
    """
    stored = [results.sections.get(name) for name in wanted]
    again = again or all(outcome is not None and outcome.is_finished for outcome in stored)
    for name, outcome in zip(wanted, stored, strict=True):
        if outcome is not None and (fresh or outcome.sources != digest() or (again and outcome.is_finished)):
            del results.sections[name]


def run_section(section: Section, results: Results, log: Path, deadline: float, options: argparse.Namespace) -> Results:
    """Run a section's missing cases in a subprocess, until its limit or the deadline. Return the new results."""
    stored = results.sections.get(section.name)
    if stored is not None and stored.is_finished:
        print(f"{section.name}: kept from the interrupted run", flush=True)
        return results
    left = deadline - time.monotonic()
    if left <= 0:
        print(f"{section.name}: no time left", flush=True)
        return results
    print(f"{section.name}:", flush=True)
    results.begin(section.name, digest())
    command = [sys.executable, "-m", "benchmarks.gpu.context", section.name, "--results", str(results.path)]
    if options.cpu:
        command.append("--cpu")
    peak = results.machine.get("bf16 peak", "unknown").split()[0]
    if peak != "unknown":
        command += ["--peak", peak]
    environment = {**os.environ, **OFFLINE, **section.environment, **(CPU_ENVIRONMENT if options.cpu else {})}
    status = run_until(command, environment, log, min(left, section.seconds))
    results = Results(results.path, results.machine, results.size)
    if status is None and deadline - time.monotonic() <= 0:
        print(f"  stopped at the run's limit of {options.limit:g} s", flush=True)
        return results
    if status != 0:
        error = f"stopped after {section.seconds} s" if status is None else f"ended with status {status}: {tail(log)}"
        record_end(results, section.name, error)
        print(f"  {error}", flush=True)
    return results


def run_until(command: Sequence[str], environment: dict[str, str], log: Path, seconds: float) -> int | None:
    """Run a command with its stderr in the log. Return its status, or None if it was stopped after `seconds`."""
    with (
        log.open("ab") as errors,
        subprocess.Popen(command, cwd=ROOT, env=environment, stderr=errors, start_new_session=True) as process,
    ):
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with its subprocesses


def record_end(results: Results, name: str, error: str) -> None:
    """Record a subprocess that ended early: for each case without an outcome, or for the section."""
    section = results.sections[name]
    if not section.planned:
        section.error = error
    for case in section.missing:
        section.cases[case] = Outcome(error=error)
    results.save()


def tail(log: Path) -> str:
    """Return the last line of the log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def summarize(results: Results, wanted: Sequence[str], file: Path, log: Path) -> int:
    """Print failures and sections that did not run. Return the exit status."""
    unfinished = [name for name in wanted if name not in results.sections or not results.sections[name].is_finished]
    failures = [
        f"{name}: {line}" for name in wanted if name in results.sections for line in results.sections[name].failures
    ]
    for line in failures:
        print(f"FAILED {line}")
    if unfinished:
        print(f"not finished: {', '.join(unfinished)}; run again to resume")
    outcomes = [
        outcome for name in wanted if (section := results.sections.get(name)) for outcome in section.cases.values()
    ]
    passed = sum(not outcome.error for outcome in outcomes)
    print(f"{passed} of {len(outcomes)} cases passed; figures in {file}, messages in {log}")
    return 1 if failures or unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
