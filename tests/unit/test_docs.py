"""Run the snippets and commands of the documentation, and check every name in them."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import typer
from transformers import LlamaConfig, PreTrainedModel
from typer.testing import CliRunner

import nrl_models
from nrl_models import AutoModelForCausalLM, Sample, registry, rollout_logprobs, start_engine
from nrl_models.cli import app
from nrl_models.errors import MixedWeightsError
from nrl_models.parity import compare_tensors
from nrl_models.testing.case import FamilyCase
from tests.unit.docs_pages import (
    PAGES,
    ROOT,
    SHELLS,
    block_with,
    blocks,
    class_names_read,
    command_lines,
    defined_names,
    dotted_names,
    imported_names,
    inline_code,
    installed,
    make_targets,
    options_of_commands,
    resolves,
    shell_lines,
    words_of_sources,
)
from tools.mutants import CATALOG


@pytest.fixture
def here(llama_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a checkpoint at the demo's path."""
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "checkpoint").symlink_to(llama_shards)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_readme_snippet_runs(here: Path, llama: PreTrainedModel) -> None:
    """The example runs with an in-process engine instead of a server."""
    (block,) = blocks("README.md", "python")
    assert block.count(SERVER) == 1
    namespace: dict[str, Any] = {}
    exec(block.replace(SERVER, '"hf-generate"'), namespace)
    assert namespace["metrics"].tokens == namespace["scores"].mask.sum() > 0
    assert namespace["metrics"].token_mult_prob_error < 1.0001
    assert torch.equal(namespace["model"].lm_head.weight, llama.lm_head.weight)


SERVER = '"http://localhost:8000"'


