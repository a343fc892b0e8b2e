"""Resume checkpoints: written on one mesh, resumed on others, with equal losses."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import checkpoint, export_and_save, setting
from safetensors.torch import load_file, save_file
from test_export_and_save import files_in
from test_loading import errors_on_every_rank
from world import World

from nrl_models.testing.mtp_weights import mtp_tensors

RESUMED: dict[str, list[dict[str, Any]]] = {
    "LlamaForCausalLM": [{"fsdp": 2, "combine": False}, {"fsdp": 2, "tp": 2}, {"fsdp": 4}],
    "Qwen2ForCausalLM": [{"fsdp": 2, "tp": 2}],
    "Gemma3ForCausalLM": [{"fsdp": 2}, {"tp": 4}],
    "MixtralForCausalLM": [{"ep": 2}, {"ep": 2, "tp": 2}],
    "DeepseekV3ForCausalLM": [{"ep": 2}, {"fsdp": 2, "tp": 2}],
    "GptOssForCausalLM": [{"fsdp": 2, "ep": 2}, {"tp": 4}],
}
"""For each model, meshes on which a checkpoint of two ranks of `tp` resumes. Each mesh is that of one model or more."""


@pytest.mark.parametrize("architecture", RESUMED)
def test_resume_on_other_meshes(two: World, four: World, tmp_path: Path, architecture: str) -> None:
    folder = tmp_path / "step-2"
    (losses, *_) = two.run(partial(checkpoint.train_and_save, tp=2), str(folder), architecture)
    assert abs(losses[3] - losses[2]) > 1e-4, "the losses are too similar to detect lost state"
    files = [f"{part}-0000{rank}-00000.safetensors" for part in ("optimizer", "weights") for rank in (0, 1)]
    assert contents(folder) == {f"version-1/{name}" for name in ["config.json", "manifest.json", *files]}
    for layout in RESUMED[architecture]:
        ranks = 1
        for size in layout.values():
            ranks *= size if size is not False else 1
        world = four if ranks == 4 else two
        for resumed in world.run(partial(checkpoint.resume, **layout), str(folder), architecture):
            # One unit of rounding in a loss near 7 is 5e-7, and CPUs differ by three. Lost state changes the loss by
            # 1e-4.
            assert resumed == pytest.approx(losses[2:], abs=5e-6), layout


def test_optimizer_state_is_restored(two: World, tmp_path: Path) -> None:
    """Without this state, losses differ, so equal losses show that the optimizer state is restored."""
    (losses, *_) = two.run(partial(checkpoint.train_and_save, fsdp=2), str(tmp_path / "step-2"), "LlamaForCausalLM")
    (forgotten, *_) = two.run(partial(checkpoint.resume_without_optimizer, fsdp=2), str(tmp_path / "step-2"))
    assert forgotten[0] == pytest.approx(losses[2], abs=1e-6)
    assert abs(forgotten[1] - losses[3]) > 1e-4


def test_sharded_mtp_weights_round_trip(two: World, tmp_path: Path) -> None:
    """Exports and files match one process. A resume checkpoint stores each tensor once."""
    published = tmp_path / "published"
    model = setting.case_of("DeepseekV3ForCausalLM").reference(torch.bfloat16)
    model.save_pretrained(published)
    mtp = mtp_tensors(model)
    save_file(load_file(published / "model.safetensors") | mtp, published / "model.safetensors", {"format": "pt"})
    two.run(partial(checkpoint.keeps_mtp, fsdp=2), str(published), str(tmp_path / "step"))
    files = [load_file(file) for file in (tmp_path / "step" / "version-1").glob("weights-*.safetensors")]
    for name, tensor in mtp.items():
        (stored,) = [block for file in files for key, block in file.items() if key.rpartition("@")[0] == name]
        assert torch.equal(stored, tensor)
    assert all(any(key.rpartition("@")[0] in mtp for key in file) for file in files), "one rank wrote all MTP weights"
    two.run(partial(export_and_save.saves_as_one_process, tp=2), str(published), str(tmp_path))
    for format_ in (True, False):
        expected = files_in(tmp_path / f"whole-{format_}")
        assert files_in(tmp_path / f"loaded-{format_}") == files_in(tmp_path / f"sharded-{format_}") == expected
    assert all(name in expected["model.safetensors.index.json"].decode() for name in mtp)


def test_stored_names_match_transformers(two: World, tmp_path: Path) -> None:
    two.run(partial(checkpoint.train_and_save, tp=2), str(tmp_path), "MixtralForCausalLM")
    version = tmp_path / "version-1"
    adapter = setting.case_of("MixtralForCausalLM").model().state_dict_adapter
    assert checkpoint.names_in(version, "weights") == set(adapter.hub)
    kinds = ("exp_avg", "exp_avg_sq")
    assert checkpoint.names_in(version, "optimizer") == {
        f"{name}.{kind}" for name in adapter.transformers for kind in kinds
    }
    states = json.loads((version / "manifest.json").read_text())["manifest"]["optimizer"]["states"]
    reference = setting.case_of("MixtralForCausalLM").reference()
    assert states.keys() == adapter.transformers.keys() == {name for name, _ in reference.named_parameters()}


def test_replicated_tensors_are_written_once(two: World, tmp_path: Path) -> None:
    two.run(partial(checkpoint.train_and_save, tp=2), str(tmp_path / "tp"), "LlamaForCausalLM")
    two.run(partial(checkpoint.train_and_save, fsdp=2), str(tmp_path / "fsdp"), "LlamaForCausalLM")
    sizes = {
        layout: [sum(tensor.nbytes for tensor in load_file(file).values()) for file in (tmp_path / layout).glob("*/w*")]
        for layout in ("tp", "fsdp")
    }
    assert sum(sizes["tp"]) == sum(sizes["fsdp"])
    assert max(sizes["tp"]) < 1.3 * min(sizes["tp"]), "one rank writes more than the other"


def test_checkpoint_of_another_model_raises(two: World, tmp_path: Path) -> None:
    two.run(partial(checkpoint.train_and_save, fsdp=2), str(tmp_path / "c"), "LlamaForCausalLM")
    for kind, text in errors_on_every_rank(
        two, partial(checkpoint.resume, fsdp=2), str(tmp_path / "c"), "Qwen2ForCausalLM"
    ):
        assert kind == "CheckpointError"
        assert "missing: model.layers.0.self_attn.k_proj.bias" in text


@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"tp": 2}], ids=["fsdp", "tp"])
def test_quantized_optimizer_state_raises(two: World, tmp_path: Path, sizes: dict[str, int]) -> None:
    pytest.importorskip("torchao")
    for problems in two.run(partial(checkpoint.saves_quantized_state, **sizes), str(tmp_path)):
        assert any(
            problem.startswith("model.embed_tokens.weight: exp_avg: is a OptimState8bit") for problem in problems
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wait", [True, False])
def test_save_into_file_path_raises(two: World, tmp_path: Path, wait: bool) -> None:
    file = tmp_path / "file"
    file.touch()
    first, second = two.run(partial(checkpoint.saves_into_a_file, fsdp=2), str(file), wait)
    assert first[0] == "SaveError"
    assert first[1].startswith(f"cannot save into {file}: File exists")
    assert second[0] == "ShardingError"


def test_different_parameter_groups_raise(two: World, tmp_path: Path) -> None:
    two.run(partial(checkpoint.train_and_save, fsdp=2), str(tmp_path / "c"), "LlamaForCausalLM")
    for kind, text in errors_on_every_rank(two, partial(checkpoint.resume_with_one_group, fsdp=2), str(tmp_path / "c")):
        assert kind == "CheckpointError"
        assert "has 2 parameter groups, this optimizer 1" in text


def test_resume_in_narrower_dtype_raises(two: World, tmp_path: Path) -> None:
    fp32, bf16 = torch.float32, torch.bfloat16
    for kind, text in errors_on_every_rank(
        two, partial(checkpoint.resumes_in_dtype, fsdp=2), str(tmp_path / "c"), fp32, bf16
    ):
        assert kind == "CheckpointError"
        assert "saved in float32, and bfloat16 in the model, which would round the values" in text
        assert "load the model with dtype=torch.float32" in text
    assert two.run(partial(checkpoint.resumes_in_dtype, fsdp=2), str(tmp_path / "c"), bf16, fp32) == [[fp32]] * 2


def test_directory_without_version_raises(two: World, tmp_path: Path) -> None:
    (tmp_path / ".version-1.nrl-saving-01234567").mkdir()
    for kind, text in errors_on_every_rank(two, partial(checkpoint.resume, fsdp=2), str(tmp_path), "LlamaForCausalLM"):
        assert kind == "CheckpointError"
        assert "this is not a complete checkpoint" in text
    two.run(partial(checkpoint.saves_values, fsdp=2), str(tmp_path / "c"), 1)
    for kind, text in errors_on_every_rank(
        two, partial(checkpoint.loaded_values, fsdp=2), str(tmp_path / "c/version-1")
    ):
        assert kind == "CheckpointError"
        assert f"pass {tmp_path / 'c'}, of which the newest version is loaded" in text
    (tmp_path / "training.json").write_text("{}")  # the format of an older version of this library
    for kind, text in errors_on_every_rank(two, partial(checkpoint.resume, fsdp=2), str(tmp_path), "LlamaForCausalLM"):
        assert kind == "CheckpointError"
        assert "with pickles, which are not read" in text


def test_save_and_load_with_different_world_sizes(two: World, four: World, tmp_path: Path) -> None:
    """Each version has the last saved values, and no files of earlier ones."""
    folder = str(tmp_path)
    for number, (world, layout) in enumerate([(four, {"fsdp": 4}), (two, {"tp": 2}), (four, {"fsdp": 2, "tp": 2})], 1):
        world.run(partial(checkpoint.saves_values, **layout), folder, number)
        assert [path.name for path in tmp_path.iterdir()] == [f"version-{number}"]
        assert two.run(partial(checkpoint.loaded_values, fsdp=2), folder) == [[number]] * 2
        assert four.run(partial(checkpoint.loaded_values, fsdp=4), folder) == [[number]] * 4


def test_unlisted_files_are_not_read(two: World, tmp_path: Path) -> None:
    two.run(partial(checkpoint.saves_values, fsdp=2), str(tmp_path), 1)
    version = tmp_path / "version-1"
    traces = tmp_path / "executed"
    (version / "optimizer").mkdir()
    extra = [version / ".metadata", version / "optimizer/.metadata", version / "weights-00002-00000.safetensors"]
    for file in extra:
        file.write_bytes(pickle.dumps(checkpoint.Planted(str(traces))))
    before = {path.name for path in tmp_path.iterdir()}
    opened_by_rank = two.run(partial(checkpoint.opened_while_loading, fsdp=2), str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == before, "a pickle was loaded"
    for opened in opened_by_rank:
        assert str(version / "manifest.json") in opened
        assert not set(map(str, extra)) & set(opened)
    two.run(partial(checkpoint.saves_values, fsdp=2), str(tmp_path), 2)
    assert contents(version) == {str(file.relative_to(version)) for file in extra}, (
        "the save removes only files of versions"
    )
    assert two.run(partial(checkpoint.loaded_values, fsdp=2), str(tmp_path)) == [[2]] * 2


@pytest.mark.parametrize("part", ["weights", "optimizer"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damaged_checkpoint_raises_on_every_rank(two: World, tmp_path: Path, part: str, damage: str) -> None:
    two.run(partial(checkpoint.train_and_save, fsdp=2), str(tmp_path), "LlamaForCausalLM")
    file = tmp_path / "version-1" / f"{part}-00001-00000.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    else:
        file.unlink()
    for kind, text in errors_on_every_rank(two, partial(checkpoint.resume, fsdp=2), str(tmp_path), "LlamaForCausalLM"):
        assert kind == "CheckpointError"
        assert f"file: {file.name}: {'not found' if damage == 'gone' else 'has'}" in text
        assert "the folder has no intact older version" in text


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"fsdp": 2}], ids=["pp", "fsdp"])
def test_optimizer_of_named_parameters_resumes(two: World, tmp_path: Path, sizes: dict[str, int]) -> None:
    assert two.run(partial(checkpoint.resumes_with_names, **sizes), str(tmp_path / "checkpoint")) == [[], []]


def test_bit_flip_raises_before_values_change(two: World, tmp_path: Path) -> None:
    two.run(partial(checkpoint.train_and_save, fsdp=2), str(tmp_path), "LlamaForCausalLM")
    for wrong in two.run(partial(checkpoint.accepts_flipped_bits, fsdp=2), str(tmp_path / "version-1"), 12):
        assert wrong == []


def test_error_names_intact_older_version(two: World, tmp_path: Path) -> None:
    two.run(partial(checkpoint.saves_values, fsdp=2), str(tmp_path), 1)
    shutil.copytree(tmp_path / "version-1", tmp_path / "aside")
    two.run(partial(checkpoint.saves_values, fsdp=2), str(tmp_path), 2)
    (tmp_path / "aside").rename(tmp_path / "version-1")
    for name in ("manifest.json", "weights-00001-00000.safetensors"):
        (tmp_path / "version-2" / name).unlink()
        for kind, text in errors_on_every_rank(two, partial(checkpoint.loaded_values, fsdp=2), str(tmp_path)):
            assert kind == "CheckpointError"
            assert f"{name}: " in text
            assert "version-1 is intact: to resume from it, move version-2 out of the folder" in text
        if name == "manifest.json":
            shutil.copy(tmp_path / "version-1" / name, tmp_path / "version-2")
    shutil.rmtree(tmp_path / "version-2")
    assert two.run(partial(checkpoint.loaded_values, fsdp=2), str(tmp_path)) == [[1]] * 2


def test_inconsistent_manifest_raises(two: World, tmp_path: Path) -> None:
    two.run(partial(checkpoint.train_and_save, fsdp=2), str(tmp_path), "LlamaForCausalLM")
    for wrong in two.run(partial(checkpoint.accepts_changed_manifests, fsdp=2), str(tmp_path / "version-1")):
        assert wrong == {}


@pytest.mark.parametrize(
    "progress", [{"step": math.nan}, {"step": None}, {"step": [2]}, {"loss": math.inf}, {"x": {1}}]
)
def test_invalid_progress_raises(two: World, tmp_path: Path, progress: dict[str, Any]) -> None:
    for kind, text in errors_on_every_rank(
        two, partial(checkpoint.saves_progress, fsdp=2), str(tmp_path / "c"), progress
    ):
        assert kind == "CheckpointError"
        assert "cannot save this in a checkpoint" in text
    assert not (tmp_path / "c").exists()


def test_weights_load_without_optimizer_files(two: World, tmp_path: Path) -> None:
    two.run(partial(checkpoint.train_and_save, fsdp=2), str(tmp_path), "LlamaForCausalLM")
    for file in (tmp_path / "version-1").glob("optimizer-*"):
        file.unlink()
    two.run(partial(checkpoint.resume_without_optimizer, fsdp=2), str(tmp_path))


@pytest.mark.parametrize(("dying", "function_name"), [(1, "write_blocks"), (0, "_finish"), (0, "remove_older")])
def test_rank_crash_during_save_leaves_complete_version(
    two: World, tmp_path: Path, dying: int, function_name: str
) -> None:
    world = World(2)
    try:
        world.run(partial(checkpoint.saves_values, fsdp=2), str(tmp_path), 1)
        (error,) = world.run_dying(
            dying, partial(checkpoint.dies_while_saving, fsdp=2), str(tmp_path), function_name
        ).values()
    finally:
        world.close()
    assert error[0] == "ShardingError"
    assert "is gone" in error[1]
    # The first rank moves the version into place. If that rank dies, its files remain in a temporary folder.
    left = {path.name.partition(".nrl-saving-")[0] for path in tmp_path.iterdir()}
    assert (
        left
        == {"version-1"}
        | {"write_blocks": set(), "_finish": {".version-2"}, "remove_older": {"version-2"}}[function_name]
    )
    expected = 2 if function_name == "remove_older" else 1
    assert two.run(partial(checkpoint.loaded_values, fsdp=2), str(tmp_path)) == [[expected]] * 2
    two.run(partial(checkpoint.saves_values, fsdp=2), str(tmp_path), 3)
    assert [path.name for path in tmp_path.iterdir()] == [f"version-{expected + 1}"]


def test_rank_crash_during_resume_does_not_hang(tmp_path: Path) -> None:
    world = World(2)
    try:
        world.run(partial(checkpoint.train_and_save, fsdp=2), str(tmp_path / "c"), "LlamaForCausalLM")
        (kind, text) = world.run_dying(1, partial(checkpoint.dies_while_resuming, fsdp=2), str(tmp_path / "c"))[0]
    finally:
        world.close()
    assert kind == "ShardingError"
    assert "cannot load" in text
    assert "is gone" in text


def contents(folder: Path) -> set[str]:
    """Return the files in a folder and its subfolders."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_killed_or_overlapping_writers_leave_one_version(tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "jobs" / "crashes.py")
    completed = subprocess.run([sys.executable, script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    killed, overlapped = completed.stdout.splitlines()
    assert int(killed.split()[3]) > 20, killed
    assert "'[1]': " in overlapped, overlapped
    assert "'[2]': " in overlapped, overlapped
