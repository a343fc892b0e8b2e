"""Compares every architecture that vLLM and the registry both have with vLLM; writes docs/engine-coverage.md.

`make engine-coverage` runs those that have no outcome with the installed versions, which takes an hour on two idle
cores for all of them. Each outcome is published as soon as it is there, so an interrupted run goes on where it stopped.
`python -m tests.engine.sweep NAME ...` runs those again, `--again` all, and `--page` writes the page alone. Exits with
1 if an architecture came out worse than before.

Models run one after another in a child process. If one takes it down, or takes too long, that is its outcome, and
another child goes on with the next. What does not agree behind others in one process counts only if it does not in a
process of its own either: an engine that was started before may leave it unfit for the next.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nrl_models.consistency.cells import NOISE_FACTOR
from nrl_models.devtools.checkout import PAGES
from nrl_models.devtools.results import Kind, Record, read_records, versions_summary
from tests.engine.published import BOUND
from tests.sweep import Outcomes, Sweep

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "engine-coverage.md"

CHILD = "--child"
"""Followed by architectures and the file that takes their outcomes: what a child process is called with."""

PATIENCE = 900.0
"""Seconds that one architecture may take."""

MEANINGS = {
    "agrees": "agree, after both refits",
    "agrees as loaded": "agree with the weights read from files, and cannot be refitted",
    "disagrees": "disagree: the verdict names the side at fault",
    "not run": "cannot be run here",
}
ORDER = tuple(MEANINGS)
"""The possible outcomes, best first."""

MOST = 600
"""Characters of a reason that the page shows; the JSON file beside it has all."""


def main() -> int:
    """Run what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    if CHILD in sys.argv:
        *names, gathered = [argument for argument in sys.argv[1:] if argument != CHILD]
        run_here(names, Path(gathered))
        return 0
    from tests.engine.families import shared_architectures

    everything = shared_architectures()

    def write_page() -> None:
        PAGE.write_text(page(read_records(PAGES)[Kind.ENGINE], everything))

    def run(names: list[str]) -> Iterator[tuple[str, Outcomes]]:
        for name, outcome in run_in_children(names):
            yield name, {Kind.ENGINE: {key: value for key, value in outcome.items() if key != "architecture"}}

    return Sweep(PAGES, everything, {Kind.ENGINE: versions()}, run, worsened, write_page).main(parser)


