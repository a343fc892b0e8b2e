"""Every architecture that vLLM and the registry both have, held against vLLM; writes docs/engine-coverage.md.

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
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "engine-coverage.md"
RESULTS = ROOT / "docs" / "engine-coverage.json"

PATIENCE = 900.0
"""Seconds that one architecture may take."""

MEANINGS = {
    "agrees": "agree, after both refits",
    "agrees as loaded": "agree with the weights read from files, and cannot be refitted",
    "disagrees": "disagree: the verdict names who is wrong",
    "not run": "cannot be run here",
}
ORDER = tuple(MEANINGS)
"""What may come of an architecture, best first."""

MOST = 600
"""Characters of a reason that the page shows; the JSON file beside it has all."""


def main() -> int:
    """Run what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures; all without an outcome by default")
    parser.add_argument("--again", action="store_true", help="run all, also those that have an outcome")
    parser.add_argument("--page", action="store_true", help="write the page from outcomes that are there")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run(options.names, options.child)
        return 0
    from tests.engine.families import shared_architectures

    everything = shared_architectures()
    if unknown := sorted(set(options.names) - set(everything)):
        parser.error(f"not shared by vLLM and the registry: {', '.join(unknown)}")
    if options.page:
        publish(published()["outcomes"], everything)
        return 0
    return sweep(options.names, everything, again=options.again)


def published() -> dict[str, Any]:
    """The results in docs: `{"versions": {...}, "outcomes": {architecture: {...}}}`."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"versions": {}, "outcomes": {}}


def publish(found: dict[str, Any], everything: list[str]) -> None:
    """Write outcomes, by architecture, as JSON and as the page."""
    content = {"versions": versions(), "outcomes": {name: found[name] for name in everything if name in found}}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    PAGE.write_text(page(content, everything))


def sweep(names: list[str], everything: list[str], *, again: bool = False) -> int:
    """Run architectures one after another, publish what came of them; 1 if one came out worse than before."""
    before = published()
    kept = before["outcomes"] if before["versions"] == versions() else {}
    left = names or [one for one in everything if again or one not in kept]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        gathered = Path(folder) / "outcomes.jsonl"

        def take() -> None:
            found.update(outcomes(gathered))
            publish(kept | found, everything)

        while left:
            ended = child(left, gathered, take)
            take()
            left = [one for one in left if one not in found]
            if ended and left:  # it ended in the middle of the first
                note(gathered, {"architecture": left[0], "status": "not run", "reason": ended})
                take()
                left = left[1:]
    worse = [
        name
        for name, outcome in found.items()
        if name in before["outcomes"]
        and ORDER.index(outcome["status"]) > ORDER.index(before["outcomes"][name]["status"])
    ]
    for name in worse:
        was, now = before["outcomes"][name]["status"], found[name]
        print(f"{name}: {was} before, {now['status']} now: {now['reason']}", file=sys.stderr)
    return 1 if worse else 0


def child(names: list[str], gathered: Path, take: Callable[[], None]) -> str:
    """Run architectures in a process of their own; how it ended, if that was before its end.

    Args:
        names: which.
        gathered: where it adds outcomes.
        take: called when it has added one.
    """
    command = [sys.executable, "-m", "tests.engine.sweep", *names, "--child", str(gathered)]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        size, since = -1, time.monotonic()
        while process.poll() is None:
            time.sleep(0.5)
            now = gathered.stat().st_size if gathered.exists() else 0
            if now != size:
                size, since = now, time.monotonic()
                take()
            if time.monotonic() - since > PATIENCE:
                process.kill()
                process.wait()
                return f"it was not done within {PATIENCE:g} s"
        if process.returncode == 0:
            return ""
        said.seek(0)
        last = said.read().decode(errors="replace").strip().splitlines()[-1:]
        return f"it takes its process down (exit status {process.returncode}): {' '.join(last)[:300]}"


def run(names: list[str], gathered: Path) -> None:
    """Hold architectures against vLLM in this process; each outcome is on disk before the next begins.

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
    return {one["architecture"]: one for one in map(json.loads, lines)}


def versions() -> dict[str, str]:
    """Of what decides the results."""
    from nrl_models.engines.vllm import vllm_version

    return {"engine": vllm_version(), "transformers": version("transformers"), "torch": version("torch")}


def page(content: dict[str, Any], everything: list[str]) -> str:
    """The results as Markdown.

    Args:
        content: versions and outcomes.
        everything: the architectures that there should be an outcome of.
    """
    found = [content["outcomes"][name] for name in sorted(content["outcomes"])]
    counts = Counter(one["status"] for one in found)
    missing = [name for name in everything if name not in content["outcomes"]]
    lines = [
        "<!-- Generated by `make engine-coverage`; do not edit. -->",
        "# Families held against a real engine",
        "",
        "Every architecture that writes text and that both the registry and the engine have: "
        f"{len(everything)}, with {content['versions'].get('engine')} on a CPU, transformers "
        f"{content['versions'].get('transformers')} and torch {content['versions'].get('torch')}.",
        "Each is tried at tiny size, in fp32, every tensor random, without images, at a temperature that leaves half",
        "the uncertainty. The engine starts on random weights and is refitted by the trainer, which then trains a step",
        "and refits it again; where that fails, the engine reads the weights from files. Numbers are",
        "`token_mult_prob_error`, the worse of decode and prefill; the bound is 1.0001. Verdicts are explained in",
        "[consistency.md](consistency.md).",
        "",
        *(f"- {counts[status]} {MEANINGS[status]}" for status in ORDER),
        *([f"- {len(missing)} were not tried yet: {', '.join(missing)}"] if missing else []),
        "",
        "| architecture | outcome | refitted | after a step | from files | why |",
        "|---|---|---|---|---|---|",
    ]
    for one in sorted(found, key=lambda one: (ORDER.index(one["status"]), one["architecture"])):
        numbers = [
            "" if one.get(key) is None else f"{one[key]:.7f}" if one[key] < 1.001 else f"{one[key]:.4f}"
            for key in ("refitted", "stepped", "loaded")
        ]
        reason = " ".join(one["reason"].split()).replace("|", "\\|")
        reason = reason if len(reason) <= MOST else f"{reason[:MOST]} …"
        lines.append(f"| {one['architecture']} | {one['status']} | {' | '.join(numbers)} | {reason} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
