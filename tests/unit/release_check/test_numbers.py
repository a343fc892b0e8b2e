"""Recorded numbers reveal planted changes of transformers' classes, with the right kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama
from versions import since

from tools.checkout import ROOT
from tools.release_check import saved_runs
from tools.release_check.numbers.cases import FOLDER, NumberCase, case_names, filled, stated
from tools.release_check.numbers.facts import Change, Kind, Section, SectionRecord, compare
from tools.release_check.numbers.library_cases import recorded_names
from tools.release_check.numbers.record import record, record_all, recorded_versions
from tools.release_check.numbers.write_cases import make_case
from tools.release_check.outcome_files import OutcomeFile
from tools.release_check.packages import tested_versions
from tools.release_check.phases import read_records
from tools.release_check.workers import Ending

LLAMA = "LlamaForCausalLM"


@pytest.fixture(scope="module")
def before() -> list[SectionRecord]:
    records = list(record(LLAMA))
    assert [one.section for one in records] == list(Section)
    assert not [one for one in records if one.error_type]
    return records


def changes(before: list[SectionRecord]) -> list[Change]:
    return compare(before, record(LLAMA))


def test_same_version_has_no_changes(before: list[SectionRecord]) -> None:
    assert changes(before) == []


@pytest.mark.long
def test_changed_layer_changes_only_numbers(before: list[SectionRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x) * 1.001)
    detected = changes(before)
    assert {change.section for change in detected} >= {Section.EAGER, Section.CACHED_STEPS, Section.GREEDY}
    assert {change.kind for change in detected} <= {Kind.NUMBERS, Kind.GRADIENTS, Kind.TOKENS}


def test_changed_initialization_does_not_change_logits(
    before: list[SectionRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    init: Callable[..., None] = modeling_llama.LlamaPreTrainedModel._init_weights

    def doubled(self: Any, module: Any) -> None:
        init(self, module)
        if isinstance(module, torch.nn.Linear) and not getattr(module.weight, "_is_hf_initialized", False):
            module.weight.data.mul_(2)

    monkeypatch.setattr(modeling_llama.LlamaPreTrainedModel, "_init_weights", doubled)
    assert {change.kind for change in changes(before)} == {Kind.INITIALIZATION, Kind.INITIALIZATION_SCALE}


def test_parameter_kept_in_fp32_is_dtype_change(before: list[SectionRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["model.norm"])
    detected = [change for change in changes(before) if change.section is Section.DTYPES]
    assert {change.kind for change in detected} == {Kind.DTYPES}
    assert ("auto: model.norm.weight", None, "float32") in {(one.key, one.before, one.after) for one in detected}


def test_error_changes_only_one_section(before: list[SectionRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "resize_token_embeddings", fail)
    (change,) = changes(before)
    assert (change.section, change.kind, change.after) == (Section.RESIZE, Kind.ERROR, "RuntimeError broken")


def test_missing_class_is_recorded_as_absent(monkeypatch: pytest.MonkeyPatch, before: list[SectionRecord]) -> None:
    monkeypatch.setattr(NumberCase, "model_class", lambda self: None)
    detected = changes(before)
    assert {(change.kind, change.after) for change in detected} == {(Kind.CLASS, False)}


def test_filled_depends_on_name_and_shape() -> None:
    weight = torch.randn(64, 32) * 0.02 + 1
    value = stated(weight)
    assert torch.equal(filled("a", value), filled("a", value))
    assert not torch.equal(filled("a", value), filled("b", value))
    assert filled("a", value).std().item() == pytest.approx(0.02, rel=0.1)
    ids = torch.randint(0, 100, (2, 7))
    assert torch.equal(filled("input_ids", stated(ids)), ids)
    mask = torch.ones(2, 5000, dtype=torch.bool)  # too large to be stored literally
    assert torch.equal(filled("mask", stated(mask)), mask)


def test_fixture_file_round_trip(tmp_path: Path) -> None:
    case = make_case(LLAMA)
    assert case is not None
    case.to_file(tmp_path)
    assert NumberCase.from_file(LLAMA, tmp_path) == case
    assert case_names(tmp_path) == [LLAMA]
    assert make_case("BaichuanForCausalLM") is None  # transformers has no such class


def test_recorded_numbers_of_tested_version_are_complete() -> None:
    tested = tested_versions.tested_versions(ROOT)["transformers"]
    records = read_records(FOLDER / f"{tested}.jsonl.gz")
    sections = {(record.architecture, record.section) for record in records}
    assert sections == {(name, section) for name in recorded_names() for section in Section}
    interrupted = [record for record in records if record.error_type in set(Ending)]
    assert not interrupted


def test_recording_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: list[SectionRecord]) -> None:
    path = tmp_path / "numbers.jsonl"

    def run_nothing(_: Any, names: list[str], **options: Any) -> Iterator[Any]:
        assert not names
        yield from ()

    monkeypatch.setattr(saved_runs, "run_subjects", run_nothing)
    file = OutcomeFile(path, ("architecture", "section"))
    for one in before:
        file.add({**one.to_json(), "versions": recorded_versions()})
    resumed = list(record_all(path, [LLAMA], jobs=1))
    assert compare(before, resumed) == []
    assert {one.section for one in resumed} == set(Section)


def test_padding_with_batch_size_one_has_separate_section(
    before: list[SectionRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = modeling_llama.LlamaModel.forward

    def unmasked(self: Any, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        mask = None if input_ids is not None and len(input_ids) == 1 else attention_mask
        return forward(self, input_ids=input_ids, attention_mask=mask, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", unmasked)
    assert {change.section for change in changes(before)} == {Section.PADDED_ALONE}


def test_cached_chunk_has_separate_section(before: list[SectionRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    forward = modeling_llama.LlamaAttention.forward

    def wrong(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, *others = forward(self, hidden_states, *args, **kwargs)
        return (output * (2 if hidden_states.shape[1] == 5 else 1), *others)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", wrong)
    assert {change.section for change in changes(before)} == {Section.CACHED_CHUNK}


def test_unloaded_base_model_weights_are_loading_change(
    before: list[SectionRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "base_model_prefix", "nothing")
    detected = [change for change in changes(before) if change.section is Section.OTHER_CLASS]
    assert {change.kind for change in detected} == {Kind.LOADING}
    assert "head: unexpected_keys" in {change.key for change in detected}


@pytest.mark.long
@since("5.7")  # older releases do not load all weights of the fixture
def test_small_window_is_recorded_for_text_and_media() -> None:
    records = {one.section: one for one in record("Gemma3ForConditionalGeneration")}
    window = records[Section.SMALL_WINDOW].facts[Kind.NUMBERS]
    assert {"logits of text, window", "logits of media, window"} <= window.keys()
    eager, media = records[Section.EAGER].facts[Kind.NUMBERS]["logits"], records[Section.MEDIA].facts[Kind.NUMBERS]
    assert window["logits of text, window"] != eager
    assert window["logits of media, window"] != media["logits"]
    bidirectional = records[Section.BIDIRECTIONAL].facts[Kind.NUMBERS]
    assert bidirectional["logits of text, bidirectional True"] != eager


@pytest.mark.long
@since("5.14")  # older releases do not initialize a loaded weight again
def test_library_changes_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights initialized again after loading, and gradients divided twice."""
    name = "PreTrainedModel"
    records = list(record(name))
    assert not [one for one in records if one.error_type]
    assert compare(records, record(name)) == []
    load = transformers.PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def initialized_again(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model, info = load(cls, *args, **kwargs)
        model.apply(model._init_weights)
        return model, info

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(initialized_again))
    step = transformers.Trainer.training_step
    monkeypatch.setattr(transformers.Trainer, "training_step", lambda *args: step(*args) + 0 * halved(args[1]))
    detected = {(change.section, change.kind) for change in compare(records, record(name))}
    assert detected == {(Section.LOADING, Kind.LOADING), (Section.GRADIENTS, Kind.GRADIENTS)}


def halved(model: torch.nn.Module) -> float:
    """Halve the gradients after a step."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= 2
    return 0.0
