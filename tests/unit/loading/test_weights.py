"""Reading a checkpoint into a model: strict, exact, and without changes to the model if anything does not fit."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from checkpoints import (
    INDEX,
    WEIGHTS,
    assert_same,
    assert_same_model,
    edit_config,
    edit_index,
    edit_weights,
    hf_tensors,
    new_model,
    problems,
    stored,
    weight_map,
)
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTNeoConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedModel,
)
from transformers import LlamaForCausalLM as HFLlama
from transformers import LlamaForSequenceClassification as HFScore
from transformers import initialization as init

from nrl_models import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    CheckpointError,
)
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.checkpoint.page_maps import PAGE
from nrl_models.common.projections import neighboring_parameters, report
from nrl_models.families.llama.model import LlamaForCausalLM
from nrl_models.family import FamilyModel
from nrl_models.loading import weights
from nrl_models.loading.fit import Tolerance
from nrl_models.loading.options import LoadOptions
from nrl_models.loading.weights import load_weights
from nrl_models.testing.tiny import tiny_config

Tensors = dict[str, torch.Tensor]

ATTENTION = "model.layers.0.self_attn"
Q, K, V = (f"{ATTENTION}.{part}_proj" for part in "qkv")


def require_load_error(folder: Path, **options: Any) -> CheckpointError:
    """Return the error for a checkpoint. Loading must fail, also into an existing model, without changing it."""
    with pytest.raises(CheckpointError) as caught:
        AutoModelForCausalLM.from_pretrained(folder, **options)
    model = meta_model(folder)
    tolerance = Tolerance(LoadOptions(strict=options.get("strict", True)))
    with pytest.raises(CheckpointError, match=re.escape(str(caught.value))):
        load_weights(model, CheckpointFiles(folder), dtype=torch.float32, tolerance=tolerance)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    assert getattr(model, "_weight_conversions", None) is None
    return caught.value


def meta_model(folder: Path) -> LlamaForCausalLM:
    with init_empty_weights(include_buffers=False):
        return LlamaForCausalLM(AutoConfig.from_pretrained(folder))


# Matching checkpoints


@pytest.mark.parametrize("name", ["llama_checkpoint", "llama_shards"])
def test_load_checkpoint_from_transformers(name: str, request: pytest.FixtureRequest, llama: PreTrainedModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(request.getfixturevalue(name))
    assert isinstance(model, LlamaForCausalLM)
    assert_same_model(model, llama)


def test_load_separate_experts(mixtral_checkpoint: Path, mixtral: PreTrainedModel) -> None:
    assert any("experts.3.w2.weight" in key for key in stored(mixtral_checkpoint))
    assert_same_model(AutoModelForCausalLM.from_pretrained(mixtral_checkpoint), mixtral)


def test_load_stacked_experts(mixtral_checkpoint: Path, mixtral: PreTrainedModel, tmp_path: Path) -> None:
    mixtral.config.save_pretrained(tmp_path)
    save_file(mixtral.state_dict(), tmp_path / WEIGHTS)
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path), mixtral)


def test_load_without_base_model_prefix(folder: Path, llama: PreTrainedModel) -> None:
    def strip(tensors: Tensors) -> None:
        for key in list(tensors):
            tensors[key.removeprefix("model.")] = tensors.pop(key)

    edit_weights(folder, strip)
    assert_same_model(AutoModelForCausalLM.from_pretrained(folder), llama)


@pytest.mark.parametrize("key", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"])
def test_stored_rotary_buffers_are_ignored(folder: Path, llama: PreTrainedModel, key: str) -> None:
    edit_weights(folder, lambda tensors: tensors.update({key: torch.full((16,), 7.0)}))
    assert_same_model(AutoModelForCausalLM.from_pretrained(folder), llama)


GPT_CONFIGS = {
    "GPTNeo": GPTNeoConfig(hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]),
    "GPTBigCode": GPTBigCodeConfig(n_embd=64, n_layer=2, n_head=4),
    "GPT2": GPT2Config(n_embd=64, n_layer=2, n_head=4),
}


@pytest.mark.parametrize(
    ("name", "keys"),
    {
        "GPTNeo": ["h.0.attn.attention.bias", "h.1.attn.attention.bias", "h.0.attn.attention.masked_bias"],
        "GPTBigCode": ["bias", "h.0.attn.bias", "h.0.attn.masked_bias"],
        "GPT2": ["h.0.attn.bias", "h.0.attn.masked_bias"],
    }.items(),
)
@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_stored_attention_masks_are_ignored(name: str, keys: list[str], prefix: str, tmp_path: Path) -> None:
    model = new_model(GPT_CONFIGS[name], "LMHeadModel" if name == "GPT2" else "ForCausalLM")
    model.save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda tensors: tensors.update({prefix + key: torch.ones(1, 1, 8, 8) for key in keys}))
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    edit_weights(tmp_path, lambda tensors: tensors.update({f"{prefix}h.0.attn.scale": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"1 problem.*\n.*h\.0\.attn\.scale"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


class _WithTable(nn.Module):
    """A table computed without an explicit dtype and kept in fp32, like Gemma 3n's audio time scales."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", self.values().float(), persistent=False)

    def values(self) -> torch.Tensor:
        return torch.exp(torch.arange(16) * -0.37)


