from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import new_model
from versions import since

import nrl_models
from nrl_models.errors import RemoteCodeError
from nrl_models.onboarding import new
from nrl_models.onboarding.family_plan import OnboardingError, heads_beside, plan_family, structure_of
from nrl_models.onboarding.family_source import model_source
from nrl_models.onboarding.new import new_family, prove
from nrl_models.testing.tiny import tiny_config
from tools.ledger.ledger import read_ledgers

ROOT = Path(nrl_models.__path__[0]).parent


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a configuration of an architecture to a folder."""

    def write(architecture: str, **values: Any) -> Path:
        folder = tmp_path / architecture
        config_class = getattr(transformers, architecture).config_class
        config_class(architectures=[architecture], **values).save_pretrained(folder)
        return folder

    return write


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Replace the slow generated tests by tests that pass. Returns the list of tests that would have run."""
    runs: list[tuple[str, ...]] = []

    def passed(module: str, architectures: Any, folder: Path, tests: Any = ()) -> list[dict[str, Any]]:
        assert (folder / f"{module.replace('.', '/')}.py").is_file()
        runs.append((module, *tests))
        return [
            {"architecture": name, "check": "test_packing[ones]", "outcome": "passed", "reason": ""}
            for name in architectures
        ]

    monkeypatch.setattr(new, "run_tests", passed)
    return runs


@pytest.mark.long
@since("5.6")
def test_new_family_is_written_and_tested(configured: Callable[..., Path], tmp_path: Path) -> None:
    family = new_family(configured("OlmoForCausalLM"), out_of_tree=tmp_path / "made", again=True)
    assert family.ok, family.undecided
    assert {result["outcome"] for result in family.results} == {"passed"}
    checks = [result["check"] for result in family.results]
    assert sum(check.startswith("test_layer_equivalence") for check in checks) == 4  # fp32 and bf16, of two heads
    assert sorted(str(file.relative_to(tmp_path / "made")) for file in family.files) == [
        "README.md",
        "nrl_models_olmo/__init__.py",
        "nrl_models_olmo/model.py",
        "pyproject.toml",
    ]
    project = (tmp_path / "made" / "pyproject.toml").read_text()
    assert 'OlmoForCausalLM = "nrl_models_olmo.model:OlmoForCausalLM"' in project


