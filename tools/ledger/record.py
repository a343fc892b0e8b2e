"""Write the ledger: test every key of every registered architecture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nrl_models import registry
from nrl_models.common.checkpoint.writing import write_whole
from nrl_models.common.config.keys import value_at
from nrl_models.testing.case import FamilyCase
from tools.architectures import require_registered
from tools.coverage_pages.results import as_json, family_of
from tools.ledger.differential import Differential, keys_at_default_only
from tools.ledger.ledger import FOLDER, KeyKind, Ledger, read_ledgers


def ledger_of(case: FamilyCase, *, survey: bool = False) -> Ledger:
    """Return the ledger of a class's tiny configuration. Every key is changed, in the model and in its reference.

    Args:
        case: The class.
        survey: Only find out which keys are not read, and record the others as untried.
    """
    differential = Differential(case)
    found = {} if survey else differential.run()
    kinds = differential.survey() if survey else {path: finding.kind for path, finding in found.items()}
    limited = [path for path in kinds if path.rpartition(".")[2] in case.model_class.config_values]
    unread = [path for path in keys_at_default_only(case) if kinds[path] == KeyKind.INERT]
    supported = {path: value_at(case.config, path) for path in (*limited, *unread)}
    departures = {
        path: finding.difference for path, finding in found.items() if finding.difference and path not in supported
    }
    kinds |= dict.fromkeys(supported, KeyKind.DEFAULT_ONLY)
    return Ledger(kinds, supported, departures, transformers=version("transformers"))


def write_ledger(
    names: Iterable[str] = (), *, again: bool = False, survey: bool = False, folder: Path = FOLDER
) -> Iterator[tuple[str, Ledger]]:
    """Test and record architectures that have no record for the installed transformers, one after the other.

    Args:
        names: Architectures. If empty, all registered ones.
        again: Also test architectures that are recorded.
        survey: Only find out which keys are not read, for architectures without any record.
        folder: The folder of the ledgers. Ledgers of other architectures do not change, whatever their version.

    Yields:
        Each architecture with its ledger.

    Raises:
        UnknownArchitectureError: A name is not registered.
    """
    require_registered(names, aliases=False)
    before, installed = read_ledgers(folder), version("transformers")
    for name in list(names) or registry.architectures(aliases=False):
        if registry.unmet_requirement(name):
            continue
        ledger = before.get(name)
        if ledger is None or ledger.transformers != installed:
            is_done = False
        else:
            is_done = survey or not ledger.count(KeyKind.UNTRIED)
        if is_done and not again:
            continue
        found = ledger_of(FamilyCase(registry.model_class(name)), survey=survey)  # type: ignore[arg-type]
        record(name, found, folder)
        yield name, found


def record(architecture: str, ledger: Ledger, folder: Path = FOLDER) -> None:
    """Replace the recorded ledger of an architecture. The other ledgers of its family remain."""
    file = folder / f"{family_of(architecture)}.json"
    content = json.loads(file.read_text()) if file.is_file() else {}
    content[architecture] = to_json(ledger)
    folder.mkdir(exist_ok=True)
    write_whole(file, as_json(dict(sorted(content.items()))) + "\n")


def to_json(ledger: Ledger) -> dict[str, Any]:
    """Format a ledger for `Ledger.from_json`."""
    paths = {kind: sorted(path for path, found in ledger.kinds.items() if found == kind) for kind in KeyKind}
    written: dict[str, Any] = {"transformers": ledger.transformers}
    written |= {str(kind): " ".join(found) for kind, found in paths.items() if found}
    if ledger.supported:
        written[KeyKind.DEFAULT_ONLY] = dict(sorted(ledger.supported.items()))
    if ledger.departures:
        written["departures"] = dict(sorted(ledger.departures.items()))
    return written
