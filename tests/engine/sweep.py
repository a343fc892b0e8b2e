"""Compare every architecture that both vLLM and the registry have with vLLM. Write its section of
docs/engine-coverage.md and docs/engine-coverage/vllm.md. `mlx_sweep.py` does the same for MLX.

`make engine-coverage` runs the architectures without an outcome for the installed versions. All of them take an hour on
two idle cores. Each outcome is published immediately, so an interrupted run resumes.
`python -m tests.engine.sweep NAME ...` runs the named architectures again, `--again` runs all, and `--page` only writes
the page. Exits with 1 if an architecture's outcome is worse than before.

Models run one after another in a child process. A crash or a timeout is the outcome of the current architecture, and
another child continues with the next one. A disagreement counts only if it also occurs as the first run of a child,
because an engine that ran earlier in the process may affect later ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nrl_models.consistency.cells import NOISE_FACTOR, THRESHOLD
from tests.engine.coverage_page import MEASURED, ORDER, pages_with, write_pages
from tests.engine.obstacles import VLLM, Stage
from tests.engine.published import BOUND
from tests.sweep import Outcomes, Sweep
from tools.checkout import PAGES
from tools.coverage_pages.results import Kind, Record, read_records, versions_summary

ROOT = Path(__file__).parents[2]

MACHINE = "2 cores, without a GPU, in November 2026"
"""The machine and date of the recorded outcomes, for the page."""

CHILD = "--child"
"""The first argument of a child process. Architectures and the file for their outcomes follow."""

TIMEOUT = 900.0
"""Timeout of one architecture in seconds."""


def main() -> int:
    """Run the requested architectures, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    if CHILD in sys.argv:
        *names, outcome_file = [argument for argument in sys.argv[1:] if argument != CHILD]
        run_here(names, Path(outcome_file))
        return 0
    from tests.engine.families import shared_architectures

    everything = shared_architectures()

    def write() -> None:
        write_pages(pages(read_records(PAGES)[Kind.ENGINE], everything))

    def run(names: list[str]) -> Iterator[tuple[str, Outcomes]]:
        for name, outcome in run_in_children(names):
            yield name, {Kind.ENGINE: {key: value for key, value in outcome.items() if key != "architecture"}}

    return Sweep(PAGES, everything, {Kind.ENGINE: versions()}, run, worsened, write).main(parser)


