"""The mutation run finds every mutant of the catalog in some architecture, and reports survivors."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from torch import nn
from typer.testing import CliRunner

from nrl_models import registry
from nrl_models.errors import UnknownArchitectureError
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.features import generated_tests
from tools.checkout import PAGES
from tools.coverage_pages.results import Kind, Record, read_records, write_record
from tools.ledger.ledger import recorded
from tools.mutants import CATALOG, Mutant, campaign
from tools.mutants.__main__ import app
from tools.mutants.campaign import (
    Hunt,
    Outcome,
    architectures_in_order,
    checks,
    read_outcomes,
    run_mutants,
)
from tools.mutants.planting import in_code, in_modules, misread, reads
from tools.variants import with_variants

pytestmark = pytest.mark.xdist_group("mutants")  # the tests share the models below

ROOT = Path(__file__).parents[3]

STAND_FOR_ALL = (
    "Qwen2ForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
    "Gemma2ForCausalLM",
    "GraniteForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Gemma3nForCausalLM",
    "Glm4ForCausalLM",
    "SmolLM3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Lfm2ForCausalLM",
)
"""Architectures for all mutants. Each mutant is tried in the first one that can have it."""

QUICK = ("test_layer_equivalence", "test_logits_equivalence")


@lru_cache(maxsize=len(STAND_FOR_ALL))
def hunt(architecture: str) -> Hunt:
    return Hunt(FamilyCase(registry.model_class(architecture), torch.device("cpu")))


@pytest.fixture
def llama() -> FamilyCase:
    return FamilyCase(registry.model_class("LlamaForCausalLM"), torch.device("cpu"))


@pytest.mark.long
@pytest.mark.parametrize("mutant", CATALOG, ids=lambda mutant: mutant.name)
def test_mutant_is_killed_by_expected_test(mutant: Mutant) -> None:
    inert = []
    for architecture in STAND_FOR_ALL:
        if registry.unmet_requirement(architecture):
            continue
        tried = hunt(architecture)
        if mutant.bug.is_possible(tried.case):
            likely = [check for name in mutant.killers for check in checks() if check.function == name]
            if tried.killer(mutant, likely):
                return
            inert.append(mutant.bug.is_inert(tried.case, tried._expected))
    if all(inert) and Version(version("transformers")) < Version(recorded()[STAND_FOR_ALL[0]].transformers):
        pytest.skip("nothing comes of it in models of this transformers")
    pytest.fail(f"of {', '.join(STAND_FOR_ALL)} none in which {', '.join(mutant.killers)} finds it")


def test_catalog_names_are_unique_and_tests_exist() -> None:
    assert len({mutant.name for mutant in CATALOG}) == len(CATALOG) >= 25
    assert {name for mutant in CATALOG for name in mutant.killers} <= set(generated_tests())


def test_checks_include_every_generated_test() -> None:
    assert {check.function for check in checks()} == set(generated_tests())
    names = {check.name for check in checks()}
    assert {"test_logits_equivalence[bfloat16]", "test_packing[padded]", "test_lora"} <= names


# Planting


def logits(model: nn.Module, case: FamilyCase) -> torch.Tensor:
    with torch.no_grad():
        return model(**case.inputs()).logits


BUGS = {
    "in code": next(quirk for quirk in CATALOG if quirk.name == "gate and up exchanged").bug,
    "in rewritten modules": next(kind for kind in CATALOG if kind.name == "attention scale dropped").bug,
    "in other modules": next(kind for kind in CATALOG if kind.name == "a norm's weight off by one").bug,
    "in reading": next(kind for kind in CATALOG if kind.name == "another rope base").bug,
}


@pytest.mark.long
@pytest.mark.parametrize("kind", BUGS)
def test_planted_bug_affects_only_nrl_models(kind: str, llama: FamilyCase, tmp_path: Path) -> None:
    ours, theirs = llama.model(), llama.reference()
    right = logits(ours, llama)
    ours.save_pretrained(tmp_path)
    with BUGS[kind].planted(llama) as mutated:
        assert not torch.allclose(logits(mutated.model(), llama), right, atol=1e-3)
        if kind != "in reading":  # reading bugs do not change values that loading computes again
            assert not torch.allclose(
                logits(llama.model_class.from_pretrained(tmp_path, combine=True), llama), right, atol=1e-3
            )
        assert torch.equal(logits(theirs, llama), right)
        assert mutated.model().config.rope_parameters == ours.config.rope_parameters
    assert torch.equal(logits(llama.model(), llama), right)
    assert torch.equal(logits(llama.model_class.from_pretrained(tmp_path, combine=True), llama), right)
    assert not [name for name in ("__init__", "forward") if name in vars(ours)]


# Verdicts


def verdict(bug: object, case: FamilyCase) -> Outcome:
    return Hunt(case, only=QUICK).run([Mutant("one", "a test", bug, ())])


@pytest.mark.long
def test_undetected_mutant_survives(llama: FamilyCase) -> None:
    assert verdict(in_code(lambda case: True, lambda case: []), llama).survived == ["one"]


def test_mutant_without_effect_is_inert(llama: FamilyCase) -> None:
    same = in_modules(lambda name, module: "Norm" in type(module).__name__, lambda module: {"weight": weight})
    weight = reads("weight", lambda weight: weight.clone())
    outcome = verdict(same, llama)
    assert (outcome.inert, outcome.applicable) == (["one"], 0)


def test_inapplicable_mutant_is_impossible(llama: FamilyCase) -> None:
    bug = misread(lambda key, value: 1 if key == "no_such_key" else value)
    assert verdict(bug, llama) == Outcome(impossible=["one"])


def test_checks_failing_without_bug_do_not_kill(llama: FamilyCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hunt, "_passes_clean", lambda self, check: False)
    assert Hunt(llama, only=QUICK).killer(CATALOG[0], checks()) is None


def test_tests_of_limited_features_are_skipped(llama: FamilyCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.model_class, "limits", {"layers": "for a test"})
    assert verdict(BUGS["in code"], llama).killed == {"one": "test_logits_equivalence[float32]"}


# Runs


def test_interrupted_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fake_run(self: Hunt, mutants: list[Mutant], progress: object) -> Outcome:
        tried.append((self.case.architecture, [mutant.name for mutant in mutants]))
        return Outcome({mutant.name: "test_lora" for mutant in mutants[:-1]}, [mutants[-1].name])

    monkeypatch.setattr(Hunt, "run", fake_run)
    first, second, third = CATALOG[:3]
    monkeypatch.setattr(campaign, "CATALOG", (first, second))
    list(run_mutants(["LlamaForCausalLM"], tmp_path))
    outcomes = dict(run_mutants(["LlamaForCausalLM", "Qwen3ForCausalLM"], tmp_path))
    # Survivors run again, because a new test may find them.
    both = [first.name, second.name]
    assert tried == [("LlamaForCausalLM", both), ("LlamaForCausalLM", both[1:]), ("Qwen3ForCausalLM", both)]
    assert outcomes["LlamaForCausalLM"] == Outcome({first.name: "test_lora"}, [second.name])
    # So do new mutants. Removed mutants are dropped.
    monkeypatch.setattr(campaign, "CATALOG", (second, third))
    outcomes = dict(run_mutants(["LlamaForCausalLM"], tmp_path))
    assert tried[3:] == [("LlamaForCausalLM", [second.name, third.name])]
    assert outcomes["LlamaForCausalLM"] == Outcome({second.name: "test_lora"}, [third.name])
    assert read_outcomes(read_records(tmp_path))["Qwen3ForCausalLM"].not_run == [third.name]


def test_outcomes_of_other_versions_are_kept_until_rerun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [mutant.name for mutant in CATALOG]
    outcome = Outcome({}, [], [], names)
    older = Record({"torch": "1"}, Outcome({names[0]: "test_lora"}, [], [], names[1:]).to_json())
    for name in ("LlamaForCausalLM", "LlamaForTokenClassification"):
        write_record(tmp_path, Kind.MUTANTS, name, older)
    monkeypatch.setattr(
        Hunt, "run", lambda self, mutants, progress: outcome if list(mutants) == list(CATALOG) else None
    )
    assert dict(run_mutants(["LlamaForCausalLM"], tmp_path)) == {"LlamaForCausalLM": outcome}
    records = read_records(tmp_path)[Kind.MUTANTS]
    assert records["LlamaForTokenClassification"] == older
    assert records["LlamaForCausalLM"].versions["torch"] == version("torch")


@pytest.mark.long
def test_architectures_in_order_start_with_one_per_family() -> None:
    order = architectures_in_order()
    assert set(order) == set(with_variants(registry.architectures(aliases=False)))
    assert len(order) == len(set(order))
    first = order[: len(registry.FAMILIES)]
    assert all(any(name in first for name in names) for names in registry.FAMILIES.values())
    with pytest.raises(UnknownArchitectureError, match=r"LamaForCausalLM \(did you mean LlamaForCausalLM\?\)"):
        architectures_in_order(["LamaForCausalLM"])


def test_progress_prints_line_per_mutant(llama: FamilyCase) -> None:
    lines: list[str] = []
    mutants = [
        Mutant("one", "a test", BUGS["in code"], ()),
        Mutant("two", "a test", misread(lambda key, value: 1 if key == "no_such_key" else value), ()),
    ]
    Hunt(llama, only=QUICK).run(mutants, lines.append)
    assert lines == ["one: found by test_layer_equivalence[float32]", "two: not applicable"]


def test_survivors_fail_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hunt, "run", lambda self, mutants, progress: Outcome({"a": "test_lora"}, ["b"]))
    result = CliRunner().invoke(app, ["LlamaForCausalLM", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "LlamaForCausalLM: 1 of 2 killed" in result.output
    assert "survived: b" in result.output


def test_no_mutant_survives_in_committed_results() -> None:
    outcomes = read_outcomes(read_records(PAGES))
    registered = registry.architectures(aliases=False)
    expected = {name for name in registered if not registry.unmet_requirement(name)}
    assert not expected - outcomes.keys(), "run `python -m tools.mutants` and commit what it writes"
    assert not {name: outcome.survived for name, outcome in outcomes.items() if outcome.survived}
    assert not {name: outcome.not_run for name, outcome in outcomes.items() if outcome.not_run}