def worsened(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What is worse now, as text; empty if nothing is."""
    if ORDER.index(now["status"]) <= ORDER.index(before["status"]):
        return ""
    return f"{before['status']} before, {now['status']} now: {now['reason']}"


def run_in_children(names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run architectures in a child process, and in another where one ends; yields each one's outcome."""
    left = list(names)
    with tempfile.TemporaryDirectory() as folder:
        gathered = Path(folder) / "outcomes.jsonl"
        while left:
            ended = yield from child(left, gathered)
            left = [name for name in left if name not in outcomes(gathered)]
            if ended and left:  # it ended in the middle of the first
                outcome = {"architecture": left[0], "status": "not run", "reason": ended}
                note(gathered, outcome)
                yield left[0], outcome
                left = left[1:]


def child(names: list[str], gathered: Path) -> Generator[tuple[str, dict[str, Any]], None, str]:
    """Run architectures in a process of their own, and yield outcomes; how it ended, if that was before its end.

    Args:
        names: which.
        gathered: where it adds outcomes.
    """
    command = [sys.executable, "-m", "tests.engine.sweep", CHILD, *names, str(gathered)]
    seen = set(outcomes(gathered))
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        since, runs = time.monotonic(), True
        while runs:
            time.sleep(0.5)
            runs = process.poll() is None
            for name, outcome in outcomes(gathered).items():
                if name not in seen:
                    seen.add(name)
                    since = time.monotonic()
                    yield name, outcome
            if runs and time.monotonic() - since > PATIENCE:
                process.kill()
                process.wait()
                return f"it was not done within {PATIENCE:g} s"
        if process.returncode == 0:
            return ""
        said.seek(0)
        last = said.read().decode(errors="replace").strip().splitlines()[-1:]
        return f"it takes its process down (exit status {process.returncode}): {' '.join(last)[:300]}"


def run_here(names: list[str], gathered: Path) -> None:
    """Compare architectures with vLLM in this process; each outcome is on disk before the next begins.

    Ends behind the first that does not agree, without its outcome if others ran before it.
    """
    import transformers

    from tests.engine.families import AGREES, hold
    from tests.engine.one_engine import OneEngine

    transformers.utils.logging.disable_progress_bar()
    for name in names:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, OneEngine() as start:
            outcome = hold(name, start, Path(folder)).to_json()
        agrees = outcome["status"] == AGREES
        if not agrees and name != names[0]:
            return
        note(gathered, outcome)
        os.write(2, f"{name}: {outcome['status']}, {time.perf_counter() - started:.0f} s\n".encode())
        if not agrees:
            return


def note(gathered: Path, outcome: dict[str, Any]) -> None:
    """Add an outcome to those that are there."""
    with gathered.open("a") as file:
        file.write(json.dumps(outcome) + "\n")


def outcomes(gathered: Path) -> dict[str, Any]:
    """What is there, by architecture."""
    lines = gathered.read_text().splitlines() if gathered.exists() else []
    return {outcome["architecture"]: outcome for outcome in map(json.loads, lines)}


def versions() -> dict[str, str]:
    """Of what decides the results."""
    from nrl_models.engines.vllm import vllm_version

    return {"engine": vllm_version(), "transformers": version("transformers"), "torch": version("torch")}


def page(records: Mapping[str, Record], everything: list[str]) -> str:
    """The results as Markdown.

    Args:
        records: what is recorded, by architecture.
        everything: the architectures that there should be an outcome of.
    """
    counts = Counter(record.outcome["status"] for record in records.values())
    missing = [name for name in everything if name not in records]
    lines = [
        "<!-- Generated by `make engine-coverage`; do not edit. -->",
        "# Families compared with a real engine",
        "",
        "Every architecture that writes text and that both the registry and the engine have: "
        f"{len({*everything, *records})}, on a CPU, with {versions_summary(records).removeprefix('engine ')}.",
        "Each is tried at tiny size, in fp32, every tensor random, without images, at a temperature that leaves half",
        "the uncertainty. The engine starts on random weights and is refitted by the trainer, which then trains a step",
        "and refits it again; where that fails, the engine reads the weights from files. Numbers are",
        f"`token_mult_prob_error`, the worse of decode and prefill; the bound is {BOUND}. Where vLLM has kernels in",
        "bf16 alone, both sides run in bf16, and the bound after each refit is what the noise floor explains: the",
        f"trainer's error against itself under other roundings, times {NOISE_FACTOR:g}. Verdicts are explained in",
        "[consistency.md](consistency.md).",
        "",
        *(f"- {counts[status]} {MEANINGS[status]}" for status in ORDER),
        *([f"- {len(missing)} were not tried yet: {', '.join(missing)}"] if missing else []),
        "",
        "| architecture | outcome | refitted | after a step | from files | why |",
        "|---|---|---|---|---|---|",
    ]
    for name in sorted(records, key=lambda name: (ORDER.index(records[name].outcome["status"]), name)):
        outcome = records[name].outcome
        numbers = [
            "" if (error := outcome.get(key)) is None else f"{error:.7f}" if error < 1.001 else f"{error:.4f}"
            for key in ("refitted", "stepped", "loaded")
        ]
        reason = " ".join([*conditions(outcome), *outcome["reason"].split()]).replace("|", "\\|")
        reason = reason if len(reason) <= MOST else f"{reason[:MOST]} …"
        lines.append(f"| {name} | {outcome['status']} | {' | '.join(numbers)} | {reason} |")
    return "\n".join([*lines, ""])


def conditions(outcome: Mapping[str, Any]) -> Iterator[str]:
    """What an architecture was run with that others were not, as sentences."""
    if (dtype := outcome.get("dtype", "float32")) != "float32":
        yield f"In {dtype}."
    if max(bounds := outcome.get("bounds", ()), default=BOUND) > BOUND:
        yield f"Bound after each refit: {', '.join(f'{bound:.4f}' for bound in bounds)}."
    if options := outcome.get("options"):
        yield f"With vLLM's {', '.join(f'`{name}={value}`' for name, value in options.items())}."


if __name__ == "__main__":
    sys.exit(main())
