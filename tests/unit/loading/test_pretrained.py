"""Loading a model from a checkpoint, and building one from a configuration."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import torch.distributed as dist
from checkpoints import (
    WEIGHTS,
    assert_same,
    assert_same_model,
    edit_config,
    edit_weights,
    hf_tensors,
    problems,
)
from packaging.version import Version
from torch.distributed.device_mesh import init_device_mesh
from transformers import BitsAndBytesConfig, Gemma3Config, LlamaConfig, PreTrainedModel, Qwen2Config
from transformers import LlamaForCausalLM as HFLlama
from transformers import __version__ as transformers_version

from nrl_models import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    CheckpointError,
    UnknownArchitectureError,
    UnknownArgumentError,
)
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.projections import report
from nrl_models.errors import ShardingError
from nrl_models.families.gemma3.model import Gemma3ForCausalLM
from nrl_models.families.llama.model import LlamaForCausalLM
from nrl_models.families.mistral.model import MistralForCausalLM
from nrl_models.families.qwen2.model import Qwen2ForCausalLM
from nrl_models.families.table.classes import MixtralForCausalLM
from nrl_models.loading import pretrained
from nrl_models.loading.read_config import read_config
from nrl_models.testing.tiny import tiny_config

# The model


def test_buffers_match_transformers(llama_checkpoint: Path, llama: PreTrainedModel) -> None:
    for device in (None, "cpu", torch.device("cpu")):
        model = AutoModelForCausalLM.from_pretrained(llama_checkpoint, device=device)
        assert_same(dict(model.named_buffers()), dict(llama.named_buffers()))
        assert not [name for name, buffer in model.named_buffers() if buffer.device.type == "meta"]


def test_logits_match_transformers(llama_checkpoint: Path, llama: PreTrainedModel, input_ids: torch.Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids).logits, llama(input_ids).logits, atol=1e-5, rtol=1e-5)


def test_failed_load_leaves_torch_unchanged(llama_checkpoint: Path) -> None:
    register = torch.nn.Module.register_parameter
    AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    with pytest.raises(UnknownArgumentError, match="nonsense"):
        AutoModelForCausalLM.from_pretrained(llama_checkpoint, nonsense=1)
    with pytest.raises(ValueError, match="attn_implementation"):
        AutoModelForCausalLM.from_pretrained(llama_checkpoint, attn_implementation="nonsense")
    assert torch.nn.Module.register_parameter is register
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


@pytest.mark.parametrize("is_new", [False, True], ids=["loaded", "new"])
def test_model_from_inference_mode_trains(is_new: bool, llama_checkpoint: Path) -> None:
    with torch.inference_mode():
        if is_new:
            model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(llama_checkpoint))
        else:
            model = AutoModelForCausalLM.from_pretrained(llama_checkpoint)
        assert torch.is_inference_mode_enabled()
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_default_dtype_is_unchanged(llama_checkpoint: Path) -> None:
    AutoModelForCausalLM.from_pretrained(llama_checkpoint, dtype=torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32


def test_rng_state_is_unchanged(llama_checkpoint: Path) -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    assert torch.equal(torch.rand(1), expected)


def test_generation_config_is_loaded(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"max_new_tokens": 7, "temperature": 0.3, "do_sample": True})
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.generation_config.max_new_tokens, model.generation_config.temperature) == (7, 0.3)
    path.unlink()
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.max_new_tokens is None


def test_generation_settings_in_transformers_4_config(folder: Path, tmp_path: Path) -> None:
    settings = {
        "do_sample": True,
        "temperature": 0.6,
        "repetition_penalty": 1.3,
        "max_length": 33,
        "eos_token_id": [2, 7],
    }
    (folder / "generation_config.json").unlink()
    edit_config(folder, **settings)
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected, loaded = HFLlama.from_pretrained(folder).generation_config.to_dict(), model.generation_config.to_dict()
    stated = {name: value for name, value in expected.items() if value is not None}
    assert loaded == loaded | stated | settings
    model.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").generation_config.to_dict()
    assert saved == saved | settings
    other_end = AutoModelForCausalLM.from_pretrained(folder, eos_token_id=5).generation_config
    assert (other_end.eos_token_id, other_end.repetition_penalty) == (5, 1.3)


def test_subfolder(llama_checkpoint: Path, llama: PreTrainedModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint.parent, subfolder=llama_checkpoint.name)
    assert_same_model(model, llama)


def test_name_or_path_is_set(llama_checkpoint: Path) -> None:
    assert AutoModelForCausalLM.from_pretrained(llama_checkpoint).name_or_path == str(llama_checkpoint)


def test_seeded_initialization_matches_transformers(llama_config: LlamaConfig) -> None:
    tensors = []
    for build in (HFLlama._from_config, AutoModelForCausalLM.from_config, LlamaForCausalLM.from_config):
        torch.manual_seed(5)
        tensors.append(build(llama_config))
    for model in tensors[1:]:
        assert_same(hf_tensors(model), tensors[0].state_dict())


def test_initialize_weights_keeps_new_model_values(llama_config: LlamaConfig) -> None:
    for combine in (True, False):
        model = AutoModelForCausalLM.from_config(llama_config, combine=combine)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(3)
        model.initialize_weights()
        assert all(parameter.eq(3).all() for parameter in model.parameters())


# Configuration


def test_config_overrides(llama_checkpoint: Path, input_ids: torch.Tensor) -> None:
    options = {"rms_norm_eps": 0.5, "num_labels": 5, "use_cache": False, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint, **options)
    assert (model.config.rms_norm_eps, model.config.num_labels, model.config.use_cache) == (0.5, 5, False)
    expected = HFLlama.from_pretrained(llama_checkpoint, **options)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids).logits, expected(input_ids).logits, atol=1e-5, rtol=1e-5)


def test_nested_config_overrides(tmp_path: Path) -> None:
    AutoModelForImageTextToText.from_config(tiny_config(Gemma3Config)).save_pretrained(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, text_config={"rms_norm_eps": 0.5})
    assert model.config.text_config.rms_norm_eps == model.model.language_model.norm.eps == 0.5
    assert model.config.text_config.hidden_size == 256


def test_passed_config_is_not_modified(llama_checkpoint: Path) -> None:
    config = LlamaConfig.from_pretrained(llama_checkpoint, rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    before = config.to_dict()
    model = LlamaForCausalLM.from_pretrained(
        llama_checkpoint, config=config, rms_norm_eps=0.5, attn_implementation="eager"
    )
    assert model.config.rope_parameters["rope_theta"] == 77.0
    assert model.config.rms_norm_eps == 0.5
    assert config.to_dict() == before


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("devic", "devic (did you mean device?)"),
        ("atn_implementation", "did you mean attn_implementation"),
        ("rms_norm_epsilon", "did you mean rms_norm_eps"),
        ("trust_remote", "did you mean trust_remote_code"),
        ("nonsense", "unknown keyword nonsense: expected one of config, dtype, device"),
        # Keywords that transformers' configuration loader consumes silently:
        ("return_unused_kwargs", "unknown keyword return_unused_kwargs"),
        # Methods of configurations are not configuration values.
        ("push_to_hub", "unknown keyword push_to_hub"),
        ("to_dict", "unknown keyword to_dict"),
    ],
)
@pytest.mark.parametrize("pass_config", [False, True], ids=["loaded config", "passed config"])
def test_unknown_keyword_raises(llama_checkpoint: Path, keyword: str, hint: str, pass_config: bool) -> None:
    config = LlamaConfig.from_pretrained(llama_checkpoint) if pass_config else None
    with pytest.raises(UnknownArgumentError) as caught:
        AutoModelForCausalLM.from_pretrained(llama_checkpoint, config=config, **{keyword: True})
    assert hint in str(caught.value)
    assert "or a key of LlamaConfig" in str(caught.value)


@pytest.mark.parametrize("keyword", ["force_download", "code_revision", "proxies"])
@pytest.mark.parametrize("pass_config", [False, True], ids=["loaded config", "passed config"])
def test_hub_keywords_raise(llama_checkpoint: Path, keyword: str, pass_config: bool) -> None:
    config = LlamaConfig.from_pretrained(llama_checkpoint) if pass_config else None
    with pytest.raises(UnknownArgumentError, match=f"^{keyword}: not supported"):
        AutoModelForCausalLM.from_pretrained(llama_checkpoint, config=config, **{keyword: True})


@pytest.mark.parametrize(
    "keyword", ["model_type", "transformers_version", "sub_configs", "use_return_dict", "_name_or_path"]
)
def test_config_attribute_override_raises(llama_checkpoint: Path, keyword: str) -> None:
    with pytest.raises(UnknownArgumentError, match=f"^{keyword}: not a configuration value, because"):
        AutoModelForCausalLM.from_pretrained(llama_checkpoint, **{keyword: "mixtral"})


@pytest.mark.parametrize("values", [{"num_labels": 3}, {"rms_norm_eps": 0.5}, {"architectures": ["LlamaForCausalLM"]}])
def test_config_property_overrides(llama_checkpoint: Path, values: dict[str, Any]) -> None:
    config = AutoModelForCausalLM.from_pretrained(llama_checkpoint, **values).config
    assert {name: getattr(config, name) for name in values} == values


def test_error_lists_all_unknown_keywords(llama_checkpoint: Path) -> None:
    with pytest.raises(UnknownArgumentError, match=r"unknown keywords one, devise \(did you mean device\?\): expected"):
        AutoModelForCausalLM.from_pretrained(llama_checkpoint, one=1, devise="cpu")


@pytest.mark.parametrize("dtype", ["bfloat61", "int8", "float8_e4m3fn", torch.int32, "Tensor", 16])
def test_invalid_dtype_raises(llama_checkpoint: Path, dtype: Any) -> None:
    with pytest.raises(UnknownArgumentError, match="expected 'auto', bfloat16"):
        AutoModelForCausalLM.from_pretrained(llama_checkpoint, dtype=dtype)


def test_empty_path_raises(llama_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(llama_checkpoint)
    with pytest.raises(UnknownArgumentError, match=r"the path is empty: pass '\.' for the current directory"):
        AutoModelForCausalLM.from_pretrained("")
    AutoModelForCausalLM.from_pretrained(".")


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", '"llama"', "\xff"])
def test_invalid_config_json_raises(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError) as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert problems(caught.value) == {("file", "config.json")}
    assert "is not a JSON object" in str(caught.value)


def test_missing_config_raises(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert problems(caught.value) == {("file", "config.json")}


def test_unknown_model_type_raises(folder: Path) -> None:
    edit_config(folder, model_type="no_such_model")
    for attempt in (AutoModelForCausalLM.from_pretrained, LlamaForCausalLM.from_pretrained, read_config):
        with pytest.raises(UnknownArchitectureError, match=r"neither transformers nor a registered family knows"):
            attempt(folder)


def test_hub_repo_offline_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for attempt in (AutoModelForCausalLM.from_pretrained, LlamaForCausalLM.from_pretrained):
        with pytest.raises(CheckpointError) as caught:
            attempt("nobody/nothing", cache_dir=tmp_path)
        assert problems(caught.value) == {("file", "nobody/nothing")}
        assert "check its name, your token and the network" in str(caught.value)


# Family classes


def test_family_class_from_pretrained(llama_checkpoint: Path, llama: PreTrainedModel) -> None:
    model = LlamaForCausalLM.from_pretrained(llama_checkpoint, dtype=torch.float32, combine=True)
    assert type(model) is LlamaForCausalLM
    assert_same_model(model, llama)
    with pytest.raises(UnknownArgumentError, match="nonsense"):
        LlamaForCausalLM.from_pretrained(llama_checkpoint, nonsense=1)


@pytest.mark.parametrize("model_class", [Qwen2ForCausalLM, MistralForCausalLM, MixtralForCausalLM, Gemma3ForCausalLM])
def test_config_of_another_family_raises(llama_checkpoint: Path, model_class: Any) -> None:
    # Llama's weights fit Mistral, which uses another attention.
    for attempt in (
        lambda: model_class.from_pretrained(llama_checkpoint),
        lambda: model_class.from_config(LlamaConfig.from_pretrained(llama_checkpoint)),
    ):
        with pytest.raises(UnknownArchitectureError) as caught:
            attempt()
        assert "LlamaConfig (model_type 'llama')" in str(caught.value)
        assert f"{model_class.__name__} takes a {model_class.config_class.__name__}" in str(caught.value)


def test_text_class_uses_text_config() -> None:
    config = tiny_config(Gemma3Config)
    model = Gemma3ForCausalLM.from_config(config)
    assert type(model.config) is type(config.text_config)


def test_config_subclass_is_accepted() -> None:
    class Tuned(Qwen2Config):
        pass

    assert Qwen2ForCausalLM.from_config(tiny_config(Tuned), device="meta").config.__class__ is Tuned


# Quantized checkpoints


@pytest.fixture
def quantized(folder: Path) -> Path:
    """`llama_checkpoint` with its linears quantized to FP8 by blocks, in DeepSeek's format."""

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.endswith("proj.weight")]:
            rows, columns = tensors[key].shape
            blocks = tensors[key].view(rows // 128, 128, columns // 128, 128)
            scales = blocks.abs().amax((1, 3)) / 448
            values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            tensors[key], tensors[f"{key}_scale_inv"] = values.view(rows, columns), scales

    edit_weights(folder, quantize)
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    edit_config(folder, quantization_config=method)
    return folder


@pytest.fixture
def awq(quantized: Path) -> Path:
    """The FP8 checkpoint with another method in its configuration, which transformers loads."""
    edit_config(quantized, quantization_config={"quant_method": "awq", "bits": 4})
    return quantized


def test_quantized_loading_info_raises_checkpoint_error(
    awq: Path, monkeypatch: pytest.MonkeyPatch, llama_config: LlamaConfig
) -> None:
    load_options = {}

    def load(model_class: type, folder: Path, **options: Any) -> Any:
        load_options.update(options, model_class=model_class)
        return HFLlama(llama_config), {
            "missing_keys": {"a"},
            "unexpected_keys": set(),
            "mismatched_keys": {("b", 1, 2)},
        }

    monkeypatch.setattr(pretrained.PreTrainedModel, "from_pretrained", classmethod(load))
    with pytest.raises(CheckpointError) as caught:
        AutoModelForCausalLM.from_pretrained(awq, dtype=torch.bfloat16)
    assert {kind for kind, _ in problems(caught.value)} == {"missing", "shape"}
    assert load_options["model_class"] is LlamaForCausalLM
    assert (load_options["dtype"], load_options["device_map"], load_options["combine"]) == (
        torch.bfloat16,
        torch.device("cpu"),
        False,
    )
    assert AutoModelForCausalLM.from_pretrained(awq, strict=False)
    # transformers needs the target devices while it loads a quantized model.
    AutoModelForCausalLM.from_pretrained(awq, strict=False, device_map="auto", max_memory={"cpu": "1GB"})
    assert (load_options["device_map"], load_options["max_memory"]) == ("auto", {"cpu": "1GB"})


@pytest.mark.skipif(
    Version(transformers_version) < Version("5.18"), reason="transformers 5.16 dequantizes no Llama without a GPU"
)
@pytest.mark.parametrize("combine", [True, False])
def test_fp8_dequantization_matches_transformers(
    quantized: Path, llama: PreTrainedModel, tmp_path: Path, combine: bool
) -> None:
    expected = HFLlama.from_pretrained(quantized, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32, combine=combine)
    assert type(model) is LlamaForCausalLM
    assert not model.training
    assert_same(hf_tensors(model), expected.state_dict())
    torch.testing.assert_close(dict(hf_tensors(model)), dict(llama.state_dict()), atol=0.05, rtol=0.1)
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), expected)


