"""GGUF files load dequantized, with the values that were written and that transformers loads."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from checkpoints import assert_same, new_model, problems, stored
from gguf import GGMLQuantizationType as Kind
from gguf_checkpoints import CHAT_TEMPLATE, write_gguf
from transformers import AutoModelForCausalLM as HFAutoModelForCausalLM
from transformers import (
    AutoTokenizer,
    BitsAndBytesConfig,
    Gemma2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)
from typer.testing import CliRunner
from versions import since

from nrl_models import AutoModelForCausalLM, CheckpointError
from nrl_models.cli import app
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.gguf.gguf_files import GGUFFiles
from nrl_models.common.gguf.gguf_header import read_header
from nrl_models.common.gguf.gguf_tables import upstream_source
from nrl_models.diagnostics.embeddings import diagnose_embeddings
from nrl_models.engines.start import start_engine
from nrl_models.errors import EngineError
from nrl_models.onboarding.convert import convert
from nrl_models.testing.tiny import tiny_config

SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def config_of(config_class: type[PreTrainedConfig], **values: Any) -> PreTrainedConfig:
    return config_class(**SIZES, **HEADS, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, **values)


ARCHITECTURES: dict[str, tuple[PreTrainedConfig, dict[str, int]]] = {
    "llama": (config_of(LlamaConfig, tie_word_embeddings=False), {"llama.rope.dimension_count": 16}),
    "qwen2": (config_of(Qwen2Config, tie_word_embeddings=True), {}),
    "gemma2": (config_of(Gemma2Config), {}),
    "qwen3moe": (
        config_of(Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=768, norm_topk_prob=True),
        {
            "qwen3moe.expert_count": 4,
            "qwen3moe.expert_used_count": 2,
            "qwen3moe.expert_feed_forward_length": 768,
        },
    ),
}
MIXED = {"attn_v": Kind.Q8_0, "ffn": Kind.Q4_1, "attn_k": Kind.F16, "attn_q.": Kind.Q5_0, "token_embd": Kind.BF16}


def write_model(
    file: Path, architecture: str, kinds: Any = Kind.F32, *, values: dict[str, int] | None = None, **options: Any
) -> PreTrainedModel:
    """Write a random model to a file and return it."""
    config, own_values = ARCHITECTURES[architecture]
    model = new_model(config)
    write_gguf(file, model, architecture, kinds, values=own_values | (values or {}), **options)
    return model


def theirs(file: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    source, keywords = upstream_source(file)
    return HFAutoModelForCausalLM.from_pretrained(source, dtype=dtype, **keywords).state_dict()


def hf_state_dict(model: Any) -> dict[str, torch.Tensor]:
    return model.state_dict_adapter.to_hf(model.state_dict(), layout="transformers")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_model(tmp_path / "in" / "llama.gguf", "llama", MIXED)
    return tmp_path / "in" / "llama.gguf"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float_tensors_round_trip(architecture: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    model = write_model(file, architecture)
    loaded = AutoModelForCausalLM.from_pretrained(file)
    expected = model.state_dict()
    if architecture == "gemma2":  # x + 1 - 1
        expected = {name: t + 1 - 1 if "norm" in name else t for name, t in expected.items()}
    assert_same(hf_state_dict(loaded), expected)
    ids = torch.arange(2, 34)[None]
    if architecture != "gemma2":
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)  # the configuration is also the same


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_quantized_tensors_match_transformers(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_model(file, architecture, MIXED)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)  # load from the directory
    assert_same(hf_state_dict(loaded), theirs(file, dtype))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.F16, Kind.BF16], ids=str)
def test_writable_tensor_types(kind: Kind, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_model(file, "llama", kind)
    with_half = kind in (Kind.F16, Kind.BF16)
    loaded = AutoModelForCausalLM.from_pretrained(file)
    assert loaded.dtype == ({Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}[kind] if with_half else torch.float32)
    assert_same(loaded.state_dict(), theirs(file, loaded.dtype))


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS], ids=str)
def test_k_quants(kind: Kind, tmp_path: Path) -> None:
    config = tiny_config(LlamaConfig, {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1})
    write_gguf(tmp_path / "model.gguf", new_model(config), "llama", {"attn": kind, "ffn": kind})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = theirs(tmp_path / "model.gguf", torch.float32)
    assert expected["model.layers.0.mlp.up_proj.weight"].unique().numel() > 100
    assert_same(loaded.state_dict(), expected)


# Choosing the file


def test_gguf_file_argument_selects_file(llama: Path) -> None:
    write_model(llama.with_name("other.gguf"), "qwen2")
    with pytest.raises(CheckpointError, match=r"several GGUF files: llama\.gguf, other\.gguf") as raised:
        AutoModelForCausalLM.from_pretrained(llama.parent)
    assert "gguf_file=" in str(raised.value)
    assert type(AutoModelForCausalLM.from_pretrained(llama.parent, gguf_file="other.gguf")).__name__.startswith("Qwen2")
    assert type(AutoModelForCausalLM.from_pretrained(llama)).__name__.startswith("Llama")
    with pytest.raises(CheckpointError, match=r"none\.gguf: no such file; GGUF files there: llama\.gguf, other\.gguf"):
        AutoModelForCausalLM.from_pretrained(llama.parent, gguf_file="none.gguf")
    llama.rename(llama.with_name("w.bin"))
    with pytest.raises(CheckpointError, match=r"w\.bin: expected a name that ends in \.gguf"):
        AutoModelForCausalLM.from_pretrained(llama.parent, gguf_file="w.bin")


def test_safetensors_have_precedence_over_gguf(llama: Path) -> None:
    model = new_model(ARCHITECTURES["qwen2"][0])
    model.save_pretrained(llama.parent)
    assert type(AutoModelForCausalLM.from_pretrained(llama.parent)).__name__.startswith("Qwen2")
    loaded = AutoModelForCausalLM.from_pretrained(llama.parent, gguf_file=llama.name)
    assert type(loaded).__name__.startswith("Llama")


# Loaded values


@since("5.6")
def test_convert_writes_unquantized_checkpoint(llama: Path, tmp_path: Path) -> None:
    (llama.parent / "other.txt").write_text("of somebody else")
    convert(llama, tmp_path / "out", dtype="bfloat16")
    plain = HFAutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert plain.dtype == torch.bfloat16
    assert_same(plain.state_dict(), theirs(llama, torch.bfloat16))
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), plain.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    source, keywords = upstream_source(llama)
    original = AutoTokenizer.from_pretrained(source, gguf_file=keywords["gguf_file"])
    text = "Grüße, hello world! 42"
    assert tokenizer(text)["input_ids"] == original(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert (tokenizer.bos_token, tokenizer.eos_token) == (original.bos_token, original.eos_token)
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == expected | {"chat_template.jinja"}
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()


def test_convert_without_tokenizer(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "llama", tokenizer=False)
    convert(tmp_path / "model.gguf", tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}


def test_save_and_reload(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    model.save_pretrained(tmp_path / "out")
    assert_same(stored(tmp_path / "out"), theirs(llama, torch.float32))


@pytest.mark.long
def test_cli_commands_with_gguf_file(llama: Path) -> None:
    runner = CliRunner()
    looked = runner.invoke(app, ["inspect", str(llama)])
    assert looked.exit_code == 0, looked.output
    for word in ("LlamaForCausalLM", "Q4_1", "Q8_0", "BF16"):
        assert word in looked.output
    compared = runner.invoke(app, ["parity", str(llama.parent), "--length", "8"])
    assert compared.exit_code == 0, compared.output
    engine = ["--engine", "hf-generate", "--length", "16", "--batch", "1", "--out", str(llama.parent / "found")]
    checked = runner.invoke(app, ["consistency", str(llama), *engine])
    assert checked.exit_code == 0, checked.output


def test_gguf_requiring_conversion_raises(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"nrl-models convert .*llama\.gguf"):
        start_engine("vllm", llama)
    with pytest.raises(CheckpointError, match="nrl-models convert"):
        diagnose_embeddings(llama, reinitialize=tmp_path / "out")
    with pytest.raises(CheckpointError, match="requests bitsandbytes"):
        AutoModelForCausalLM.from_pretrained(llama, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    assert diagnose_embeddings(llama).outcome


@pytest.mark.skipif(not hasattr(transformers, "GgufConfig"), reason="this transformers has no GgufConfig")
def test_gguf_keywords_of_transformers(llama: Path) -> None:
    source, keywords = upstream_source(llama)
    loaded = AutoModelForCausalLM.from_pretrained(source, **keywords)
    assert_same(loaded.state_dict(), theirs(llama, torch.float32))
    packed = transformers.GgufConfig(dequantize=False)
    with pytest.raises(CheckpointError, match="is dequantized on load"):
        AutoModelForCausalLM.from_pretrained(llama, quantization_config=packed)


# Errors


def test_tensors_are_dequantized_lazily(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, sizes = gguf.dequantize, []

    def counted(data: np.ndarray, kind: Kind) -> np.ndarray:
        result = original(data, kind)
        sizes.append(result.size)
        return result

    monkeypatch.setattr(gguf, "dequantize", counted)
    files = GGUFFiles(llama)
    assert sum(sizes) < 1000  # one block of each type, to find out whether it is readable
    sizes.clear()
    key = "model.layers.1.self_attn.k_proj.weight"
    assert files.read(files.tensors[key]).shape == (32, 64)
    assert sizes == [32 * 64]
    assert files.nbytes < llama.stat().st_size


def test_truncated_gguf_raises(llama: Path, tmp_path: Path) -> None:
    content = llama.read_bytes()
    data_start = min(tensor.start for tensor in read_header(llama).tensors)
    cut = tmp_path / "cut.gguf"
    for size in (0, 3, 10, 23, 30, 200, data_start // 2, data_start - 40):
        cut.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: is no GGUF file, damaged or cut off"):
            AutoModelForCausalLM.from_pretrained(cut)
    cut.write_bytes(content[: len(content) - 5000])
    with pytest.raises(CheckpointError, match="it is cut off") as raised:
        AutoModelForCausalLM.from_pretrained(cut)
    assert "download the file again" in str(raised.value)
    assert 1 <= len(raised.value.problems) < 22
    cut.write_bytes(b"PK" + content[2:])
    with pytest.raises(CheckpointError, match="begins with b'PKUF', expected b'GGUF'"):
        AutoModelForCausalLM.from_pretrained(cut)


def test_split_gguf_raises(tmp_path: Path) -> None:
    file = tmp_path / "model-00001-of-00003.gguf"
    write_model(file, "llama", values={"split.count": 3, "split.no": 0})
    with pytest.raises(CheckpointError, match=r"is part 1 of 3; .*\n.*llama-gguf-split --merge"):
        AutoModelForCausalLM.from_pretrained(file)


def test_unsupported_architecture_raises(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", new_model(ARCHITECTURES["llama"][0]), "plamo")
    with pytest.raises(CheckpointError, match=r"architecture 'plamo', which transformers .* does not read") as raised:
        AutoModelForCausalLM.from_pretrained(file)
    assert ", llama, " in str(raised.value)


def test_unsupported_tensor_type_raises(llama: Path) -> None:
    header = read_header(llama)
    content = bytearray(llama.read_bytes())
    name = b"blk.0.ffn_up.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8
    assert content[place] == Kind.Q4_1
    for number, word in ((4, "number 4"), (Kind.Q8_1, "Q8_1")):
        content[place] = number
        llama.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"is of type {word}, which the package gguf") as raised:
            GGUFFiles(llama)
        assert problems(raised.value) == {("dtype", name.decode())}
        assert "llama-quantize" in str(raised.value)
    assert len(header.tensors) == 2 * 9 + 3


def test_missing_gguf_package_raises(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "nrl_models.common.gguf.gguf_tables.find_spec", lambda name: None if name == "gguf" else find(name)
    )
    with pytest.raises(CheckpointError, match=r"pip install gguf"):
        AutoModelForCausalLM.from_pretrained(llama)


def test_unmapped_tensor_raises(tmp_path: Path) -> None:
    """Llama 3.1 stores its RoPE scaling only in such a tensor."""
    factors = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    model = write_model(tmp_path / "model.gguf", "llama", extra=factors)
    with pytest.raises(CheckpointError) as raised:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert problems(raised.value) == {("unexpected", "rope_freqs.weight")}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, strict=False)
    assert_same(loaded.state_dict(), model.state_dict())


def test_folder_without_weights_raises(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(ARCHITECTURES["llama"][0].to_json_string())
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin found"):
        CheckpointFiles(tmp_path)
