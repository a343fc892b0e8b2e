"""Writing the ledger: the differential test of every key of every registered architecture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

from nrl_models import registry
from nrl_models.common.config.keys import value_at
from nrl_models.common.config.ledger import DEFAULT_ONLY, FILE, INERT, UNTRIED, Ledger, Ledgers, read_ledgers
from nrl_models.devtools.differential import Differential, keys_at_default_only
from nrl_models.errors import NRLModelsError, UnknownArchitectureError
from nrl_models.testing.case import FamilyCase


class LedgerError(NRLModelsError):
    """A ledger cannot be recorded as asked for."""


def ledger_of(case: FamilyCase, *, survey: bool = False) -> Ledger:
    """What becomes of each key of a class's tiny configuration: every one is changed, on both sides.

    Args:
        case: the class.
        survey: whether to say only which keys nothing reads, and to leave the others untried.
    """
    differential = Differential(case)
    found = {} if survey else differential.run()
    kinds = differential.survey() if survey else {path: one.kind for path, one in found.items()}
    limited = [path for path in kinds if path.rpartition(".")[2] in case.model_class.config_values]
    unread = [path for path in keys_at_default_only(case) if kinds[path] == INERT]
    supported = {path: value_at(case.config, path) for path in (*limited, *unread)}
    departures = {path: one.difference for path, one in found.items() if one.difference and path not in supported}
    return Ledger(kinds | dict.fromkeys(supported, DEFAULT_ONLY), supported, departures)


def write_ledger(
    names: Iterable[str] = (), *, again: bool = False, survey: bool = False, file: Path = FILE
) -> Iterator[tuple[str, Ledger]]:
    """Find out what is not recorded yet, and record it, architecture by architecture.

    Args:
        names: architectures; all registered ones if there are none.
        again: whether to find out anew what is recorded.
        survey: whether to say only which keys nothing reads, of architectures that are not recorded at all.
        file: where the ledgers are.

    Yields:
        Each architecture and its ledger when it is found.

    Raises:
        UnknownArchitectureError: a name that no family serves.
        LedgerError: the file is of another transformers, and only some architectures are asked for.
    """
    known = registry.architectures(aliases=False)
    if unknown := sorted(set(names) - set(known)):
        raise UnknownArchitectureError(f"{', '.join(unknown)}: no family serves such an architecture")
    before, installed = read_ledgers(file), version("transformers")
    if names and before.of and before.transformers != installed:
        raise LedgerError(
            f"{file} is of transformers {before.transformers}, and {installed} is installed: a ledger is of one "
            "version. Name no architecture, and everything is found out anew."
        )
    of = {name: one for name, one in before.of.items() if name in known and before.transformers == installed}
    for name in list(names) or known:
        is_done = name in of and (survey or not of[name].count(UNTRIED))
        if (is_done and not again) or registry.unmet_requirement(name):
            continue
        of[name] = ledger_of(FamilyCase(registry.model_class(name)), survey=survey)  # type: ignore[arg-type]
        Ledgers(installed, of).write(file)
        yield name, of[name]
