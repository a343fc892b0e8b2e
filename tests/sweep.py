"""What sweeps over architectures have in common: outcomes are kept as they come, and a run goes on where one stopped.

A sweep's file holds `{"versions": {...}, "outcomes": {architecture: {...}}}`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nrl_models.common.saving import write_whole

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
        """Try architectures, those without an outcome if none are named; 1 if one came out worse than before."""
        before = published(self.results)
        kept = before["outcomes"] if before["versions"] == self.versions else {}
        found: dict[str, Outcome] = {}
        for name, outcome in self.run(names or [one for one in self.everything if again or one not in kept]):
            found[name] = outcome
            self.publish(kept | found)
        worse = {
            name: words
            for name, outcome in found.items()
            if name in before["outcomes"] and (words := self.worsened(before["outcomes"][name], outcome))
        }
        for name, words in worse.items():
            print(f"{name}: {words}", file=sys.stderr)
        return 1 if worse else 0

    def publish(self, outcomes: dict[str, Outcome]) -> None:
        """Write outcomes, by architecture, and the page."""
        known = {name: outcomes[name] for name in self.everything if name in outcomes}
        content = {"versions": self.versions, "outcomes": known}
        write_whole(self.results, json.dumps(content, indent=1) + "\n")
        self.write_page(content)
