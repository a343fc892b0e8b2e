"""Recorded numbers show planted changes of transformers' classes, each under its kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from tools.release_check import numbers
from tools.release_check.facts import Change, Kind, Section, SectionRecord, compare
from tools.release_check.number_cases import NumberCase, case_names, filled, stated
from tools.release_check.write_number_cases import make_case

LLAMA = "LlamaForCausalLM"


@pytest.fixture(scope="module")
def before() -> list[SectionRecord]:
    records = list(numbers.record(LLAMA))
    assert [record.section for record in records] == list(Section)
    assert not [record for record in records if record.error_type]
    return records


def changes(before: list[SectionRecord]) -> list[Change]:
    return compare(before, numbers.record(LLAMA))


def test_the_same_version_has_no_change(before: list[SectionRecord]) -> None:
    assert changes(before) == []


def test_a_changed_layer_changes_numbers_only(before: list[SectionRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x) * 1.001)
    found = changes(before)
    assert {change.section for change in found} >= {Section.EAGER, Section.CACHED_STEPS, Section.GREEDY}
    assert {change.kind for change in found} <= {Kind.NUMBERS, Kind.GRADIENTS, Kind.TOKENS}


def test_a_changed_initialization_moves_no_logits(before: list[SectionRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    init: Callable[..., None] = modeling_llama.LlamaPreTrainedModel._init_weights

    def doubled(self: Any, module: Any) -> None:
        init(self, module)
        if isinstance(module, torch.nn.Linear) and not getattr(module.weight, "_is_hf_initialized", False):
            module.weight.data.mul_(2)

    monkeypatch.setattr(modeling_llama.LlamaPreTrainedModel, "_init_weights", doubled)
    assert {change.kind for change in changes(before)} == {Kind.INITIALIZATION, Kind.INITIALIZATION_SCALE}


def test_a_parameter_that_is_kept_in_fp32_is_a_change_of_dtypes(
    before: list[SectionRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["model.norm"])
    found = [change for change in changes(before) if change.section is Section.DTYPES]
    assert {change.kind for change in found} == {Kind.DTYPES}
    assert ("auto: model.norm.weight", None, "float32") in {(one.key, one.before, one.after) for one in found}


def test_an_error_is_a_change_of_its_section_only(before: list[SectionRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "resize_token_embeddings", fail)
    (change,) = changes(before)
    assert (change.section, change.kind, change.after) == (Section.RESIZE, Kind.ERROR, "RuntimeError broken")


def test_a_class_that_a_version_lacks_is_absent(monkeypatch: pytest.MonkeyPatch, before: list[SectionRecord]) -> None:
    monkeypatch.setattr(NumberCase, "model_class", lambda self: None)
    found = changes(before)
    assert {(change.kind, change.after) for change in found} == {(Kind.CLASS, False)}


def test_a_fixture_fills_by_name_and_shape() -> None:
    weight = torch.randn(64, 32) * 0.02 + 1
    value = stated(weight)
    assert torch.equal(filled("a", value), filled("a", value))
    assert not torch.equal(filled("a", value), filled("b", value))
    assert filled("a", value).std().item() == pytest.approx(0.02, rel=0.1)
    ids = torch.randint(0, 100, (2, 7))
    assert torch.equal(filled("input_ids", stated(ids)), ids)
    mask = torch.ones(2, 5000, dtype=torch.bool)  # larger than what is stored literally
    assert torch.equal(filled("mask", stated(mask)), mask)


def test_a_fixture_survives_its_file(tmp_path: Path) -> None:
    case = make_case(LLAMA)
    assert case is not None
    case.to_file(tmp_path)
    assert NumberCase.from_file(LLAMA, tmp_path) == case
    assert case_names(tmp_path) == [LLAMA]
    assert make_case("BaichuanForCausalLM") is None  # transformers has none


def test_records_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: list[SectionRecord]) -> None:
    path = tmp_path / "numbers.jsonl"
    monkeypatch.setattr(numbers, "run_subjects", lambda run, names, **_: iter(()) if not names else pytest.fail(names))
    file = numbers.OutcomeFile(path, ("architecture", "section"))
    for record in before:
        file.add({**record.to_json(), "versions": numbers.recorded_versions()})
    resumed = list(numbers.record_all(path, [LLAMA], jobs=1))
    assert compare(before, resumed) == []
    assert {record.section for record in resumed} == set(Section)
