"""Record names, dtypes and numbers of transformers' own classes on fixed tiny checkpoints, to find silent changes.

    python -m tools.release_check.numbers.record --out numbers.jsonl [--names LlamaForCausalLM ...] [--jobs 2]

It needs torch and transformers, and not nrl_models. Checkpoints, configurations and inputs are fixtures
(`number_cases`), so that a difference between two records is a change of the library. `compare` in `facts` lists the
changes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path

from transformers.utils import logging as transformers_logging

from tools.release_check.numbers import library_cases
from tools.release_check.numbers.cases import FOLDER, NumberCase
from tools.release_check.numbers.facts import Facts, Kind, Section, SectionRecord
from tools.release_check.numbers.recorded import NotApplicableError, Recorded
from tools.release_check.numbers.sections import SECTIONS
from tools.release_check.outcome_files import source_digest, versions_of
from tools.release_check.saved_runs import SavedRun
from tools.release_check.workers import End

TIMEOUT = 300.0
"""Timeout of one architecture in seconds. One takes 1 to 5 on an idle machine."""

OWN_SOURCES = (
    "numbers/record.py",
    "numbers/sections.py",
    "numbers/variants.py",
    "numbers/mixtures.py",
    "numbers/library_cases.py",
    "numbers/recorded.py",
    "numbers/facts.py",
    "numbers/cases.py",
    "cached_steps.py",
)


def record(architecture: str, fixtures: Path = FOLDER) -> Iterator[SectionRecord]:
    """Record every section of a class, or of a library case, in the order of `Section`."""
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if (library := library_cases.CASES.get(architecture)) is not None:
            for section in Section:
                yield _recorded(architecture, section, library.sections.get(section, _nothing))
            return
        case = NumberCase.from_file(architecture, fixtures)
        model_class = case.model_class()
        if model_class is None:
            for section in Section:
                yield SectionRecord(architecture, section, {Kind.CLASS: {"present": False}})
            return
        with tempfile.TemporaryDirectory() as folder:
            recorded = Recorded(case, model_class, Path(folder))
            for section, function in SECTIONS.items():
                yield _recorded(architecture, section, partial(function, recorded), folder)


def _nothing() -> Facts:
    raise NotApplicableError("no such section")


def _recorded(architecture: str, section: Section, run: Callable[[], Facts], folder: str = "") -> SectionRecord:
    """Run a section. Removes `folder` from error messages."""
    started = time.monotonic()
    try:
        found = SectionRecord(architecture, section, run())
    except NotApplicableError:
        found = SectionRecord(architecture, section)
    except Exception as error:
        text = " ".join(str(error).split())
        message = (text.replace(folder, "") if folder else text)[:300]
        found = SectionRecord(architecture, section, error_type=type(error).__name__, message=message)
    return replace(found, seconds=round(time.monotonic() - started, 3))


# The command line


def main(arguments: list[str] | None = None) -> int:
    """Record every class that has a fixture."""
    parser = argparse.ArgumentParser(description="Record names, dtypes and numbers of transformers' own classes.")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines file; an interrupted run resumes from it")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="architectures; default: all that have a fixture")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="worker processes; default: one a core")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds for one architecture")
    options = parser.parse_args(arguments)
    names = library_cases.recorded_names()
    if unknown := sorted(set(options.names or ()) - set(names)):
        parser.error(f"no fixture: {', '.join(unknown)}. Write it with tools.release_check.numbers.write_cases.")
    records = list(record_all(options.out, options.names or names, jobs=options.jobs, timeout=options.timeout))
    errors = [found for found in records if found.error_type]
    for found in errors:
        print(f"{found.architecture}: {found.section}: {found.error_type}: {found.message[:160]}")
    print(f"{len(records)} sections of {len({found.architecture for found in records})} classes, {len(errors)} errors")
    return 0


def record_all(path: Path, names: list[str], *, jobs: int, timeout: float = TIMEOUT) -> Iterator[SectionRecord]:
    """Yield a record for every section of every class: existing records of the file, then new ones, which are appended.

    Args:
        path: The file of records.
        names: Architectures.
        jobs: Number of worker processes.
        timeout: Timeout of one architecture in seconds.
    """
    saved = SavedRun(record, list(Section), "section", SectionRecord.from_json, _lost)
    yield from saved.outcomes(path, names, recorded_versions(), jobs=jobs, timeout=timeout)


def _lost(architecture: str, section: StrEnum, end: End) -> SectionRecord:
    return SectionRecord(architecture, Section(section), error_type=str(end.ending), message=end.detail)


def recorded_versions() -> dict[str, str]:
    """Return the versions of the packages that influence the records, and a hash of this module."""
    here = Path(__file__).parents[1]
    return versions_of("torch", "transformers", "compressed-tensors") | {
        "numbers": source_digest(*(here / name for name in OWN_SOURCES))
    }


if __name__ == "__main__":
    sys.exit(main())
