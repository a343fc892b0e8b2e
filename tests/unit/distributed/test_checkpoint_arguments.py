"""Arguments of resume checkpoints and of `parallelize`: directories, optimizers, models and meshes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig
from typer.testing import CliRunner

from nrl_models import AutoModelForCausalLM, export_adapter
from nrl_models.cli import app
from nrl_models.distributed import load_checkpoint, parallelize, save_checkpoint
from nrl_models.errors import CheckpointError, ShardingError, StateDictError, UnknownArgumentError


@pytest.fixture
def model() -> Iterator[Any]:
    """A model that is sharded over one rank."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    yield parallelize(AutoModelForCausalLM.from_config(config, dtype=torch.float32), mesh)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda optimizer: LambdaLR(optimizer, lambda step: 1.0),
            r"a LambdaLR, .*: pass scheduler\.optimizer, and put",
        ),
        (lambda optimizer: [optimizer], "a list, .*: pass one optimizer, with a parameter group for each"),
        (type, "the class AdamW, .*: pass the optimizer itself, or None"),
        (lambda optimizer: optimizer.state_dict(), "a dict, .*: pass the optimizer itself, or None"),
        (lambda optimizer: "adamw", "a str, .*: pass the optimizer itself, or None"),
    ],
    ids=["scheduler", "list", "class", "state", "name"],
)
def test_other_objects_than_optimizers_raise(
    model: Any, make: Callable[[torch.optim.Optimizer], Any], message: str, tmp_path: Path
) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UnknownArgumentError, match=f"optimizer is {message}"):
        save_checkpoint(tmp_path / "run", model, make(optimizer))
    assert not list(tmp_path.iterdir())
    save_checkpoint(tmp_path / "run", model, optimizer)
    with pytest.raises(UnknownArgumentError, match=f"optimizer is {message}"):
        load_checkpoint(tmp_path / "run", model, make(optimizer))


def test_arguments_of_parallelize_with_other_types_raise(model: Any) -> None:
    mesh = model.sharding.mesh
    plain = AutoModelForCausalLM.from_config(model.config)
    for arguments, message in (
        ((mesh, plain), r"mesh is a LlamaForCausalLM, .*: call parallelize\(model, mesh, plan\)"),
        ((plain, "auto", mesh), "mesh is a str, expected a torch"),
        ((plain, None), "mesh is a NoneType, expected a torch"),
        ((plain, {"fsdp": 1}), "mesh is a dict, expected a torch"),
        (("checkpoint", mesh), r"model is a str, .*: call parallelize\(model, mesh, plan\)"),
        ((None, mesh), "model is a NoneType, "),
        ((type(plain), mesh), "model is the class LlamaForCausalLM, "),
    ):
        with pytest.raises(UnknownArgumentError, match=message):
            parallelize(*arguments)
    with pytest.raises(StateDictError, match="Linear: is neither a model"):
        parallelize(nn.Linear(2, 2), mesh)
    for plan, message in (({1: "colwise"}, "is neither 'auto' nor rules"), ({"lm_head": ["colwise"]}, "has the style")):
        with pytest.raises(ShardingError, match=message):
            parallelize(plain, mesh, plan)
    assert type(plain.lm_head.weight) is nn.Parameter


def _part_before_model(model: Any, mesh: Any) -> Any:
    parallelize(model.model, mesh)
    return model


def _fully_sharded(model: Any, mesh: Any) -> Any:
    return fully_shard(model, mesh=mesh)


def _base_fully_sharded(model: Any, mesh: Any) -> Any:
    fully_shard(model.model, mesh=mesh)
    return model


def _in_ddp(model: Any, mesh: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model)


def _compiled(model: Any, mesh: Any) -> Any:
    return torch.compile(model)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (_part_before_model, r"fsdp=1: is the mesh of model\.model"),
        (_fully_sharded, "the model: torch's fully_shard has sharded it"),
        (_base_fully_sharded, r"model\.model: torch's fully_shard has sharded it"),
        (_in_ddp, "DistributedDataParallel: wraps the LlamaForCausalLM; expected"),
        (_compiled, "OptimizedModule: wraps the LlamaForCausalLM; expected"),
    ],
)
def test_parallelize_leaves_sharded_or_wrapped_models_unchanged(
    model: Any, prepare: Callable[[Any, Any], Any], message: str
) -> None:
    mesh = model.sharding.mesh
    prepared = prepare(AutoModelForCausalLM.from_config(model.config), mesh)
    kinds = [type(part) for part in prepared.modules()]
    for _ in range(2):
        with pytest.raises(ShardingError, match=message):
            parallelize(prepared, mesh)
    assert [type(part) for part in prepared.modules()] == kinds
    assert "sharding" not in vars(prepared)


