"""Training packages give the same results with sharded models as with transformers' models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import integrations, setting
from safetensors.torch import load_file
from world import World

from nrl_models import AutoModelForCausalLM
from nrl_models.common.projections import report

pytestmark = pytest.mark.timeout(600)  # one launch trains several models

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny Llama with biases, saved by transformers."""
    folder = tmp_path_factory.mktemp("llama")
    setting.llama_case({"attention_bias": True}).reference().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def examples(count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(16, 480, (count, 12), generator=generator).tolist()
    return [{"input_ids": row, "attention_mask": [1] * 12, "labels": row} for row in rows]


# transformers


def test_trainer_matches_transformers_model(checkpoint: Path, tmp_path: Path) -> None:
    import trainer
    import transformers

    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    options = {"use_cpu": True, "seed": 0}
    losses = []
    for folder, auto in ((theirs, transformers.AutoModelForCausalLM), (ours, AutoModelForCausalLM)):
        losses.append(trainer.train(auto.from_pretrained(checkpoint), str(folder), steps=4, **options))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[0][-1] != losses[0][0]
    first, second = (stored(folder / "checkpoint-4") for folder in (theirs, ours))
    assert sorted(first) == sorted(second)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=1e-5, rtol=1e-4)
    again = []
    for folder in (ours, theirs):  # from our checkpoint, and from transformers'
        shutil.rmtree(folder / "checkpoint-4")
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        again.append(trainer.train(model, str(folder), steps=4, resume=True, **options)[-2:])
    assert again[0] == pytest.approx(losses[1][-2:], abs=1e-6)
    assert again[1] == pytest.approx(losses[0][-2:], abs=1e-5)


# PEFT


def test_lora_under_fsdp_loads_on_transformers_model(two: World, checkpoint: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    adapters = [two.run(partial(integrations.trains_lora, fsdp=2), str(checkpoint), str(tmp_path / "adapter"))[0]]
    assert all("q_proj" in name or "v_proj" in name or "up_proj" in name for name in adapters[0])
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    reference = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter")
    inputs = {"input_ids": torch.tensor([[20, 30, 40, 50]])}
    ours = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        expected, actual = reference(**inputs).logits, ours(**inputs).logits
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        assert (actual - base(**inputs).logits).abs().max() > 1e-3, "the adapter has no effect"


@pytest.mark.parametrize(
    "adapters",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "lm_head"]},
    ],
    ids=["saved", "lora"],
)
def test_logprobs_with_adapter_on_sharded_head(two: World, checkpoint: Path, adapters: dict[str, list[str]]) -> None:
    pytest.importorskip("peft")
    job = partial(integrations.logprobs_of_adapted_head, fsdp=2)
    for differences in two.run(job, str(checkpoint), adapters):
        assert len(differences) > 8
        assert max(differences.values()) <= 1e-4, differences


