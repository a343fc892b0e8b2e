"""Loads of every architecture: state dicts, automatic dtypes, and base models, parametrized like the suite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import assert_same, hf_tensors, stored
from safetensors.torch import load_file, save_file

from nrl_models import AutoModel, CheckpointError
from nrl_models.testing.case import FamilyCase
from tools.release_check.sweep.class_under_test import without_dtype


def test_state_dict_without_path_loads(family_case: FamilyCase, tmp_path: Path) -> None:
    reference = family_case.reference()
    reference.save_pretrained(tmp_path)
    tensors = stored(tmp_path)
    model = family_case.model_class.from_pretrained(
        None, config=family_case.config, state_dict=tensors, dtype=torch.float32
    )
    assert_same(hf_tensors(model), reference.state_dict())


def test_auto_dtype_with_fp32_vectors_matches_transformers(family_case: FamilyCase, tmp_path: Path) -> None:
    """Published files have norms, biases or routers in fp32, some of them first in the file."""
    family_case.reference().save_pretrained(tmp_path / "fp32")
    folder = without_dtype(tmp_path / "fp32", tmp_path / "auto")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        file.unlink()  # a hard link
        mixed = {
            name: tensor.to(torch.bfloat16) if tensor.is_floating_point() and tensor.ndim > 1 else tensor
            for name, tensor in tensors.items()
        }
        save_file(mixed, file, metadata={"format": "pt"})
    expected = family_case.reference_class.from_pretrained(folder, dtype="auto").state_dict()
    loaded = hf_tensors(family_case.model_class.from_pretrained(folder))
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {
        name: tensor.dtype for name, tensor in expected.items()
    }


def test_base_model_loads_from_files_with_head(family_case: FamilyCase, tmp_path: Path) -> None:
    if type(family_case.config) not in transformers.AutoModel._model_mapping:
        return
    family_case.reference().save_pretrained(tmp_path)
    expected, info = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    if len(info["missing_keys"]) > 1:  # the base model has an encoder or a pooler
        with pytest.raises(CheckpointError, match="missing: "):
            AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    elif not info["missing_keys"]:
        assert_same(hf_tensors(AutoModel.from_pretrained(tmp_path, dtype=torch.float32)), expected.state_dict())
