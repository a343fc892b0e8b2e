"""transformers' keywords have the same effect as in transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WEIGHTS, assert_same, edit_config, edit_weights, stored
from transformers import AutoConfig, BitsAndBytesConfig, Gemma3Config, LlamaConfig, PreTrainedModel
from transformers import AutoModelForCausalLM as HFAuto
from transformers import LlamaForCausalLM as HFLlama

from nrl_models import AutoModelForCausalLM, AutoModelForSequenceClassification, BackendConfig, CheckpointError
from nrl_models.common.checkpoint import files
from nrl_models.distributed import load_checkpoint
from nrl_models.errors import ConfigurationError, DeviceError, StateDictError, UnknownArgumentError
from nrl_models.families.llama.model import LlamaForCausalLM
from nrl_models.loading import keywords as of_keywords
from nrl_models.loading.read_config import override


def properties(model: PreTrainedModel) -> dict[str, Any]:
    """Return the properties of a model that a keyword may change."""
    return {
        "dtypes": {name: parameter.dtype for name, parameter in model.named_parameters()},
        "devices": {name: parameter.device for name, parameter in model.named_parameters()},
        "map": getattr(model, "hf_device_map", None),
        "hooks": [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")],
        "training": model.training,
        "config dtype": model.config.dtype,
        "attention": model.config._attn_implementation,
    }


HALVES = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}


@pytest.mark.parametrize(
    "keywords",
    [
        {"dtype": None},
        {"dtype": "auto"},
        {"dtype": "bfloat16"},
        {"dtype": torch.float16},
        {"torch_dtype": torch.bfloat16},
        {"torch_dtype": "auto"},
        {"device_map": "cpu"},
        {"device_map": torch.device("cpu")},
        {"device_map": {"": "cpu"}},
        {"device_map": {"": torch.device("cpu")}},
        {"device_map": HALVES | {"lm_head": "cpu"}},
        {"device_map": HALVES},  # the head is on the same device as everything else
        {"device_map": "auto"},
        {"device_map": "balanced"},
        {"device_map": "balanced_low_0"},
        {"device_map": "sequential"},
        {"low_cpu_mem_usage": True},
        {"low_cpu_mem_usage": False, "use_safetensors": True},
        {"use_safetensors": None, "local_files_only": True},
        {"attn_implementation": "eager"},
    ],
    ids=str,
)
def test_keyword_matches_transformers(keywords: dict[str, Any], llama_checkpoint: Path) -> None:
    theirs = HFAuto.from_pretrained(pretrained_model_name_or_path=llama_checkpoint, **keywords)
    for of in (AutoModelForCausalLM, LlamaForCausalLM):
        ours = of.from_pretrained(pretrained_model_name_or_path=llama_checkpoint, **keywords)
        assert properties(ours) == properties(theirs)
        assert_same(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize(
    ("short", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_short_dtype_names(short: str, dtype: torch.dtype, llama_checkpoint: Path, llama_config: LlamaConfig) -> None:
    for model in (
        AutoModelForCausalLM.from_pretrained(llama_checkpoint, dtype=short),
        AutoModelForCausalLM.from_config(llama_config, torch_dtype=short),
    ):
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_torch_dtype_warns_once(llama_checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    of_keywords.logger.warning_once.cache_clear()
    for _ in range(2):
        AutoModelForCausalLM.from_pretrained(llama_checkpoint, torch_dtype="bf16", dtype="bf16")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "`torch_dtype` is deprecated here and in transformers"
    ]


def test_keywords_with_default_values_have_no_effect(llama_checkpoint: Path) -> None:
    defaults: dict[str, Any] = {"disable_mmap": None, "kernel_config": None, "allow_all_kernels": False}
    defaults |= {"adapter_name": "".join(["de", "fault"]), "tqdm_class": None, "force_download": False}
    AutoModelForCausalLM.from_pretrained(llama_checkpoint, **defaults)
    unsupported = {name: default for name, (default, _) in of_keywords.UNSUPPORTED.items()}
    AutoModelForCausalLM.from_pretrained(llama_checkpoint, **unsupported)
    AutoModelForCausalLM.from_pretrained(llama_checkpoint, **dict.fromkeys(unsupported))
    AutoModelForCausalLM.from_pretrained(llama_checkpoint, dtype=torch.bfloat16, torch_dtype="bfloat16")


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"device_map": "bogus"}, UnknownArgumentError, "device_map='bogus': expected a device .* auto, balanced"),
        ({"device_map": {"": "cqu"}}, UnknownArgumentError, r"device_map\[''\]='cqu': expected a device"),
        ({"device_map": 1.5}, UnknownArgumentError, "device_map=1.5"),
        ({"device": "bogus"}, UnknownArgumentError, "device='bogus': expected a device"),
        ({"device_map": -1}, DeviceError, "device_map=-1: no such accelerator; available: cpu"),
        ({"device_map": 99}, DeviceError, "device_map=99"),
        ({"device_map": {"model": 99}}, DeviceError, r"device_map\['model'\]=99"),
        ({"device_map": "cuda:99"}, DeviceError, "device_map='cuda:99': .*; available: cpu"),
        ({"device": "cuda:99"}, DeviceError, "device='cuda:99'"),
        ({"dtype": "float23"}, UnknownArgumentError, "dtype='float23'"),
        ({"dtpe": "float32"}, UnknownArgumentError, r"unknown keyword dtpe \(did you mean dtype\?\)"),
        ({"load_in_4bit": True}, UnknownArgumentError, r"load_in_4bit \(pass quantization_config=transformers\.Bits"),
        ({"device": "xpu"}, DeviceError, "device='xpu': XPU is not available to torch; available: cpu"),
        (
            {"attn_implementation": "flash_attn"},
            ConfigurationError,
            "(?s)config: attn_implementation: .*What to do: pass a supported attn_implementation to from_pretrained",
        ),
        (
            {"dtype": "bf16", "torch_dtype": "fp16"},
            UnknownArgumentError,
            "dtype='bf16' and torch_dtype='fp16': two names of the same option",
        ),
        (
            {"torch_dtype": "fp32", "dtype": "bf16"},
            UnknownArgumentError,
            "torch_dtype='fp32' and dtype='bf16': two names",
        ),
        (
            {"dtype": "flaot32"},
            UnknownArgumentError,
            r"dtype='flaot32' \(did you mean float32\?\): expected 'auto', bfloat16 \(bf16\), ",
        ),
        ({"dtype": "torch.float32"}, UnknownArgumentError, r"dtype='torch.float32' \(did you mean float32\?\)"),
        ({"rope_theta": 7.0}, UnknownArgumentError, r"rope_theta \(pass rope_parameters={.*'rope_theta': 7.0"),
        ({"use_safetensors": False}, UnknownArgumentError, "use_safetensors=False: .* Only safetensors are supported"),
        ({"model_type": "mistral"}, UnknownArgumentError, "model_type: not a configuration value"),
        ({"sub_configs": {}, "base_model_tp_plan": {}}, UnknownArgumentError, "sub_configs, base_model_tp_plan: "),
        ({"tp_plan": "auto", "device_mesh": None}, UnknownArgumentError, "tp_plan: transformers' own sharded loading"),
        ({"proxies": {"http": "x"}, "from_tf": False}, UnknownArgumentError, r"proxies: not supported\. Set the"),
        ({"force_download": True}, UnknownArgumentError, r"^force_download: not supported\. Delete the repository"),
        ({"generation_config": {"top_k": 5}}, UnknownArgumentError, r"^generation_config: .*after loading$"),
        ({"adapter_name": "mine", "dtype": None}, UnknownArgumentError, r"^adapter_name: not supported\. Load the"),
        ({"disable_mmap": True, "use_kernels": 1}, UnknownArgumentError, r"^disable_mmap: .*; use_kernels: not supp"),
        ({"weights_only": False}, UnknownArgumentError, "weights_only: only safetensors are read"),
        ({"from_tf": True, "use_safetensors": False}, UnknownArgumentError, "from_tf: .*; use_safetensors=False"),
        ({"key_mapping": {"(": "x"}}, UnknownArgumentError, r"key_mapping: '\(' is not a regular expression"),
        ({"key_mapping": {"a": 5}}, UnknownArgumentError, r"key_mapping\['a'\]=5: expected the name"),
        ({"key_mapping": 5, "strict": "x"}, UnknownArgumentError, "key_mapping=5: expected Mapping; strict='x'"),
        ({"subfolder": 5}, UnknownArgumentError, "subfolder=5: expected str"),
        ({"gguf_file": 5}, UnknownArgumentError, "gguf_file=5: expected str"),
        ({"config": 5}, UnknownArgumentError, "config=5: expected PathLike or str or PreTrainedConfig"),
        ({"backend": 5}, UnknownArgumentError, "backend=5: expected BackendConfig"),
        ({"mesh": 5}, UnknownArgumentError, "mesh=5: expected DeviceMesh"),
        ({"max_memory": 5}, UnknownArgumentError, "max_memory=5: expected Mapping"),
        (
            {"device_map": "auto", "max_memory": {"cpu": "x"}},
            UnknownArgumentError,
            r"max_memory\['cpu'\]='x': expected bytes, or a size such as '5GB'",
        ),
        *(
            ({"device_map": "auto", "max_memory": memory}, error, message)
            for memory, error, message in [
                ({99: "1GB", "cpu": "1GB"}, DeviceError, "max_memory: device=99: no such accelerator; available: cpu"),
                ({"cuda:0": "1GB"}, UnknownArgumentError, r"max_memory\['cuda:0'\]: expected the number of an acc"),
                ({"gpu": "1GB"}, UnknownArgumentError, r"max_memory\['gpu'\]: expected the number of an acc"),
                ({True: "1GB"}, UnknownArgumentError, r"max_memory\[True\]: expected the number of an acc"),
                ({"cpu": 1.5}, UnknownArgumentError, r"max_memory\['cpu'\]=1\.5: expected bytes"),
                ({"cpu": None}, UnknownArgumentError, r"max_memory\['cpu'\]=None: expected bytes"),
                ({"cpu": True}, UnknownArgumentError, r"max_memory\['cpu'\]=True: expected bytes"),
            ]
        ),
        *(
            ({"device_map": place, "offload_folder": folder}, UnknownArgumentError, f"{__file__} is a file, expected")
            for place in ({"": "disk"}, "auto")
            for folder in (__file__, f"{__file__}/below")
        ),
        ({"device_map": {"": "disk"}}, UnknownArgumentError, "the model on 'disk': pass offload_folder"),
        ({"device_map": {}}, UnknownArgumentError, r"device_map={}: expected a device for each module"),
        (
            {"key_mapping": {"^model": r"\1"}},
            UnknownArgumentError,
            r"key_mapping\['\^model'\]=.*: expected a replacement",
        ),
        ({"local_file_only": True}, UnknownArgumentError, r"local_file_only \(did you mean local_files_only\?\)"),
        ({"torch_dtpye": "auto"}, UnknownArgumentError, r"torch_dtpye \(did you mean torch_dtype\?\)"),
        ({"backend_confg": None}, UnknownArgumentError, r"backend_confg \(did you mean backend_config"),
        ({"pretrained_model_name_or_path": "a"}, UnknownArgumentError, "once: as the first argument, or as"),
    ],
    ids=str,
)
def test_invalid_keyword_raises_before_reading(
    keywords: dict[str, Any],
    error: type[Exception],
    message: str,
    llama_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files.CheckpointFiles, "read", lambda *_: pytest.fail("read"))
    monkeypatch.setattr(files.CheckpointFiles, "read_joined", lambda *_: pytest.fail("read"))
    with pytest.raises(error, match=message):
        AutoModelForCausalLM.from_pretrained(llama_checkpoint, **keywords)


def test_missing_path_raises() -> None:
    with pytest.raises(UnknownArgumentError, match="expected a directory or the name of a hub repository"):
        AutoModelForCausalLM.from_pretrained()


def test_from_config_keywords(llama_config: LlamaConfig) -> None:
    with pytest.raises(UnknownArgumentError, match=r"backends \(did you mean backend\?\)"):
        AutoModelForCausalLM.from_config(llama_config, backends=None)
    model = AutoModelForCausalLM.from_config(llama_config, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    model = AutoModelForCausalLM.from_config(llama_config, backend_config=BackendConfig(attn="eager", linear="torch"))
    assert model.config._attn_implementation == "eager"


def test_local_files_only_is_passed_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    local_only_values: list[bool] = []

    def fetch(name: str, *, local_files_only: bool, **_: object) -> str:
        local_only_values.append(local_files_only)
        raise OSError("not there")

    monkeypatch.setattr("nrl_models.common.checkpoint.resolve_folder.snapshot_download", fetch)
    for keywords in ({"local_files_only": True}, {}):
        with pytest.raises(CheckpointError, match="not there"):
            AutoModelForCausalLM.from_pretrained("owner/name", **keywords)
    assert local_only_values == [True, False]


@pytest.mark.parametrize("shard_size", ["5GB", "2MB"])
def test_weight_variant(llama: PreTrainedModel, shard_size: str, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path, variant="fp16", max_shard_size=shard_size)
    assert not (tmp_path / WEIGHTS).exists()
    assert len(list(tmp_path.glob("*.safetensors"))) == (1 if shard_size == "5GB" else 3)
    ours, theirs = (of.from_pretrained(tmp_path, variant="fp16") for of in (AutoModelForCausalLM, HFAuto))
    assert_same(ours.state_dict(), theirs.state_dict())
    with pytest.raises(CheckpointError, match=r"has neither model\.bf16\.safetensors nor"):
        AutoModelForCausalLM.from_pretrained(tmp_path, variant="bf16")
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("keyword", ["strict", "subfolder", "trust_remote_code", "local_files_only", "mtp", "combine"])
def test_none_means_default(keyword: str, llama_checkpoint: Path, llama: PreTrainedModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint, **{keyword: None})
    assert_same(model.state_dict(), llama.state_dict())


@pytest.mark.parametrize(
    "path",
    [5, b"x", ["a"], "x\0y", "a" * 300, "~nobody-of-that-name/x"],
    ids=["number", "bytes", "list", "null byte", "long", "unknown user"],
)
def test_invalid_path_raises(path: Any) -> None:
    with pytest.raises((UnknownArgumentError, CheckpointError), match=r"expected a directory|is not a path"):
        AutoModelForCausalLM.from_pretrained(path)


SWAPPED = {r"layers\.0\.": "layers.7.", r"layers\.1\.": "layers.0.", r"layers\.7\.": "layers.1."}


def test_key_mapping_that_swaps_names(llama_checkpoint: Path, tmp_path: Path) -> None:
    models = [of.from_pretrained(llama_checkpoint, key_mapping=SWAPPED) for of in (AutoModelForCausalLM, HFAuto)]
    ours, theirs = (model.state_dict() for model in models)
    assert_same(ours, theirs)
    name = "model.layers.{}.mlp.up_proj.weight"
    assert_same({name.format(0): ours[name.format(1)]}, {name.format(0): stored(llama_checkpoint)[name.format(0)]})
    models[1].save_pretrained(tmp_path / "theirs")
    if len(stored(tmp_path / "theirs")) < len(theirs):  # transformers 5.5 loses the tensors of one layer
        with pytest.raises(StateDictError, match=r"duplicated: model\.layers\.\d\.\S+: transformers gives it the name"):
            models[0].save_pretrained(tmp_path / "ours")
        models[0].save_pretrained(tmp_path / "ours", save_original_format=False)
        assert_same(stored(tmp_path / "ours"), ours)
        return
    models[0].save_pretrained(tmp_path / "ours")
    assert_same(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))


def test_key_mapping_to_unknown_names_raises(llama_checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        AutoModelForCausalLM.from_pretrained(llama_checkpoint, key_mapping={r"layers\.1\.": "layers.9."})


def test_key_mapping_is_reverted_on_save(folder: Path, llama: PreTrainedModel, tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.layers", "decoder.blocks")] = tensors.pop(name)

    edit_weights(folder, rename)
    mapping = {r"^decoder\.blocks": "model.layers"}
    models = {of: of.from_pretrained(folder, key_mapping=mapping) for of in (AutoModelForCausalLM, HFAuto)}
    saved = []
    for of, model in models.items():
        assert_same(model.state_dict(), llama.state_dict())
        model.save_pretrained(tmp_path / of.__module__)
        saved.append(stored(tmp_path / of.__module__))
    assert_same(*saved)
    assert any(name.startswith("decoder.blocks") for name in saved[0])
    with pytest.raises(CheckpointError, match=r"unexpected: decoder\.blocks"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_partial_key_mapping(mixtral_checkpoint: Path, tmp_path: Path) -> None:
    """Reverting the regular expression would also rename the router weights."""
    shutil.copytree(mixtral_checkpoint, tmp_path / "source")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(".block_sparse_moe.experts.", ".ffn.experts.")] = tensors.pop(name)

    edit_weights(tmp_path / "source", rename)
    mapping = {r"\.ffn\.": ".mlp."}
    for name, auto in (("theirs", HFAuto), ("ours", AutoModelForCausalLM)):
        model = auto.from_pretrained(tmp_path / "source", key_mapping=mapping)
        model.save_pretrained(tmp_path / name)
    assert_same(stored(tmp_path / "ours"), stored(tmp_path / "source"))
    assert stored(tmp_path / "theirs").keys() != stored(tmp_path / "source").keys()
    assert dict(model.state_dict_adapter.iter_export(model)).keys() == stored(mixtral_checkpoint).keys()


def test_output_loading_info_matches_transformers(llama_checkpoint: Path, folder: Path) -> None:
    keywords: dict[str, Any] = {"output_loading_info": True}
    ours, info = AutoModelForCausalLM.from_pretrained(llama_checkpoint, **keywords)
    theirs, expected = HFAuto.from_pretrained(llama_checkpoint, **keywords)
    assert info == expected
    assert ours.state_dict_adapter is not None
    edit_weights(folder, lambda tensors: tensors.update(extra=tensors.pop("model.norm.weight")))
    torch.manual_seed(0)
    ours, info = AutoModelForCausalLM.from_pretrained(folder, strict=False, **keywords)
    torch.manual_seed(0)
    theirs, expected = HFAuto.from_pretrained(folder, **keywords)
    assert info == expected
    assert info == {
        "missing_keys": {"model.norm.weight"},
        "unexpected_keys": {"extra"},
        "mismatched_keys": set(),
        "error_msgs": [],
    }
    assert_same(ours.state_dict(), theirs.state_dict())
    _, info = AutoModelForSequenceClassification.from_pretrained(llama_checkpoint, strict=False, **keywords)
    assert info["missing_keys"] == {"score.weight"}
    assert info["unexpected_keys"] == {"lm_head.weight"}


def test_config_from_another_path(llama_checkpoint: Path, folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.5}))
    for place in (folder, str(folder), path):
        ours, theirs = (of.from_pretrained(llama_checkpoint, config=place) for of in (LlamaForCausalLM, HFLlama))
        assert ours.config.rms_norm_eps == theirs.config.rms_norm_eps == 0.5


LABELS = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}


@pytest.mark.parametrize("names", [("id2label", "num_labels"), ("label2id", "num_labels"), (*LABELS, "num_labels")])
def test_label_overrides_in_any_order(names: tuple[str, ...], folder: Path) -> None:
    edit_config(folder, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    values = LABELS | {"num_labels": 2}
    expected = AutoConfig.from_pretrained(folder, **{name: values[name] for name in names})
    for order in (names, names[::-1]):
        overrides = {name: values[name] for name in order}
        config = AutoModelForSequenceClassification.from_pretrained(folder, new_head=True, **overrides).config
        assert (config.id2label, config.label2id) == (expected.id2label, expected.label2id)


@pytest.mark.parametrize("order", [1, -1])
def test_attn_implementation_applies_to_passed_text_config(order: int) -> None:
    overrides = {"attn_implementation": "eager", "text_config": {"rms_norm_eps": 1e-3}}
    config = Gemma3Config()
    override(config, dict(list(overrides.items())[::order]))
    assert config.text_config.rms_norm_eps == 1e-3
    assert config.text_config._attn_implementation == config.vision_config._attn_implementation == "eager"


@pytest.mark.parametrize("value", [None, "1"])
def test_value_rejected_by_config_setter_raises(value: Any, folder: Path) -> None:
    with pytest.raises(UnknownArgumentError, match=f"num_labels={value!r}: LlamaConfig does not accept this value"):
        AutoModelForSequenceClassification.from_pretrained(folder, num_labels=value)


@pytest.mark.parametrize("keys", [3, True, b"x", ["rope_scaling", 3], [["rope_scaling"]], iter(["rope_scaling"])])
def test_ignore_config_keys_must_be_strings(keys: Any, folder: Path) -> None:
    expected = r"ignore_config_keys=.*: expected a key of config.json, or a list of keys, as strings"
    with pytest.raises(UnknownArgumentError, match=expected):
        AutoModelForCausalLM.from_pretrained(folder, ignore_config_keys=keys)
    config = AutoConfig.from_pretrained(folder)
    for check in (
        AutoModelForCausalLM.from_config,
        lambda config, **keys: load_checkpoint("x", HFLlama(config), **keys),
    ):
        with pytest.raises(UnknownArgumentError, match=expected):
            check(config, ignore_config_keys=keys)


@pytest.mark.parametrize("value", ["nf4", 4, True, ["nf4"], BitsAndBytesConfig])
def test_quantization_config_of_another_type_raises(value: Any, folder: Path) -> None:
    expected = r"quantization_config=.*: expected a configuration of transformers, for example .*load_in_4bit=True"
    with pytest.raises(UnknownArgumentError, match=expected):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=value)


@pytest.mark.parametrize(
    "value", [{}, {"quant_method": "nf4"}, {"load_in_4bit": "yes", "quant_method": "bitsandbytes"}]
)
def test_error_names_invalid_quantization_dictionary(value: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)quantization_config.*was passed as .*pass a different value"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=value)


def test_errors_mention_from_config_and_from_pretrained() -> None:
    with pytest.raises(UnknownArgumentError, match=r"or call from_config\(config\) for a model with new weights"):
        AutoModelForCausalLM.from_pretrained(None, config=LlamaConfig())
    with pytest.raises(
        UnknownArgumentError, match=r"config='ckpt': .*AutoConfig\.from_pretrained\(path\)\. .* from_pret"
    ):
        AutoModelForCausalLM.from_config("ckpt")  # type: ignore[arg-type]


def test_implementation_keyword_takes_precedence_over_backend(llama_checkpoint: Path) -> None:
    backend = BackendConfig(attn="sdpa")
    keywords: Any = {"attn_implementation": "eager", "backend": backend}
    loaded = AutoModelForCausalLM.from_pretrained(llama_checkpoint, **keywords)
    assert loaded.config._attn_implementation == "eager"
    built = AutoModelForCausalLM.from_config(loaded.config, **keywords)
    assert built.config._attn_implementation == "eager"
    keywords["attn_implementation"] = None
    for model in (
        AutoModelForCausalLM.from_pretrained(llama_checkpoint, **keywords),
        AutoModelForCausalLM.from_config(loaded.config, **keywords),
    ):
        assert model.config._attn_implementation == "sdpa"


def test_misspelled_keyword_of_save_pretrained_raises(llama_config: LlamaConfig, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(llama_config)
    with pytest.raises(UnknownArgumentError, match=r"max_shard_sise \(did you mean max_shard_size\?\)"):
        model.save_pretrained(tmp_path / "saved", max_shard_sise="2MB")
    assert not list(tmp_path.iterdir())
    model.save_pretrained(tmp_path / "saved", safe_serialization=True, save_function=torch.save, tags=["x"])
