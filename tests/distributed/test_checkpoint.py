"""Checkpoints to resume from: written at one layout, resumed at others, with equal losses."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jobs import checkpoint, export_and_save, setting
from test_loading import refused
from world import World

RESUMED: dict[str, list[dict[str, Any]]] = {
    "LlamaForCausalLM": [{"fsdp": 2}, {"fsdp": 2, "combine": False}, {"fsdp": 2, "tp": 2}, {"fsdp": 4}],
    "Qwen2ForCausalLM": [{"fsdp": 2}, {"fsdp": 2, "tp": 2}],
    "Gemma3ForCausalLM": [{"fsdp": 2}, {"fsdp": 2, "tp": 2}, {"tp": 4}],
    "MixtralForCausalLM": [{"ep": 2}, {"fsdp": 2, "ep": 2}, {"ep": 2, "tp": 2}],
    "DeepseekV3ForCausalLM": [{"ep": 2}, {"fsdp": 2, "tp": 2}, {"fsdp": 4}],
    "GptOssForCausalLM": [{"fsdp": 2}, {"fsdp": 2, "ep": 2}, {"tp": 4}],
}
"""For each model the layouts at which a checkpoint of two ranks of `tp` goes on."""


@pytest.mark.parametrize("architecture", RESUMED)
def test_training_goes_on_at_other_layouts(two: World, four: World, tmp_path: Path, architecture: str) -> None:
    folder = tmp_path / "step-2"
    (losses, *_) = two.run(partial(checkpoint.train_and_save, tp=2), str(folder), architecture)
    assert abs(losses[3] - losses[2]) > 1e-4, "the losses tell nothing"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model", "optimizer", "training.json"]
    for layout in RESUMED[architecture]:
        ranks = 1
        for size in layout.values():
            ranks *= size if size is not False else 1
        world = four if ranks == 4 else two
        for resumed in world.run(partial(checkpoint.resume, **layout), str(folder), architecture):
            assert resumed == pytest.approx(losses[2:], abs=1e-6), layout


def test_the_optimiser_is_resumed_not_begun_anew(two: World, tmp_path: Path) -> None:
    """Or the losses above would be equal for another reason."""
    (losses, *_) = two.run(partial(checkpoint.train_and_save, fsdp=2), str(tmp_path / "step-2"), "LlamaForCausalLM")
    (forgotten, *_) = two.run(partial(checkpoint.resume_without_optimizer, fsdp=2), str(tmp_path / "step-2"))
    assert forgotten[0] == pytest.approx(losses[2], abs=1e-6)
    assert abs(forgotten[1] - losses[3]) > 1e-4


def test_names_on_disk_are_hugging_faces(two: World, tmp_path: Path) -> None:
    two.run(partial(checkpoint.train_and_save, tp=2), str(tmp_path / "c"), "MixtralForCausalLM")
    names = two.run(checkpoint.names_in_checkpoint, str(tmp_path / "c"))[0]
    hub = setting.case_of("MixtralForCausalLM").model().state_dict_adapter
    assert sorted(names["model"]) == sorted(hub.hub)
    assert sorted(names["optimizer"]) == sorted(
        f"{name}.{kind}" for name in hub.transformers for kind in ("exp_avg", "exp_avg_sq")
    )
    training = json.loads((tmp_path / "c" / "training.json").read_text())
    assert sorted(training["scalars"]) == sorted(hub.transformers)
    reference = setting.case_of("MixtralForCausalLM").reference()
    assert sorted(training["scalars"]) == sorted(name for name, _ in reference.named_parameters())


def test_a_checkpoint_of_another_model_is_refused(two: World, tmp_path: Path) -> None:
    two.run(partial(checkpoint.train_and_save, fsdp=2), str(tmp_path / "c"), "LlamaForCausalLM")
    for kind, text in refused(two, partial(checkpoint.resume, fsdp=2), str(tmp_path / "c"), "Qwen2ForCausalLM"):
        assert kind == "CheckpointError"
        assert "missing: model.layers.0.self_attn.k_proj.bias" in text


def test_an_optimiser_of_other_groups_is_refused(two: World, tmp_path: Path) -> None:
    two.run(partial(checkpoint.train_and_save, fsdp=2), str(tmp_path / "c"), "LlamaForCausalLM")
    for kind, text in refused(two, partial(checkpoint.resume_with_one_group, fsdp=2), str(tmp_path / "c")):
        assert kind == "CheckpointError"
        assert "has 2 parameter groups, this optimiser 1" in text


def test_a_half_written_checkpoint_is_none(two: World, tmp_path: Path) -> None:
    two.run(partial(checkpoint.train_and_save, fsdp=2), str(tmp_path / "c"), "LlamaForCausalLM")
    (tmp_path / "c" / "training.json").unlink()
    for kind, text in refused(two, partial(checkpoint.resume, fsdp=2), str(tmp_path / "c"), "LlamaForCausalLM"):
        assert kind == "CheckpointError"
        assert "this is not a complete checkpoint" in text


@pytest.mark.parametrize("part", ["model", "optimizer"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_checkpoint_is_an_error_on_every_rank(two: World, tmp_path: Path, part: str, damage: str) -> None:
    two.run(partial(checkpoint.train_and_save, fsdp=2), str(tmp_path / "c"), "LlamaForCausalLM")
    file = max((tmp_path / "c" / part).iterdir(), key=lambda path: path.stat().st_size)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    else:
        file.unlink()
    for kind, text in refused(two, partial(checkpoint.resume, fsdp=2), str(tmp_path / "c"), "LlamaForCausalLM"):
        assert kind == "CheckpointError"
        assert f"file: {part}/{file.name}: {'is not there' if damage == 'gone' else 'has'}" in text


def test_a_checkpoint_that_cannot_be_read_to_its_end_names_the_ranks(two: World, tmp_path: Path) -> None:
    two.run(partial(checkpoint.train_and_save, fsdp=2), str(tmp_path / "c"), "LlamaForCausalLM")
    file = max((tmp_path / "c" / "optimizer").iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(bytes(file.stat().st_size))
    for kind, text in refused(two, partial(checkpoint.resume, fsdp=2), str(tmp_path / "c"), "LlamaForCausalLM"):
        assert kind == "ShardingError"
        assert "rank: rank 0: " in text


def test_weights_alone_are_loaded_without_the_optimizers_files(two: World, tmp_path: Path) -> None:
    two.run(partial(checkpoint.train_and_save, fsdp=2), str(tmp_path / "c"), "LlamaForCausalLM")
    shutil.rmtree(tmp_path / "c" / "optimizer")
    two.run(partial(checkpoint.resume_without_optimizer, fsdp=2), str(tmp_path / "c"))


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_leaves_no_checkpoint_and_no_other_waiting(tmp_path: Path, dying: int) -> None:
    world = World(2)
    try:
        (found,) = world.run_dying(
            dying, partial(export_and_save.dies_while_saving, checkpoint=True, fsdp=2), str(tmp_path / "c")
        ).values()
    finally:
        world.close()
    assert found[0] == "ShardingError"
    assert "is gone" in found[1]
    # The first rank moves the folder into place; if it is the one that dies, what it had written stays aside.
    assert not (tmp_path / "c").exists()
    assert dying == 0 or list(tmp_path.iterdir()) == []


def test_a_rank_that_dies_while_others_resume_leaves_none_waiting(tmp_path: Path) -> None:
    world = World(2)
    try:
        world.run(partial(checkpoint.train_and_save, fsdp=2), str(tmp_path / "c"), "LlamaForCausalLM")
        (kind, text) = world.run_dying(1, partial(checkpoint.dies_while_resuming, fsdp=2), str(tmp_path / "c"))[0]
    finally:
        world.close()
    assert kind == "ShardingError"
    assert "cannot load" in text
    assert "is gone" in text