class _WithTableLlama(HFLlama):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.scales = _WithTable()
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, _WithTable):
            init.copy_(module.table, module.values())


def test_fp32_buffers_are_not_rounded_to_load_dtype(folder: Path) -> None:
    class Ours(FamilyModel, _WithTableLlama):
        pass

    model = Ours.from_pretrained(folder, dtype=torch.bfloat16)
    assert torch.equal(model.scales.table, torch.exp(torch.arange(16) * -0.37))
    assert torch.equal(model.scales.table, _WithTableLlama.from_pretrained(folder, dtype=torch.bfloat16).scales.table)


def test_parameters_are_trainable_leaves(llama_checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    for parameter in model.parameters():
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad
        assert parameter.is_leaf


def test_training_does_not_change_files(folder: Path, input_ids: torch.Tensor) -> None:
    before = (folder / WEIGHTS).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(input_ids=input_ids, labels=input_ids).loss.backward()
    optimizer.step()
    assert not torch.equal(model.lm_head.weight, stored(folder)["lm_head.weight"])
    assert (folder / WEIGHTS).read_bytes() == before


def mapped_ranges(folder: Path) -> list[range]:
    """Return the addresses of this process at which files of a folder are mapped."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    return [range(*(int(number, 16) for number in line.split()[0].split("-"))) for line in lines]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="pages of files are mapped on Linux only")
def test_contiguous_tensors_are_memory_mapped(tmp_path: Path) -> None:
    new_model(tiny_config(LlamaConfig)).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, combine=True)
    assert neighboring_parameters(model)
    mapped = mapped_ranges(tmp_path)
    # Pages that two linears share, and the last one of a file, are copied.
    middles = {
        name: tensor.data_ptr() + tensor.nbytes // 2
        for name, tensor in model.named_parameters()
        if tensor.nbytes > 2 * PAGE
    }
    assert len(middles) > 10
    assert [name for name, middle in middles.items() if not any(middle in pages for pages in mapped)] == []
    assert all(group.joined for group in report(model))
    del model
    gc.collect()
    assert not mapped_ranges(tmp_path)


def test_load_without_page_maps(shards: Path, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointFiles, "read_joined", lambda *_: None)
    assert_same_model(AutoModelForCausalLM.from_pretrained(shards), llama)


def test_load_shards_in_any_tensor_order(folder: Path, llama: PreTrainedModel) -> None:
    # Shards in an odd order: q, k and v of a layer are in three files, at odd byte offsets.
    tensors, files = load_file(folder / WEIGHTS), 3
    (folder / WEIGHTS).unlink()
    entries = {key: f"part-{index * 7 % files}.safetensors" for index, key in enumerate(sorted(tensors))}
    for file in set(entries.values()):
        content = {key: tensor for key, tensor in tensors.items() if entries[key] == file}
        save_file(content | {f"{file}.pad": torch.zeros(3, dtype=torch.uint8)}, folder / file)
        entries[f"{file}.pad"] = file
    (folder / INDEX).write_text(json.dumps({"weight_map": entries}))
    error = require_load_error(folder)
    assert problems(error) == {("unexpected", key) for key in entries if key.endswith(".pad")}
    model = AutoModelForCausalLM.from_pretrained(folder, strict=False)
    assert_same_model(model, llama)


# Mismatched checkpoints


def pop(*keys: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(key) for key in keys]


def put(key: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({key: torch.zeros(*shape)})


def copy(source: str, key: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({key: tensors[source].clone()})


MISMATCHES: dict[str, tuple[Callable[[Tensors], object], set[tuple[str, str]], str]] = {
    "missing": (
        pop("model.norm.weight"),
        {("missing", "model.norm.weight")},
        "model.norm.weight: not found",
    ),
    "missing attention": (
        pop(f"{Q}.weight", f"{K}.weight", f"{V}.bias"),
        {("missing", f"{Q}.weight"), ("missing", f"{K}.weight"), ("missing", f"{V}.bias")},
        "not found",
    ),
    "extra": (
        put("model.layers.0.extra.weight", 3),
        {("unexpected", "model.layers.0.extra.weight")},
        f"unexpected: model.layers.0.extra.weight ({WEIGHTS}): the model has no such tensor",
    ),
    "extra layer": (
        put("model.layers.2.self_attn.q_proj.weight", 256, 256),
        {("unexpected", "model.layers.2.self_attn.q_proj.weight")},
        "has no such tensor",
    ),
    "shape": (
        put("model.norm.weight", 255),
        {("shape", "model.norm.weight")},
        f"({WEIGHTS}): has shape (255,), the model expects (256,)",
    ),
    "projection shape": (
        put(f"{K}.weight", 256, 256),
        {("shape", f"{K}.weight")},
        "has shape (256, 256), the model expects (128, 256)",
    ),
    "broadcastable shape": (
        put("model.norm.weight", 1),
        {("shape", "model.norm.weight")},
        "has shape (1,), the model expects (256,)",
    ),
    "transposed shape": (
        put("model.layers.0.mlp.down_proj.weight", 384, 256),
        {("shape", "model.layers.0.mlp.down_proj.weight")},
        "has shape (384, 256), the model expects (256, 384)",
    ),
    "with and without prefix": (
        copy("model.norm.weight", "norm.weight"),
        {("duplicated", "model.norm.weight, norm.weight")},
        "fill model.norm.weight more than once",
    ),
    "fused projection name": (
        put(f"{ATTENTION}.qkv_proj.weight", 512, 256),
        {("unexpected", f"{ATTENTION}.qkv_proj.weight")},
        "the model has no such tensor",
    ),
    "integers": (
        lambda tensors: tensors.update({key: tensor.to(torch.int8) for key, tensor in tensors.items() if "lm" in key}),
        {("dtype", "lm_head.weight")},
        "is stored quantized, as torch.int8; the model's is torch.float32",
    ),
    "fp8": (
        lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)}),
        {("dtype", "lm_head.weight")},
        "quantized weights need a quantization_config in config.json",
    ),
    "fp8 with scales": (
        lambda tensors: tensors.update(
            {f"{K}.weight": tensors[f"{K}.weight"].to(torch.float8_e4m3fn), f"{K}.weight_scale_inv": torch.ones(1)}
        ),
        {
            ("unexpected", f"{K}.weight_scale_inv"),
            ("dtype", f"{K}.weight"),
        },
        "is stored quantized, as torch.float8_e4m3fn",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISMATCHES.values(), ids=MISMATCHES)
def test_mismatched_checkpoint_raises(
    folder: Path, case: tuple[Callable[[Tensors], object], set[tuple[str, str]], str]
) -> None:
    edit, expected, message = case
    edit_weights(folder, edit)
    error = require_load_error(folder)
    assert problems(error) == expected
    assert message in str(error)
    assert f"{folder} does not fit LlamaForCausalLM" in str(error)
    assert "What to do: " in str(error)


def test_error_lists_all_mismatches(folder: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        for key in ("missing", "extra", "projection shape", "with and without prefix"):
            MISMATCHES[key][0](tensors) if key != "missing" else tensors.pop("lm_head.weight")
        tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(2, 2)
        tensors[f"{K}.weight"] = torch.zeros(256, 256)

    edit_weights(folder, spoil)
    error = require_load_error(folder)
    assert problems(error) == {
        ("missing", "lm_head.weight"),
        ("unexpected", "model.layers.0.extra.weight"),
        ("shape", f"{K}.weight"),
        ("shape", "model.layers.1.self_attn.k_proj.weight"),
        ("duplicated", "model.norm.weight, norm.weight"),
    }
    assert "tie_word_embeddings=True" in str(error)
    assert "config.json and the weights belong to different models" in str(error)


def test_tensor_in_two_shards_raises(shards: Path) -> None:
    first, second = sorted(shards.glob("model-*.safetensors"))[:2]
    key, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {key: tensor}, second)
    with pytest.raises(CheckpointError) as caught:
        AutoModelForCausalLM.from_pretrained(shards)
    assert problems(caught.value) == {("duplicated", key)}


def test_prefixed_duplicate_in_two_shards_raises(shards: Path) -> None:
    last = max(weight_map(shards).values())
    edit_weights(shards, copy("model.norm.weight", "norm.weight"), last)
    edit_index(shards, lambda entries: entries.update({"norm.weight": last}))
    assert problems(require_load_error(shards)) == {("duplicated", "model.norm.weight, norm.weight")}


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({"hidden_size": 128}, ["shape"]),
        ({"num_hidden_layers": 3}, ["missing"]),
        ({"num_hidden_layers": 1}, ["unexpected"]),
        ({"num_key_value_heads": 8}, ["shape"]),
        ({"attention_bias": False}, ["unexpected"]),
        ({"vocab_size": 500}, ["shape"]),
        ({"architectures": ["LlamaForSequenceClassification"], "hidden_size": 128}, ["shape"]),
    ],
    ids=str,
)
def test_mismatched_config_raises(folder: Path, values: dict[str, Any], kinds: list[str]) -> None:
    edit_config(folder, **values)
    with pytest.raises(CheckpointError) as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert sorted({kind for kind, _ in problems(caught.value)}) == kinds


@pytest.mark.parametrize(("model_type", "name"), [("qwen3", "Qwen3ForCausalLM"), ("mixtral", "MixtralForCausalLM")])
def test_config_of_another_architecture_raises(folder: Path, model_type: str, name: str) -> None:
    edit_config(folder, model_type=model_type, architectures=[name])
    with pytest.raises(CheckpointError) as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert {kind for kind, _ in problems(caught.value)} == {"missing", "unexpected"}


def test_weights_of_another_architecture_raise(mixtral_checkpoint: Path, folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((mixtral_checkpoint / WEIGHTS).read_bytes())
    kinds = {kind for kind, _ in problems(require_load_error(folder))}
    assert kinds == {"missing", "unexpected"}


def test_error_names_missing_experts(mixtral_checkpoint: Path, tmp_path: Path) -> None:
    tensors = stored(mixtral_checkpoint)
    missing = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != missing}, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text((mixtral_checkpoint / "config.json").read_text())
    with pytest.raises(CheckpointError) as caught:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    (problem,) = caught.value.problems
    assert problem.kind == "partial"
    assert problem.detail.endswith(f"experts.gate_up_proj; {missing} not found")


def test_stacked_and_separate_experts_raise(mixtral_checkpoint: Path, mixtral: PreTrainedModel, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    save_file(stored(mixtral_checkpoint) | {name: mixtral.state_dict()[name]}, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text((mixtral_checkpoint / "config.json").read_text())
    with pytest.raises(CheckpointError) as caught:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    (problem,) = caught.value.problems
    assert problem.kind == "duplicated"
    assert name in problem.subject


def test_mismatched_checkpoint_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("read")

    edit_weights(folder, pop("model.norm.weight"))
    for name in ("read", "read_joined"):
        monkeypatch.setattr(CheckpointFiles, name, fail)
    require_load_error(folder)


# Dtypes


def test_wider_tensor_warns_unless_dtype_is_requested(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = new_model(tiny_config(LlamaConfig), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    exact = torch.randn(128, 256) / 3
    edit_weights(tmp_path, lambda tensors: tensors.update({f"{K}.weight": exact}))
    # As transformers loads it, but with a warning.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    logged = caplog.text
    caplog.clear()
    assert_same(hf_tensors(loaded), HFLlama.from_pretrained(tmp_path).state_dict())
    assert torch.equal(hf_tensors(loaded)[f"{K}.weight"], exact.bfloat16())
    assert f"stores 1 tensors ({K}.weight, ...) in a wider dtype than torch.bfloat16" in logged
    # With a requested dtype, no value is rounded and nothing is logged.
    masters = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(hf_tensors(masters)[f"{K}.weight"], exact)
    assert torch.equal(hf_tensors(masters)[f"{Q}.weight"], model.state_dict()[f"{Q}.weight"].float())
    assert not caplog.records


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, "float32", "bfloat16"], ids=str)
@pytest.mark.parametrize("stored_as", [torch.bfloat16, torch.float32], ids=str)
def test_requested_dtype(tmp_path: Path, dtype: str | torch.dtype, stored_as: torch.dtype) -> None:
    reference = new_model(tiny_config(LlamaConfig), dtype=stored_as)
    reference.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert_same(hf_tensors(model), {name: tensor.to(wanted) for name, tensor in reference.state_dict().items()})
    assert model.dtype == model.config.dtype == wanted
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_auto_dtype_uses_config_dtype(tmp_path: Path) -> None:
    new_model(tiny_config(LlamaConfig), dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    edit_config(tmp_path, dtype="float16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.float16


def test_auto_dtype_without_config_dtype_uses_checkpoint(tmp_path: Path) -> None:
    new_model(tiny_config(LlamaConfig), dtype=torch.bfloat16).save_pretrained(tmp_path)
    edit_config(tmp_path, dtype=None, torch_dtype=None)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_keep_in_fp32_modules_matches_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, combine: bool, strict: bool
) -> None:
    attribute = "_keep_in_fp32_modules_strict" if strict else "_keep_in_fp32_modules"
    for model_class in (HFLlama, LlamaForCausalLM):
        monkeypatch.setattr(model_class, attribute, {"v_proj", "norm", "down_proj"}, raising=False)
    new_model(tiny_config(LlamaConfig)).save_pretrained(tmp_path)
    for dtype in (torch.float16, torch.bfloat16):
        expected = HFLlama.from_pretrained(tmp_path, dtype=dtype)
        if combine:  # q, k and v are one tensor, so they have the widest of their dtypes
            monkeypatch.setattr(LlamaForCausalLM, attribute, {"q_proj", "k_proj", "v_proj", "norm", "down_proj"})
            for layer in expected.model.layers:
                for part in "qk":
                    linear = getattr(layer.self_attn, f"{part}_proj")
                    linear.weight.data = linear.weight.data.to(layer.self_attn.v_proj.weight.dtype)
        model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype, combine=combine)
        dtypes = {name: tensor.dtype for name, tensor in hf_tensors(model).items()}
        assert dtypes == {name: tensor.dtype for name, tensor in expected.state_dict().items()}


def test_gpt_oss_fp32_modules_match_transformers(tmp_path: Path) -> None:
    reference = new_model(tiny_config(GptOssConfig))
    reference.save_pretrained(tmp_path)
    expected = type(reference).from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {name: tensor.dtype for name, tensor in hf_tensors(model).items()} == {
        name: tensor.dtype for name, tensor in expected.state_dict().items()
    }


# Tied weights


def tie(folder: Path, edit: Callable[[Tensors], object]) -> None:
    edit_config(folder, tie_word_embeddings=True)
    edit_weights(folder, edit)


HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"

STORED_TIED = {
    "embeddings only": pop(HEAD),
    "head only": lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDINGS)}),
    "both and equal": copy(EMBEDDINGS, HEAD),
}


@pytest.mark.parametrize("edit", STORED_TIED.values(), ids=STORED_TIED)
@pytest.mark.parametrize("combine", [True, False])
def test_tied_weights_share_storage(
    folder: Path, llama: PreTrainedModel, edit: Callable[[Tensors], object], combine: bool
) -> None:
    tie(folder, edit)
    model = AutoModelForCausalLM.from_pretrained(folder, combine=combine)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, llama.model.embed_tokens.weight)
    assert model.config.tie_word_embeddings is True


def test_tied_weights_with_different_values_raise(folder: Path) -> None:
    tie(folder, lambda tensors: None)
    error = require_load_error(folder)
    assert problems(error) == {("tied", HEAD)}
    assert f"differs from {EMBEDDINGS}, but the configuration ties them" in str(error)
    assert "tie_word_embeddings=False" in str(error)
    model = AutoModelForCausalLM.from_pretrained(folder, tie_word_embeddings=False)  # as the message suggests
    assert torch.equal(model.lm_head.weight, stored(folder)[HEAD])
    assert torch.equal(model.model.embed_tokens.weight, stored(folder)[EMBEDDINGS])


def test_tied_weights_in_two_dtypes_are_compared_by_value(folder: Path) -> None:
    tie(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDINGS].double()}))
    assert AutoModelForCausalLM.from_pretrained(folder).lm_head.weight.dtype == torch.float32
    tie(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDINGS].bfloat16()}))
    assert problems(require_load_error(folder)) == {("tied", HEAD)}


def test_missing_tied_weights_raise(folder: Path) -> None:
    tie(folder, pop(HEAD, EMBEDDINGS))
    assert {kind for kind, _ in problems(require_load_error(folder))} == {"missing"}


def test_missing_untied_head_raises(folder: Path) -> None:
    edit_weights(folder, pop(HEAD))
    error = require_load_error(folder)
    assert problems(error) == {("missing", HEAD)}
    model = AutoModelForCausalLM.from_pretrained(folder, tie_word_embeddings=True)  # as the message suggests
    assert "pass tie_word_embeddings=True" in str(error)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_untied_weights_do_not_share_storage(llama_checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


# `strict=False`


def test_non_strict_load_initializes_new_head(
    llama_checkpoint: Path, llama: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CheckpointError) as caught:
        AutoModelForSequenceClassification.from_pretrained(llama_checkpoint)
    assert problems(caught.value) == {("missing", "score.weight"), ("unexpected", HEAD)}
    assert "new_head=True" in str(caught.value)
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(llama_checkpoint, strict=False, num_labels=1)
    assert "initialized score.weight; skipped lm_head.weight" in caplog.text
    assert len(caplog.records) == 1
    tensors, base = hf_tensors(model), llama.state_dict()
    score = tensors.pop("score.weight")
    assert_same(tensors, {name: tensor for name, tensor in base.items() if name != HEAD})
    assert score.shape == (1, 256)
    torch.manual_seed(3)
    expected = HFScore.from_pretrained(llama_checkpoint, num_labels=1).score.weight
    assert score.std() == pytest.approx(expected.std().item(), rel=0.3)  # initialized as in transformers
    assert not torch.equal(model.score.weight, torch.zeros_like(score))


def test_non_strict_load_of_complete_checkpoint_logs_nothing(
    llama_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    AutoModelForCausalLM.from_pretrained(llama_checkpoint, strict=False)
    assert not caplog.records


@pytest.mark.parametrize(
    "missing",
    [
        (f"{Q}.weight", f"{K}.weight", f"{V}.weight"),
        (f"{Q}.bias", f"{K}.bias", f"{V}.bias"),
        ("model.norm.weight",),
        ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        (HEAD,),
        (EMBEDDINGS,),
    ],
    ids=lambda missing: missing[0],
)
def test_non_strict_load_initializes_only_missing_weights(
    folder: Path, llama: PreTrainedModel, missing: tuple[str, ...]
) -> None:
    edit_weights(folder, pop(*missing))
    tensors = hf_tensors(AutoModelForCausalLM.from_pretrained(folder, strict=False))
    expected = llama.state_dict()
    assert_same(
        {name: tensor for name, tensor in tensors.items() if name not in missing},
        {name: tensor for name, tensor in expected.items() if name not in missing},
    )
    for name in missing:
        value = tensors[name]
        if name.endswith("bias"):
            assert value.eq(0).all()
        elif "norm" in name:
            assert value.eq(1).all()
        else:
            assert value.std() == pytest.approx(llama.config.initializer_range, rel=0.05)


@pytest.mark.parametrize(
    "name",
    [
        "shape",
        "projection shape",
        "with and without prefix",
        "fp8",
    ],
)
def test_non_strict_load_raises_on_mismatch(folder: Path, name: str) -> None:
    edit, expected, _ = MISMATCHES[name]
    edit_weights(folder, edit)
    error = require_load_error(folder, strict=False)
    assert problems(error) == {problem for problem in expected if problem[0] != "missing"}


def test_initialize_weights_keeps_loaded_values(llama_checkpoint: Path, llama: PreTrainedModel) -> None:
    for combine in (True, False):
        model = AutoModelForCausalLM.from_pretrained(llama_checkpoint, combine=combine)
        for module in model.modules():
            module._is_hf_initialized = False
        model.initialize_weights()
        assert_same_model(model, llama)


# Progress


@pytest.mark.parametrize("seconds", [0.0, 2.0])
def test_progress_bar_for_slow_loads(
    llama_checkpoint: Path, seconds: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging as hf_logging

    monkeypatch.setattr(weights, "PROGRESS_AFTER_SECONDS", seconds)
    monkeypatch.setattr(CheckpointFiles, "read_joined", lambda *_: None)
    hf_logging.enable_progress_bar()
    try:
        AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    finally:
        hf_logging.disable_progress_bar()
    assert ("Loading weights" in capsys.readouterr().err) is (seconds == 0)
    AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    assert "Loading weights" not in capsys.readouterr().err


def test_read_error_is_raised(llama_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise OSError("the disk is gone")

    monkeypatch.setattr(CheckpointFiles, "read", fail)
    for dtype in (torch.float32, torch.bfloat16):  # mapped; converted by threads
        with pytest.raises(OSError, match="the disk is gone"):
            AutoModelForCausalLM.from_pretrained(llama_checkpoint, dtype=dtype)
