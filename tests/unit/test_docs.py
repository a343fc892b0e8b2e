"""What the README and the guides show runs as it is shown, on another checkpoint."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from checkpoints import stored
from transformers import PreTrainedModel
from typer.testing import CliRunner

import nrl_models
from nrl_models import AutoModelForCausalLM, registry
from nrl_models.cli import app
from nrl_models.parity import compare_tensors
from nrl_models.testing.case import FamilyCase
from tools.mutants import CATALOGUE

ROOT = Path(__file__).parents[2]


def blocks(file: str, language: str) -> list[str]:
    """The code blocks of a page, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / file).read_text(), re.MULTILINE | re.DOTALL)


def block_with(file: str, text: str) -> str:
    """The one Python block of a page that has `text` in it."""
    (found,) = [block for block in blocks(file, "python") if text in block]
    return found


@pytest.fixture
def here(llama_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a checkpoint where the demo leaves it."""
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "checkpoint").symlink_to(llama_shards)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_readmes_code(here: Path, llama: PreTrainedModel) -> None:
    found: dict[str, Any] = {}
    for block in blocks("README.md", "python"):
        exec(block, found)
    model = found["model"]
    q_proj, qkv_proj = (getattr(model.model.layers[0].self_attn, name).weight for name in ("q_proj", "qkv_proj"))
    assert q_proj.data_ptr() == qkv_proj.data_ptr()
    assert torch.equal(q_proj, llama.model.layers[0].self_attn.q_proj.weight)
    assert stored(here / "out").keys() == llama.state_dict().keys()
    assert found["name"] in llama.state_dict()


def test_the_readmes_commands(here: Path) -> None:
    lines = "".join(blocks("README.md", "console")).splitlines()
    shown = [shlex.split(line, comments=True)[2:] for line in lines if line.startswith("$ nrl-models ")]
    commands = {words[0]: words for words in reversed(shown)}
    assert commands["diagnose"][1] == "embeddings", "the first of them, which needs no engine"
    for command in ("inspect", "convert", "plan", "quirks", "parity", "diagnose"):
        result = CliRunner().invoke(app, commands[command])
        assert result.exit_code == 0, result.output
    assert (here / "out" / "model.safetensors").is_file()


def test_the_readmes_figures() -> None:
    """Correct the README when this fails."""
    text = " ".join((ROOT / "README.md").read_text().split())
    tested, bugs = len(registry.architectures(aliases=False)), len(CATALOGUE)
    _, vllm, images, mlx = (ROOT / "docs/engine-coverage.md").read_text().split("\n## ")
    assert f"generated tests for each of [{tested} architectures]" in text
    assert f"Each of the {tested} architectures" in text
    assert f"{bugs} known bugs" in text
    published = sum(len(json.loads(file.read_text())) for file in (ROOT / "tests/unit/config/published").glob("*.json"))
    assert published > 100, "the README says so"
    assert f"{agreeing(vllm)} architectures compared so far with vLLM agree" in text
    assert f"{agreeing(mlx)} with MLX" in text
    assert f"{agreeing(images)} that were given the same images" in text


def agreeing(section: str) -> str:
    """How many of how many agree, as the README has it."""
    outcomes = re.findall(r"^- (\d+) (agree|disagree)\b", section, re.MULTILINE)
    return f"{outcomes[0][0]} of the {sum(int(count) for count, _ in outcomes)}"


def test_the_code_for_who_comes_from_nemo(here: Path) -> None:
    tests = block_with("docs/from-nemo.md", "@pytest.fixture")
    found: dict[str, Any] = {}
    for block in blocks("docs/from-nemo.md", "python"):
        if block != tests:
            exec(block, found)
    model = found["model"]
    assert model.config._attn_implementation == "eager"
    assert found["own"].keys() == model.state_dict().keys()
    assert (found["name"], found["more"]) == ("model.norm.weight", [])
    assert not model.get_input_embeddings().weight.requires_grad


def test_the_onboarding_guides_tests(pytester: pytest.Pytester) -> None:
    code = block_with("docs/from-nemo.md", "@pytest.fixture")
    pytester.makepyfile(code)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=code.count("def test_"))


def test_the_parity_guides_code(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every snippet, in the order of the page, as a reader runs them."""
    found: dict[str, Any] = {}
    for block in blocks("docs/parity.md", "python"):
        exec(block, found)
    assert found["report"].passed
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "PASSED" in line] == [
        "Level 1 PASSED: state dict round-trip is exact.",
        "Level 2 PASSED: component parity within tolerance.",
        "Level 3 PASSED: E2E forward pass parity within tolerance.",
    ]
    assert any(re.fullmatch(r"weight_check: All \d+ parameters match exactly\.", line) for line in lines)
    assert compare_tensors(found["expected"], found["final"], verbose=False).max_diff < 1e-5
    assert sum(line.startswith("grad_") for line in lines) == len(list(found["model"].parameters()))


