"""Fuzz targets: valid inputs, how they are damaged, and the expected outcome.

A kind of input is a function that takes hypothesis' `draw` and a new folder, and raises a `BugError`. To add a kind,
write such a function and add it to `TARGETS`.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import torch
import transformers
from compressed_checkpoints import write as write_compressed
from damage import Draw, gguf_bytes, json_bytes, safetensors_bytes, some_bytes
from gguf_architectures import CASES as ARCHITECTURES
from gguf_architectures import write as write_architecture
from gguf_checkpoints import write_gguf
from huggingface_hub.errors import StrictDataclassFieldValidationError
from hypothesis import strategies as st
from outcomes import BugError, outcome
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel

import nrl_models
from nrl_models.common.checkpoint.local_path import MANIFEST_NAME
from nrl_models.common.config.types import with_declared_types
from nrl_models.common.gguf import gguf_tables
from nrl_models.distributed.resume_checkpoints.manifest import (
    Manifest,
    OptimizerFacts,
    ParameterGroup,
    States,
    WrittenFile,
    read_manifest,
)
from nrl_models.distributed.resume_checkpoints.manifest import _rendered as rendered_as_manifest
from nrl_models.engines import http, http_connection
from nrl_models.engines.answers import LARGEST_LOGPROB
from nrl_models.engines.engine_types import Sample
from nrl_models.engines.http import HTTPEngine
from nrl_models.errors import NRLModelsError
from nrl_models.families.llama.model import LlamaForCausalLM
from nrl_models.loading.read_config import generation_config
from nrl_models.logprobs import Sampling
from nrl_models.testing.case import randomize

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


def _llama(**values: Any) -> PreTrainedConfig:
    return LlamaConfig(**SMALL, pad_token_id=0, **values)


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: _llama(
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}, tie_word_embeddings=True
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, pad_token_id=0
    ),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=16),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SMALL | {"num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **SMALL,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"],
    ),
}


@cache
def checkpoint(name: str, shards: bool = False) -> Path:
    """Save a small model of a kind with transformers. Returns the folder."""
    folder = Path(tempfile.mkdtemp(prefix=f"nrl-fuzz-{name}-"))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    randomize(model)
    model.save_pretrained(folder, **({"max_shard_size": "20KB"} if shards else {}))
    return folder


@cache
def fp8_checkpoint() -> Path:
    """Save a Llama whose linears are in FP8, in blocks of 16 x 16."""
    folder = Path(tempfile.mkdtemp(prefix="nrl-fuzz-fp8-"))
    shutil.copytree(checkpoint("llama"), folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.rand(-(-rows // 16), -(-columns // 16)) + 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16], "fmt": "e4m3"}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


Load = Callable[[Path], PreTrainedModel]


def _ours(path: Path) -> PreTrainedModel:
    return nrl_models.AutoModelForCausalLM.from_pretrained(path)


def _theirs(path: Path, ours: PreTrainedModel | None = None) -> PreTrainedModel:
    source, keywords = gguf_tables.upstream_source(path)
    dtype = ours.dtype if ours is not None and keywords else "auto"  # by default, transformers loads GGUF in fp32
    return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **keywords).eval()


@cache
def _undamaged(path: Path) -> PreTrainedModel:
    model = _ours(path)
    if path != fp8_checkpoint() and (actual := difference(model, _theirs(path, model))):  # loading FP8 requires a GPU
        raise BugError(f"the undamaged checkpoint loads differently: {actual}")
    return model


def contents(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return all tensors that a model computes with."""
    return dict(model.state_dict()) | dict(model.named_buffers())


def difference(model: PreTrainedModel, other: PreTrainedModel) -> str:
    """Describe the difference between two models. Empty if they are equal."""
    if type(model).__name__ != type(other).__name__:
        return f"{type(model).__name__} and {type(other).__name__}"
    return _different_values(_values(model.config), _values(other.config)) or _different_tensors(
        contents(model), contents(other)
    )


