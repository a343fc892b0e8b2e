"""Damaged inputs of every kind load as if undamaged, load as in transformers, or raise a typed error.

`--cases` is the number of cases of each kind, and `--fuzz-seed` selects them. Hypothesis minimizes failing inputs and
keeps them in `found/`, and the next run tries them first. Commit them with the fix.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from targets import TARGETS

from nrl_models.testing.tiny import silent_transformers

FOUND = Path(__file__).parent / "found"


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    with silent_transformers():
        yield


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TARGETS)
def test_damaged_input_loads_correctly_or_raises_typed_error(kind: str, request: pytest.FixtureRequest) -> None:
    @seed(request.config.getoption("--fuzz-seed"))
    @settings(
        max_examples=request.config.getoption("--cases"),
        database=DirectoryBasedExampleDatabase(FOUND / kind),
        deadline=None,
        phases=set(Phase) - {Phase.explain},  # takes minutes
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def damaged(data: st.DataObject) -> None:
        with TemporaryDirectory(prefix=f"nrl-fuzz-{kind}-") as folder:
            TARGETS[kind](data.draw, Path(folder))

    damaged()
