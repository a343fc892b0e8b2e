"""Every registered architecture, sharded over two processes; writes docs/model-coverage/distributed.json.

Each is loaded from a tiny checkpoint over two ranks: of FSDP2, of tensor parallelism and, where it has experts, of
expert parallelism. Exported weights have to be the checkpoint's, bit for bit, and loss and gradients of a step those of
one process. QLoRA is tried too, in one process, against transformers' own class, where bitsandbytes is installed.

`make distributed-coverage` runs those that have no outcome with the installed versions, and writes the coverage pages.
Each outcome is on disk as soon as it is there, so an interrupted run goes on where it stopped.
`python -m tests.distributed.sweep NAME ...` runs those again, `--again` all, and `--page` writes the pages alone. Exits
with 1 if an architecture came out worse than before.

Two processes run all of them. Where they fail together in any way but by refusing, two others go on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # where the processes of a world look for jobs, too

from jobs import sweep as jobs
from world import RanksFailedError, RanksLostError, World

from nrl_models import registry
from nrl_models.devtools.mutants.campaign import architectures_in_order
from nrl_models.devtools.sharding_outcomes import AGREES, RESULTS, VERDICTS, status
from nrl_models.quirks.quirk import installed
from tests.sweep import Outcome, Sweep

DOCS = Path(__file__).parents[2] / "docs" / "model-coverage"

PATIENCE = 300.0
"""Seconds that one architecture may take with one layout. On a busy machine little of that is spent on it; and what
hangs in a collective ends by itself after two minutes."""

MOST = 2000
"""Characters of a reason that are kept."""


def main() -> int:
    """Run what is asked for, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = architectures_in_order()
    ended = Sweep(DOCS / RESULTS, everything, versions(), run, worsened, lambda content: None).main(parser)
    write_pages()
    return ended


def write_pages() -> None:
    """Write the coverage pages, which show what was found."""
    from nrl_models.devtools.coverage import write_pages

    write_pages(DOCS / "results.json", DOCS)


def versions() -> dict[str, str]:
    """Of what decides the results."""
    packages = ("torch", "transformers", "bitsandbytes", "peft")
    return {package: found for package in packages if (found := installed(package))}


def worsened(before: Outcome, now: Outcome) -> str:
    """What is worse now, in words; empty if nothing is."""
    return "; ".join(
        f"{what}: {status(before[what])} before, now {outcome}"
        for what, outcome in now.items()
        if what in before and list(VERDICTS).index(status(outcome)) > list(VERDICTS).index(status(before[what]))
    )


def run(names: list[str]) -> Iterator[tuple[str, Outcome]]:
    """Try architectures one after another; yields each one's outcome by layout, see `devtools.sharding_outcomes`.

    Those that need what is not installed are left out.
    """
    ranks = Ranks()
    for name in names:
        if registry.unmet_requirement(name):
            continue
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            outcome = ranks.hold(name, folder)
        words = ", ".join(f"{what} {status(one)}" for what, one in outcome.items())
        print(f"{name}: {words}, {time.perf_counter() - started:.1f} s", flush=True)
        yield name, outcome
    ranks.close()


class Ranks:
    """Two processes for all architectures, replaced where they can no longer be trusted to be in step."""

    def __init__(self) -> None:
        self.world: World | None = None

    def hold(self, architecture: str, folder: str) -> Outcome:
        """One architecture's outcomes, by layout."""
        dimensions, failed = self.run(jobs.prepare, architecture, folder)
        if failed:
            return dict.fromkeys(("fsdp", "tp"), failed)
        outcome = {}
        for dimension in dimensions[0]:
            found, failed = self.run(jobs.holds, architecture, folder, dimension)
            differs = next(filter(None, found), "") if found else ""
            outcome[dimension] = failed or (f"disagrees: {differs}"[:MOST] if differs else AGREES)
        if find_spec("bitsandbytes") and find_spec("peft"):
            found, failed = self.run(jobs.qlora, architecture, folder)
            outcome["qlora"] = failed or ": ".join(filter(None, found[0]))[:MOST]
        return outcome

    def run(self, job: Callable[..., Any], *arguments: Any) -> tuple[list[Any], str]:
        """What each rank returned; or why they did not, in the words of an outcome."""
        if self.world is None:
            self.world = World(2)
        try:
            return self.world.run(job, *arguments, patience=PATIENCE), ""
        except RanksFailedError as error:
            kinds, (text, *_) = {kind for kind, _ in error.errors.values()}, [text for _, text in error.errors.values()]
            if kinds == {"ShardingError"} and len(error.errors) == 2 and "cannot be sharded over" in text:
                return [], f"refused: {text}"[:MOST]
            # One that waits for the other says little.
            said = sorted(f"{kind}: {text}" for kind, text in error.errors.values() if kind != "ShardingError")
            failed = f"error: {(said or [text])[0]}"[:MOST]
            if len(error.errors) < 2 and job is jobs.qlora:  # of which the other rank knows nothing
                return [], failed
        except RanksLostError as error:
            failed = f"error: {error}"[:MOST]
        self.close()
        return [], failed

    def close(self) -> None:
        """End the processes."""
        if self.world is not None:
            self.world.close()
        self.world = None


if __name__ == "__main__":
    sys.exit(main())