def test_readme_commands_run(here: Path) -> None:
    rows = re.findall(r"^\| `nrl-models ([^`]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    commands = {words[0]: words for words in map(shlex.split, rows)}
    known = {command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands}
    assert {"demo", *commands} == {*known, "diagnose"}
    (here / "capsule.safetensors").touch()
    paths = {"PATH": "demo/checkpoint", "OUT": "out", "CAPSULE": "capsule.safetensors"}
    program = typer.main.get_command(app)
    for name in (
        "certify",
        "consistency",
        "replay",
        "refit-check",
        "train",
        "new",
    ):  # parsed with their values, but not run
        arguments = [paths.get(word, word) for word in commands[name][1:]]
        program.commands[name].make_context(name, arguments)  # type: ignore[attr-defined]
    for name in ("inspect", "convert", "plan", "quirks", "parity", "diagnose"):
        result = CliRunner().invoke(app, [paths.get(word, word) for word in commands[name]])
        assert result.exit_code == 0, result.output
    assert (here / "out" / "model.safetensors").is_file()


def test_certify_snippet_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("docs/certify.md", "python")
    exec(block, {})
    sentence, validity = capsys.readouterr().out.splitlines()[-2:]
    assert sentence.startswith("llama-shards")
    assert validity == "valid"


def test_watch_snippet_runs(here: Path) -> None:
    code, _ = blocks("docs/watch.md", "python")
    exec(code, {})
    events = [json.loads(line) for line in Path("watch.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["step", "sync"] * 2
    assert not any(event["findings"] for event in events)


def test_readme_figures_match_generated_pages() -> None:
    """The README's counts match the generated pages."""
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"**{len(registry.architectures(aliases=False))} architectures**" in text
    assert f"{len(CATALOG)} known bugs" in text
    _, vllm, images, mlx = (counts(part) for part in (ROOT / "docs/engine-coverage.md").read_text().split("\n## "))
    count = vllm.compared + vllm.not_run
    tried = "All" if count == vllm.shared else str(count)
    assert (
        "Counting variants (such as Gemma 4 with experts), "
        f"vLLM supports {vllm.shared} of the architectures in the row above. {tried} were tried on a CPU. "
        f"{vllm.compared} ran: {vllm.agreeing} agree after both refits (with the initial weights and after a training "
        f"step); {vllm.disagreeing} disagree or do not accept new weights; "
        f"{vllm.undecided} are not decided. {vllm.not_run} did not run."
    ) in text
    assert (
        f"{images.compared + images.not_run} architectures were also tried "
        f"[with images](docs/engine-coverage.md#vllm-with-images), and {images.compared} of them ran: "
        f"{images.agreeing} agree, {images.undecided} are not decided, {images.disagreeing} disagree."
    ) in text
    assert (
        f"Of the architectures in the first row and their variants, MLX-LM supports {mlx.shared}. "
        f"{mlx.compared + mlx.not_run} were tried. "
        f"{mlx.compared} ran: {mlx.agreeing} agree, "
        f"{mlx.disagreeing} disagree."
    ) in text


def test_readme_costs_match_benchmarks() -> None:
    rows = re.findall(r"^\| (.+?) \| .+ \| (.+?) % \| .+? % \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    cost, page = dict(rows), (ROOT / "docs/benchmarks.md").read_text()
    factors = {name: " to ".join(f"{int(part) / 100:.2f}" for part in span.split(" to ")) for name, span in rows}
    step, head = "RL loss step with `rollout_logprobs`", "log-probabilities with `token_logprobs`"
    assert f"`rollout_logprobs` takes {cost[f'{step}, time']} % of the time" in page
    assert f"and {factors[f'{step}, memory']} times the memory." in page
    assert f"`token_logprobs` needs {cost[f'{head}, memory']} % of the memory" in page
    assert f"without `loss=...`, {factors[f'{head}, time']} times." in page
    dense, mixture = (f"time to load a {kind} model" for kind in ("dense", "MoE"))
    assert f"load in {cost[mixture]} % of transformers' time, dense ones in {cost[dense]} %" in page
    assert len(cost) == 6


def test_training_page_has_the_costs_of_fused_projections() -> None:
    text = " ".join((ROOT / "docs/training.md").read_text().split())
    low, high = re.findall(r"\[(\d+) to (\d+) %\]\(benchmarks/combine.md\)", text)[0]
    assert f"take {int(low) / 100:.2f} to {int(high) / 100:.2f} times" in (ROOT / "docs/benchmarks.md").read_text()


def test_quickstart_commands_run(here: Path) -> None:
    """Commands for the engine's environment run with an in-process engine."""
    lines = "".join(blocks("docs/quickstart.md", "console")).splitlines()
    commands = [shlex.split(line, comments=True)[1:] for line in lines if "bin/nrl-models " in line]
    assert {words[1] for words in commands} == {"inspect", "quirks", "certify", "refit-check", "consistency"}
    for program, *arguments in commands:
        assert program in (".venv/bin/nrl-models", ".venv-engine/bin/nrl-models")
        arguments = ["hf-generate" if word == "vllm" else word for word in arguments]
        if arguments[0] == "certify":  # its engine checks are tested elsewhere
            arguments += ["--only", "files", "--only", "tokenizer"]
        if arguments[0] == "consistency":
            arguments += ["--length", "16", "--data", "dummy", "--mode", "greedy", "--out", str(here / "out")]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == (3 if arguments[0] == "certify" else 0), result.output


def test_quickstart_snippet_runs(here: Path) -> None:
    namespace: dict[str, Any] = {}
    (block,) = blocks("docs/quickstart.md", "python")
    exec(block, namespace)
    assert namespace["model"].dtype == torch.float32
    page = (ROOT / "docs/quickstart.md").read_text()
    for trainer, function in (("trl", "send_hub_tensors"), ("automodel", "register")):
        assert f"`from nrl_models.adapters import {trainer}`, then `{trainer}.{function}(" in page
        assert callable(getattr(import_module(f"nrl_models.adapters.{trainer}"), function))


class Counts(NamedTuple):
    """Numbers of architectures by outcome, in a section of the engine coverage page."""

    agreeing: int
    undecided: int
    compared: int
    not_run: int
    shared: int
    """Architectures and variants that registry and engine share, tested or not."""

    @property
    def disagreeing(self) -> int:
        """Number that ran and neither agrees nor is undecided."""
        return self.compared - self.agreeing - self.undecided


def counts(section: str) -> Counts:
    """Read the counts of a section. Zeros if it does not exist."""
    outcomes = [(int(count), words) for count, words in re.findall(r"^- (\d+) (.+)$", section, re.MULTILINE)]
    not_run = sum(count for count, words in outcomes if words.startswith("cannot be run"))
    match = re.search(r"(\d+) architectures and variants", section)
    agreeing = outcomes[0][0] if outcomes else 0
    compared = sum(count for count, _ in outcomes) - not_run
    undecided = sum(count for count, words in outcomes if words.startswith("not decided"))
    return Counts(agreeing, undecided, compared, not_run, int(match[1]) if match else 0)


def test_from_nemo_snippets_run(here: Path) -> None:
    namespace: dict[str, Any] = {}
    for block in blocks("docs/from-nemo.md", "python"):
        exec(block, namespace)
    model = namespace["model"]
    assert model.config._attn_implementation == "eager"
    assert namespace["restored"].keys() == model.state_dict().keys()
    assert [name for name, _ in namespace["pairs"]] == ["model.norm.weight"]
    assert not model.get_input_embeddings().weight.requires_grad


def test_parity_snippets_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every snippet, in the order of the page, as a reader runs them."""
    namespace: dict[str, Any] = {}
    for block in [*blocks("docs/parity.md", "python"), *blocks("docs/parity-steps.md", "python")]:
        exec(block, namespace)
    assert namespace["report"].passed
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "PASSED" in line] == [
        "Level 1 PASSED: state dict round-trip is exact.",
        "Level 2 PASSED: component parity within tolerance.",
        "Level 3 PASSED: E2E forward pass parity within tolerance.",
    ]
    assert any(re.fullmatch(r"weight_check: All \d+ parameters match exactly\.", line) for line in lines)
    assert compare_tensors(namespace["expected"], namespace["final"], verbose=False).max_diff < 1e-5
    assert sum(line.startswith("grad_") for line in lines) == len(list(namespace["model"].parameters()))


def test_loading_snippet_runs(llama_checkpoint: Path) -> None:
    code = block_with("docs/loading.md", "path_or_id")
    assert 'device="cuda"' in code
    namespace: dict[str, Any] = {"path_or_id": llama_checkpoint, "torch": torch}
    exec(code.replace('device="cuda"', 'device="cpu"'), namespace)
    assert namespace["model"].dtype == torch.float32


def test_refit_snippet_runs(llama_checkpoint: Path, llama: PreTrainedModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    weights: dict[str, torch.Tensor] = {}
    model(torch.tensor([[1, 2]])).logits.sum().backward()
    names = {"model": model, "send": weights.__setitem__}
    exec(block_with("docs/refit.md", "export_plan()"), names)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert names["gradients"].keys() == expected.keys()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in names["gradients"].items())
    assert weights.keys() == llama.state_dict().keys()


def test_lora_export_snippets_run(
    llama_checkpoint: Path, llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(llama_checkpoint),
        peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False),
    )
    weights: dict[str, torch.Tensor] = {}
    names = {"nrl_models": nrl_models, "peft_model": adapted, "engine": SimpleNamespace(refit=weights.update)}
    exec(block_with("docs/lora.md", "export_adapter"), names)
    changed = {name for name, tensor in llama.state_dict().items() if not torch.equal(weights[name], tensor)}
    assert changed == {name for name in weights if name.endswith("q_proj.weight")}
    monkeypatch.chdir(tmp_path)
    exec(block_with("docs/lora.md", 'save_pretrained("merged"'), names)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in saved.items())


def test_lora_snippet_for_tied_embeddings_runs(
    llama_config: LlamaConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    llama_config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(llama_config, dtype=torch.float32).save_pretrained("tied")
    options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "init_lora_weights": False}
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained("tied"), peft.LoraConfig(**options))
    adapted.get_output_embeddings().modules_to_save.default.weight.data += 1
    state_dict_adapter = nrl_models.export_adapter(adapted)
    page = " ".join((ROOT / "docs/lora.md").read_text().split())
    with pytest.raises(MixedWeightsError) as caught:
        start_engine("hf-generate", "tied").refit(state_dict_adapter.iter_export(adapted))
    (quoted,) = re.findall(r"`(lm_head\.weight differs[^`]+)`", page)
    assert quoted in str(caught.value)
    names = {"peft_model": adapted, "state_dict_adapter": state_dict_adapter, "start_engine": start_engine}
    exec(block_with("docs/lora.md", "tie_word_embeddings").replace('"vllm"', '"hf-generate"'), names)
    input_ids = torch.tensor([[11, 12, 13]])
    engine_logits = names["engine"].model(input_ids).logits
    torch.testing.assert_close(engine_logits, adapted(input_ids).logits, rtol=1e-3, atol=1e-4)

    base = {name: tensor + 1 for name, tensor in AutoModelForCausalLM.from_pretrained("tied").state_dict().items()}
    with pytest.raises(RuntimeError, match=r"Missing key.*lora_A"):
        adapted.get_base_model().load_state_dict(base)
    layer = adapted.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    assert torch.equal(layer.weight, base["model.layers.0.self_attn.q_proj.weight"])
    base = {name: tensor + 1 for name, tensor in base.items()}
    adapted.load_state_dict(base, strict=False)
    assert not torch.equal(layer.weight, base["model.layers.0.self_attn.q_proj.weight"])
    exec(block_with("docs/lora.md", "load_state_dict"), {"peft_model": adapted, "base_weights": base})
    assert torch.equal(layer.weight, base["model.layers.0.self_attn.q_proj.weight"])


def test_losses_snippets_run() -> None:
    namespace: dict[str, Any] = {}
    first, second = blocks("docs/losses.md", "python")
    exec(first, namespace)
    exec(second, namespace)
    # The ratio of a sequence of 3 tokens is exp(0.3), and DAPO averages over 6 tokens.
    advantages, ratio = namespace["advantages"], torch.tensor(0.3).exp()
    torch.testing.assert_close(namespace["loss"], -(advantages * 3 * ratio).sum() / 6)
    assert namespace["settings"].eps_high == 0.28
    assert namespace["settings"].normalize == "token"


def test_logprobs_snippet_places_engine_logprobs(llama: PreTrainedModel) -> None:
    """Some tokens of the samples are outside of the trainer's `top_p`."""
    samples = [Sample((11, 12), (13, 14, 15), (-1.0, -2.0, -3.0), "length"), Sample((16,), (17,), (-4.0,), "length")]
    names = {"model": llama, "samples": samples, "score": [[False, False, True, True, True], [False, True]]}
    names |= {"rollout_logprobs": rollout_logprobs, "torch": torch}
    exec(block_with("docs/logprobs.md", "result.outside]"), names)
    assert names["result"].outside.any()
    assert not names["result"].logprobs.requires_grad
    assert names["engine_logprobs"].tolist() == [[0.0, 0.0, -1.0, -2.0, -3.0], [0.0, -4.0, 0.0, 0.0, 0.0]]


def test_freezing_snippet_runs() -> None:
    _, model = FamilyCase(registry.model_class("Gemma3ForConditionalGeneration")).new_pair()
    namespace: dict[str, Any] = {"model": model, "torch": torch}
    exec(block_with("docs/training.md", "freeze_vision_tower"), namespace)
    optimized = {id(parameter) for group in namespace["optimizer"].param_groups for parameter in group["params"]}
    frozen = [name for name, parameter in model.named_parameters() if id(parameter) not in optimized]
    assert frozen
    assert all("vision_tower" in name or "projector" in name for name in frozen)


def test_logprobs_snippets_give_equal_gradients(llama: PreTrainedModel) -> None:
    input_ids = torch.randint(16, 400, (2, 9), generator=torch.Generator().manual_seed(0))
    sampled = torch.zeros(2, 9, dtype=torch.bool)
    sampled[:, 4:] = True
    namespace = {
        "model": llama,
        "input_ids": input_ids,
        "mask": torch.ones_like(sampled),
        "sampled": sampled,
        "old": torch.full((2, 9), -6.0),
        "advantages": torch.tensor([1.0, -1.0]),
        "weights": sampled / 10,
    }
    exec(block_with("docs/logprobs.md", "result.loss.backward()"), namespace)
    expected = llama.lm_head.weight.grad
    assert expected.any()
    llama.zero_grad()
    namespace |= {"sequences": input_ids.tolist(), "score": sampled.tolist(), "optimizer": Mock()}
    exec(block_with("docs/logprobs.md", "optimizer.step()"), namespace)
    torch.testing.assert_close(llama.lm_head.weight.grad, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    namespace["optimizer"].step.assert_called_once_with()
    llama.zero_grad()


def test_fused_projections_snippet_runs(llama_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint, combine=True)
    projection = model.model.layers[0].self_attn.k_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach().clone())
    namespace: dict[str, Any] = {"model": model}
    exec(block_with("docs/training.md", "join(model)"), namespace)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "model.layers.0.self_attn.qkv_proj ('q_proj', 'k_proj', 'v_proj') weights do not share one buffer"
    )
    assert second == "model.layers.0.mlp.gate_up_proj ('gate_proj', 'up_proj') True"
    assert all(group.joined for group in namespace["report"](model))


VARIABLE = re.compile(r"(NRL|VLLM|OMP|HF_HUB|TRANSFORMERS|XDG|PYTEST)_[A-Z0-9_]+")


def test_environment_page_lists_every_variable() -> None:
    page = (ROOT / "docs/environment.md").read_text()
    named = {
        node.value
        for file in (ROOT / "nrl_models").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value)
    }
    assert len(named) > 8
    assert not {name for name in named if f"`{name}`" not in page}


def test_security_page_names_existing_tests() -> None:
    page = (ROOT / "docs/security.md").read_text()
    guarantees, _, listed = page[page.index("## Untrusted inputs") :].partition("## Trusted inputs")
    inputs = re.findall(r"^\| (?!input \|)(.+?) \|", guarantees, re.MULTILINE)
    tested = re.findall(r"^\| [^:|]+: (.+) \| (`test_\w+`.*) \|$", listed[listed.index("## Tests") :], re.MULTILINE)
    assert len(inputs) > 10
    assert [name for name, _ in tested] == inputs
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    missing = [name for name in re.findall(r"`(test_\w+)`", page) if f"def {name}(" not in tests]
    assert not missing, "no such tests: did their names change?"


def test_pages_contain_no_local_paths() -> None:
    """Neither local directories nor escaped line breaks."""
    records = ROOT / "docs" / "model-coverage" / "results"
    files = [*(ROOT / "docs").rglob("*.md"), *records.glob("*.json")]
    matches = {
        file.name for file in files if re.search(r"site-packages|(?<![\w.])/(work|home)/|\\\\n", file.read_text())
    }
    assert not matches


OTHER_OPTIONS = {
    "--against": "benchmarks.save",
    "--api-key": "vLLM's server",
    "--check-weight-update-equal": "miles",
    "--checkout": "tools.release_check",
    "--full-torch": "tools.release_check",
    "--history": "examples/grpo.py",
    "--jobs": "tools.release_check",
    "--lora": "examples/sft.py",
    "--qlora": "examples/sft.py",
    "--recorded": "tools.release_check.replay",
    "--true-on-policy-mode": "miles",
}
"""Options in code spans that belong to other programs than `nrl-models`, with the program."""

OTHER_NAMES = {
    *("CombinedGateUpMLP", "CombinedProjectionStateDictAdapter", "CombinedQKVAttentionMixin", "GroupedExperts"),
    *("HFCheckpointingMixin", "MoEConfig", "MoEFSDPSyncMixin"),  # NeMo AutoModel
    *("NovaMixer", "NovaModel", "NovaNorm", "PackedMixer"),  # invented, in docs/add-a-family.md
    *("VegaConfig", "VegaForCausalLM"),  # its example of another repository
    *("IPCTrainerInitInfo", "NCCLTrainerInitInfo"),  # vLLM
    "FsdpWeightSource",  # SkyRL
    "PretrainedConfig",  # transformers
}
"""Class names in code spans that do not exist in this repository."""

INVENTED = re.compile(r"\bnova\b|model_diagnostics|upstream-changes|judgments")
"""Files that a reader or a command creates, and files of other repositories."""

ENTRY_POINTS = ("nrl_models.configs", "nrl_models.families")


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short(page: str) -> None:
    longest = 120 if page == "README.md" else 200
    assert len((ROOT / page).read_text().splitlines()) <= longest


@pytest.mark.parametrize("page", PAGES)
def test_code_fits_the_site(page: str) -> None:
    """Code blocks of the site have at least 90 columns on a laptop's screen."""
    code = re.findall(r"^```.*?^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert not [line for block in code for line in block.splitlines() if len(line) > 90]


def test_api_reference_lists_every_public_name() -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    directives = re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE)
    assert not [name for name in directives if not resolves(name)]
    packages = [import_module(name) for name in directives if hasattr(import_module_or_none(name), "__path__")]
    listed = {name.rpartition(".")[2] for name in directives}
    listed |= {name for package in packages for name in getattr(package, "__all__", ())}
    errors = {name for name in nrl_models.__all__ if name.endswith("Error")}  # ::: nrl_models.errors
    assert {*nrl_models.__all__} - errors - {"__version__"} <= listed


def import_module_or_none(name: str) -> Any:
    """Import a module. Returns None if the name is an attribute, or a module whose requirements are not installed."""
    try:
        return import_module(name)
    except ImportError:
        return None


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    targets = make_targets((ROOT / "Makefile").read_text())
    named = {name for line in shell_lines(page) for name in re.findall(r"(?:^|[\s(])make ([a-z][a-z-]*)", line)}
    assert named <= targets


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page: str) -> None:
    known = options_of_commands()
    for line in command_lines(page):
        assert line.command in known, line
        unknown = {word.split("=")[0] for word in line.arguments if word.startswith("-")} - known[line.command]
        assert not unknown, f"nrl-models {line.command} has no option {unknown}"
    options = {span.split()[0].split("=")[0].rstrip(",") for span in inline_code(page) if span.startswith("--")}
    assert options <= {*OTHER_OPTIONS, *set().union(*known.values())}


@pytest.mark.parametrize("page", PAGES)
def test_names_in_snippets_resolve(page: str) -> None:
    """Imports, dotted names and class names; classes may come from an earlier snippet of the page."""
    defined: set[str] = set()
    for block in blocks(page, "python"):
        if INVENTED.search(block) or block.startswith('"cwm": Row("CwmForCausalLM"'):
            continue
        imported = {name for _, name in imported_names(block)}
        ours = {name for name in imported | dotted_names(block) if name.split(".")[0] == "nrl_models"}
        assert not {name for name in ours if not resolves(name)}
        for name in imported - ours:
            module, _, attribute = name.rpartition(".")
            if module and installed(module):
                assert hasattr(import_module(module), attribute) or importlib.util.find_spec(name), name
        defined |= defined_names(block)
        assert class_names_read(block) <= defined


@pytest.mark.parametrize("page", PAGES)
def test_modules_files_and_classes_in_code_exist(page: str) -> None:
    """Names in shell commands, configuration and code spans."""
    for code in (*inline_code(page), *blocks(page, *SHELLS, "json", "text", "toml")):
        if INVENTED.search(code):
            continue
        modules = re.findall(r"(?<![\w./\"-])nrl_models(?:\.\w+)+", code)
        modules += re.findall(r"-m ((?:benchmarks|tools|tests)(?:\.\w+)+)", code)
        modules += re.findall(r"external_lib=([\w.]+)", code)
        assert not {name for name in modules if not resolves(name) and name not in ENTRY_POINTS}
        folders = "benchmarks|docs|examples|nrl_models|tests|tools"
        files = re.findall(rf"(?<![\w/.])((?:{folders})/[\w./-]+\.(?:json|md|py|toml))\b", code)
        assert not {file for file in files if not (ROOT / file).exists()}
        if page not in ("docs/comparison.md", "docs/upstream-changes.md"):  # about other projects
            classes = set(re.findall(r"\b[A-Z][a-z0-9]+(?:[A-Z]+[a-z0-9]*)+\b|\b[A-Z]{2,}[a-z]\w+\b", code))
            assert classes <= words_of_sources() | OTHER_NAMES


@pytest.mark.parametrize(
    ("page", "text", "fault", "test"),
    [
        (
            "docs/trainers.md",
            "external_lib=nrl_models.adapters.verl",
            "external_lib=nrl_models.adapters.verll",
            "modules",
        ),
        (
            "docs/quickstart.md",
            "external_lib=nrl_models.adapters.verl",
            "external_lib=nrl_models.adapter.verl",
            "modules",
        ),
        ("docs/refit.md", "    AdapterSource,", "    AdapterSorce,", "snippets"),
        ("docs/refit.md", "source=AdapterSource(model)", "source=AdapterSorce(model)", "snippets"),
        ("docs/refit.md", "`AdapterSource(model)` is", "`AdapterSorce(model)` is", "modules"),
        ("docs/vllm.md", "$ make engine", "$ make engin", "make"),
        ("README.md", "nrl-models demo --break", "nrl-models demo --brake", "options"),
        ("README.md", "nrl-models refit-check PATH --engine", "nrl-models refit-check PATH --engin", "options"),
        ("docs/quickstart.md", "nrl-models refit-check", "nrl-models refit-chek", "options"),
    ],
)
def test_checks_detect_planted_faults(page: str, text: str, fault: str, test: str, tmp_path: Path) -> None:
    tests = {
        "make": test_make_targets_exist,
        "modules": test_modules_files_and_classes_in_code_exist,
        "options": test_commands_and_options_exist,
        "snippets": test_names_in_snippets_resolve,
    }
    original = (ROOT / page).read_text()
    assert text in original
    faulty = tmp_path / "page.md"
    faulty.write_text(original.replace(text, fault, 1))
    with pytest.raises(AssertionError):
        tests[test](str(faulty))
