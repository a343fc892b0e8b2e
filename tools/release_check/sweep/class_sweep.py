"""Run the cheap checks for every registered class, and record outcomes as they come.

    python -m tools.release_check.sweep.class_sweep --out outcomes.jsonl [--names LlamaForCausalLM ...] [--jobs 2]

To test another checkout of nrl_models, put it first: `PYTHONPATH=<other checkout>:<this checkout> python -P -m ...`.
Without `-P`, Python imports packages from the working directory before those of `PYTHONPATH`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from tools.release_check.outcome_files import source_digest, versions_of
from tools.release_check.saved_runs import SavedRun
from tools.release_check.sweep.outcomes import PASSED, Check, Outcome, SweepOutcome
from tools.release_check.workers import End, Ending

TIMEOUT = 300.0
"""Timeout of one architecture in seconds. One takes 1 to 5 on an idle machine."""

OWN_SOURCES = ("sweep", "cached_steps.py")


def main(arguments: list[str] | None = None) -> int:
    """Run the sweep. Returns 1 if an outcome is not in `PASSED`."""
    parser = argparse.ArgumentParser(description="Run the cheap checks for every registered class.")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines file; an interrupted run resumes from it")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="architectures; default: all that are registered")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="worker processes; default: one a core")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds for one architecture")
    options = parser.parse_args(arguments)
    import nrl_models
    from nrl_models import registry
    from tools.variants import with_variants

    print(f"nrl_models of {Path(str(nrl_models.__file__)).parent}", flush=True)
    names = with_variants(registry.architectures(aliases=False))
    if unknown := sorted(set(options.names or ()) - set(names)):
        parser.error(f"not registered: {', '.join(unknown)}")
    counts: Counter[Outcome] = Counter()
    for outcome in sweep(options.out, options.names or names, jobs=options.jobs, timeout=options.timeout):
        counts[outcome.outcome] += 1
        if outcome.outcome not in PASSED:
            found = f" max_diff {outcome.max_diff:.3g}" if outcome.max_diff is not None else ""
            print(
                f"{outcome.architecture}: {outcome.check}: {outcome.outcome}{found} "
                f"({outcome.reference}) {outcome.error_type} {outcome.message[:200]}",
                flush=True,
            )
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return 1 if counts.keys() - PASSED else 0


def sweep(path: Path, names: list[str], *, jobs: int, timeout: float = TIMEOUT) -> Iterator[SweepOutcome]:
    """Yield an outcome for every check of every architecture: existing ones of the file, then new ones, which are
    appended.

    Args:
        path: The file of outcomes.
        names: Architectures.
        jobs: Number of worker processes.
        timeout: Timeout of one architecture in seconds.
    """
    saved = SavedRun(_checks_of, list(Check), "check", SweepOutcome.from_json, _lost)
    yield from saved.outcomes(path, names, installed_versions(), jobs=jobs, timeout=timeout)


def _lost(architecture: str, check: StrEnum, end: End) -> SweepOutcome:
    kind = Outcome.CRASHED if end.ending is Ending.CRASHED else Outcome.TIMED_OUT
    return SweepOutcome(architecture, Check(check), kind, message=end.detail)


def _checks_of(architecture: str) -> Iterator[SweepOutcome]:
    from tools.release_check.sweep.class_checks import run_checks

    return run_checks(architecture)


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that influence the outcomes. For a checkout, a hash of its sources."""
    import nrl_models

    here = Path(__file__).parents[1]
    sources = {
        "nrl_models": source_digest(Path(str(nrl_models.__file__)).parent),
        "sweep": source_digest(*(here / name for name in OWN_SOURCES)),
    }
    return versions_of("torch", "transformers") | sources


if __name__ == "__main__":
    sys.exit(main())
