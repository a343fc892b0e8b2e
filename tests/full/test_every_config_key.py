"""Change every key of every architecture, here and in transformers. The effect must match the ledger."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from nrl_models.testing.case import FamilyCase
from tools.ledger.ledger import KeyKind, recorded
from tools.ledger.record import ledger_of


@pytest.mark.timeout(1800)
def test_ledger_matches_effects_of_every_key(family_case: FamilyCase) -> None:
    current = ledger_of(family_case)
    assert not current.departures
    ledger = recorded()[family_case.architecture]
    if version("transformers") != ledger.transformers:
        return  # keys have another effect in that version, but the same on both sides
    assert not ledger.count(KeyKind.UNTRIED), "run `python -m tools.ledger` and commit tools/ledger/recorded"
    keys = {**ledger.kinds, **current.kinds}
    other = {key: (ledger.kinds.get(key), current.kinds.get(key)) for key in keys}
    assert not {key: kinds for key, kinds in other.items() if kinds[0] != kinds[1]}, "recorded kind, current kind"
    assert current == ledger