def test_peft_model_saves_and_resumes_under_fsdp(two: World, checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folders = [str(tmp_path / name) for name in ("training", "adapter")]
    assert two.run(partial(integrations.peft_model_resumes, fsdp=2), str(checkpoint), *folders) == [[], []]
    two.run(integrations.checkpoints_need_a_sharded_model, str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_lora_under_tensor_parallelism_raises(two: World, checkpoint: Path, tmp_path: Path) -> None:
    from test_loading import errors_on_every_rank

    for kind, text in errors_on_every_rank(
        two, partial(integrations.trains_lora, tp=2), str(checkpoint), str(tmp_path / "adapter")
    ):
        assert kind == "ShardingError"
        assert "LoRA adapters, which tp does not divide" in text


def test_qlora_with_bitsandbytes(checkpoint: Path, tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=config)
    assert isinstance(model.model.layers[0].self_attn.q_proj, bitsandbytes.nn.Linear4bit)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    tokens = torch.tensor([[20, 30, 40, 50, 60, 70]])
    losses = []
    for _ in range(6):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    model.save_pretrained(tmp_path / "adapter")
    assert any("q_proj" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))


# TRL


def new_tokenizer() -> Any:
    """Create a tokenizer with one word per number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {str(number): number for number in range(4, 512)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special)


@pytest.fixture
def tokenizer() -> Any:
    """A tokenizer with one word per number."""
    return new_tokenizer()


@pytest.fixture
def with_tokenizer(checkpoint: Path, tokenizer: Any, tmp_path: Path) -> Path:
    """The checkpoint, with a tokenizer in its folder."""
    folder = shutil.copytree(checkpoint, tmp_path / "with-tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_trl_sft(checkpoint: Path, tmp_path: Path, tokenizer: Any, lora: bool) -> None:
    pytest.importorskip("trl")
    import sft
    import transformers

    texts = [" ".join(map(str, row["input_ids"])) for row in examples(8)]
    losses = []
    for name, auto in (("theirs", transformers.AutoModelForCausalLM), ("ours", AutoModelForCausalLM)):
        trainer = sft.trainer_for(
            auto.from_pretrained(checkpoint, dtype=torch.float32), tokenizer, texts, str(tmp_path / name), lora=lora,
            max_steps=3, learning_rate=1e-3, use_cpu=True, bf16=False, seed=0,
        )  # fmt: skip
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert len(losses[0]) == 3


def test_sft_example_with_qlora_saves_adapter(with_tokenizer: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("bitsandbytes")
    import sft

    sft.main([str(with_tokenizer), str(tmp_path / "out"), "--qlora", "--steps", "2"])
    names = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert any("q_proj" in name for name in names)
    assert not any("qkv_proj" in name for name in names)


def test_grpo_example_evaluates_and_saves(with_tokenizer: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    import grpo_trl
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(with_tokenizer)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(with_tokenizer)
    options = ["--steps=1", "--questions=1", "--group=2", "--new-tokens=4"]
    history = grpo_trl.main([str(with_tokenizer), str(tmp_path / "out"), *options])
    assert [evaluation["step"] for evaluation in history["evaluations"]] == [0, 1]
    assert len(history["steps"]) == 1
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())


def test_grpo_example_reward_requires_eos_token(tokenizer: Any) -> None:
    pytest.importorskip("trl")
    import grpo_trl

    completions = [[{"role": "assistant", "content": "17 + 25 = 42"}]] * 2
    ids = [[17, 25, 42, tokenizer.eos_token_id], [17, 25, 42]]
    assert grpo_trl.reward_for(tokenizer)(completions, ids, first=[17, 17], second=[25, 25]) == [1.0, 0.0]


def test_trl_grpo(checkpoint: Path, tmp_path: Path, tokenizer: Any) -> None:
    pytest.importorskip("trl")
    import grpo_trl
    import transformers

    prompts = ["20 30 40", "50 60 70", "80 90 100", "110 120 130"]

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [sum(int(word) % 7 for word in completion.split() if word.isdigit()) / 10 for completion in completions]

    weights = []
    for name, auto in (("theirs", transformers.AutoModelForCausalLM), ("ours", AutoModelForCausalLM)):
        trainer = grpo_trl.trainer_for(
            auto.from_pretrained(checkpoint, dtype=torch.float32), tokenizer, {"prompt": prompts}, reward,
            str(tmp_path / name), max_steps=2, learning_rate=1e-3, max_completion_length=6, use_cpu=True, bf16=False,
            seed=0,
        )  # fmt: skip
        trainer.train()
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        assert len(rewards) == 2
        trainer.model.save_pretrained(tmp_path / f"{name}-saved")
        weights.append((rewards, stored(tmp_path / f"{name}-saved")))
    before = stored(checkpoint)
    assert weights[1][0] == pytest.approx(weights[0][0])  # the same completions
    assert sorted(weights[0][1]) == sorted(weights[1][1])
    for name, tensor in weights[0][1].items():
        torch.testing.assert_close(weights[1][1][name], tensor, atol=1e-4, rtol=1e-3)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights[1][1].items())


# accelerate, Trainer and TRL, sharded


@dataclass(frozen=True)
class ShardedRun:
    """A run sharded over two processes: its output folder, and both ranks' log of each step."""

    out: Path
    logged: list[dict[str, float]]

    def of(self, key: str) -> list[float]:
        """Return one metric of each step."""
        return [step[key] for step in self.logged]


@pytest.fixture(scope="session")
def plain_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without biases: the gradient of a key bias is only rounding, which Adam amplifies to a full step."""
    folder = tmp_path_factory.mktemp("plain")
    setting.case_of("LlamaForCausalLM").reference().save_pretrained(folder)
    new_tokenizer().save_pretrained(folder)
    return folder


def launch(script: str, *arguments: str) -> None:
    """Run a script under `accelerate launch` with FSDP2 over two processes."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--use_fsdp", "--fsdp_version", "2"]
    command += ["--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
    command += ["--fsdp_transformer_layer_cls_to_wrap", "LlamaDecoderLayer"]
    command += ["--main_process_port", "0", "--fsdp_state_dict_type", "FULL_STATE_DICT"]
    command += [str(SCRIPTS / script), *arguments]
    paths = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    completed = subprocess.run(command, env=os.environ | environment, timeout=580, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-6000:]


@pytest.fixture(scope="session")
def sharded_runs(plain_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ShardedRun]:
    """A training loop, `Trainer`, SFT and GRPO, sharded in several ways. Some also resume from their second step."""
    pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("sharded")
    runs = {f"loop-{by}": {"kind": "loop", "sharded_by": by} for by in ("accelerate", "us")}
    runs |= {
        f"{kind}-{by}": {"kind": kind, "sharded_by": by}
        for kind, references in (("trainer", ()), ("sft", ("transformers",)), ("grpo", ("transformers",)))
        for by in (*references, "accelerate", "us")
    }
    for run in runs.values():
        run |= {"checkpoint": str(plain_checkpoint), "out": str(folder / f"{run['kind']}-{run['sharded_by']}")}
    for kind, by in (("trainer", "accelerate"), ("trainer", "us"), ("sft", "us")):
        runs[f"{kind}-{by}-again"] = runs[f"{kind}-{by}"] | {"forget": "checkpoint-4"}
    (folder / "runs.json").write_text(json.dumps(list(runs.values())))
    launch("trainers_on_cpu.py", str(folder / "runs.json"))
    first, second = (json.loads((folder / f"runs.json.{rank}").read_text()) for rank in range(2))
    assert first == second
    return {name: ShardedRun(Path(run["out"]), logged) for (name, run), logged in zip(runs.items(), first, strict=True)}


def assert_close_checkpoints(folder: Path, other: Path) -> None:
    """Check that names are equal, and values agree within the rounding of four Adam steps."""
    first, second = stored(folder), stored(other)
    assert sorted(first) == sorted(second)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=1e-4, rtol=0)


