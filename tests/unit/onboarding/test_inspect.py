import json
from pathlib import Path

import pytest
from config.published_configs import values_of
from transformers import AutoConfig, CLIPConfig, CLIPModel
from typer.testing import CliRunner
from versions import needs, since

from nrl_models import registry
from nrl_models.cli import app
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.modules import input_embeddings
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.savable import check_ties
from nrl_models.diagnostics.embeddings import find_embeddings
from nrl_models.distributed.parallel_plan import declared_tensor_plan
from nrl_models.errors import CheckpointError
from nrl_models.loading.read_config import read_config
from nrl_models.onboarding.inspect import inspect, kinds_of
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.tiny import tiny_config
from tests.unit.printed import unframed


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("llama", ["dense"]),
        ("mixtral", ["moe"]),
        ("deepseek_v3", ["moe"]),
        ("gemma3", ["dense", "vlm"]),
        ("qwen3_next", ["moe", "hybrid"]),
        ("gpt_oss", ["moe"]),
        ("dbrx", ["moe"]),
        ("gemma2", ["dense"]),
        ("bamba", ["dense", "hybrid"]),
    ],
)
def test_kinds_of_config(model_type: str, kinds: list[str]) -> None:
    assert kinds_of(AutoConfig.for_model(model_type)) == kinds


@needs("NemotronHForCausalLM")
@pytest.mark.parametrize(
    ("repository", "kinds"),
    [
        ("nvidia/Nemotron-H-8B-Base-8K", ["dense", "hybrid"]),  # a number of experts, and no layer with experts
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", ["moe", "hybrid"]),
    ],
)
def test_kinds_of_published_config(repository: str, kinds: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values_of(repository)))
    assert kinds_of(read_config(tmp_path)) == kinds


def test_inspect_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FamilyCase(registry.model_class("MixtralForCausalLM")).reference().save_pretrained(tmp_path)
    monkeypatch.setattr("nrl_models.common.checkpoint.files.CheckpointFiles.read", None)
    monkeypatch.setattr("nrl_models.common.checkpoint.files.CheckpointFiles.read_joined", None)
    report = inspect(tmp_path)
    assert report.stored_tensors == 41
    assert report.groups == {"MixtralAttention: q_proj + k_proj + v_proj": 2}


def test_embedding_rows_differ_from_vocab_size(tmp_path: Path) -> None:
    FamilyCase(registry.model_class("LlamaForCausalLM")).reference().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert inspect(tmp_path).embedding_rows == config["vocab_size"]
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)]).output
    assert "rows in the files" not in shown
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    shown = " ".join(CliRunner().invoke(app, ["inspect", str(tmp_path)]).output.replace("│", " ").split())
    assert f"{config['vocab_size']} rows in the files, and vocab_size is 100" in shown


@since("5.24")
def test_model_type_that_uses_another_class(tmp_path: Path) -> None:
    config = AutoConfig.for_model("sarvam_moe", architectures=["Glm4MoeForCausalLM"], num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    inspection = inspect(tmp_path)
    assert (inspection.model_type, inspection.class_model_type) == ("sarvam_moe", "glm4_moe")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert "sarvam_moe: uses the class of glm4_moe, keeps its own tensor names" in unframed(result.output)


@pytest.mark.usefixtures("no_persimmon")
def test_inspect_unregistered_architecture(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "persimmon", num_hidden_layers=2, hidden_size=64, architectures=["PersimmonForCausalLM"]
    )
    config.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="PersimmonForCausalLM is not registered"):
        report = inspect(tmp_path)
    assert report.family is None
    assert report.groups == {}
    assert report.flags == ()


@pytest.mark.filterwarnings("ignore:DbrxForCausalLM is not registered")
@pytest.mark.parametrize(
    ("clip_qkv", "message"),
    [
        pytest.param(
            8,
            "DbrxForCausalLM: reads values of tensors, which a model without weights does not have",
            marks=since("5.18"),
        ),
        (None, "attn_config.clip_qkv: is None: "),
    ],
)
def test_plan_of_unregistered_experts_raises(tmp_path: Path, clip_qkv: int | None, message: str) -> None:
    sizes = {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 100, "architectures": ["DbrxForCausalLM"]}
    sizes |= {"attn_config": {"clip_qkv": clip_qkv, "kv_n_heads": 2, "rope_theta": 10000.0}}
    AutoConfig.for_model("dbrx", **sizes).save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["plan", str(tmp_path), "--mesh", "fsdp=1"], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in str(result.exception) + result.output


@pytest.mark.filterwarnings("ignore:CLIPModel is not registered")
def test_model_without_input_embeddings(tmp_path: Path) -> None:
    model = CLIPModel(tiny_config(CLIPConfig, None, CLIPModel))
    model.save_pretrained(tmp_path)
    assert input_embeddings(model) is None
    result = inspect(tmp_path)
    assert (result.architecture, result.embedding_rows) == ("CLIPModel", None)
    check_ties(model, StateDictAdapter(model))
    assert "embed" not in str(declared_tensor_plan(model))
    with pytest.raises(CheckpointError, match="the input embeddings: are not one module of CLIPModel"):
        find_embeddings(tmp_path, CheckpointFiles(tmp_path))
