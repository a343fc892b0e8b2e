"""Every architecture's hub layout at full size: two layers of each kind determine the layout of the others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from nrl_models.common.state_dict import layouts
from nrl_models.common.state_dict.layouts import convert_layout, hub_conversions, own_tensors, transformers_views
from nrl_models.common.views.view import HFTensor, Piece
from nrl_models.testing.case import FamilyCase


def _at_full_size(case: FamilyCase) -> PreTrainedModel:
    """Build the model on meta. Uses the tiny configuration if the class cannot be built with its defaults."""
    upstream: Any = case.reference_class
    with torch.device("meta"):
        try:
            return upstream._from_config(upstream.config_class())
        except Exception:
            return upstream._from_config(copy.deepcopy(case.config))


@pytest.mark.timeout(600)
def test_hub_layout_matches_conversion_of_every_layer(family_case: FamilyCase) -> None:
    model = _at_full_size(family_case)
    conversions = hub_conversions(model)
    if conversions is None:
        pytest.skip("transformers converts nothing")
    tensors_by_name = own_tensors(model)
    tensors = {
        name: HFTensor(name, tensors_by_name[name].shape, (Piece(view),)) for name, view in transformers_views(model)
    }
    shared = convert_layout(model, tensors, tensors_by_name, conversions)
    full = layouts._traced(model, tensors, lambda name: tensors_by_name[name].dtype, hub_conversions(model))
    assert list(shared.items()) == list(full.items())