def test_accelerate_launch_with_fsdp2(sharded_runs: dict[str, ShardedRun], plain_checkpoint: Path) -> None:
    theirs, ours = sharded_runs["loop-accelerate"], sharded_runs["loop-us"]
    assert len(theirs.logged) == 6
    assert theirs.of("loss")[:3] != theirs.of("loss")[3:], "both ranks had the same batches"
    assert ours.of("loss") == pytest.approx(theirs.of("loss"), abs=1e-5)
    assert_close_checkpoints(theirs.out, ours.out)
    before = stored(plain_checkpoint)
    assert before.keys() == stored(ours.out).keys()
    assert not any(torch.equal(tensor, before[name]) for name, tensor in stored(theirs.out).items())


@pytest.mark.parametrize("sharded_by", ["accelerate", "us"])
def test_trainer_with_sharded_model_matches_one_process(
    sharded_runs: dict[str, ShardedRun], plain_checkpoint: Path, tmp_path: Path, sharded_by: str
) -> None:
    import trainer

    options = {"use_cpu": True, "seed": 0, "learning_rate": 1e-3, "per_device_train_batch_size": 4}
    model = AutoModelForCausalLM.from_pretrained(plain_checkpoint)
    losses = trainer.train(model, str(tmp_path), steps=4, **options)
    sharded = sharded_runs[f"trainer-{sharded_by}"]
    assert sharded.of("loss") == pytest.approx(losses, abs=1e-5)
    assert abs(losses[0] - losses[-1]) > 0.1
    for step in ("checkpoint-2", "checkpoint-4"):
        assert_close_checkpoints(tmp_path / step, sharded.out / step)


@pytest.mark.parametrize("run", ["trainer-accelerate", "trainer-us", "sft-us"])
def test_sharded_run_resumes(sharded_runs: dict[str, ShardedRun], run: str) -> None:
    again = sharded_runs[f"{run}-again"]
    assert len(again.logged) == 4  # the two steps logged in the checkpoint, and two more
    assert again.of("loss") == pytest.approx(sharded_runs[run].of("loss"), abs=1e-6)


