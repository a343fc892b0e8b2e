"""Compares every architecture that takes images, and that vLLM and the registry both have, with vLLM on prompts with
images; writes its section of docs/engine-coverage.md.

`make image-coverage` runs those that have no outcome with the installed versions; arguments are those of `sweep.py`.
vLLM runs in a process of its own for each, so that what takes it down is an outcome, and leaves nothing to the next.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.engine.published import BOUND
from tests.engine.sweep import CHILD, PAGE, ROOT, outcome_lines, page_with, taken_down, versions, worsened
from tests.sweep import Outcomes, Sweep
from tools.checkout import PAGES
from tools.coverage_pages.results import Kind, Record, read_records, versions_summary

MEANINGS = {
    "agrees": "agree, after the refit",
    "disagrees": "disagree: what differs first is named; which side is at fault, or the tiny processor, is not",
    "not run": "cannot be run here",
}
"""The possible outcomes, best first."""

PATIENCE = 120.0
"""Seconds that one architecture may take."""


def main() -> int:
    """Run what is asked for, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    if CHILD in sys.argv:
        name, file = [argument for argument in sys.argv[1:] if argument != CHILD]
        run_here(name, Path(file))
        return 0
    everything = image_architectures()

    def write_page() -> None:
        PAGE.write_text(page(read_records(PAGES)[Kind.IMAGES], everything))

    return Sweep(PAGES, everything, {Kind.IMAGES: versions()}, run, worsened, write_page).main(parser)


def image_architectures() -> list[str]:
    """Every architecture that takes images and that the installed engine and the registry both have."""
    from vllm.model_executor.models.registry import _MULTIMODAL_MODELS

    from nrl_models import registry
    from nrl_models.errors import NRLModelsError
    from nrl_models.inputs.images import accepts_images
    from tests.engine.families import shared_architectures

    def takes_images(name: str) -> bool:
        try:
            model_class: Any = registry.model_class(name)
            reference = model_class.reference_class()
        except NRLModelsError:  # it needs other versions than are installed
            return False
        return accepts_images(reference)

    return [name for name in shared_architectures() if name in _MULTIMODAL_MODELS and takes_images(name)]


def run(names: list[str]) -> Iterator[tuple[str, Outcomes]]:
    """Compare architectures one after another, each in a child process."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            outcome = in_child(name, Path(folder) / "outcome.json")
        print(f"{name}: {outcome['status']}", file=sys.stderr, flush=True)
        yield name, {Kind.IMAGES: {key: value for key, value in outcome.items() if key != "architecture"}}


def in_child(name: str, file: Path) -> dict[str, object]:
    """The outcome of one architecture; what takes its process down is one as well."""
    command = [sys.executable, "-m", "tests.engine.image_sweep", CHILD, name, str(file)]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return {"status": "not run", "reason": f"it was not done within {PATIENCE:g} s"}
    if file.exists():
        found: dict[str, object] = json.loads(file.read_text())
        return found
    return {"status": "not run", "reason": taken_down(ended.returncode, ended.stderr)}


def run_here(name: str, file: Path) -> None:
    """Compare an architecture in this process, and write its outcome."""
    import transformers

    from tests.engine.image_families import hold_images
    from tests.engine.one_engine import OneEngine

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, OneEngine() as start:
        file.write_text(json.dumps(hold_images(name, start, Path(folder)).to_json()))


def page(records: Mapping[str, Record], everything: list[str]) -> str:
    """The page as Markdown, with these results of vLLM with images.

    Args:
        records: what is recorded, by architecture.
        everything: the architectures that there should be an outcome of.
    """
    from tests.engine.image_families import CAUSES

    known = {
        name: replace(record, outcome={**record.outcome, "reason": f"{record.outcome['reason']} {CAUSES[name]}"})
        if name in CAUSES
        else record
        for name, record in records.items()
    }
    intro = [
        "Every architecture that takes images and that both the registry and the engine have: "
        f"{len({*everything, *records})}, on a CPU, with {versions_summary(records).removeprefix('engine ')}.",
        "The engine starts on random weights, those of the vision tower included, and is refitted once. It gets images",
        "as they are, the trainer what transformers' processor makes of them: a square one, a wide one, a tall one,",
        f"and two in one prompt. The bound is {BOUND} for decode and prefill; where vLLM has kernels in bf16 alone,",
        "it is what the noise floor explains, which is much where rounding decides which experts a token goes to.",
        "Processors are transformers' own, at tiny size; where none could be made, that is the outcome. Where prompts",
        "disagree, what differs first is named, see [consistency.md](consistency.md#images), and the cause if known.",
    ]
    return page_with("vLLM with images", [*intro, *outcome_lines(known, everything, MEANINGS, {"refitted": "error"})])


if __name__ == "__main__":
    sys.exit(main())