@pytest.mark.integrations
def test_bitsandbytes_linears_stay_unfused(llama_checkpoint: Path, input_ids: torch.Tensor) -> None:
    pytest.importorskip("bitsandbytes")
    skipped = ["lm_head", "gate_proj", "up_proj"]
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=skipped)
    models = [
        load(llama_checkpoint, quantization_config=config, dtype=torch.float32)
        for load in (HFLlama.from_pretrained, AutoModelForCausalLM.from_pretrained)
    ]
    with torch.no_grad():
        torch.testing.assert_close(*(model(input_ids).logits for model in models))
    for group in report(models[1]):
        assert group.joined == group.name.endswith("gate_up_proj")
        assert group.joined or "replaced: q_proj, k_proj, v_proj" in str(group.reason)
    attention = models[1].model.layers[0].self_attn
    assert [type(getattr(attention, name)).__name__ for name in ("q_proj", "k_proj", "v_proj")] == ["Linear4bit"] * 3


def test_integer_weights_without_quantization_config_raise(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(torch.int8)}))
    with pytest.raises(CheckpointError) as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert problems(caught.value) == {("dtype", "lm_head.weight")}
    assert (folder / WEIGHTS).exists()


def test_directory_with_gguf_suffix(llama: PreTrainedModel, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path / "llama.gguf")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "llama.gguf").state_dict(), llama.state_dict())
    (tmp_path / "llama.gguf" / "backup.gguf").mkdir()
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "llama.gguf").state_dict(), llama.state_dict())


