"""Kimi K2.5 under each of its architecture names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import assert_same_model, edit_config

from nrl_models import AutoModelForImageTextToText, registry
from nrl_models.testing.case import FamilyCase

if unmet := registry.unmet_requirement("Kimi_K25ForConditionalGeneration"):
    pytest.skip(f"needs {unmet}", allow_module_level=True)

from nrl_models.families.table.classes import Kimi_K25ForConditionalGeneration


@pytest.mark.parametrize("name", ["KimiK25ForConditionalGeneration", "KimiK25VLForConditionalGeneration"])
def test_architecture_aliases_load_same_class(tmp_path: Path, name: str) -> None:
    case = FamilyCase(Kimi_K25ForConditionalGeneration)
    case.reference(torch.bfloat16).save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=[name])
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(model) is Kimi_K25ForConditionalGeneration
    assert_same_model(model, case.reference_class.from_pretrained(tmp_path))
    model.save_pretrained(tmp_path / "saved")
    assert model.config.architectures == ["Kimi_K25ForConditionalGeneration"]
