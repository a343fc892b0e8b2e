"""The sweep finds planted faults in our class, and resumes after an interruption."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from nrl_models import registry
from nrl_models.errors import NRLModelsError
from nrl_models.testing.case import FamilyCase
from tests.unit.common.source_names import trees
from tools.release_check import saved_runs
from tools.release_check.outcome_files import OutcomeFile
from tools.release_check.sweep import class_sweep
from tools.release_check.sweep.class_checks import CHECKS, ClassUnderTest, difference, run_checks, run_one
from tools.release_check.sweep.independent import IMPLEMENTATIONS, independent_logits
from tools.release_check.sweep.outcomes import Check, Outcome, Reference, SweepOutcome
from tools.release_check.workers import End, Ending, Result

LLAMA = "LlamaForCausalLM"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ClassUnderTest:
    case = ClassUnderTest(LLAMA, tmp_path_factory.mktemp("sweep"))
    assert case.model
    return case


@pytest.fixture
def forward(llama: ClassUnderTest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Return a function that plants a fault into our model's forward, given the original forward and its arguments."""
    original = llama.model.forward

    def plant(fault: Callable[..., Any]) -> None:
        monkeypatch.setattr(llama.model, "forward", lambda *args, **kwargs: fault(original, *args, **kwargs))

    return plant


def cache_name() -> str:
    parameters = inspect.signature(FamilyCase(registry.model_class(LLAMA)).reference_class.forward).parameters
    return next(name for name in ("cache", "past_key_values") if name in parameters)


def test_correct_class_passes(llama: ClassUnderTest) -> None:
    for check in (Check.LOGITS, Check.CACHED_STEPS, Check.GREEDY, Check.GRADIENTS):
        outcome = run_one(LLAMA, check, llama)
        assert outcome.outcome is Outcome.EQUAL
        assert outcome.max_diff is not None
        assert outcome.max_diff < 1e-5


def test_sweep_detects_ignored_cache(llama: ClassUnderTest, forward: Callable[..., None]) -> None:
    name = cache_name()
    forward(lambda original, *args, **kwargs: original(*args, **{**kwargs, name: None}))
    outcome = run_one(LLAMA, Check.CACHED_STEPS, llama)
    assert outcome.outcome is Outcome.CACHE_IGNORED
    assert run_one(LLAMA, Check.LOGITS, llama).outcome is Outcome.EQUAL


def test_sweep_detects_wrong_logits_of_cached_steps(llama: ClassUnderTest, forward: Callable[..., None]) -> None:
    name = cache_name()

    def shifted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if kwargs.get(name) is not None and output.logits.shape[1] == 1:
            output.logits = output.logits + 1e-2
        return output

    forward(shifted)
    outcome = run_one(LLAMA, Check.CACHED_STEPS, llama)
    assert (outcome.outcome, outcome.reference) == (Outcome.DIFFERENT, Reference.SAME_CALL)
    assert outcome.max_diff is not None
    assert 1e-3 < outcome.max_diff <= 1e-2  # relative to logits of about four
    assert run_one(LLAMA, Check.LOGITS, llama).outcome is Outcome.EQUAL


