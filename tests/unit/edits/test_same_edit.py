"""Make each edit of the table to transformers' model and to ours. The outcomes must be equal."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from importlib import import_module, util
from pathlib import Path

import numpy
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from versions import has_reached

from edits.models import BUILDERS, CONFIGS, ours
from edits.outcome import Outcome, differences
from edits.peft_tuners import PROMPTS, TUNERS
from edits.table import EDITS, Edit, Subject, step
from nrl_models.common.projections import report

for file in sorted(Path(__file__).parent.glob("*.py")):
    if not file.stem.startswith(("test_", "__")):
        import_module(f"edits.{file.stem}")

# Edits for which our model raises an error and transformers' does not: the error, and the reason.
DOCUMENTED: dict[str, tuple[type[Exception], str]] = {
    "modes: mutation of saved tensors is allowed": (
        RuntimeError,
        "torch's mode clones a tensor before it is changed by the storage that was saved; a group saves the memory of "
        "all its weights, of which each weight is a storage of its own, so the change is refused as without the mode",
    ),
}


# Edits that transformers' model supports only since some version.
SINCE = {"compilers: jit trace of model": "5.9"}


def outcome_of(edit: Edit, library: str, folder: Path) -> Outcome | Exception:
    """Return the outcome of the edit on a new model of this library. An error is also an outcome."""
    folder.mkdir()
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    try:
        return edit.apply(Subject(library, edit.which, edit.dtype, folder))
    except Exception as error:  # any exception is an outcome
        return error


def skip_unless_installed(edit: Edit) -> None:
    if missing := [name for name in edit.needs if util.find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}: install the extra `integrations`")


@pytest.mark.long
@pytest.mark.parametrize(
    "edit",
    [pytest.param(edit, id=edit.id, marks=[pytest.mark.integrations] if edit.needs else []) for edit in EDITS],
)
@pytest.mark.usefixtures("accepts_installed_peft")
def test_same_edit(edit: Edit, tmp_path: Path) -> None:
    skip_unless_installed(edit)
    if not has_reached(SINCE.get(edit.id, "5")):
        pytest.skip(f"transformers {SINCE[edit.id]} takes it")
    expected = outcome_of(edit, "transformers", tmp_path / "transformers")
    assert_effective(edit, expected)
    actual = outcome_of(edit, "ours", tmp_path / "ours")
    if edit.id in DOCUMENTED:
        error, reason = DOCUMENTED[edit.id]
        assert type(actual) is error, f"ours is documented to raise {error.__name__} ({reason}), and gave {actual!r}"
        return
    if isinstance(expected, Exception):
        assert type(actual) is type(expected), f"transformers' model raises {expected!r}; ours gives {actual!r:.500}"
        return
    if isinstance(actual, Exception):
        raise actual
    assert not (mismatches := list(differences(actual, expected, edit.tolerance))), "\n".join(
        [f"{edit.id}: {len(mismatches)} differences of ours from transformers' model", *mismatches[:12]]
    )


def assert_effective(edit: Edit, outcome: Outcome | Exception) -> None:
    """Check that the edit changed transformers' model. An edit without an effect would always pass."""
    if edit.raises is not None:
        assert type(outcome) is edit.raises, f"transformers' model should raise {edit.raises.__name__}: {outcome!r}"
        return
    if isinstance(outcome, Exception):
        raise outcome
    assert list(differences(outcome, unedited(edit.which, edit.dtype))), "the outcome is that of an unedited model"
    if isinstance(outcome, dict) and "seen" in outcome:
        assert outcome["seen"], "nothing shows that the edit took place"


@cache
def unedited(which: str, dtype: torch.dtype) -> Outcome:
    """Return a step of transformers' model without an edit."""
    return step(Subject("transformers", which, dtype, Path()))


def test_edit_table() -> None:
    assert len(EDITS) >= 150
    assert len(DOCUMENTED) <= 4
    assert set(DOCUMENTED) <= {edit.id for edit in EDITS}
    assert not [name for name, count in Counter(edit.id for edit in EDITS).items() if count > 1]


def test_differences_detect_changes() -> None:
    """The comparison detects a different value, flag, key, order, missing gradient or NaN."""
    one = {"a": torch.ones(2), "b": None, "c": ["x", 1.0]}
    assert not list(differences({**one, "a": torch.ones(2) + 1e-6}, one))
    for other in (
        {**one, "a": torch.ones(2) + 1e-3},
        {**one, "a": torch.ones(2, dtype=torch.float64)},
        {**one, "a": torch.ones(2, requires_grad=True)},
        {**one, "a": torch.full((2,), torch.nan)},
        {**one, "b": torch.zeros(2)},
        {**one, "c": ["x"]},
        {**one, "c": ["x", 1.1]},
        {"b": None, **one},
        {**one, "d": 1},
    ):
        assert list(differences(other, one)), other


# Other features of PEFT, and why they are not in the table.
OTHER_TUNERS = {
    "CARTRIDGE": "a cache that is made elsewhere; it touches no weight",
    "CPT": "prompt tuning over given tokens; it touches no weight",
    "MULTITASK_PROMPT_TUNING": "prompt tuning with task ids; it touches no weight",
    "POLY": "takes task ids in forward",
    "SHADOW": "a second model beside the first",
    "XLORA": "mixes LoRA adapters that are there",
}


def test_every_peft_tuner_is_covered() -> None:
    covered = {of_config.func for of_config in (*TUNERS.values(), *PROMPTS.values())}
    others = {tuner.value for tuner, of_config in PEFT_TYPE_TO_CONFIG_MAPPING.items() if of_config not in covered}
    assert others == set(OTHER_TUNERS)


@pytest.mark.parametrize("which", CONFIGS)
def test_unedited_models_are_equal(which: str, tmp_path: Path) -> None:
    """Without an edit, both are the same model, and our groups run as one matmul."""
    untouched = Edit("nothing", "", step, which=which)
    expected, actual = (outcome_of(untouched, library, tmp_path / library) for library in BUILDERS)
    assert not list(differences(actual, expected))
    groups = report(ours(which))
    assert groups
    assert not [f"{group.name}: {group.reason}" for group in groups if not group.joined]
