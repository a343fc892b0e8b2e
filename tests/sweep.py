"""Shared code of sweeps over architectures. Each outcome is recorded immediately, so an interrupted run resumes.

Outcomes recorded with other versions remain until their architecture runs again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.coverage_pages.results import FOLDER, Kind, Record, read_records, write_record

Outcomes = Mapping[Kind, Mapping[str, Any]]
"""The outcomes of one architecture by kind."""


@dataclass(frozen=True)
class Sweep:
    """A sweep over architectures, one after another.

    Args:
        pages: The folder of the coverage pages, which contains the recorded outcomes.
        everything: All architectures that should have outcomes.
        versions: For each kind, the versions of the packages that influence its outcome.
        run: Runs the passed architectures, and yields the outcomes of each immediately.
        worsened: Compares an earlier and a later outcome. Describes how the later one is worse, or returns an empty
            string.
        write_page: Called after each recorded outcome.
        optional: Kinds that not every architecture has.
    """

    pages: Path
    everything: list[str]
    versions: Mapping[Kind, Mapping[str, str]]
    run: Callable[[list[str]], Iterator[tuple[str, Outcomes]]]
    worsened: Callable[[Mapping[str, Any], Mapping[str, Any]], str]
    write_page: Callable[[], None]
    optional: frozenset[Kind] = field(default_factory=frozenset)

    def main(self, parser: argparse.ArgumentParser) -> int:
        """Run the sweep with command-line options. Returns 1 if an architecture's outcome is worse than before."""
        parser.add_argument("names", nargs="*", metavar="NAME", help="architectures; all without an outcome by default")
        parser.add_argument("--again", action="store_true", help="run all, also those that have an outcome")
        parser.add_argument("--page", action="store_true", help="write the page from outcomes that are there")
        options = parser.parse_args()
        if unknown := sorted(set(options.names) - set(self.everything)):
            parser.error(f"not among the architectures of this sweep: {', '.join(unknown)}")
        if options.page:
            self.write_page()
            return 0
        return self.go_on(options.names, again=options.again)

    def go_on(self, names: list[str], *, again: bool = False) -> int:
        """Run architectures. Returns 1 if an architecture's outcome is worse than before.

        Args:
            names: Architectures. If empty, those without an outcome for the installed versions.
            again: If `names` is empty, run all architectures, except those that an interrupted run of this kind
                finished.
        """
        records = read_records(self.pages)
        again = again and not names
        if again:
            done = self._tried_again.read_text().split() if self._tried_again.is_file() else []
        else:
            done = [name for name in self.everything if self._is_done(records, name)]
        worse = False
        for name, outcomes in self.run(names or [name for name in self.everything if name not in done]):
            for kind, outcome in outcomes.items():
                write_record(self.pages, kind, name, Record(self.versions[kind], outcome))
                before = records[kind].get(name)
                if before and (text := self.worsened(before.outcome, outcome)):
                    print(f"{name}: {kind}: {text}", file=sys.stderr, flush=True)
                    worse = True
            if again:
                with self._tried_again.open("a") as file:
                    file.write(f"{name}\n")
            self.write_page()
        if again:
            self._tried_again.unlink(missing_ok=True)
        return 1 if worse else 0

    @property
    def _tried_again(self) -> Path:
        """File of the architectures that an unfinished `--again` run has finished."""
        return self.pages / FOLDER / f".{next(iter(self.versions))}.again"

    def _is_done(self, records: Mapping[Kind, Mapping[str, Record]], name: str) -> bool:
        """Return True if an architecture has all outcomes for the installed versions."""
        return all(
            record.versions == versions if (record := records[kind].get(name)) else kind in self.optional
            for kind, versions in self.versions.items()
        )
