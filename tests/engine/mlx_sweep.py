"""Compare every architecture that both mlx-lm and the registry have with MLX. Write the section of
docs/engine-coverage.md.

`make mlx-coverage` runs the architectures without an outcome for the installed versions. The arguments are those of
`sweep.py`. MLX runs in a separate subprocess for each architecture, so a crash is an outcome and does not affect the
next one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import transformers

from tests.engine.certificates import write_certificate
from tests.engine.coverage_page import pages_with, write_pages
from tests.engine.mlx_families import BOUND, LIMITS, compare_mlx_architecture, one_mlx, shared_architectures
from tests.engine.obstacles import MLX
from tests.engine.sweep import MACHINE, worsened
from tests.sweep import Outcomes, Sweep
from tools.checkout import PAGES
from tools.coverage_pages.results import Kind, Record, read_records, versions_summary

VERSIONS = {name: version(name) for name in ("mlx-lm", "mlx", "transformers", "torch")}
"""The versions of the packages that influence the results."""


def main() -> int:
    """Run the requested architectures, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = shared_architectures()
    transformers.utils.logging.disable_progress_bar()

    def write() -> None:
        write_pages(pages(read_records(PAGES)[Kind.MLX], everything))

    return Sweep(PAGES, everything, {Kind.MLX: VERSIONS}, run, worsened, write).main(parser)


def run(names: list[str]) -> Iterator[tuple[str, Outcomes]]:
    """Compare architectures one after another."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder, one_mlx() as start:
            result = compare_mlx_architecture(name, start, Path(folder))
            write_certificate("MLX", "mlx", result, Path(folder) / "checkpoint")
        outcome = result.to_json()
        print(f"{name}: {outcome['status']}", file=sys.stderr, flush=True)
        yield name, {Kind.MLX: {key: value for key, value in outcome.items() if key != "architecture"}}


def pages(records: Mapping[str, Record], everything: list[str]) -> dict[Path, str]:
    """Return the pages with the results of MLX.

    Args:
        records: The recorded outcomes by architecture.
        everything: All architectures that should have an outcome.
    """
    intro = [
        f"`make mlx-coverage`, on {MACHINE}, with {versions_summary(records)}. "
        f"{len({*everything, *records})} architectures and variants that generate text have a model type that "
        "mlx-lm supports.",
        "",
        f"Each is tested as with vLLM; the bound is {BOUND}. After both refits, another MLX process reads the",
        "trainer's weights from files. Its log-probabilities must equal those of the refitted process bit for bit.",
    ]
    return pages_with("MLX", intro, records, everything, causes=LIMITS, obstacles=MLX)


if __name__ == "__main__":
    sys.exit(main())
