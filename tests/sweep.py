"""What sweeps over architectures have in common: outcomes are kept as they come, and a run goes on where one stopped.

A sweep's file holds `{"versions": {...}, "outcomes": {architecture: {...}}}`; while all are tried again, also under
`"again"` those that have been.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nrl_models.common.checkpoint.writing import write_whole

Outcome = dict[str, Any]


def published(results: Path) -> dict[str, Any]:
    """What a sweep's file holds."""
    return json.loads(results.read_text()) if results.exists() else {"versions": {}, "outcomes": {}}


@dataclass(frozen=True)
class Sweep:
    """Architectures tried one after another.

    Args:
        results: the file with the outcomes.
        everything: the architectures that there should be an outcome of.
        versions: of what decides the outcomes: those of other versions are forgotten.
        run: tries the architectures it is given, and yields each one's outcome as soon as it is there.
        worsened: what is worse in an outcome, the second, than it was in the first, in words; empty if nothing is.
        write_page: called with what the file holds, whenever that has changed.
    """

    results: Path
    everything: list[str]
    versions: dict[str, str]
    run: Callable[[list[str]], Iterator[tuple[str, Outcome]]]
    worsened: Callable[[Outcome, Outcome], str]
    write_page: Callable[[dict[str, Any]], None]

    def main(self, parser: argparse.ArgumentParser) -> int:
        """Run what the command line asks for; 1 if an architecture came out worse than before."""
        parser.add_argument("names", nargs="*", metavar="NAME", help="architectures; all without an outcome by default")
        parser.add_argument("--again", action="store_true", help="run all, also those that have an outcome")
        parser.add_argument("--page", action="store_true", help="write the page from outcomes that are there")
        options = parser.parse_args()
        if unknown := sorted(set(options.names) - set(self.everything)):
            parser.error(f"not among the architectures of this sweep: {', '.join(unknown)}")
        if options.page:
            self.write_page(published(self.results))
            return 0
        return self.go_on(options.names, again=options.again)

    def go_on(self, names: list[str], *, again: bool = False) -> int:
        """Try architectures; 1 if one came out worse than before.

        Args:
            names: those to try. If none are named, those without an outcome.
            again: if none are named, try all; but those that a run of this kind tried before it was cut.
        """
        before = published(self.results)
        kept = before["outcomes"] if before["versions"] == self.versions else {}
        again = again and not names
        done = kept.keys() if not again else before.get("again", []) if kept else []
        found: dict[str, Outcome] = {}
        worse = False
        for name, outcome in self.run(names or [one for one in self.everything if one not in done]):
            found[name] = outcome
            self.publish(kept | found, [*done, *found] if again else [])
            if name in before["outcomes"] and (words := self.worsened(before["outcomes"][name], outcome)):
                print(f"{name}: {words}", file=sys.stderr, flush=True)
                worse = True
        if again:
            self.publish(kept | found, [])
        return 1 if worse else 0

    def publish(self, outcomes: dict[str, Outcome], again: list[str]) -> None:
        """Write outcomes, by architecture, and the page; and which have been tried again, while others are to be."""
        known = {name: outcomes[name] for name in self.everything if name in outcomes}
        content: dict[str, Any] = {"versions": self.versions, "outcomes": known}
        if again:
            content["again"] = again
        write_whole(self.results, json.dumps(content, indent=1) + "\n")
        self.write_page(content)
