"""Every registered architecture, sharded over two processes; records outcomes in docs/model-coverage/results.

Each is loaded from a tiny checkpoint over two ranks: of FSDP2, of tensor parallelism and, where it has experts, of
expert parallelism. Exported weights have to be the checkpoint's, bit for bit, and loss and gradients of a step those of
one process. Those that generate take a step over two stages of a pipeline. QLoRA is tried too, in one process, against
transformers' own class, where bitsandbytes is installed.

`make distributed-coverage` runs those that have no outcome with the installed versions, and writes the coverage pages.
Each outcome is on disk as soon as it is there, so an interrupted run goes on where it stopped.
`python -m tests.distributed.sweep NAME ...` runs those again and leaves all other outcomes as they are, `--again` runs
all, and `--page` writes the pages alone. Exits with 1 if an architecture came out worse than before.

Two processes run all of them. Where they fail together in any way but by refusing, two others go on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # where the processes of a world look for jobs, too

from jobs import sweep as jobs
from world import RanksFailedError, RanksLostError, World

from nrl_models import registry
from nrl_models.errors import Problem, ProblemKind
from tests.sweep import Outcomes, Sweep
from tools.checkout import PAGES
from tools.coverage_pages.pages import write_pages
from tools.coverage_pages.results import Kind
from tools.coverage_pages.sharding_outcomes import ShardingOutcome, Status
from tools.mutants.campaign import architectures_in_order

PATIENCE = 300.0
"""Seconds that one architecture may take with one layout. On a busy machine little of that is spent on it; and what
hangs in a collective ends by itself after two minutes."""

MOST = 2000
"""Characters of a reason that are kept."""

REFUSALS = {ProblemKind.PLAN, ProblemKind.DIVIDE}
"""Kinds of problems for which a model is not sharded; of others an error is made."""


def main() -> int:
    """Run what is asked for, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    optional = frozenset({Kind.EP, Kind.PP})
    ended = Sweep(PAGES, architectures_in_order(), versions(), run, worsened, lambda: None, optional).main(parser)
    write_pages(PAGES)
    return ended


def versions() -> dict[Kind, dict[str, str]]:
    """What is tried with what is installed, and the versions that decide its outcome."""
    kinds = (Kind.FSDP, Kind.TP, Kind.EP, Kind.PP)
    needed = dict.fromkeys(kinds, ("torch", "transformers"))
    if find_spec("bitsandbytes") and find_spec("peft"):
        needed[Kind.QLORA] = ("torch", "transformers", "bitsandbytes", "peft")
    return {kind: {package: version(package) for package in packages} for kind, packages in needed.items()}


def worsened(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What is worse now; empty if nothing is."""
    if not Status(now["status"]).is_worse_than(Status(before["status"])):
        return ""
    return f"{before['status']} before, now {now['status']}: {now['reason']}"


def run(names: list[str]) -> Iterator[tuple[str, Outcomes]]:
    """Try architectures one after another; yields the outcomes of each.

    Those that need what is not installed are left out.
    """
    ranks = Ranks()
    for name in names:
        if registry.unmet_requirement(name):
            continue
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            outcomes = ranks.try_sharding(name, folder)
        text = ", ".join(f"{kind} {outcome.status}" for kind, outcome in outcomes.items())
        print(f"{name}: {text}, {time.perf_counter() - started:.1f} s", flush=True)
        yield name, {kind: asdict(outcome) for kind, outcome in outcomes.items()}
    ranks.close()


class Ranks:
    """Two processes for all architectures, replaced where they can no longer be trusted to be in step."""

    def __init__(self) -> None:
        self.world: World | None = None

    def try_sharding(self, architecture: str, folder: str) -> dict[Kind, ShardingOutcome]:
        """The outcomes of one architecture."""
        prepared = self.run(jobs.prepare, architecture, folder)
        if isinstance(prepared, ShardingOutcome):
            return dict.fromkeys((Kind.FSDP, Kind.TP), prepared)
        outcomes = {}
        for dimension in prepared[0]:
            over_stages = dimension == Kind.PP
            arguments = () if over_stages else (folder, dimension)
            found = self.run(jobs.holds_over_stages if over_stages else jobs.holds, architecture, *arguments)
            if not isinstance(found, ShardingOutcome):
                difference = next(filter(None, found), "")[:MOST]
                found = ShardingOutcome(Status.DISAGREES if difference else Status.AGREES, difference)
            outcomes[Kind(dimension)] = found
        if Kind.QLORA in versions():
            found = self.run(jobs.qlora, architecture, folder)
            if not isinstance(found, ShardingOutcome):
                status, reason = found[0]
                found = ShardingOutcome(Status(status), reason[:MOST])
            outcomes[Kind.QLORA] = found
        return outcomes

    def run(self, job: Callable[..., Any], *arguments: Any) -> list[Any] | ShardingOutcome:
        """What each rank returned; or why they did not, as an outcome."""
        if self.world is None:
            self.world = World(2)
        try:
            return self.world.run(job, *arguments, patience=PATIENCE)
        except RanksFailedError as error:
            refusing = [{problem.kind for problem in problems} for problems in error.problems.values()]
            if len(refusing) == 2 and all(kinds and kinds <= REFUSALS for kinds in refusing):
                return ShardingOutcome(Status.REFUSED, reason_of(error.problems[0]))
            (text, *_) = [text for _, text in error.errors.values()]
            # One that waits for the other says little.
            said = sorted(f"{kind}: {text}" for kind, text in error.errors.values() if kind != "ShardingError")
            failed = ShardingOutcome(Status.ERROR, (said or [text])[0][:MOST])
            if len(error.errors) < 2 and job is jobs.qlora:  # of which the other rank knows nothing
                return failed
        except RanksLostError as error:
            failed = ShardingOutcome(Status.ERROR, str(error)[:MOST])
        self.close()
        return failed

    def close(self) -> None:
        """End the processes."""
        if self.world is not None:
            self.world.close()
        self.world = None


def reason_of(problems: Iterable[Problem]) -> str:
    """The reason of a refusal."""
    return "; ".join(map(str, problems))[:MOST]


if __name__ == "__main__":
    sys.exit(main())
