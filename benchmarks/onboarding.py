"""Measure how long `nrl-models new` takes, its generated tests included, on randomly drawn architectures.

Each architecture starts from the default configuration of its class, and its code is written to a new folder. The table
collects the results of several runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from transformers import PreTrainedModel

from benchmarks.reporting import RESULTS, Row, median, publish
from nrl_models.onboarding.detect import detect
from tests.onboarding_reach import decoders

TIMEOUT = 1800.0
"""Timeout of one onboarding in seconds."""


def main() -> None:
    """Draw architectures, measure, print and save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=8, help="how many architectures to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    options = parser.parse_args()
    measure(islice(drawn(decoders(), options.seed), options.count), options.out)


def drawn(classes: Iterable[type[PreTrainedModel]], seed: int = 0) -> Iterator[type[PreTrainedModel]]:
    """Return the classes in random order, without those that have nothing to combine or do not run."""
    classes = list(classes)
    for model_class in random.Random(seed).sample(classes, k=len(classes)):
        found = detect(model_class)
        if found.ok and found.groups:
            yield model_class


def measure(classes: Iterable[type[PreTrainedModel]], out: Path) -> None:
    """Time the classes one by one. Save the results after each."""
    file = out / "onboarding.json"
    rows: list[Row] = json.loads(file.read_text())["rows"] if file.is_file() else []
    timed = {row["architecture"]: row for row in rows}
    for model_class in classes:
        timed[model_class.__name__] = time_one(model_class)
        rows = [timed[name] for name in sorted(timed)]
        publish("onboarding", "Onboarding a new family", rows, out, [in_words(rows)])


def time_one(model_class: type[PreTrainedModel]) -> Row:
    """Return wall and CPU seconds of the command for one class, the machine's load before, and whether it succeeded."""
    assert model_class.config_class is not None
    with tempfile.TemporaryDirectory() as folder:
        config = model_class.config_class()
        config.architectures = [model_class.__name__]
        config.save_pretrained(folder)
        command = [sys.executable, "-m", "nrl_models", "new", folder, "--out-of-tree", f"{folder}/made", "--again"]
        load, before = os.getloadavg()[0], os.times()
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        if done.returncode != 0:
            print((done.stdout + done.stderr)[-600:], file=sys.stderr)
        return {
            "architecture": model_class.__name__,
            "seconds": round(after.elapsed - before.elapsed, 1),
            "CPU seconds": round(cpu, 1),
            "load": round(load, 1),
            "family complete": "yes" if done.returncode == 0 else "no",
        }


def in_words(rows: list[Row]) -> str:
    """Summarize the medians in a sentence."""
    wall, cpu, load = (median(rows, key) for key in ("seconds", "CPU seconds", "load"))
    green = sum(row["family complete"] == "yes" for row in rows)
    return (
        f"{len(rows)} decoders of transformers, drawn at random. Median: {wall:.0f} s wall-clock time, {cpu:.0f} s CPU "
        f"time, machine load {load:.1f}. For {green} of {len(rows)}, the generated family was complete: no "
        "question was left to the user."
    )


if __name__ == "__main__":
    main()
