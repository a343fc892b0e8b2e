"""Shard every registered architecture over two processes, and record the outcomes in docs/model-coverage/results.

Each is loaded from a tiny checkpoint over two ranks of FSDP2, of tensor parallelism and, if it has experts, of expert
parallelism. Architectures with experts also take a step with one compiled layer of each kind that has experts, over two
ranks of each of the last two.
Exported weights must equal the checkpoint's bit for bit, and loss and gradients of a step must equal those
of one process. Architectures that generate also take a step over two pipeline stages. If bitsandbytes is installed,
QLoRA runs in one process and is compared with transformers' own class.

`make distributed-coverage` runs the architectures without an outcome for the installed versions, and writes the
coverage pages. Each outcome is saved immediately, so an interrupted run resumes.
`python -m tests.distributed.sweep NAME ...` runs the named architectures again and keeps all other outcomes, `--again`
runs all, and `--page` only writes the pages. Exits with 1 if an architecture's outcome is worse than before.

Two processes run all architectures. If they fail in any other way than with a validation error, two others continue.
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

sys.path.insert(0, str(Path(__file__).parent))  # worker processes also look for jobs here

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
"""Timeout in seconds of one architecture with one layout. A hanging collective ends after two minutes."""

MAX_REASON_LENGTH = 2000
"""Maximum length of a recorded reason."""

REFUSALS = {ProblemKind.PLAN, ProblemKind.INDIVISIBLE, ProblemKind.PIPELINE}
"""Kinds of problems for which a model cannot be sharded. Other kinds count as errors."""


def main() -> int:
    """Run the requested architectures, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    optional = frozenset({Kind.EP, Kind.COMPILED, Kind.PP})
    ended = Sweep(PAGES, architectures_in_order(), versions(), run, worsened, lambda: None, optional).main(parser)
    write_pages(PAGES)
    return ended


def versions() -> dict[Kind, dict[str, str]]:
    """Return the tests that can run in this environment, and the versions that influence their outcome."""
    kinds = (Kind.FSDP, Kind.TP, Kind.EP, Kind.COMPILED, Kind.PP)
    needed = dict.fromkeys(kinds, ("torch", "transformers"))
    if find_spec("bitsandbytes") and find_spec("peft"):
        needed[Kind.QLORA] = ("torch", "transformers", "bitsandbytes", "peft")
    return {kind: {package: version(package) for package in packages} for kind, packages in needed.items()}


def worsened(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe how an outcome is worse than before. Empty if it is not."""
    if not Status(now["status"]).is_worse_than(Status(before["status"])):
        return ""
    return f"{before['status']} before, now {now['status']}: {now['reason']}"


def run(names: list[str]) -> Iterator[tuple[str, Outcomes]]:
    """Run architectures one after another. Yields the outcomes of each.

    Architectures whose requirements are not installed are skipped.
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
    """Two processes for all architectures. They are replaced if they may be out of step."""

    def __init__(self) -> None:
        self.world: World | None = None

    def try_sharding(self, architecture: str, folder: str) -> dict[Kind, ShardingOutcome]:
        """Return the outcomes of one architecture."""
        prepared = self.run(jobs.prepare, architecture, folder)
        if isinstance(prepared, ShardingOutcome):
            return dict.fromkeys((Kind.FSDP, Kind.TP), prepared)
        outcomes = {}
        for dimension in prepared[0]:
            job = {Kind.PP: jobs.holds_over_stages, Kind.COMPILED: jobs.holds_compiled}.get(dimension, jobs.holds)
            arguments = (folder, dimension) if job is jobs.holds else (folder,) if job is jobs.holds_compiled else ()
            outcome = self.run(job, architecture, *arguments)
            if not isinstance(outcome, ShardingOutcome):
                difference = next(filter(None, outcome), "")[:MAX_REASON_LENGTH]
                outcome = ShardingOutcome(Status.DISAGREES if difference else Status.AGREES, difference)
            outcomes[Kind(dimension)] = outcome
        if Kind.QLORA in versions():
            outcome = self.run(jobs.qlora, architecture, folder)
            if not isinstance(outcome, ShardingOutcome):
                status, reason = outcome[0]
                outcome = ShardingOutcome(Status(status), reason[:MAX_REASON_LENGTH])
            outcomes[Kind.QLORA] = outcome
        return outcomes

    def run(self, job: Callable[..., Any], *arguments: Any) -> list[Any] | ShardingOutcome:
        """Return the results of all ranks, or an outcome that describes their failure."""
        if self.world is None:
            self.world = World(2)
        try:
            return self.world.run(job, *arguments, patience=PATIENCE)
        except RanksFailedError as error:
            problem_kinds = [{problem.kind for problem in problems} for problems in error.problems.values()]
            if len(problem_kinds) == 2 and all(kinds and kinds <= REFUSALS for kinds in problem_kinds):
                return ShardingOutcome(Status.REFUSED, reason_of(error.problems[0]))
            (text, *_) = [text for _, text in error.errors.values()]
            # The error of a rank that only waits for the other has little information.
            messages = sorted(f"{kind}: {text}" for kind, text in error.errors.values() if kind != "ShardingError")
            failed = ShardingOutcome(Status.ERROR, (messages or [text])[0][:MAX_REASON_LENGTH])
            if len(error.errors) < 2 and job is jobs.qlora:  # the other rank does not report this error
                return failed
        except RanksLostError as error:
            failed = ShardingOutcome(Status.ERROR, str(error)[:MAX_REASON_LENGTH])
        self.close()
        return failed

    def close(self) -> None:
        """End the processes."""
        if self.world is not None:
            self.world.close()
        self.world = None


def reason_of(problems: Iterable[Problem]) -> str:
    """Return the reason in a validation error."""
    return "; ".join(map(str, problems))[:MAX_REASON_LENGTH]


if __name__ == "__main__":
    sys.exit(main())