@pytest.mark.parametrize("sharded_by", ["accelerate", "us"])
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_trl_with_sharded_model_matches_transformers_model(
    sharded_runs: dict[str, ShardedRun], plain_checkpoint: Path, kind: str, sharded_by: str
) -> None:
    theirs, ours = sharded_runs[f"{kind}-transformers"], sharded_runs[f"{kind}-{sharded_by}"]
    key = "loss" if kind == "sft" else "reward"  # GRPO's reward, because its loss is almost zero
    assert len(theirs.logged) == 4
    assert ours.of(key) == pytest.approx(theirs.of(key), abs=1e-4)
    assert len(set(theirs.of(key))) > 1
    assert_close_checkpoints(theirs.out, ours.out)
    before = stored(plain_checkpoint)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in stored(ours.out).items())


# torch


@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"tp": 2}], ids=["fsdp", "tp"])
def test_compiled_layers_match_one_process(two: World, sizes: dict[str, int]) -> None:
    for results in two.run(partial(integrations.compiled_layers_equal_one_process, **sizes), "LlamaForCausalLM"):
        assert results["loss"] <= 1e-5
        assert results["gradients"] <= 1e-5
        assert results["graphs"] > 0


# Errors that prevent different values on each rank


@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"tp": 2}], ids=["fsdp", "tp"])
@pytest.mark.parametrize(
    ("kind", "parameter"),
    [
        ("lora", "layers.0.self_attn.q_proj.lora_A.default.weight"),
        ("injected lora", "layers.0.self_attn.q_proj.lora_A.default.weight"),
        ("head", "lm_head.weight"),
        ("value head", "value_head.weight"),
    ],
)
def test_parameters_added_after_sharding_raise(
    two: World, tmp_path: Path, kind: str, parameter: str, sizes: dict[str, int]
) -> None:
    job = partial(integrations.later_parameters_raise, **sizes)
    for named in two.run(job, str(tmp_path / "saved"), kind):
        assert all(any(name.endswith(parameter) for name in names) for names in named), named
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("kind", "sizes", "argument"),
    [
        ("prefix", {"fsdp": 2}, "past_key_values"),
        ("prefix", {"tp": 2}, "past_key_values"),
        ("prompt", {"tp": 2}, "inputs_embeds"),  # over fsdp, torch refuses PEFT's call of the sharded embedding
    ],
)
def test_trained_inputs_of_sharded_model_raise(two: World, kind: str, sizes: dict[str, int], argument: str) -> None:
    assert two.run(partial(integrations.trained_inputs, kind, **sizes)) == [(argument,)] * 2


def test_copied_head_trains_under_tensor_parallelism(two: World) -> None:
    assert max(two.run(partial(integrations.copied_head_trains, tp=2))) <= 1e-6


@pytest.mark.parametrize("dimension", ["ep", "tp"])
def test_different_batches_in_one_group_raise(two: World, dimension: str) -> None:
    run = partial(two.run, partial(integrations.batches_must_be_equal, **{dimension: 2}))
    assert run(dimension) == [("input_ids", "labels")] * 2
    assert set(run("length")[0]) >= {"input_ids", "labels"}


@pytest.mark.parametrize("dimension", ["ep", "tp"])
def test_different_floats_in_one_group_raise(two: World, dimension: str) -> None:
    run = partial(two.run, partial(integrations.embeddings_must_be_equal, **{dimension: 2}))
    assert run("") == [()] * 2  # the mask has infinite values
    assert run("order") == [("inputs_embeds",)] * 2
    assert run("mask") == [("attention_mask",)] * 2
    assert run("list") == [("images['pixels'][1]",)] * 2


def test_different_batches_over_fsdp_are_allowed(two: World, four: World) -> None:
    assert two.run(partial(integrations.batches_must_be_equal, fsdp=2), "fsdp") == [()] * 2
    run = partial(four.run, partial(integrations.batches_must_be_equal, fsdp=2, tp=2))
    assert run("fsdp") == [()] * 4
    assert run("tp") == [("input_ids", "labels")] * 4