@pytest.mark.long
@pytest.mark.usefixtures("every_family")
def test_new_family_in_repository_updates_ledger_and_page(tmp_path: Path, configured: Callable[..., Path]) -> None:
    # In a copy without an existing family, onboarding generates that family again.
    shutil.copytree(ROOT / "nrl_models", tmp_path / "copy" / "nrl_models", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("docs", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / "copy" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    families = tmp_path / "copy" / "nrl_models" / "families"
    table = families / "table" / "dense.py"
    rows = table.read_text()
    row = next(row for row in rows.splitlines(keepends=True) if row.startswith('    "cwm": Row('))
    table.write_text(rows.replace(row, ""))
    ledger, results = (
        tmp_path / "copy" / "tools" / "ledger" / "recorded",
        tmp_path / "copy" / "docs" / "model-coverage" / "results",
    )
    before = {path: path.read_text() for folder in (ledger, results) for path in folder.iterdir()}
    for folder in (ledger, results):
        (folder / "cwm.json").unlink()
    run = subprocess.run(
        [sys.executable, "-m", "nrl_models", "new", str(configured("CwmForCausalLM"))],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "copy")},
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "All generated tests pass." in run.stdout
    assert "hf.CwmAttention: CombinedQKV," in (families / "cwm" / "model.py").read_text()
    page = (tmp_path / "copy" / "docs" / "model-coverage" / "cwm.md").read_text()
    assert "| feature | CwmForCausalLM |" in page
    assert "| state dict | yes |" in page
    assert not list(families.glob(".nrl-new-*"))
    new_ledger = read_ledgers(ledger)["CwmForCausalLM"]
    assert new_ledger.kinds["hidden_size"] == "shapes"
    assert not new_ledger.departures
    assert {path.name for path, text in before.items() if path.read_text() != text} <= {"cwm.json"}


def test_shared_failures_become_limits_and_others_stay_open(
    configured: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = {"test_packing[None]", "test_greedy_generation", "test_state_dict_roundtrip"}
    stated: list[tuple[bool, bool]] = []

    def run(module: str, architectures: Any, folder: Path, tests: Any = ()) -> list[dict[str, Any]]:
        # transformers' class does not implement `generate`, so its tests fail for any limits.
        source = next(folder.glob("*/model.py")).read_text()
        limited = "packed sequences" in source
        stated.append((limited, '"generate"' in source))
        return [
            {
                "architecture": "OlmoForCausalLM",
                "check": check,
                "outcome": "limited" if limited and "packing" in check else "failed" if check in fails else "passed",
                "reason": "so it is",
                "upstream": "generation" in check,
            }
            for check in (*fails, "test_logits_equivalence")
            if not tests or check.partition("[")[0] in tests
        ]

    monkeypatch.setattr(new, "run_tests", run)
    plan = plan_family(configured("OlmoForCausalLM"), again=True)
    limits, results = prove(plan, "olmo", tmp_path / "stage")
    assert limits == {"packed sequences": "transformers' own Olmo also fails test_packing"}
    assert stated == [(False, False), (True, True), (True, False)]
    assert '"generate"' not in (tmp_path / "stage" / "olmo" / "model.py").read_text()
    assert [result["outcome"] for result in results] == ["failed", "passed", "limited", "failed"]
    # The report separates the failures that transformers' class has too.
    family = new_family(configured("OlmoForCausalLM"), out_of_tree=tmp_path / "out", name="olmo", again=True)
    assert family.undecided == ("OlmoForCausalLM: test_state_dict_roundtrip failed: so it is",)
    assert family.upstream == ("OlmoForCausalLM: test_greedy_generation failed: so it is",)
    assert not family.ok
    assert sorted(path.name for path in (tmp_path / "stage").iterdir()) == ["olmo"]


def test_structural_config_values_are_in_tiny_config(configured: Callable[..., Path]) -> None:
    plan = plan_family(configured("OlmoForCausalLM", attention_bias=True, hidden_size=512), again=True)
    assert plan.tiny == {"attention_bias": True}
    assert '"attention_bias": True' in model_source(plan, {})
    assert structure_of(transformers.OlmoConfig(clip_qkv=None, hidden_act="gelu")) == {"hidden_act": "gelu"}


def test_long_groups_and_reasons_are_wrapped(configured: Callable[..., Path]) -> None:
    plan = plan_family(configured("Qwen3_5ForCausalLM"), again=True)
    text = model_source(plan, {"packed sequences": "because " * 30})
    assert max(map(len, text.splitlines())) <= 120
    assert '("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")' in text
    compile(text, "model.py", "exec")


def test_mismatched_weights_stay_open(tmp_path: Path, untested: list[Any]) -> None:
    model = new_model(tiny_config(transformers.LlamaConfig))
    model.save_pretrained(tmp_path / "model", state_dict=model.state_dict() | {"model.extra.weight": torch.ones(3)})
    family = new_family(tmp_path / "model", out_of_tree=tmp_path / "out", again=True)
    assert not family.ok
    assert [undecided for undecided in family.undecided if "model.extra.weight" in undecided]


def test_failing_forward_stays_open(
    configured: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untested: list[Any]
) -> None:
    folder = configured("OlmoForCausalLM")
    monkeypatch.setattr(transformers.OlmoForCausalLM, "forward", lambda self, **_: 1 / 0)
    family = new_family(folder, out_of_tree=tmp_path / "out", again=True)
    assert "fails at the step 'text': ZeroDivisionError" in family.undecided[0]
    assert untested == []  # no tests run, because all would fail for the same reason


def test_existing_families_and_folders_are_not_overwritten(
    configured: Callable[..., Path], tmp_path: Path, untested: list[Any]
) -> None:
    folder = configured("OlmoForCausalLM")
    with pytest.raises(OnboardingError, match="OlmoForCausalLM is already served by nrl_models"):
        new_family(folder, out_of_tree=tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(OnboardingError, match="out exists; nothing was written"):
        new_family(folder, out_of_tree=tmp_path / "out", again=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    with pytest.raises(OnboardingError, match="llama exists; nothing was written"):
        new_family(folder, name="llama", again=True)
    for name in ("../llama", "class"):
        with pytest.raises(OnboardingError, match="is not a package name"):
            new_family(folder, name=name, out_of_tree=tmp_path / "other", again=True)


def test_interruption_leaves_no_files(
    configured: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    folder = configured("OlmoForCausalLM")
    monkeypatch.setattr(new, "run_tests", interrupted)
    with pytest.raises(KeyboardInterrupt):
        new_family(folder, out_of_tree=tmp_path / "made" / "out", again=True)
    assert list((tmp_path / "made").iterdir()) == []


def test_invalid_config_raises(configured: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(OnboardingError, match=r"expected a directory with a config\.json"):
        plan_family(tmp_path / "nowhere")
    folder = configured("OlmoForCausalLM")
    content = json.loads((folder / "config.json").read_text())
    for architectures, message in [
        (["NovaForCausalLM"], "is a NovaForCausalLM, which transformers .* does not have.*`Outside this repository`"),
        ([], "OlmoForCausalLM is already served"),  # the class of `model_type`
        (["A", "B"], "expected one name"),
    ]:
        (folder / "config.json").write_text(json.dumps(content | {"architectures": architectures}))
        with pytest.raises(OnboardingError, match=message):
            plan_family(folder)
    remote = content | {"model_type": "nova", "auto_map": {"AutoConfig": "configuration_nova.NovaConfig"}}
    (folder / "config.json").write_text(json.dumps(remote))
    with pytest.raises(RemoteCodeError, match="trust_remote_code"):
        plan_family(folder)
    with pytest.raises(OnboardingError, match="has no linears that read one input"):
        new_family(configured("MambaForCausalLM"), out_of_tree=tmp_path / "out", again=True)


@since("5.24")
@pytest.mark.parametrize("architectures", [["ExaoneForCausalLM"], None])
def test_model_type_with_class_of_other_family_needs_no_family(architectures: list[str] | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "exaone", "architectures": architectures}))
    message = r"through LlamaForCausalLM .*exaone.* It needs no family" if architectures else "is already served"
    with pytest.raises(OnboardingError, match=message):
        plan_family(tmp_path)


def test_heads_of_other_models_are_excluded() -> None:
    """transformers classifies with an encoder and a decoder, but generates with the decoder only."""
    expected = {"PLBartForCausalLM": (), "LlamaForCausalLM": ("LlamaForSequenceClassification",)}
    for name, heads in expected.items():
        model_class = getattr(transformers, name)
        assert heads_beside(model_class, model_class.config_class())[:1] == heads
