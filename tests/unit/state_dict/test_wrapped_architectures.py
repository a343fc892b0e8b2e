"""Wrapped layers keep their names in exports, plans and files of every architecture, parametrized like the suite."""

from __future__ import annotations

import copy
from itertools import cycle
from pathlib import Path

import torch
from checkpoints import assert_same, stored
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

from nrl_models.common.modules import own_parameters
from nrl_models.family import FamilyModel
from nrl_models.testing.case import FamilyCase


def wrap_layers(model: FamilyModel) -> int:
    """Wrap each element of a list of modules, and the embeddings. Returns the number of wrapped modules."""
    wrappers = cycle([checkpoint_wrapper, offload_wrapper, lambda module: torch.compile(module, backend="eager")])
    embeddings = model.get_input_embeddings()
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    count = 0
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if module is embeddings or any(parent is each for each in lists):
                parent._modules[name] = next(wrappers)(module)
                count += 1
    return count


def test_wrapped_layers_keep_names(family_case: FamilyCase, tmp_path: Path) -> None:
    model = copy.deepcopy(family_case.model())
    expected = {name: tensor.clone() for name, tensor in model.state_dict_adapter.iter_export(model)}
    plan = model.state_dict_adapter.export_plan()
    names = [name for name, _ in own_parameters(model)]
    assert wrap_layers(model) > 1
    assert [name for name, _ in own_parameters(model)] == names
    assert_same(dict(model.state_dict_adapter.iter_export(model)), expected)
    assert model.state_dict_adapter.export_plan() == plan
    model.save_pretrained(tmp_path)
    assert stored(tmp_path).keys() == expected.keys()
    family_case.model_class.from_pretrained(tmp_path, dtype=torch.float32)