def _values(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        key: value
        for key, value in config.to_dict().items()
        if key not in ("_name_or_path", "_model_name_or_path", "transformers_version")
    }


def _different_values(values: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    other = [key for key in values.keys() | others.keys() if repr(values.get(key)) != repr(others.get(key))]
    return f"other values: {sorted(map(repr, other))}" if other else ""


def _different_tensors(tensors: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> str:
    if tensors.keys() != others.keys():
        return f"other tensors: {sorted(tensors.keys() ^ others.keys())}"
    for name, tensor in tensors.items():
        other = others[name]
        if tensor.dtype != other.dtype or not torch.equal(
            *(t.nan_to_num() if t.is_floating_point() else t for t in (tensor, other))
        ):
            return f"other weights: {name}"
    return ""


def compare(path: Path, undamaged: Path) -> None:
    """Check that a damaged checkpoint loads as if undamaged, loads as in transformers, or raises an error."""
    loaded = outcome(lambda: _ours(path))
    if isinstance(loaded, NRLModelsError) or not difference(loaded, _undamaged(undamaged)):
        return
    try:
        try:
            expected = _theirs(path, loaded)
        except StrictDataclassFieldValidationError:  # an integer instead of a float, which nrl_models accepts
            content = json.loads((path / "config.json").read_bytes())
            _rewrite(path / "config.json", json.dumps(with_declared_types(type(loaded.config), content, "")).encode())
            expected = _theirs(path, loaded)
    except Exception as error:
        raise BugError(f"loads, but transformers raises {type(error).__name__}: {str(error)[:300]}") from error
    if actual := difference(loaded, expected):
        raise BugError(f"loads differently than in transformers: {actual}")


def _copy(source: Path, folder: Path) -> Path:
    return shutil.copytree(source, folder / "checkpoint", copy_function=os.link)


def _rewrite(file: Path, data: bytes) -> None:
    file.unlink()
    file.write_bytes(data)


def config(draw: Draw, folder: Path) -> None:
    """Damage `config.json` of several families."""
    valid = checkpoint(draw(st.sampled_from([*CONFIGS])))
    damaged = _copy(valid, folder)
    _rewrite(damaged / "config.json", json_bytes(draw, json.loads((valid / "config.json").read_text())))
    compare(damaged, valid)


def quantized_config(draw: Draw, folder: Path) -> None:
    """Damage the `quantization_config` of an FP8 checkpoint."""
    valid = fp8_checkpoint()
    damaged = _copy(valid, folder)
    content = json.loads((valid / "config.json").read_text())
    _rewrite(damaged / "config.json", json_bytes(draw, content, ("quantization_config",)))
    loaded = outcome(lambda: _ours(damaged))
    if isinstance(loaded, NRLModelsError) or not (actual := difference(loaded, _undamaged(valid))):
        return
    quantization = json.loads((damaged / "config.json").read_bytes())["quantization_config"]
    # Two blocks of 17 rows also cover 32 rows, and the scales then apply to those blocks.
    if quantization.get("weight_block_size") == [16, 16]:
        raise BugError(f"loads differently: {actual}")


def generation(draw: Draw, folder: Path) -> None:
    """Damage `generation_config.json`."""
    values = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": [1, 2], "max_length": 64}
    values |= {"bad_words_ids": [[1]], "watermarking_config": None, "cache_implementation": None}
    (folder / "generation_config.json").write_bytes(json_bytes(draw, values))
    actual = outcome(lambda: generation_config(LlamaForCausalLM, folder))
    if isinstance(actual, NRLModelsError):
        return
    if actual.to_dict() != GenerationConfig.from_pretrained(folder).to_dict() and "nan" not in repr(actual):
        raise BugError("settings differ from those that transformers reads")


def header(draw: Draw, folder: Path) -> None:
    """Damage the header of `model.safetensors`."""
    valid = checkpoint("llama")
    damaged = _copy(valid, folder)
    _rewrite(damaged / "model.safetensors", safetensors_bytes(draw, (valid / "model.safetensors").read_bytes()))
    compare(damaged, valid)


def index(draw: Draw, folder: Path) -> None:
    """Damage `model.safetensors.index.json`."""
    valid = checkpoint("llama", shards=True)
    damaged = _copy(valid, folder)
    name = "model.safetensors.index.json"
    _rewrite(damaged / name, json_bytes(draw, json.loads((valid / name).read_text())))
    compare(damaged, valid)


LOADERS: dict[str, Callable[[Path], Any]] = {
    "language model": _ours,
    "base model": nrl_models.AutoModel.from_pretrained,
    "classifier": lambda path: nrl_models.AutoModelForSequenceClassification.from_pretrained(path, new_head=True),
    "not strict": lambda path: nrl_models.AutoModelForCausalLM.from_pretrained(path, strict=False),
    "bfloat16": lambda path: nrl_models.AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16"),
}


def files(draw: Draw, folder: Path) -> None:
    """Remove or damage any files of a checkpoint, and load it in any way: a value or a typed error."""
    kinds = (checkpoint("llama"), checkpoint("llama", shards=True), checkpoint("qwen3_moe"), compressed())
    valid = draw(st.sampled_from(kinds))
    damaged = _copy(valid, folder)
    if not (damaged / "generation_config.json").exists():
        (damaged / "generation_config.json").write_text("{}")
    for _ in range(draw(st.integers(1, 3))):
        file = draw(st.sampled_from(sorted(path for path in damaged.iterdir() if path.is_file())))
        damage_kind = draw(
            st.sampled_from(["bytes", "bytes", "structure", "structure", "remove", "directory", "other"])
        )
        if damage_kind in ("remove", "directory"):
            file.unlink()
            if damage_kind == "directory":
                file.mkdir()
        elif damage_kind == "other":
            other = draw(st.sampled_from(sorted(path for path in damaged.iterdir() if path.is_file())))
            _rewrite(file, other.read_bytes())
        elif damage_kind == "structure" and (content := _content(file)) is not None:
            is_header = file.suffix == ".safetensors"
            _rewrite(file, safetensors_bytes(draw, file.read_bytes()) if is_header else json_bytes(draw, content))
        else:
            data = file.read_bytes()
            header = 8 + int.from_bytes(data[:8], "little") if file.suffix == ".safetensors" else len(data)
            _rewrite(file, some_bytes(draw, data, header))
        if not any(path.is_file() for path in damaged.iterdir()):
            break
    outcome(lambda: LOADERS[draw(st.sampled_from([*LOADERS]))](damaged))


def _content(file: Path) -> Any:
    """Return the JSON in a file or in a safetensors header. None if it is damaged already."""
    data = file.read_bytes()
    if file.suffix == ".safetensors":
        data = data[8 : 8 + int.from_bytes(data[:8], "little")]
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


@cache
def compressed() -> Path:
    """Save a Llama in INT4 in the compressed-tensors format."""
    folder = Path(tempfile.mkdtemp(prefix="nrl-fuzz-compressed-"))
    config = CONFIGS["llama"]()
    config.intermediate_size = 64  # a multiple of the group size
    write_compressed(folder, config, "int4")
    _ours(folder)  # loads without damage
    return folder


def compressed_config(draw: Draw, folder: Path) -> None:
    """Damage the `quantization_config` of a compressed-tensors checkpoint: the same weights or a typed error."""
    valid = compressed()
    damaged = _copy(valid, folder)
    content = json.loads((valid / "config.json").read_text())
    _rewrite(damaged / "config.json", json_bytes(draw, content, ("quantization_config",)))
    loaded = outcome(lambda: _ours(damaged))
    if isinstance(loaded, NRLModelsError):
        return
    actual = {name: tensor.shape for name, tensor in loaded.state_dict().items()}
    if actual != {name: tensor.shape for name, tensor in _ours(valid).state_dict().items()}:
        raise BugError("loads with other shapes")


@cache
def gguf_file() -> Path:
    """Write a GGUF file of a small Llama."""
    folder = Path(tempfile.mkdtemp(prefix="nrl-fuzz-gguf-"))
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    return write_gguf(folder / "llama.gguf", model, "llama", gguf.GGMLQuantizationType.F16, tokenizer=False)


def gguf_header(draw: Draw, folder: Path) -> None:
    """Damage the header of a GGUF file."""
    damaged = folder / "damaged.gguf"
    damaged.write_bytes(gguf_bytes(draw, gguf_file().read_bytes()))
    gguf_tables._values.cache_clear()
    compare(damaged, gguf_file())


@cache
def gguf_of(architecture: str) -> Path:
    """Write a GGUF file of a small model."""
    folder = Path(tempfile.mkdtemp(prefix=f"nrl-fuzz-{architecture}-"))
    case = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(case.config)
    write_architecture(folder / "model.gguf", model, architecture, case)
    return folder / "model.gguf"


def gguf_metadata(draw: Draw, folder: Path) -> None:
    """Damage the header of GGUF files of all architectures: a model or a typed error."""
    damaged = folder / "damaged.gguf"
    names = sorted(ARCHITECTURES.keys() - {"gemma4"})  # its per-layer embeddings are large
    damaged.write_bytes(gguf_bytes(draw, gguf_of(draw(st.sampled_from(names))).read_bytes()))
    gguf_tables._values.cache_clear()
    outcome(lambda: _ours(damaged))


@cache
def adapter() -> Path:
    """Save a LoRA adapter for the small Llama with PEFT."""
    folder = Path(tempfile.mkdtemp(prefix="nrl-fuzz-lora-"))
    torch.manual_seed(0)
    model = get_peft_model(_ours(checkpoint("llama")), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return folder


def lora(draw: Draw, folder: Path) -> None:
    """Damage the files of a LoRA adapter. PEFT must give the same result as on transformers' model."""
    valid = adapter()
    damaged = _copy(valid, folder)
    if draw(st.booleans()):
        content = json.loads((valid / "adapter_config.json").read_text())
        _rewrite(damaged / "adapter_config.json", json_bytes(draw, content))
    else:
        name = "adapter_model.safetensors"
        _rewrite(damaged / name, safetensors_bytes(draw, (valid / name).read_bytes()))
    ours, theirs = (_adapted(copy.deepcopy(base), damaged) for base in _bases())
    if isinstance(ours, Exception) or isinstance(theirs, Exception):
        if type(ours) is not type(theirs):
            raise BugError(f"ours: {ours!r:.300}; onto transformers' model: {theirs!r:.300}")
    elif actual := _different_tensors(ours, theirs):
        raise BugError(actual)


@cache
def _bases() -> tuple[PreTrainedModel, PreTrainedModel]:
    return _ours(checkpoint("llama")), _theirs(checkpoint("llama"))


def _adapted(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor] | Exception:
    torch.manual_seed(0)
    try:
        return dict(PeftModel.from_pretrained(model, folder).state_dict())
    except Exception as error:  # any exception of PEFT, but the same for both
        return error


PROMPTS = ([1, 2, 3], [4, 5])

CHOICES = [
    {
        "index": index,
        "text": "",
        "finish_reason": "length",
        "token_ids": [6, 7],
        "logprobs": {"tokens": ["token_id:6", "token_id:7"], "token_logprobs": [-1.5, -0.25]},
        "prompt_logprobs": [None, *({str(token): {"logprob": -2.0, "rank": 3}} for token in prompt[1:])],
    }
    for index, prompt in enumerate(PROMPTS)
]

ANSWERS: dict[str, Any] = {
    "/v1/models": {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 64}]},
    "/v1/completions": {"id": "x", "object": "text_completion", "choices": CHOICES, "usage": {"total_tokens": 9}},
}
"""Responses of a completions server to `PROMPTS`."""


def scripted_engine(answers: Mapping[str, bytes]) -> HTTPEngine:
    """Return an engine whose server sends predefined responses."""

    class ScriptedConnection(http_connection.ServerConnection):
        async def _ask(self, method: str, path: str, content: bytes | None, limit: int) -> Any:
            return http_connection._Answer(200, "", answers[path])

    with mock.patch.object(http, "ServerConnection", ScriptedConnection):
        return HTTPEngine("http://127.0.0.1:9", vocabulary=64)


def http_answers(draw: Draw, folder: Path) -> None:
    """Damage the responses of a completions server: models, samples and scores."""
    answers = {path: json.dumps(answer).encode() for path, answer in ANSWERS.items()}
    path = draw(st.sampled_from([*answers, "/v1/completions"]))
    answers[path] = json_bytes(draw, ANSWERS[path])

    def ask() -> tuple[list[Sample], list[list[float]]]:
        engine = scripted_engine(answers)
        return engine.generate(PROMPTS, Sampling(), max_new_tokens=2), engine.score(PROMPTS, Sampling())

    actual = outcome(ask)
    if isinstance(actual, NRLModelsError):
        return
    samples, scores = actual
    tokens = [token for sample in samples for token in sample.tokens]
    logprobs = [value for values in (*(sample.logprobs for sample in samples), *scores) for value in values]
    if not all(type(token) is int and 0 <= token < 64 for token in tokens):
        raise BugError(f"tokens outside the vocabulary: {tokens}")
    if not all(type(value) is float and not value > LARGEST_LOGPROB for value in logprobs):
        raise BugError(f"invalid log-probabilities: {logprobs}")
    if list(map(len, scores)) != list(map(len, PROMPTS)) or any(
        len(sample.tokens) != len(sample.logprobs) for sample in samples
    ):
        raise BugError(f"wrong lengths: {actual}")


def manifest(draw: Draw, folder: Path) -> None:
    """Damage the manifest of a resume checkpoint: any byte, or any field under a recomputed hash."""
    digest = "0123456789abcdef" * 2
    valid = Manifest(
        files={name: WrittenFile(1_000, digest) for name in ("config.json", "weights-00000-00001.safetensors")},
        progress={"step": 7, "seed": [1, 2]},
        optimizer=OptimizerFacts(
            [ParameterGroup({"lr": 1e-3, "betas": [0.9, 0.999], "fused": None}, ["lm_head.weight"])],
            {"lm_head.weight": States({"step": 7.0}, ["exp_avg", "exp_avg_sq"])},
        ),
    )
    data = valid.rendered()
    if draw(st.booleans()):
        damaged = some_bytes(draw, data)
    else:
        content = json_bytes(draw, json.loads(data)["manifest"])
        try:
            damaged = rendered_as_manifest(json.loads(content))
        except (ValueError, RecursionError):  # not JSON, so there is no hash to compute
            damaged = content
    (folder / MANIFEST_NAME).write_bytes(damaged)
    actual = outcome(lambda: read_manifest(folder))
    if isinstance(actual, NRLModelsError):
        return
    again, read = (json.loads(each)["manifest"] for each in (actual.rendered(), damaged))
    if again != read and "format" in read:  # the default is the current format
        raise BugError(f"changes when it is written again: {actual}")


TARGETS: dict[str, Callable[[Draw, Path], None]] = {
    "header": header,
    "index": index,
    "config": config,
    "quantized-config": quantized_config,
    "compressed-config": compressed_config,
    "files": files,
    "generation-config": generation,
    "gguf": gguf_header,
    "gguf-metadata": gguf_metadata,
    "lora": lora,
    "http": http_answers,
    "manifest": manifest,
}
