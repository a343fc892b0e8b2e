"""The ledger contains exactly the keys of every registered architecture."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version
from patterns import ONE_OF_EACH_PATTERN

from nrl_models import registry
from nrl_models.testing.case import FamilyCase
from tools.ledger.differential import keys_at_default_only, ledger_keys
from tools.ledger.ledger import KeyKind, recorded
from tools.ledger.record import ledger_of

REMEDY = "run `python -m tools.ledger {}` and commit tools/ledger/recorded"


def test_every_key_is_in_the_ledger(family_case: FamilyCase) -> None:
    name = family_case.architecture
    assert name in recorded(), f"no ledger of {name}: {REMEDY.format(name)}"
    ledger, config = recorded()[name], family_case.config
    unknown = set(ledger_keys(config)) - set(ledger.kinds)
    gone = set(ledger.kinds) - set(ledger_keys(config))
    if Version(version("transformers")) < Version(ledger.transformers):
        unknown = gone = set()  # keys have been added and removed in newer versions
    assert not unknown, f"keys that are not in the ledger of {name}: {sorted(unknown)}: {REMEDY.format(name)}"
    assert not gone, f"keys in the ledger of {name} that it does not have: {sorted(gone)}: {REMEDY.format(name)}"
    assert not ledger.departures


def test_unread_keys_are_limited_to_default(family_case: FamilyCase) -> None:
    ledger = recorded()[family_case.architecture]
    if version("transformers") != ledger.transformers:
        pytest.skip(f"the ledger is of transformers {ledger.transformers}")
    inert = {path for path, kind in ledger.kinds.items() if kind in (KeyKind.INERT, KeyKind.DEFAULT_ONLY)}
    limited = {path for path in ledger.kinds if path.rpartition(".")[2] in family_case.model_class.config_values}
    assert set(ledger.supported) == limited | (inert & set(keys_at_default_only(family_case)))


@pytest.mark.parametrize("family", ONE_OF_EACH_PATTERN)
def test_ledger_matches_differential_run(family: str) -> None:
    name = registry.FAMILIES[family][0]
    if version("transformers") != recorded()[name].transformers:
        pytest.skip(f"the ledger is of transformers {recorded()[name].transformers}")
    assert not recorded()[name].count(KeyKind.UNTRIED), REMEDY.format(name)
    assert ledger_of(FamilyCase(registry.model_class(name))) == recorded()[name]
