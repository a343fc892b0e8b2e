"""Models prepared, offloaded or dispatched by accelerate compute and save the same as without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from checkpoints import assert_same, new_model, stored
from safetensors.torch import load_model, save_model
from transformers import LlamaConfig, PreTrainedModel

from nrl_models import AutoModelForCausalLM, registry
from nrl_models.common.projections import join, report
from nrl_models.errors import CheckpointError
from nrl_models.logprobs import rollout_logprobs, token_logprobs
from nrl_models.testing.tiny import tiny_config

MAP = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}
"""A device map for `dispatch_model`. With the CPU as the main device, only "disk" is another device."""


def offload_to_memory(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    return accelerate.cpu_offload(model, execution_device="cpu")


def offload_to_disk(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    return accelerate.disk_offload(model, folder, execution_device="cpu")


def dispatch(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    return accelerate.dispatch_model(model, MAP, offload_dir=folder, main_device="cpu", force_hooks=True)


OFFLOADS = [offload_to_memory, offload_to_disk, dispatch]
offloads = pytest.mark.parametrize("offload_model", OFFLOADS)

Offload = Callable[[PreTrainedModel, Path], PreTrainedModel]


def logits(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=input_ids, use_cache=False).logits


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def _fresh_state() -> Iterator[None]:
    """Reset accelerate's process-wide state, so that other tests start without it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# Offloaded


@offloads
def test_offloaded_model_matches_reference(
    offload_model: Offload, llama_checkpoint: Path, llama: PreTrainedModel, input_ids: torch.Tensor, tmp_path: Path
) -> None:
    model = offload_model(AutoModelForCausalLM.from_pretrained(llama_checkpoint, combine=True), tmp_path)
    projection = model.model.layers[0].self_attn.qkv_proj.weight
    assert projection.is_meta
    assert_close(logits(model, input_ids), logits(llama, input_ids))
    assert projection.is_meta
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(input_ids, **options), llama.generate(input_ids, **options))


