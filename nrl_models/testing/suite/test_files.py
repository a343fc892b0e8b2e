"""Tests of files: checkpoints of transformers load here, and files written here equal those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nrl_models.common.modules import predicts_words
from nrl_models.common.upstream_conversions import as_meant
from nrl_models.errors import CheckpointError
from nrl_models.testing.case import SEED, FamilyCase, randomize
from nrl_models.testing.features import applies_to, proves
from nrl_models.testing.mtp_weights import mtp_tensors
from nrl_models.testing.suite.asserts import all_tensors, assert_same_tensors
from nrl_models.testing.suite.conditions import has_mtp


@pytest.mark.thorough
@proves("files")
def test_load_from_transformers(family_case: FamilyCase, tmp_path: Path) -> None:
    """Check that a sharded checkpoint of transformers loads exactly, including buffers and frozen parameters."""
    reference = family_case.reference_class._from_config(family_case.config, dtype=torch.bfloat16)
    randomize(reference)
    frozen = {name for name, parameter in reference.named_parameters() if not parameter.requires_grad}
    reference.save_pretrained(tmp_path, max_shard_size="700KB")
    reference = family_case.reference_class.from_pretrained(tmp_path)
    model = family_case.model_class.from_pretrained(tmp_path)
    assert_same_tensors(
        model.state_dict_adapter.to_hf(model.state_dict(), layout="transformers"), reference.state_dict()
    )
    assert_same_tensors(dict(model.named_buffers()), dict(reference.named_buffers()))
    assert not model.training
    # Frozen: parameters that transformers' class freezes when it is built. Its loading unfreezes them.
    tensors = model.state_dict_adapter.transformers
    frozen_parameters = {parameter for name in frozen for parameter in tensors[name].parameters}
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == frozen_parameters


@pytest.mark.thorough
@proves("files")
def test_load_in_another_dtype(family_case: FamilyCase, tmp_path: Path) -> None:
    """Check that a bf16 checkpoint loads in fp32 if requested, as in transformers."""
    family_case.reference(torch.bfloat16).save_pretrained(tmp_path)
    reference = family_case.reference_class.from_pretrained(tmp_path, dtype=torch.float32)
    model = family_case.model_class.from_pretrained(tmp_path, dtype=torch.float32)
    converted = model.state_dict_adapter.to_hf(model.state_dict(), layout="transformers")
    assert_same_tensors(converted, reference.state_dict())


@proves("files")
def test_save_equals_transformers(family_case: FamilyCase, tmp_path: Path) -> None:
    """Check that saved tensors and configurations equal those of transformers, and load in both libraries."""
    family_case.reference(torch.bfloat16).save_pretrained(tmp_path / "first")
    model = family_case.model_class.from_pretrained(tmp_path / "first")
    reference = family_case.reference_class.from_pretrained(tmp_path / "first")
    for shard_size in ("5GB", "700KB"):
        ours, theirs = tmp_path / f"ours-{shard_size}", tmp_path / f"theirs-{shard_size}"
        model.save_pretrained(ours, max_shard_size=shard_size)
        reference.save_pretrained(theirs, max_shard_size=shard_size)
        assert_same_tensors(all_tensors(ours), as_meant(all_tensors(theirs)))
        for path in theirs.glob("*config.json"):
            assert (ours / path.name).read_text() == path.read_text()
        reference_class: Any = family_case.reference_class
        reloaded, info = reference_class.from_pretrained(ours, output_loading_info=True)
        assert not any(info.values()), info
        assert_same_tensors(reloaded.state_dict(), reference.state_dict())
        assert_same_tensors(family_case.model_class.from_pretrained(ours).state_dict(), model.state_dict())


@pytest.mark.thorough
@proves("files")
def test_new_model_saves_as_transformers(family_case: FamilyCase, tmp_path: Path) -> None:
    """Check that a new model is saved in the same layout as in transformers."""
    for directory, build in (
        ("a", family_case.reference_class._from_config),
        ("b", family_case.model_class.from_config),
    ):
        torch.manual_seed(SEED)
        build(family_case.config).save_pretrained(tmp_path / directory)
    assert_same_tensors(*(all_tensors(tmp_path / directory) for directory in "ba"))


@proves("files")
@applies_to(has_mtp)
def test_mtp_weights_are_kept(family_case: FamilyCase, tmp_path: Path) -> None:
    """Check that MTP weights are saved and exported unchanged, or dropped if requested."""
    published, file = tmp_path / "published", tmp_path / "published" / "model.safetensors"
    family_case.reference(torch.bfloat16).save_pretrained(published)
    plain = family_case.model_class.from_pretrained(published)
    base_tensors = all_tensors(published)
    mtp = mtp_tensors(plain)
    save_file(base_tensors | mtp, file, metadata={"format": "pt"})
    model = family_case.model_class.from_pretrained(published)
    assert_same_tensors(model.state_dict(), plain.state_dict())
    saved_mtp = mtp if predicts_words(model) else {}
    model.save_pretrained(tmp_path / "again")
    assert_same_tensors(all_tensors(tmp_path / "again"), base_tensors | saved_mtp)
    exported = dict(model.state_dict_adapter.iter_export(model))
    assert_same_tensors({name: exported.pop(name) for name in saved_mtp}, saved_mtp)
    assert_same_tensors(exported, dict(plain.state_dict_adapter.iter_export(plain)))
    plan = {name: (shape, dtype) for name, shape, dtype in model.state_dict_adapter.export_plan()}
    assert plan == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in (exported | saved_mtp).items()}
    without = family_case.model_class.from_pretrained(published, mtp="drop")
    without.save_pretrained(tmp_path / "without")
    assert_same_tensors(all_tensors(tmp_path / "without"), base_tensors)
    save_file(base_tensors | mtp | {"model.layers.999.eh_proj.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.999"):
        family_case.model_class.from_pretrained(published)