MIXTURES = [
    "AfmoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
]
"""Different routers, shared experts, and biases of experts."""

QUICK = [("GptOssForCausalLM", "tp")]
"""Cases that are not marked long, as well as Mixtral over ep and tp below. The sweep compiles all mixtures."""


@pytest.mark.parametrize(
    ("architecture", "dimension"),
    [
        pytest.param(name, dimension, marks=() if (name, dimension) in QUICK else pytest.mark.long)
        for name in MIXTURES
        for dimension in ("ep", "tp")
    ],
)
def test_compiled_moe_gradients_match_uncompiled(two: World, architecture: str, dimension: str) -> None:
    check_compiled(two, architecture, **{dimension: 2})


@pytest.mark.parametrize("sizes", [pytest.param({"fsdp": 2, "ep": 2}, marks=pytest.mark.long), {"ep": 2, "tp": 2}])
def test_compiled_moe_gradients_over_two_dimensions(four: World, sizes: dict[str, int]) -> None:
    check_compiled(four, "MixtralForCausalLM", **sizes)


def check_compiled(world: World, architecture: str, **sizes: int) -> None:
    for results in world.run(partial(integrations.compiled_equals_uncompiled, **sizes), architecture):
        assert results.pop("loss") <= 1e-5
        assert results == {"wrong": {}, "replicas differ": 0}


def test_sharded_example_resumes_on_another_mesh(two: World, four: World, checkpoint: Path, tmp_path: Path) -> None:
    run = [str(checkpoint), str(tmp_path / "at-once"), "--length", "16"]
    (uninterrupted, *_) = two.run(integrations.sharded_example, *run, "--mesh", "fsdp=2", "--steps", "4")
    run[1] = str(tmp_path / "in-two")
    (first, *_) = two.run(integrations.sharded_example, *run, "--mesh", "fsdp=2", "--steps", "2")
    for second in four.run(integrations.sharded_example, *run, "--mesh", "fsdp=2,tp=2", "--steps", "4"):
        assert first + second == pytest.approx(uninterrupted, abs=1e-5)
    assert uninterrupted[0] != uninterrupted[-1]
    one, other = stored(tmp_path / "at-once" / "model"), stored(tmp_path / "in-two" / "model")
    assert one.keys() == stored(checkpoint).keys()
    # The gradient of a key bias is only rounding, which Adam amplifies to a full step.
    assert all(torch.allclose(other[name], one[name], atol=1e-5) for name in one if "k_proj.bias" not in name)


def test_sharded_example_in_bf16(two: World, checkpoint: Path, tmp_path: Path) -> None:
    run = [str(checkpoint), str(tmp_path / "out"), "--length", "16", "--bf16"]
    for losses in two.run(integrations.sharded_example, *run, "--mesh", "fsdp=2", "--steps", "2"):
        assert all(torch.isfinite(torch.tensor(losses)))
    assert {tensor.dtype for tensor in stored(tmp_path / "out" / "model").values()} == {torch.float32}


# accelerate's device maps


def test_device_map_auto(checkpoint: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, device_map="auto")
    assert {str(parameter.device) for parameter in model.parameters()} <= {"cpu", "cuda:0"}
    tokens = torch.tensor([[20, 30, 40, 50]])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits.cpu(), expected(tokens).logits, atol=1e-5, rtol=1e-5)


def test_device_map_with_weights_on_disk(checkpoint: Path, tmp_path: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(checkpoint)
    names = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "cpu"}
    names |= {"lm_head": "cpu", "model.rotary_emb": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, device_map=names, offload_folder=tmp_path, combine=True)
    assert model.model.layers[0].self_attn.q_proj.weight.device.type == "meta"
    assert any("q_proj" in path.name for path in tmp_path.rglob("*"))
    tokens = torch.tensor([[20, 30, 40, 50]])
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)
    first, *_, last = report(model)  # accelerate hooks every module, so each linear runs separately
    assert "is on meta" in str(first.reason)
    assert "forward" in str(last.reason)


def test_device_and_device_map_raise(checkpoint: Path) -> None:
    from nrl_models.errors import UnknownArgumentError

    with pytest.raises(UnknownArgumentError, match="device and device_map"):
        AutoModelForCausalLM.from_pretrained(checkpoint, device="cpu", device_map="auto")
