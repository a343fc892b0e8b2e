"""Compares every architecture that mlx-lm and the registry both have with MLX; writes its section of
docs/engine-coverage.md.

`make mlx-coverage` runs those that have no outcome with the installed versions; arguments are those of `sweep.py`. MLX
runs in a process of its own for each, so that what takes it down is an outcome, and leaves nothing to the next.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import transformers

from tests.engine.mlx_families import BOUND, hold_mlx, one_mlx, shared_architectures
from tests.engine.sweep import PAGE, outcome_lines, page_with, worsened
from tests.sweep import Outcomes, Sweep
from tools.checkout import PAGES
from tools.coverage_pages.results import Kind, Record, read_records, versions_summary

VERSIONS = {name: version(name) for name in ("mlx-lm", "mlx", "transformers", "torch")}
"""Of what decides the results."""


def main() -> int:
    """Run what is asked for, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = shared_architectures()
    transformers.utils.logging.disable_progress_bar()

    def write_page() -> None:
        PAGE.write_text(page(read_records(PAGES)[Kind.MLX], everything))

    return Sweep(PAGES, everything, {Kind.MLX: VERSIONS}, run, worsened, write_page).main(parser)


def run(names: list[str]) -> Iterator[tuple[str, Outcomes]]:
    """Compare architectures one after another."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder, one_mlx() as start:
            outcome = hold_mlx(name, start, Path(folder)).to_json()
        print(f"{name}: {outcome['status']}", file=sys.stderr, flush=True)
        yield name, {Kind.MLX: {key: value for key, value in outcome.items() if key != "architecture"}}


def page(records: Mapping[str, Record], everything: list[str]) -> str:
    """The page as Markdown, with these results of MLX.

    Args:
        records: what is recorded, by architecture.
        everything: the architectures that there should be an outcome of.
    """
    intro = [
        "Every architecture that writes text and whose model type mlx-lm has: "
        f"{len({*everything, *records})}, on a CPU, with {versions_summary(records)}.",
        f"Each is tried as it is with vLLM; the bound is {BOUND}. After both refits another MLX reads the trainer's",
        "weights from files, and has to give the same log-probabilities, bit for bit.",
    ]
    return page_with("MLX", [*intro, *outcome_lines(records, everything)])


if __name__ == "__main__":
    sys.exit(main())