@offloads
def test_logprobs_of_offloaded_model(
    offload_model: Offload, llama_checkpoint: Path, input_ids: torch.Tensor, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    with torch.no_grad():
        expected = token_logprobs(model, input_ids).logprobs
        model = offload_model(model, tmp_path)
        for chunk_size in ("auto", None):
            result = token_logprobs(model, input_ids, chunk_size=chunk_size)
            rollouts = rollout_logprobs(model, input_ids.tolist(), chunk_size=chunk_size)
            assert_close(result.logprobs, expected)
            assert_close(rollouts.logprobs, expected)


@offloads
def test_offloaded_model_saves_all_weights(offload_model: Offload, llama_checkpoint: Path, tmp_path: Path) -> None:
    model = offload_model(AutoModelForCausalLM.from_pretrained(llama_checkpoint), tmp_path / "offload")
    model.save_pretrained(tmp_path / "saved")
    assert_same(stored(tmp_path / "saved"), stored(llama_checkpoint))


@offloads
def test_offloaded_model_saves_tied_weights_once(offload_model: Offload, tmp_path: Path) -> None:
    new_model(tiny_config(LlamaConfig, {"tie_word_embeddings": True})).save_pretrained(tmp_path / "tied")
    model = offload_model(AutoModelForCausalLM.from_pretrained(tmp_path / "tied"), tmp_path / "offload")
    model.save_pretrained(tmp_path / "saved")
    assert_same(stored(tmp_path / "saved"), stored(tmp_path / "tied"))


def test_saving_meta_model_raises(llama_config: LlamaConfig, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(llama_config, device="meta")
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight: is on meta"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_infer_auto_device_map_matches_transformers(llama_checkpoint: Path) -> None:
    maps = []
    for auto in (transformers.AutoModelForCausalLM, AutoModelForCausalLM):
        model = auto.from_pretrained(llama_checkpoint)
        memory = {"cpu": 4_500_000, "disk": 10**9}
        maps.append(accelerate.infer_auto_device_map(model, memory, no_split_module_classes=model._no_split_modules))
    assert maps[1] == maps[0]
    assert maps[1]["model.layers.0"] == "cpu"
    assert maps[1]["model.layers.1"] == "disk"


# Prepared


@pytest.mark.usefixtures("_fresh_state")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_prepared_model_training_matches_transformers(
    precision: str, llama_checkpoint: Path, input_ids: torch.Tensor
) -> None:
    losses = []
    for auto in (transformers.AutoModelForCausalLM, AutoModelForCausalLM):
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
        model = auto.from_pretrained(llama_checkpoint).train()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses.append([])
        for _ in range(6):
            with accelerator.accumulate(model):
                loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses[-1].append(loss.item())
        assert type(accelerator.unwrap_model(model)).__name__ == "LlamaForCausalLM"
    expected, actual = losses
    assert actual == pytest.approx(expected, rel=1e-4 if precision == "no" else 1e-2)
    assert actual[-1] < actual[0] - 0.1


@pytest.mark.usefixtures("_fresh_state")
def test_logprobs_of_model_prepared_in_mixed_precision(llama_checkpoint: Path, input_ids: torch.Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    model = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    with torch.no_grad():
        logprobs = model(input_ids=input_ids).logits[:, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, input_ids[:, 1:, None])[..., 0]
    for result in (token_logprobs(model, input_ids), rollout_logprobs(model, input_ids.tolist())):
        assert_close(result.logprobs[:, 1:], expected)


@pytest.mark.usefixtures("_fresh_state")
def test_accelerate_save_model_writes_transformers_checkpoint(llama_checkpoint: Path, tmp_path: Path) -> None:
    """Every tensor is saved, because fused linears are not mistaken for tied ones. Both libraries load the file."""
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    accelerate.Accelerator(cpu=True).save_model(model, str(tmp_path))
    assert_same(stored(tmp_path), stored(llama_checkpoint))


@pytest.mark.long
def test_load_checkpoint_in_model_loads_every_parameter(
    llama_checkpoint: Path, llama: PreTrainedModel, input_ids: torch.Tensor
) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(llama.config, combine=True).eval()
    accelerate.load_checkpoint_in_model(model, llama_checkpoint)
    assert_same(model.state_dict(), llama.state_dict())
    assert_close(logits(model, input_ids), logits(llama, input_ids))
    join(model)
    assert [group.joined for group in report(model)] == [True] * 4
    assert_close(logits(model, input_ids), logits(llama, input_ids))


@pytest.mark.usefixtures("_fresh_state")
def test_training_resumes_from_saved_state(llama_checkpoint: Path, input_ids: torch.Tensor, tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint).train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def steps(count: int) -> list[float]:
        losses = []
        for _ in range(count):
            loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    steps(2)
    accelerator.save_state(str(tmp_path / "state"))
    expected = steps(3)
    accelerator.load_state(str(tmp_path / "state"))
    assert steps(3) == pytest.approx(expected, rel=1e-5)
    assert expected[2] < expected[0] - 0.01


WRAPPED: dict[str, Callable[[Any], torch.nn.Module]] = {
    "unwrapped": lambda model: model,
    "LoRA": lambda model: peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"])),
    "inside a module": lambda model: torch.nn.ModuleDict({"pretrained_model": model, "v_head": torch.nn.Linear(4, 1)}),
}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_saved_state_of_tied_model_loads(
    architecture: str, wrap: Callable[[Any], torch.nn.Module], tmp_path: Path
) -> None:
    model_class = registry.model_class(architecture)
    config = tiny_config(model_class.config_class, {"tie_word_embeddings": True})
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(wrap(model_class.from_config(config)))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accelerator.save_state(str(tmp_path / "state"))
    save_model(model, str(tmp_path / "model.safetensors"))
    loads: list[Callable[[], object]] = [
        lambda: accelerator.load_state(str(tmp_path / "state")),
        lambda: load_model(model, tmp_path / "model.safetensors"),
    ]
    for load in loads:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load()
        assert_same(model.state_dict(), expected)