@pytest.mark.parametrize(
    ("error", "expected"), [(TypeError("cache"), Outcome.RAW_ERROR), (NRLModelsError("no"), Outcome.TYPED_ERROR)]
)
def test_error_types_have_separate_outcomes(
    llama: ClassUnderTest, forward: Callable[..., None], error: Exception, expected: Outcome
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    forward(fail)
    outcome = run_one(LLAMA, Check.LOGITS, llama)
    assert (outcome.outcome, outcome.error_type) == (expected, type(error).__name__)


def test_error_of_both_classes_is_reference_error(
    llama: ClassUnderTest, forward: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    @wraps(llama.reference_class.forward)  # the checks inspect its signature
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("both")

    forward(fail)
    monkeypatch.setattr(llama.reference_class, "forward", fail)
    assert run_one(LLAMA, Check.LOGITS, llama).outcome is Outcome.REFERENCE_ERROR


def test_baichuan_has_independent_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Model and reference of Baichuan inherit the same attention bug. The independent implementation does not."""
    from nrl_models.families.baichuan import modeling

    original = modeling.alibi_slopes
    monkeypatch.setattr(modeling, "alibi_slopes", lambda heads: [2 * slope for slope in original(heads)])
    case = ClassUnderTest("BaichuanForCausalLM", tmp_path)
    outcome = run_one("BaichuanForCausalLM", Check.LOGITS, case)
    assert (outcome.outcome, outcome.reference) == (Outcome.DIFFERENT, Reference.INDEPENDENT)


@pytest.mark.parametrize("name", registry.FAMILIES["baichuan"])
@pytest.mark.parametrize("check", [Check.LOGITS, Check.GRADIENTS])
def test_independent_baichuan_matches_reference(name: str, check: Check, tmp_path: Path) -> None:
    outcome = run_one(name, check, ClassUnderTest(name, tmp_path))
    assert outcome.outcome is Outcome.EQUAL


@pytest.mark.parametrize("name", registry.FAMILIES["baichuan"])
def test_wrong_attention_of_baichuan_is_found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each model and its reference scale attention by the same wrong factor."""
    from nrl_models.families.baichuan.modeling import BaichuanAttention

    original: Callable[..., None] = BaichuanAttention.__init__

    def scaled(self: Any, *args: Any) -> None:
        original(self, *args)
        self.scaling *= 1.1

    monkeypatch.setattr(BaichuanAttention, "__init__", scaled)
    case = ClassUnderTest(name, tmp_path)
    for check in (Check.LOGITS, Check.GRADIENTS):
        outcome = run_one(name, check, case)
        assert (outcome.outcome, outcome.reference) == (Outcome.DIFFERENT, Reference.INDEPENDENT)


@pytest.fixture(scope="module")
def kimi_vl(tmp_path_factory: pytest.TempPathFactory) -> ClassUnderTest:
    return ClassUnderTest("KimiVLForConditionalGeneration", tmp_path_factory.mktemp("kimi"))


def wide_images(case: ClassUnderTest) -> dict[str, torch.Tensor]:
    """Text with two images that are wider than high, and higher than wide."""
    config: Any = case.reference().config
    grids = [[2, 8], [6, 4]]
    ids = torch.full((1, 14), config.media_placeholder_token_id)
    ids[0, [0, 5, -3, -2]] = torch.tensor([20, 21, 22, 23])
    vision = config.vision_config
    shape = (sum(rows * columns for rows, columns in grids), vision.num_channels, *[vision.patch_size] * 2)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_hws": torch.tensor(grids)}


@torch.no_grad()
def test_independent_kimi_vl_matches_wide_and_high_images(kimi_vl: ClassUnderTest) -> None:
    inputs = wide_images(kimi_vl)
    expected = independent_logits(kimi_vl.reference(), inputs)
    assert difference(kimi_vl.reference()(**inputs).logits, expected) < 1e-5


@torch.no_grad()
def test_wrong_positions_of_kimi_vl_are_found(kimi_vl: ClassUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model and reference share a vision tower that exchanges rows and columns."""
    from nrl_models.families.kimi_vl import modeling

    original = modeling.rotary_angles

    def exchanged(*arguments: Any) -> torch.Tensor:
        return original(*arguments).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)

    monkeypatch.setattr(modeling, "rotary_angles", exchanged)
    for check in (Check.MEDIA_LOGITS, Check.GRADIENTS):
        outcome = run_one("KimiVLForConditionalGeneration", check, kimi_vl)
        assert (outcome.outcome, outcome.reference) == (Outcome.DIFFERENT, Reference.INDEPENDENT)


def test_references_of_this_library_have_independent_implementations() -> None:
    architectures = set(registry.architectures(aliases=False))
    modules = [tree for file, tree in trees().items() if file.startswith("families/")]
    defined = {node.name for tree in modules for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    references = {
        name
        for name in defined & architectures
        if not registry.model_class(name).reference_class().__module__.startswith("transformers.")  # type: ignore[attr-defined]
    }
    assert references
    assert references <= IMPLEMENTATIONS.keys()


def test_masked_logits_do_not_hide_differences() -> None:
    expected = torch.randn(2, 8)
    expected[:, 3] = torch.finfo(torch.float32).min
    moved, unmasked = expected.clone(), expected.clone()
    moved[0, 0] += 0.1
    unmasked[0, 3] = 0.0
    assert difference(expected.clone(), expected) == 0
    assert difference(moved, expected) > 0.01
    assert difference(unmasked, expected) > 1


def test_unused_images_are_not_media_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny configuration without an image token, the forward runs on text."""
    name = "LlavaForConditionalGeneration"
    case = ClassUnderTest(name, tmp_path)
    assert run_one(name, Check.MEDIA_LOGITS, case).outcome is Outcome.EQUAL
    inputs = case.media()
    text = {key: torch.full_like(value, 20) if key == "input_ids" else value for key, value in inputs.items()}
    forward = case.reference_class.forward

    @wraps(forward)
    def without_image(*args: Any, pixel_values: Any = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    monkeypatch.setattr(case.reference_class, "forward", without_image)
    monkeypatch.setattr(case.model, "forward", lambda **kwargs: without_image(case.model, **kwargs))
    monkeypatch.setattr(case, "media", lambda: text)
    outcome = run_one(name, Check.MEDIA_LOGITS, case)
    assert (outcome.outcome, outcome.error_type) == (Outcome.NO_INPUTS, "MediaInputsError")


def test_construction_error_gives_outcome_for_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise AttributeError("no such class")

    monkeypatch.setattr(registry, "model_class", broken)
    outcomes = list(run_checks(LLAMA))
    assert [outcome.check for outcome in outcomes] == list(Check) == list(CHECKS)
    assert {(outcome.outcome, outcome.error_type) for outcome in outcomes} == {(Outcome.RAW_ERROR, "AttributeError")}


# Recording


def fake_events(started: list[str], crash: str = "") -> Callable[..., Iterator[Result | End]]:
    def run(_: Any, names: list[str], **options: Any) -> Iterator[Result | End]:
        for name in names:
            started.append(name)
            for check in Check:
                if name == crash and check is Check.LOGITS:
                    yield End(name, Ending.CRASHED, "exit code -11", 1.0)
                    break
                yield Result(name, SweepOutcome(name, check, Outcome.EQUAL))
            else:
                yield End(name, Ending.FINISHED, "", 1.0)

    return run


def test_interrupted_sweep_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, started = tmp_path / "outcomes.jsonl", list[str]()
    monkeypatch.setattr(saved_runs, "run_subjects", fake_events(started))
    monkeypatch.setattr(class_sweep, "installed_versions", lambda: {"transformers": "5.24.0"})
    first = class_sweep.sweep(path, ["A", "B", "C"], jobs=1)
    for _ in range(len(Check) + 2):  # interrupted in B
        next(first)
    first.close()
    assert started == ["A", "B"]
    started.clear()
    outcomes = list(class_sweep.sweep(path, ["A", "B", "C"], jobs=1))
    assert started == ["B", "C"]
    assert {(outcome.architecture, outcome.check) for outcome in outcomes} == {
        (name, check) for name in "ABC" for check in Check
    }
    started.clear()
    monkeypatch.setattr(class_sweep, "installed_versions", lambda: {"transformers": "5.25.0"})
    list(class_sweep.sweep(path, ["A"], jobs=1))
    assert started == ["A"]


def test_crash_keeps_earlier_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_runs, "run_subjects", fake_events([], crash="A"))
    outcomes = {outcome.check: outcome for outcome in class_sweep.sweep(tmp_path / "o.jsonl", ["A"], jobs=1)}
    assert outcomes[Check.LOAD].outcome is Outcome.EQUAL
    assert outcomes[Check.LOGITS].outcome is outcomes[Check.GRADIENTS].outcome is Outcome.CRASHED
    assert outcomes[Check.LOGITS].message == "exit code -11"


@pytest.mark.parametrize(
    ("outcome", "message", "again"),
    [
        (Outcome.TIMED_OUT, "more than 300 s", ["A"]),
        (Outcome.CRASHED, "exit code -9", ["A"]),  # killed
        (Outcome.CRASHED, "exit code -11", []),  # a crash of the class
    ],
)
def test_interrupted_class_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Outcome, message: str, again: list[str]
) -> None:
    path, started = tmp_path / "outcomes.jsonl", list[str]()
    monkeypatch.setattr(saved_runs, "run_subjects", fake_events(started))
    list(class_sweep.sweep(path, ["A"], jobs=1))
    lost = SweepOutcome("A", Check.LOGITS, outcome, message=message, versions=class_sweep.installed_versions())
    OutcomeFile(path, ("architecture", "check")).add(lost.to_json())
    started.clear()
    outcomes = {one.check: one.outcome for one in class_sweep.sweep(path, ["A"], jobs=1)}
    assert started == again
    assert outcomes[Check.LOGITS] is (Outcome.EQUAL if again else outcome)


def test_unknown_names_exit_with_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        class_sweep.main(["--out", str(tmp_path / "o.jsonl"), "--names", "LamaForCausalLM"])
    assert "not registered: LamaForCausalLM" in capsys.readouterr().err