# Concurrent loads


def test_sequence_classifier_with_new_head_trains(llama_checkpoint: Path, input_ids: torch.Tensor) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(llama_checkpoint, strict=False, num_labels=1)
    loss = model(input_ids).logits.square().mean()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def open_files(folder: Path) -> list[str]:
    """Return the paths of a folder that this process has open, one for each descriptor."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor that lists the directory
            links.append(os.readlink(descriptor))
    return [link for link in links if link.startswith(str(folder.resolve()))]


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


@on_linux
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # mapped, and copied
@pytest.mark.parametrize("name", ["folder", "shards", "quantized"])
def test_loaded_model_keeps_no_file_open(name: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert open_files(folder) == []
    assert model.model.embed_tokens.weight.isfinite().all()  # reads all pages


@on_linux
def test_failed_load_closes_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def fails(model: PreTrainedModel, files: CheckpointFiles, **_: Any) -> None:
        files.read(next(iter(files.tensors.values())))
        opened.extend(open_files(folder))
        raise OSError("gone")

    monkeypatch.setattr(pretrained, "load_weights", fails)
    with pytest.raises(OSError, match="gone") as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert opened
    assert open_files(folder) == []
    assert caught.value  # the traceback references the file contents


@on_linux
def test_failed_sharded_load_closes_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: PreTrainedModel, files: CheckpointFiles, *_: object, **__: object) -> None:
        files.read(next(iter(files.tensors.values())))
        assert open_files(folder)
        raise ShardingError("another rank failed", [])

    monkeypatch.setattr(pretrained, "load_sharded", fails)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        with pytest.raises(ShardingError) as caught:
            AutoModelForCausalLM.from_pretrained(folder, mesh=mesh)
    finally:
        dist.destroy_process_group()
    assert open_files(folder) == []
    assert caught.value


def test_loaded_models_do_not_share_memory(llama_checkpoint: Path) -> None:
    first, second = (AutoModelForCausalLM.from_pretrained(llama_checkpoint) for _ in range(2))
    with torch.no_grad():
        first.model.norm.weight.zero_()  # does not affect the second model
    assert second.model.norm.weight.all()


def test_new_model_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_config(tiny_config(LlamaConfig), dtype=dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