def test_the_guides_code_for_loading(llama_checkpoint: Path) -> None:
    code = block_with("docs/loading.md", "path_or_id")
    assert 'device="cuda"' in code
    found: dict[str, Any] = {"path_or_id": llama_checkpoint, "torch": torch}
    exec(code.replace('device="cuda"', 'device="cpu"'), found)
    assert found["model"].dtype == torch.float32


def test_the_guides_code_for_a_refit(llama_checkpoint: Path, llama: PreTrainedModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    weights: dict[str, torch.Tensor] = {}
    engine = SimpleNamespace(update=weights.__setitem__)
    own = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    weight = model.model.layers[0].self_attn.q_proj.weight
    exec(
        block_with("docs/refit.md", "engine.update"),
        {"model": model, "engine": engine, "gradients": own, "weight": weight},
    )
    assert weights.keys() == llama.state_dict().keys()


def test_the_guides_code_for_adapters_in_engines(llama_checkpoint: Path, llama: PreTrainedModel) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(llama_checkpoint),
        peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False),
    )
    weights: dict[str, torch.Tensor] = {}
    names = {"nrl_models": nrl_models, "peft_model": adapted, "engine": SimpleNamespace(refit=weights.update)}
    exec(block_with("docs/loading.md", "export_adapter"), names)
    changed = {name for name, tensor in llama.state_dict().items() if not torch.equal(weights[name], tensor)}
    assert changed == {name for name in weights if name.endswith("q_proj.weight")}


def test_the_guides_code_for_freezing() -> None:
    _, model = FamilyCase(registry.model_class("Gemma3ForConditionalGeneration")).new_pair()
    found: dict[str, Any] = {"model": model, "torch": torch}
    exec(block_with("docs/training.md", "freeze_vision_tower"), found)
    given = {id(parameter) for group in found["optimizer"].param_groups for parameter in group["params"]}
    frozen = [name for name, parameter in model.named_parameters() if id(parameter) not in given]
    assert frozen
    assert all("vision_tower" in name or "projector" in name for name in frozen)


def test_the_loss_of_the_guide(llama: PreTrainedModel) -> None:
    input_ids = torch.randint(16, 400, (2, 9), generator=torch.Generator().manual_seed(0))
    sampled = torch.zeros(2, 9, dtype=torch.bool)
    sampled[:, 4:] = True
    given = {
        "model": llama,
        "input_ids": input_ids,
        "mask": torch.ones_like(sampled),
        "sampled": sampled,
        "old": torch.full((2, 9), -6.0),
        "advantages": torch.tensor([1.0, -1.0]),
        "weights": sampled / 10,
    }
    exec(block_with("docs/training.md", "found.loss.backward()"), given)
    expected = llama.lm_head.weight.grad
    assert expected.any()
    llama.zero_grad()
    given |= {"sequences": input_ids.tolist(), "score": sampled.tolist(), "optimizer": Mock()}
    exec(block_with("docs/training.md", "rollout_logprobs(model"), given)
    torch.testing.assert_close(llama.lm_head.weight.grad, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    given["optimizer"].step.assert_called_once_with()
    llama.zero_grad()


def test_the_guides_code_for_what_runs_as_one_matmul(
    llama_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    projection = model.model.layers[0].self_attn.k_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach().clone())
    found: dict[str, Any] = {"model": model}
    exec(block_with("docs/training.md", "join(model)"), found)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "model.layers.0.self_attn.qkv_proj ('q_proj', 'k_proj', 'v_proj') weights are not side by side"
    )
    assert second == "model.layers.0.mlp.gate_up_proj ('gate_proj', 'up_proj') True"
    assert all(group.joined for group in found["report"](model))


VARIABLE = re.compile(r"(NRL|VLLM|OMP|HF_HUB|TRANSFORMERS|XDG|PYTEST)_[A-Z0-9_]+")


def test_every_environment_variable_is_on_its_page() -> None:
    page = (ROOT / "docs/environment.md").read_text()
    named = {
        node.value
        for file in (ROOT / "nrl_models").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value)
    }
    assert len(named) > 8
    assert not {name for name in named if f"`{name}`" not in page}


def test_every_promise_of_the_security_page_is_held_by_a_test() -> None:
    page = (ROOT / "docs/security.md").read_text()
    promises = page[page.index("## What is not trusted") : page.index("## What is trusted")]
    rows = [line for line in promises.splitlines() if re.match(r"\| (?!input \|)", line)]
    assert len(rows) > 10
    assert not [row for row in rows if not re.findall(r"`test_\w+`", row.rsplit(" | ", 1)[1])]
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    missing = [name for name in re.findall(r"`(test_\w+)`", page) if f"def {name}(" not in tests]
    assert not missing, "no such tests: did their names change?"


def test_outcomes_name_nothing_of_the_machine_that_made_them() -> None:
    """Neither directories that nobody else has, nor line breaks as two letters."""
    records = ROOT / "docs" / "model-coverage" / "results"
    files = [*(ROOT / "docs").rglob("*.md"), *records.glob("*.json")]
    found = {file.name for file in files if re.search(r"site-packages|(?<![\w.])/(work|home)/|\\\\n", file.read_text())}
    assert not found
