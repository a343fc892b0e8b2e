"""What came of architectures that were sharded over processes: the outcomes of `make distributed-coverage`.

An outcome is `agrees`; `refused: ` and the message; `limited: ` and why transformers' own class cannot do it either;
`disagrees: ` and where; or `error: ` and what was raised.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nrl_models.devtools.overview import grouped

RESULTS = "distributed.json"
"""Where the outcomes are, beside the results of the generated tests."""

FEATURES = {"fsdp": "FSDP2", "tp": "TP", "ep": "EP", "qlora": "QLoRA"}
"""What is tried of an architecture, and what the pages call it."""

AGREES = "agrees"
VERDICTS = {AGREES: "yes", "refused": "refused", "limited": "limited", "disagrees": "fails", "error": "fails"}
"""What may come of a try, best first, and what the pages call it."""

_MEANING = (
    'FSDP2, TP and EP stand for loading over two processes with `plan="auto"`: exported weights bit for bit those of '
    "the checkpoint, loss and gradients of a step those of one process. `refused` is refused before anything is read, "
    "for the reason on the family's page; EP is for models with experts. QLoRA stands for training adapters on a "
    "checkpoint in 4 bits, against transformers' own class."
)

MOST = 400
"""Characters of a reason that a page shows; the outcomes have all."""


def status(outcome: str) -> str:
    """An outcome's first word, one of `VERDICTS`."""
    return outcome.partition(":")[0]


@dataclass(frozen=True)
class Sharded:
    """Outcomes by architecture and by what was tried, a key of `FEATURES`."""

    versions: Mapping[str, str] = field(default_factory=dict)
    outcomes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @staticmethod
    def read(file: Path) -> Sharded:
        """What the sweep wrote; nothing if it wrote nothing yet."""
        if not file.is_file():
            return Sharded()
        content = json.loads(file.read_text())
        return Sharded(content["versions"], content["outcomes"])

    def verdicts(self, architecture: str) -> dict[str, str]:
        """For each feature `yes`, `refused`, `limited`, `fails`, `n/a` or `not tested`."""
        outcome = self.outcomes.get(architecture)
        if outcome is None:
            return dict.fromkeys(FEATURES.values(), "not tested")
        untried = {"ep": "n/a"}  # of models without experts it is not tried
        return {
            name: VERDICTS[status(outcome[key])] if key in outcome else untried.get(key, "not tested")
            for key, name in FEATURES.items()
        }

    def reasons(self, architectures: Iterable[str]) -> list[str]:
        """Whatever is not a plain yes, with the reason: a line each, with the architectures it is said of."""
        said = grouped(
            (f"{feature} {what}: {_in_short(outcome[key])}", name)
            for name in architectures
            for key, feature in FEATURES.items()
            if key in (outcome := self.outcomes.get(name, {})) and (what := status(outcome[key])) != AGREES
        )
        return [f"{words} ({', '.join(names)})" for words, names in said.items()]

    def summary(self) -> list[str]:
        """The outcomes of all architectures, in a paragraph; none without outcomes."""
        if not self.outcomes:
            return []
        lines = []
        for key, feature in FEATURES.items():
            counts = Counter(VERDICTS[status(one[key])] for one in self.outcomes.values() if key in one)
            words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in dict.fromkeys(VERDICTS.values()))
            lines.append(f"- {feature}: {words}")
        tried = f"{len(self.outcomes)} architectures were tried, with {in_words(self.versions)}"
        return [f"{_MEANING} {tried}:", "", *lines, ""]


def in_words(versions: Mapping[str, str]) -> str:
    """The versions of packages that something was tried with, but this one's."""
    return ", ".join(f"{package} {version}" for package, version in versions.items() if package != "nrl_models")


def _in_short(outcome: str) -> str:
    """The reason in an outcome, on one line: of an error of ours the problems alone."""
    reason = outcome.partition(": ")[2]
    problems = [line.removeprefix("  - ") for line in reason.splitlines() if line.startswith("  - ")]
    words = " ".join("; ".join(problems or [reason]).split())
    return words if len(words) <= MOST else f"{words[:MOST]} …"
