"""Exports and saved files of sharded models are bit-identical to those of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from jobs import export_and_save, setting
from safetensors.torch import load_file, save_file
from test_loading import CASES, LAYOUTS, MARKED_CASES, errors_on_every_rank, world_for
from world import World

from nrl_models import registry
from tests.patterns import ONE_OF_EACH_PATTERN


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("architecture", "layout"), MARKED_CASES)
def test_exports_and_files_match_one_process(
    two: World, four: World, tmp_path: Path, architecture: str, layout: str
) -> None:
    world = world_for(layout, two, four)
    world.run(partial(export_and_save.exports_and_saves, **LAYOUTS[layout]), architecture, str(tmp_path / "sharded"))
    assert files_in(tmp_path / "sharded") == files_in(tmp_path / "sharded-whole")


@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"tp": 2}], ids=["fsdp", "tp"])
def test_loaded_embeddings_stay_tied(two: World, sizes: dict[str, int]) -> None:
    two.run(partial(export_and_save.assigned_tensors_stay_tied, **sizes))


# Gathering DTensors with torch


@pytest.mark.parametrize(("step", "min_count"), [(16, 1), pytest.param(1, 60, marks=pytest.mark.long)])
def test_packed_placements(two: World, step: int, min_count: int) -> None:
    """`full_tensor`, `get_model_state_dict` and `set_model_state_dict` for mixtures with packed gate and up."""
    for count, wrong in two.run(partial(export_and_save.packed_placements_are_correct, step, tp=2), patience=1200):
        assert count >= min_count
        assert wrong == {}


LAYOUT_PAIRS = [({"tp": 2}, {"fsdp": 2}), ({"fsdp": 2}, {"tp": 2}), ({"tp": 2}, {"ep": 2})]


@pytest.mark.parametrize("layouts", LAYOUT_PAIRS, ids=str)
def test_torch_reshards_packed_parameters(two: World, tmp_path: Path, layouts: tuple[dict, dict]) -> None:
    two.run(export_and_save.reshards_by_torch, "MixtralForCausalLM", str(tmp_path / "dcp"), *layouts)
    assert files_in(tmp_path / "dcp-plain") == files_in(tmp_path / "dcp-whole")


def test_torch_reshards_packed_parameters_over_two_dimensions(four: World, tmp_path: Path) -> None:
    four.run(partial(export_and_save.placements_are_correct, fsdp=2, tp=2), "MixtralForCausalLM")
    layouts = {"fsdp": 2, "tp": 2}, {"ep": 2, "tp": 2}
    four.run(export_and_save.reshards_by_torch, "MixtralForCausalLM", str(tmp_path / "dcp"), *layouts)
    assert files_in(tmp_path / "dcp-plain") == files_in(tmp_path / "dcp-whole")


OTHER_ARCHITECTURES = sorted(
    {registry.FAMILIES[family][0] for family in ONE_OF_EACH_PATTERN} - {architecture for architecture, _ in CASES}
)


@pytest.mark.parametrize("architecture", OTHER_ARCHITECTURES)
def test_exports_of_other_families_match_one_process(two: World, tmp_path: Path, architecture: str) -> None:
    if unmet := registry.unmet_requirement(architecture):
        pytest.skip(f"{architecture} needs {unmet}")
    two.run(partial(export_and_save.exports_and_saves, fsdp=2), architecture, str(tmp_path / "sharded"))
    assert files_in(tmp_path / "sharded") == files_in(tmp_path / "sharded-whole")


def test_export_peak_memory_is_a_few_buckets(two: World) -> None:
    for peak, bucket in two.run(partial(export_and_save.peak_of_export, fsdp=2)):
        # The current bucket, the previous one that the caller still uses, and memory of gloo and malloc.
        assert peak <= 8 * bucket, f"{peak / bucket:.1f} buckets"


def test_loaded_checkpoint_is_saved_in_its_layout(two: World, tmp_path: Path) -> None:
    reference = setting.case_of("MixtralForCausalLM").reference()
    reference.save_pretrained(tmp_path / "hub")
    two.run(partial(export_and_save.loads_and_saves, tp=2), str(tmp_path / "hub"), str(tmp_path / "again"))
    first, again = files_in(tmp_path / "hub"), files_in(tmp_path / "again")
    assert first["model.safetensors"] == again["model.safetensors"]


def test_both_save_formats_match_one_process(two: World, tmp_path: Path) -> None:
    setting.case_of("MixtralForCausalLM").reference().save_pretrained(tmp_path / "hub")
    two.run(partial(export_and_save.saves_as_one_process, fsdp=2), str(tmp_path / "hub"), str(tmp_path))
    for original in (True, False):
        expected = files_in(tmp_path / f"whole-{original}")
        assert files_in(tmp_path / f"loaded-{original}") == expected
        assert files_in(tmp_path / f"sharded-{original}") == expected


@pytest.mark.parametrize("dimension", ["fsdp", "tp"])
def test_code_of_registered_class_is_saved(two: World, tmp_path: Path, dimension: str) -> None:
    imported = "from nrl_models.families.llama.model import LlamaForCausalLM\n"
    (tmp_path / "modeling_own.py").write_text(f"{imported}class OwnForCausalLM(LlamaForCausalLM):\n    pass\n")
    two.run(partial(export_and_save.saves_code_as_one_process, **{dimension: 2}), str(tmp_path), str(tmp_path))
    expected = files_in(tmp_path / "whole")
    assert "modeling_own.py" in expected
    assert files_in(tmp_path / "sharded") == expected


def test_exports_use_checkpoint_names(two: World, tmp_path: Path) -> None:
    """Kimi-K2.5 as published. transformers would save other names."""
    setting.case_of("Kimi_K25ForConditionalGeneration").reference().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.replace("model.blocks.", "model.layers."): tensor for name, tensor in load_file(file).items()}
    assert any(".layers." in name for name in tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    two.run(partial(export_and_save.exports_the_checkpoint, fsdp=2), str(tmp_path))


def test_unused_checkpoint_tensors_are_saved(two: World, tmp_path: Path) -> None:
    """Published Gemma 3n and 4 checkpoints have unused keys and values for layers that share earlier ones."""
    published = tmp_path / "published"
    case = setting.case_of("Gemma3nForCausalLM")
    case.reference(torch.bfloat16).save_pretrained(published)
    tensors = load_file(published / "model.safetensors")
    queries = [name for name in tensors if name.endswith("self_attn.q_proj.weight")]
    keys = {name.replace("q_proj", "k_proj") for name in queries} - tensors.keys()
    assert len(keys) == case.config.num_kv_shared_layers > 0
    tensors |= {key: torch.randn(64, 256).half() for key in keys}
    save_file(tensors, published / "model.safetensors", metadata={"format": "pt"})
    two.run(partial(export_and_save.saves_as_one_process, fsdp=2), str(published), str(tmp_path))
    expected = files_in(tmp_path / "whole-True")
    assert all(key in expected["model.safetensors.index.json"].decode() for key in keys)
    assert files_in(tmp_path / "loaded-True") == expected
    assert files_in(tmp_path / "sharded-True") == expected


def test_changes_after_sharding_raise(two: World, tmp_path: Path) -> None:
    """Otherwise, removed tensors are exported and saved as zeros."""
    expected = {
        "head": "missing: lm_head.weight: is no longer in the model",
        "layers": "self_attn.q_proj.weight: is no longer in the model",
        "buffer": "unexpected: extra: was added after sharding",
        "norm": "rank: model.norm.weight: was replaced after sharding",
    }
    for change, text in expected.items():
        job = partial(export_and_save.changed_after_sharding, fsdp=1, tp=2)
        for errors in two.run(job, str(tmp_path / change), change):
            assert len(errors) == 5
            for error in errors:
                assert "has changed since it was sharded" in error
                assert text in error
        assert not (tmp_path / change / "saved").exists()


def test_change_of_one_stage_raises_on_every_rank(two: World, tmp_path: Path) -> None:
    first, second = two.run(partial(export_and_save.changed_after_sharding, pp=2), str(tmp_path), "head")
    assert all("missing: lm_head.weight: is no longer in the model" in error for error in second)
    assert all("ranks failed or disagree" in error and "lm_head.weight" in error for error in first)


def test_load_state_dict_reports_removed_tensors(two: World) -> None:
    two.run(partial(export_and_save.loads_without_head, fsdp=2))


@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("before", [torch.bfloat16, torch.float32])
def test_cast_after_sharding_is_exported_and_saved(
    two: World, tmp_path: Path, before: torch.dtype, sizes: dict[str, int]
) -> None:
    after = torch.float32 if before == torch.bfloat16 else torch.bfloat16
    job = partial(export_and_save.exports_and_saves_after_cast, **sizes)
    two.run(job, str(tmp_path / "sharded"), before, after)
    assert files_in(tmp_path / "sharded") == files_in(tmp_path / "sharded-whole")


@pytest.mark.parametrize("failing", ["file", "kept tensor"])
def test_failed_save_raises_on_every_rank(two: World, tmp_path: Path, failing: str) -> None:
    folder = tmp_path / "out"
    two.run(partial(export_and_save.saves, fsdp=2), str(folder))
    before = files_in(folder)
    first, second = errors_on_every_rank(two, partial(export_and_save.saves, fsdp=2), str(folder), failing)
    assert first == ("OSError", "disk full")
    assert second[0] == "ShardingError"
    assert "rank 0: OSError: disk full" in second[1]
    assert files_in(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_rank_crash_during_save_keeps_old_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    world = World(2)
    try:
        world.run(partial(export_and_save.saves, fsdp=2), str(folder))
        before = files_in(folder)
        (kind, text) = world.run_dying(1, partial(export_and_save.dies_while_saving, fsdp=2), str(folder))[0]
    finally:
        world.close()
    assert kind == "ShardingError"
    assert "is gone" in text
    assert files_in(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_rank_crash_during_export_does_not_hang() -> None:
    world = World(2)
    try:
        (kind, text) = world.run_dying(1, partial(export_and_save.dies_while_exporting, fsdp=2))[0]
    finally:
        world.close()
    assert kind == "ShardingError"
    assert "cannot gather the model's tensors" in text


def test_unsupported_save_options_raise(two: World, tmp_path: Path) -> None:
    for kind, text in errors_on_every_rank(two, partial(export_and_save.pushes, fsdp=2), str(tmp_path / "out")):
        assert kind == "UnknownArgumentError"
        assert "push_to_hub" in text