def worsened(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe how an outcome is worse than before. Empty if it is not."""
    if ORDER.index(now["status"]) <= ORDER.index(before["status"]):
        return ""
    return f"{before['status']} before, {now['status']} now: {now['reason']}"


def run_in_children(names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run architectures in child processes, one after another. Yields the outcome of each architecture."""
    left = list(names)
    with tempfile.TemporaryDirectory() as folder:
        outcome_file = Path(folder) / "outcomes.jsonl"
        while left:
            ended = yield from child(left, outcome_file)
            left = [name for name in left if name not in outcomes(outcome_file)]
            if ended and left:  # the first architecture crashed or timed out
                outcome = {"architecture": left[0], "status": "not run", "stage": Stage.RUN, "reason": ended}
                note(outcome_file, outcome)
                yield left[0], outcome
                left = left[1:]


def child(names: list[str], outcome_file: Path) -> Generator[tuple[str, dict[str, Any]], None, str]:
    """Run architectures in a child process and yield their outcomes. Returns why it ended early, or an empty string.

    Args:
        names: The architectures.
        gathered: The file to which the child appends outcomes.
    """
    command = [sys.executable, "-m", "tests.engine.sweep", CHILD, *names, str(outcome_file)]
    seen = set(outcomes(outcome_file))
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        since, runs = time.monotonic(), True
        while runs:
            time.sleep(0.5)
            runs = process.poll() is None
            for name, outcome in outcomes(outcome_file).items():
                if name not in seen:
                    seen.add(name)
                    since = time.monotonic()
                    yield name, outcome
            if runs and time.monotonic() - since > TIMEOUT:
                process.kill()
                process.wait()
                return f"it was not done within {TIMEOUT:g} s"
        if process.returncode == 0:
            return ""
        output.seek(0)
        return crash_reason(process.returncode, output.read())


def crash_reason(status: int, output: bytes) -> str:
    """Format the reason for a crash: the exit status and the last line of output."""
    last = output.decode(errors="replace").strip().splitlines()[-1:]
    return f"it takes its process down (exit status {status}): {' '.join(last)[:300]}"


def run_here(names: list[str], outcome_file: Path) -> None:
    """Compare architectures with vLLM in this process. Each outcome is saved before the next begins.

    Stops after the first disagreement. Its outcome is not saved if other architectures ran before it.
    """
    import transformers

    from nrl_models.engines.vllm.vllm_start import runs_transformers_classes
    from tests.engine.certificates import write_certificate
    from tests.engine.families import AGREES, AS_LOADED, DISAGREES, NOT_DECIDED, compare_architecture
    from tests.engine.one_engine import OneEngine

    transformers.utils.logging.disable_progress_bar()
    for name in names:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, OneEngine() as start:
            checkpoint = Path(folder) / "own" / "checkpoint"
            native = compare_architecture(name, start, checkpoint.parent)
            outcome = native.to_json()
            agrees = outcome["status"] in (AGREES, NOT_DECIDED)
            if not agrees and name != names[0]:
                return
            write_certificate("vLLM", "vllm", native, checkpoint)
            # If an architecture did not run, there may be no checkpoint.
            if outcome["status"] in (AS_LOADED, DISAGREES) and not runs_transformers_classes(checkpoint):
                other = partial(start, model_impl="transformers")
                backend_outcome = compare_architecture(name, other, Path(folder) / "transformers").to_json()
                outcome["transformers"] = {key: backend_outcome[key] for key in ("status", *MEASURED, "reason")}
        note(outcome_file, outcome)
        os.write(2, f"{name}: {outcome['status']}, {time.perf_counter() - started:.0f} s\n".encode())
        if not agrees:
            return


def note(outcome_file: Path, outcome: dict[str, Any]) -> None:
    """Append an outcome to the file."""
    with outcome_file.open("a") as file:
        file.write(json.dumps(outcome) + "\n")


def outcomes(outcome_file: Path) -> dict[str, Any]:
    """Read the outcomes in the file, by architecture."""
    lines = outcome_file.read_text().splitlines() if outcome_file.exists() else []
    return {outcome["architecture"]: outcome for outcome in map(json.loads, lines)}


def versions() -> dict[str, str]:
    """Return the versions of the packages that influence the results."""
    from nrl_models.engines.vllm import vllm_version

    return {"engine": vllm_version(), "transformers": version("transformers"), "torch": version("torch")}


def pages(records: Mapping[str, Record], everything: list[str]) -> dict[Path, str]:
    """Return the pages with the results of vLLM.

    Args:
        records: The recorded outcomes by architecture.
        everything: All architectures that should have an outcome.
    """
    from tests.engine.limits import LIMITS

    intro = [
        f"`make engine-coverage`, on {MACHINE}, with {versions_summary(records).removeprefix('engine ')}. "
        f"{len({*everything, *records})} architectures and variants that generate text are in both nrl_models and "
        "vLLM.",
        "",
        "The engine starts with different random weights than the trainer, and the trainer refits it (sends it its",
        "weights). The trainer then trains one step and refits the engine again. If a refit fails, the engine is",
        "tested on weights read from files. Prompts have no images.",
        "",
        f"The bound is {BOUND} in fp32. If vLLM only has kernels in bf16, both sides run in bf16, and the bound after",
        f"each refit is `1 + {NOISE_FACTOR:g} * (noise floor - 1)`, with the trainer's",
        "[noise floor](consistency.md#the-noise-floor). In bf16, two more rules apply:",
        "",
        "- Rounding can change the choice of experts, and then errors exceed the bound. Such an error still counts as",
        "  rounding if trainer and engine are close to transformers in fp64: at most twice as far from it as",
        "  transformers in bf16 is.",
        f"- An error above {THRESHOLD} never counts as agreement. If it is within its bound, or counts as rounding,",
        '  the architecture is "not decided".',
        "",
        "If vLLM's own class fails, transformers' class is also tested in vLLM (`model_impl=transformers`).",
    ]
    causes = {name: limit.reason for name, limit in LIMITS.items()}
    return pages_with("vLLM", intro, records, everything, causes=causes, obstacles=VLLM)


if __name__ == "__main__":
    sys.exit(main())
