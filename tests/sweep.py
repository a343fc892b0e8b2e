"""What sweeps over architectures share: outcomes are recorded as they come, and a run goes on where one stopped.

An outcome that was recorded with other versions stays until its own architecture is tried again.
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
"""What came out for one architecture, by what was tried."""


@dataclass(frozen=True)
class Sweep:
    """Architectures tried one after another.

    Args:
        pages: the folder of the coverage pages, beside which outcomes are recorded.
        everything: the architectures that there should be outcomes of.
        versions: what is tried, and the versions of the packages that decide its outcome.
        run: tries the architectures it is given, and yields each one's outcomes as soon as they are there.
        worsened: what is worse in an outcome, the last, than it was in the one before; empty if nothing is.
        write_page: called whenever something was recorded.
        optional: what is not tried of every architecture.
    """

    pages: Path
    everything: list[str]
    versions: Mapping[Kind, Mapping[str, str]]
    run: Callable[[list[str]], Iterator[tuple[str, Outcomes]]]
    worsened: Callable[[Mapping[str, Any], Mapping[str, Any]], str]
    write_page: Callable[[], None]
    optional: frozenset[Kind] = field(default_factory=frozenset)

    def main(self, parser: argparse.ArgumentParser) -> int:
        """Run what the command line asks for; 1 if an architecture came out worse than before."""
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
        """Try architectures; 1 if one came out worse than before.

        Args:
            names: those to try. If none are named, those without an outcome of the installed versions.
            again: if none are named, try all; but those that a run of this kind tried before it was cut.
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
        """The architectures that have been tried again, while others are to be."""
        return self.pages / FOLDER / f".{next(iter(self.versions))}.again"

    def _is_done(self, records: Mapping[Kind, Mapping[str, Record]], name: str) -> bool:
        """Whether there is an outcome of the installed versions of everything that is tried of an architecture."""
        return all(
            record.versions == versions if (record := records[kind].get(name)) else kind in self.optional
            for kind, versions in self.versions.items()
        )
