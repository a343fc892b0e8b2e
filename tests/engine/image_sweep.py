"""Compare every architecture with images that both vLLM and the registry have with vLLM, on prompts with images. Write
the section of docs/engine-coverage.md.

`make image-coverage` runs the architectures without an outcome for the installed versions. The arguments are those of
`sweep.py`. vLLM runs in a separate subprocess for each architecture, so a crash is an outcome and does not affect the
next one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.engine.coverage_page import MEANINGS, pages_with, write_pages
from tests.engine.obstacles import IMAGES, Stage
from tests.engine.published import BOUND
from tests.engine.sweep import CHILD, MACHINE, ROOT, crash_reason, versions, worsened
from tests.sweep import Outcomes, Sweep
from tools.checkout import PAGES
from tools.coverage_pages.results import Kind, Record, read_records, versions_summary

IMAGE_MEANINGS = {
    "agrees": "agree, after the refit",
    "not decided": MEANINGS["not decided"],
    "disagrees": "disagree: the reason names the first difference, but not which side is wrong",
    "not run": "cannot be run here",
}
"""The possible outcomes, best first."""

TIMEOUT = 120.0
"""Timeout of one architecture in seconds."""


def main() -> int:
    """Run the requested architectures, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    if CHILD in sys.argv:
        name, file = [argument for argument in sys.argv[1:] if argument != CHILD]
        run_here(name, Path(file))
        return 0
    everything = image_architectures()

    def write() -> None:
        write_pages(pages(read_records(PAGES)[Kind.IMAGES], everything))

    return Sweep(PAGES, everything, {Kind.IMAGES: versions()}, run, worsened, write).main(parser)


def image_architectures() -> list[str]:
    """List every architecture with images that both the installed engine and the registry have."""
    from vllm.model_executor.models.registry import _MULTIMODAL_MODELS

    from nrl_models import registry
    from nrl_models.errors import NRLModelsError
    from nrl_models.inputs.images import accepts_images
    from tests.engine.families import shared_architectures
    from tools.variants import split_variant

    def takes_images(name: str) -> bool:
        try:
            model_class: Any = registry.model_class(name)
            reference = model_class.reference_class()
        except NRLModelsError:  # the family needs other package versions
            return False
        return accepts_images(reference)

    classes = {name: split_variant(name)[0] for name in shared_architectures()}
    return [name for name, of_class in classes.items() if of_class in _MULTIMODAL_MODELS and takes_images(of_class)]


def run(names: list[str]) -> Iterator[tuple[str, Outcomes]]:
    """Compare architectures one after another, each in a child process."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            outcome = in_child(name, Path(folder) / "outcome.json")
        print(f"{name}: {outcome['status']}", file=sys.stderr, flush=True)
        yield name, {Kind.IMAGES: {key: value for key, value in outcome.items() if key != "architecture"}}


def in_child(name: str, file: Path) -> dict[str, object]:
    """Return the outcome of one architecture from a child process. A crash is also an outcome."""
    command = [sys.executable, "-m", "tests.engine.image_sweep", CHILD, name, str(file)]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"status": "not run", "stage": Stage.RUN, "reason": f"it was not done within {TIMEOUT:g} s"}
    if file.exists():
        outcome: dict[str, object] = json.loads(file.read_text())
        return outcome
    return {"status": "not run", "stage": Stage.RUN, "reason": crash_reason(ended.returncode, ended.stderr)}


def run_here(name: str, file: Path) -> None:
    """Compare an architecture in this process, and write its outcome."""
    import transformers

    from tests.engine.certificates import write_certificate
    from tests.engine.image_families import compare_image_architecture
    from tests.engine.one_engine import OneEngine

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, OneEngine() as start:
        outcome = compare_image_architecture(name, start, Path(folder))
        write_certificate("vLLM with images", "vllm", outcome, Path(folder) / "checkpoint")
        file.write_text(json.dumps(outcome.to_json()))


def pages(records: Mapping[str, Record], everything: list[str]) -> dict[Path, str]:
    """Return the pages with the results of vLLM with images.

    Args:
        records: The recorded outcomes by architecture.
        everything: All architectures that should have an outcome.
    """
    from tests.engine.image_families import CAUSES

    intro = [
        f"`make image-coverage`, on {MACHINE}, with {versions_summary(records).removeprefix('engine ')}. "
        f"{len({*everything, *records})} architectures that take images are in both nrl_models and vLLM.",
        "",
        "The engine starts with random weights, also in the vision tower, and is refitted once. The engine gets",
        "images; the trainer gets the tensors of transformers' processor. Prompts have a square, a wide or a tall",
        "image, or two images. Processors are those of transformers, at tiny size. Architectures without one are not",
        "run.",
        "",
        f"The bound is {BOUND} for decode and prefill. If vLLM only has kernels in bf16, the bound follows from the",
        "noise floor, which is large if rounding changes the choice of experts. If trainer and engine disagree on a",
        "prompt, the reason names the [first difference](images.md#the-first-difference), and its cause if it is",
        "known.",
    ]
    measured = {"refitted": "error"}
    return pages_with("vLLM with images", intro, records, everything, IMAGE_MEANINGS, measured, CAUSES, IMAGES)


if __name__ == "__main__":
    sys.exit(main())
