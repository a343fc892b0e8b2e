"""Quantized files of every architecture load dequantized, parametrized like the suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same, edit_config, edit_weights, stored
from compressed_checkpoints import FORMS as COMPRESSED
from compressed_checkpoints import group
from test_dequantized import FORMS as FP8

from nrl_models.testing.case import FamilyCase

UNQUANTIZED = ("embed", "lm_head", "position", "wpe", "wte")
"""Parts of the names of matrices that are not linears, or that published files leave unquantized."""


def quantized_config(form: str) -> dict[str, Any]:
    if form in FP8:
        return {"quant_method": "fp8", **FP8[form][1]}
    return {
        "quant_method": "compressed-tensors",
        "format": COMPRESSED[form][0],
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group(form)},
    }


def quantize(form: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Quantize the matrices of a file in place. Returns all weights as they are after dequantization."""
    expected = dict(tensors)
    for key, tensor in expected.items():
        if (
            tensor.ndim != 2
            or not key.endswith(".weight")
            or min(tensor.shape) < 16
            or any(map(key.count, UNQUANTIZED))
        ):
            continue
        del tensors[key]
        if form in FP8:
            parts, expected[key] = FP8[form][0](key, tensor.float())
        else:
            named, expected[key] = COMPRESSED[form][2](tensor.float())
            parts = {key.removesuffix("weight") + name: part for name, part in named.items()}
        tensors |= {name: part.contiguous() for name, part in parts.items()}
    return expected


@pytest.mark.parametrize(
    "forms", [[form for form in FP8 if "FP4" not in form], ["fp8-tensor", "int8"]], ids=["fp8", "ct"]
)
def test_quantized_files_load_dequantized(family_case: FamilyCase, forms: list[str], tmp_path: Path) -> None:
    """The architectures take turns with the forms."""
    form = forms[len(family_case.architecture) % len(forms)]
    reference = family_case.reference()
    reference.save_pretrained(tmp_path / "quantized")
    expected: dict[str, torch.Tensor] = {}
    edit_weights(tmp_path / "quantized", lambda tensors: expected.update(quantize(form, tensors)))
    assert expected.keys() != stored(tmp_path / "quantized").keys(), "nothing was quantized"
    edit_config(tmp_path / "quantized", quantization_config=quantized_config(form))
    model = family_case.model_class.from_pretrained(tmp_path / "quantized", dtype=torch.float32)
    assert_same(dict(model.state_dict_adapter.iter_export(model)), expected)
    model.save_pretrained(tmp_path / "saved")
    assert stored(tmp_path / "saved").keys() == expected.keys()
