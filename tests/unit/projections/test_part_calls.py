"""A group gives the outcomes of separate linears for all calls and edits between them.

`--cases` is the number of programs of each kind (all of a kind, if it has fewer), and `--fuzz-seed` selects them. `make
campaign` runs many.
"""

from __future__ import annotations

import random
from itertools import islice, product

import pytest
from part_calls import AROUND, BETWEEN, CALLS, EDITS, Program, differs, modules, outcome, same

STEPS = (*CALLS, *EDITS)
PLAIN = ()
"""The steps of a forward that only calls its linears."""

KINDS: dict[str, list[Program]] = {
    "two steps": [[(steps, "grad", "")] for steps in product(STEPS, repeat=2)],
    "three steps": [[(steps, "grad", "")] for steps in product(STEPS, repeat=3)],
    "two steps, the forward in a mode": [
        [(steps, around, "")]
        for steps in product(STEPS, repeat=2)
        for around in CALLS
        # A checkpoint edits again during recomputation, which is not meaningful with separate linears either.
        if "checkpoint" not in around or not EDITS.keys() & set(steps)
    ],
    "three forwards": [
        [(PLAIN, first, ""), (PLAIN, second, edit), (PLAIN, third, other)]
        for first, second, third in product(AROUND, repeat=3)
        for edit, other in product(BETWEEN, repeat=2)
    ],
}


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS)
def test_random_call_and_edit_programs(kind: str, request: pytest.FixtureRequest) -> None:
    cases, seed = request.config.getoption("--cases", 200), request.config.getoption("--fuzz-seed", 0)
    programs = KINDS[kind]
    if kind != "two steps":
        programs = random.Random(seed).sample(programs, min(len(programs), cases // 2))
    assert not list(islice(filter(differs, programs), 5))


def test_programs_detect_swapped_outputs() -> None:
    """Most programs give values, not errors. A group with swapped slices gives other values."""
    programs = KINDS["two steps"]
    errors = 0
    for program in programs:
        plain, _ = modules()
        errors += any(isinstance(value, type) for value in outcome(plain, program))
    assert errors < len(programs) / 4
    plain, combined = modules()
    run = combined.qkv_proj.compute
    combined.qkv_proj.compute = lambda *args: [run(*args)[index] for index in (0, 2, 1)]
    assert not same(outcome(combined, [(PLAIN, "grad", "")]), outcome(plain, [(PLAIN, "grad", "")]))
