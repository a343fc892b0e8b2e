"""The catalog's data: it is complete, refers to existing code, and every entry has its tests."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from quirk_guide import guide_pages
from quirk_probes import OF_CLASS, OF_INSTALLED, OF_RUNNING_VLLM, OF_VLLM
from quirk_tripwires import CatalogError, QuirkExpiredError, check_catalog, tripwire

from nrl_models.common.flags import ModelFlag
from nrl_models.common.switches import SWITCHES, VARIABLE, is_off, quirks_off
from nrl_models.errors import UnknownArgumentError
from nrl_models.quirks import CATALOG, Quirk
from tests.quirk_removals import REMOVE

TESTS = Path(__file__).parents[2]
DOCS = TESTS.parent / "docs"

by_name = pytest.mark.parametrize("quirk", CATALOG, ids=lambda quirk: quirk.name)

ONE = Quirk(
    name="one",
    symptom="It hurts.",
    where=("load",),
    handling="It is cured.",
    code=("nrl_models.common.switches:is_off",),
    off="do not do it",
    probe="behavioral",
    asks="it hurts",
)


def test_catalog_is_complete() -> None:
    check_catalog(CATALOG)
    assert len(CATALOG) >= 25
    assert REMOVE.keys() == {quirk.name for quirk in CATALOG}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"probe": ""}, "one: has neither a probe nor a version bound"),
        ({"asks": ""}, "one: has a probe that asks nothing"),
        ({"probe": "hearsay"}, "one: has a probe of kind 'hearsay'"),
        ({"since": "the last one"}, "one: is introduced in 'the last one', which is not a requirement"),
        ({"probe": "", "fixed": "the next one"}, "one: is fixed in 'the next one', which is not a requirement"),
        ({"where": ("everywhere",)}, "one: acts at everywhere: expected some of load, forward"),
        ({"where": ()}, "one: acts at no place"),
        ({"off": ""}, "one: has no switch"),
        ({"handling": ""}, "one: has no handling"),
        ({"code": ()}, "one: does not say where it is handled"),
        ({"name": "token-types"}, r"token-types: has a switch of its own"),
    ],
)
def test_incomplete_entry_raises(change: dict, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        check_catalog([*CATALOG, replace(ONE, **change)])


def test_duplicate_or_missing_entry_raises() -> None:
    check_catalog([*CATALOG, ONE])
    with pytest.raises(CatalogError, match="one: is in the catalog twice"):
        check_catalog([*CATALOG, ONE, ONE])
    with pytest.raises(CatalogError, match="token-types: can be switched off, but the catalog does not say"):
        check_catalog(quirk for quirk in CATALOG if quirk.name != "token-types")


def test_every_probe_runs_in_exactly_one_way() -> None:
    run = [*OF_INSTALLED, *OF_CLASS, *OF_VLLM, *OF_RUNNING_VLLM]
    assert sorted(run) == sorted(quirk.name for quirk in CATALOG if quirk.probe)


@by_name
def test_referenced_code_exists(quirk: Quirk) -> None:
    for where in quirk.code:
        module, _, attributes = where.partition(":")
        target = importlib.import_module(module)
        for attribute in attributes.split("."):
            target = getattr(target, attribute)


def test_every_switch_is_read_in_code() -> None:
    sources = "\n".join(path.read_text() for path in (TESTS.parent / "nrl_models").rglob("*.py"))
    assert {name for name in SWITCHES if f'is_off("{name}")' not in sources} == set()


def test_every_model_flag_belongs_to_a_quirk() -> None:
    text = " ".join(quirk.handling for quirk in CATALOG)
    assert [flag for flag in ModelFlag.__members__ if flag != "NONE" and f"ModelFlag.{flag}" not in text] == []


def test_predicates_do_not_use_model_names() -> None:
    folder = TESTS.parent / "nrl_models" / "quirks"
    for file in ("predicates.py", "subject.py", *(path.name for path in sorted(folder.glob("*_quirks.py")))):
        names = {
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in ast.walk(ast.parse((folder / file).read_text()))
            if isinstance(node, (ast.Attribute, ast.Name))
        }
        assert not names & {"model_type", "architectures", "architecture", "name_or_path", "_name_or_path"}


@by_name
@pytest.mark.parametrize("part", ["symptom", "cure"])
def test_quirk_has_symptom_and_cure_tests(quirk: Quirk, part: str) -> None:
    test_name = f"test_{part}_of_{quirk.name.replace('-', '_')}"
    files = [*(TESTS / "unit" / "quirks").glob("test_*.py"), *(TESTS / "engine").glob("test_*.py")]
    assert sum(path.read_text().count(f"def {test_name}(") for path in files) == 1


def test_guide_pages_match_catalog() -> None:
    pages = guide_pages(DOCS)
    for path, text in pages.items():
        assert path.read_text() == text, "run python -m tests.quirk_guide"
        assert len(text.splitlines()) <= 200
    entries = [line for text in pages.values() for line in text.splitlines() if line.startswith("## ")]
    assert {f"## {quirk.name}" for quirk in CATALOG} <= set(entries)


# Switches


def test_quirks_off_applies_within_block() -> None:
    assert not is_off("token-types")
    with quirks_off("token-types", "packed-documents"):
        assert is_off("token-types")
        with quirks_off("mrope-stale-offsets"):
            assert is_off("token-types")
            assert is_off("mrope-stale-offsets")
        assert not is_off("mrope-stale-offsets")
    assert not is_off("token-types")


def test_unknown_switch_raises_with_suggestion() -> None:
    with (
        pytest.raises(UnknownArgumentError, match=r"token_types cannot be switched off \(did you mean token-types\?\)"),
        quirks_off("token_types"),
    ):
        pass
    with pytest.raises(UnknownArgumentError, match="fp32-masters cannot be switched off"), quirks_off("fp32-masters"):
        pass  # an argument selects it


@pytest.mark.parametrize(("value", "expected"), [("token-types, packed-documents", "True True"), ("tokens", "cannot")])
def test_environment_variable_switches_quirks_off(value: str, expected: str) -> None:
    code = "from nrl_models.common.switches import is_off; print(is_off('token-types'), is_off('packed-documents'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={VARIABLE: value, "PYTHONPATH": str(TESTS.parent)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert expected in done.stdout + done.stderr


# Messages of tripwires


def test_tripwire_error_names_quirk() -> None:
    tripwire(ONE, True)
    tripwire(ONE, None)
    with pytest.raises(QuirkExpiredError, match=r"one: it is no longer so that it hurts; asked of Nova\. .*Delete it"):
        tripwire(ONE, False, "Nova")


def test_tripwire_fires_if_all_versions_have_the_fix() -> None:
    past = replace(ONE, fixed="torch>=2.0")
    assert past.is_fixed
    with pytest.raises(QuirkExpiredError, match=r"one: every version .* satisfies torch>=2\.0\. Delete it"):
        tripwire(past, None)
    retained = replace(past, kept_for="those who look back")
    tripwire(retained, False)
    with pytest.raises(QuirkExpiredError, match=r"said to be fixed in torch>=2\.0, but upstream has it again"):
        tripwire(retained, True)
    later = replace(ONE, fixed="torch>=99")
    assert not later.is_fixed
    tripwire(later, True)


def test_the_tripwire_accepts_releases_before_the_quirk() -> None:
    tripwire(replace(ONE, since="torch>=99"), False)
    with pytest.raises(QuirkExpiredError, match="it is no longer so that it hurts"):
        tripwire(replace(ONE, since="torch>=2.0"), False)
    assert replace(ONE, since="torch>=2.0").expiry.startswith(
        "torch 2.0 introduced it. A test checks that this quirk still exists: "
    )