def test_parallelize_shards_models_whose_layers_torch_has_sharded(model: Any) -> None:
    mesh = model.sharding.mesh
    plain = AutoModelForCausalLM.from_config(model.config)
    tokens = torch.tensor([[1, 2, 3]])
    expected = plain(tokens).logits
    for layer in plain.model.layers:
        fully_shard(layer, mesh=mesh)
    with pytest.raises(ShardingError, match=r"is a DTensor already, which tp cannot divide again"):
        parallelize(plain, init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)))
    assert torch.equal(parallelize(plain, mesh)(tokens).logits, expected)


def test_export_of_sharded_adapters_raises_with_one_problem(model: Any) -> None:
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"])
    with pytest.raises(StateDictError, match="is sharded, with 2 more under adapters") as caught:
        export_adapter(peft.get_peft_model(model, config))
    assert len(caught.value.problems) == 1


def test_checkpoint_of_weights_without_values_raises(model: Any, tmp_path: Path) -> None:
    on_meta = AutoModelForCausalLM.from_config(model.config, device="meta")
    with pytest.raises(StateDictError, match=r"model\.embed_tokens\.weight: is on meta"):
        save_checkpoint(tmp_path / "run", parallelize(on_meta, model.sharding.mesh))
    assert not list(tmp_path.iterdir())


def test_checkpoint_of_complex_weights_raises(model: Any, tmp_path: Path) -> None:
    cast = AutoModelForCausalLM.from_config(model.config)
    norm = cast.model.norm
    norm.weight = nn.Parameter(norm.weight.detach().to(torch.complex64))
    cast = parallelize(cast, model.sharding.mesh)
    for save in (lambda: save_checkpoint(tmp_path / "run", cast), lambda: cast.save_pretrained(tmp_path / "saved")):
        with pytest.raises(StateDictError, match=r"complex weights cannot be") as caught:
            save()
        assert [problem.subject for problem in caught.value.problems] == ["model.norm.weight"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wait", [True, False])
def test_checkpoints_expand_home_directory(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    version = save_checkpoint("~/run", model, None, {"step": 1}, wait=wait).wait()
    assert version == tmp_path / "run" / "version-1"
    assert load_checkpoint("~/run", model) == {"step": 1}


@pytest.mark.parametrize("folder", ["", 3, "a\0b", "x" * 300, "~nobody-of-that-name/x"], ids=ascii)
def test_paths_that_no_directory_can_have_raise(
    model: Any, folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownArgumentError, match="directory to save into"):
        save_checkpoint(folder, model)
    with pytest.raises((CheckpointError, UnknownArgumentError), match=r"is not a path|path is empty|expected a dir"):
        load_checkpoint(folder, model)
    assert not list(tmp_path.iterdir())


def test_resume_checkpoint_is_not_loaded_as_hugging_face_checkpoint(model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save_checkpoint(folder, model)
    advice = re.escape(f"then call load_checkpoint({str(folder)!r}, model)")
    with pytest.raises(CheckpointError, match=rf"(?s)run: is a resume checkpoint, .*{advice}") as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert "did you mean" not in str(caught.value)
    version = folder / "version-1"
    with pytest.raises(CheckpointError, match=rf"(?s)version-1: is one version of a resume checkpoint.*{advice}"):
        AutoModelForCausalLM.from_pretrained(version)
    for path in (folder, version):
        result = CliRunner().invoke(app, ["inspect", str(path)])
        assert result.exit_code != 0
        assert "load_checkpoint" in result.output
        assert "did you mean" not in result.output


def test_weights_next_to_manifest_load(model: Any, tmp_path: Path) -> None:
    """A Hugging Face checkpoint that is called version-1, and has a file manifest.json of another program."""
    folder = tmp_path / "version-1"
    AutoModelForCausalLM.from_config(model.config).save_pretrained(folder)
    (folder / "manifest.json").write_text("{}")
    AutoModelForCausalLM.from_pretrained(folder)


def test_wait_must_be_bool(model: Any, tmp_path: Path) -> None:
    with pytest.raises(UnknownArgumentError, match="wait='no': expected True or False"):
        save_checkpoint(tmp_path / "run", model, wait="no")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
