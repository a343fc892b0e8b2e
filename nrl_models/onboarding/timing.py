"""How long `nrl-models new` takes: the command itself, on architectures drawn at random."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from nrl_models.onboarding.detect import detect

TIMEOUT = 1800.0
"""Seconds after which an onboarding is given up."""


def time_onboarding(classes: Iterable[type[PreTrainedModel]], count: int, file: Path, seed: int = 0) -> None:
    """Run `nrl-models new` for architectures drawn at random, each from its default configuration into a new folder.

    Args:
        classes: what to draw from; those that have nothing to combine, or do not run, are drawn again.
        count: how many to time.
        file: JSON to write after each; what is in it of other architectures is kept, of the same ones replaced.
        seed: of the draw.
    """
    classes = list(classes)
    drawn = (one for one in random.Random(seed).sample(classes, k=len(classes)) if _combines(one))
    timings = {one["architecture"]: one for one in read_timings(file)}
    for model_class in islice(drawn, count):
        timings[model_class.__name__] = time_one(model_class)
        content = {"cores": os.cpu_count(), "timings": [timings[name] for name in sorted(timings)]}
        file.write_text(json.dumps(content, indent=1) + "\n")


def _combines(model_class: type[PreTrainedModel]) -> bool:
    found = detect(model_class)
    return found.ok and bool(found.groups)


def time_one(model_class: type[PreTrainedModel]) -> dict[str, Any]:
    """The command's wall and CPU seconds for one class, the machine's load before, and whether it came out green."""
    with tempfile.TemporaryDirectory() as folder:
        config = model_class.config_class()
        config.architectures = [model_class.__name__]
        config.save_pretrained(folder)
        command = [sys.executable, "-m", "nrl_models", "new", folder, "--out-of-tree", f"{folder}/made", "--again"]
        load, before = os.getloadavg()[0], os.times()
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        return {
            "architecture": model_class.__name__,
            "seconds": round(after.elapsed - before.elapsed, 1),
            "cpu_seconds": round(cpu, 1),
            "load": round(load, 1),
            "green": done.returncode == 0,
            "said": "" if done.returncode == 0 else (done.stdout + done.stderr)[-600:],
        }


def read_timings(file: Path) -> list[dict[str, Any]]:
    """What `time_onboarding` left in a file; nothing if there is none."""
    return json.loads(file.read_text())["timings"] if file.is_file() else []


def in_words(timings: list[Mapping[str, Any]]) -> str:
    """The medians, in a sentence."""
    wall, cpu, load = (statistics.median(one[key] for one in timings) for key in ("seconds", "cpu_seconds", "load"))
    green = sum(one["green"] for one in timings)
    return (
        f"`nrl-models new` was timed on {len(timings)} of them, drawn at random, each from the configuration its class "
        f"has by default into a new folder, its generated tests included: a median of {wall:.0f} s by the clock and "
        f"{cpu:.0f} s of CPU time (median load of the machine then: {load:.1f}); {green} of {len(timings)} came out "
        "with nothing left to decide. `nrl-models reach --time N` times N of them anew."
    )
