"""Refits of every architecture: incomplete parameters, and heads of engines that tie them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from checkpoints import assert_same

from nrl_models.common.state_dict.ties import declared_ties
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import MixedWeightsError
from nrl_models.family import FamilyModel
from nrl_models.logprobs import Sampling
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.features import applies_to
from nrl_models.testing.suite.conditions import ties_embeddings

PARTS = 6
"""Maximum number of parts that the test leaves out, one of each kind."""


def parts_of_parameters(model: FamilyModel) -> list[str]:
    """Return hub tensors that are only a part of a parameter, one of each kind; or else one complete parameter."""
    adapter = model.state_dict_adapter
    parts: dict[str, str] = {}
    for name, tensor in adapter.exported("hub").items():
        if any(len(adapter.tensors_in(parameter, "hub")) > 1 for parameter in tensor.parameters):
            parts.setdefault(".".join(word for word in name.split(".") if not word.isdigit()), name)
    return list(parts.values())[:PARTS] or [next(iter(adapter.exported("hub")))]


def held_values(engine: HFEngine, model: FamilyModel) -> dict[str, torch.Tensor]:
    """Return the engine's weights by hub name."""
    return model.state_dict_adapter.to_hf(engine.model.state_dict())


def test_refit_without_part_of_parameter_raises(family_case: FamilyCase) -> None:
    model, engine = family_case.model(), HFEngine(copy.deepcopy(family_case.reference()))
    weights = {name: tensor.clone() for name, tensor in model.state_dict_adapter.iter_export(model)}
    for missing in parts_of_parameters(model):
        sent = [(name, tensor) for name, tensor in weights.items() if name != missing]
        with pytest.raises(MixedWeightsError, match=rf"left 1 tensors unwritten: {missing}"):
            engine.refit(sent, digests=False)
        with pytest.raises(MixedWeightsError, match="raises on every call"):
            engine.score([[1, 2]], Sampling())
    new = {name: tensor * 2 if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    assert engine.refit(new.items()).unwritten == ()
    held = held_values(engine, model)
    assert_same({name: held[name] for name in new}, new)


def parts_of(config: Any) -> Iterator[Any]:
    """Yield a configuration and all configurations inside."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        if (part := getattr(config, name, None)) is not None:
            yield from parts_of(part)


@applies_to(ties_embeddings)
@pytest.mark.parametrize("is_first", [True, False], ids=["head first", "head last"])
def test_head_of_tied_engine_must_equal_embeddings(family_case: FamilyCase, is_first: bool) -> None:
    config = family_case.config
    for part in parts_of(config):
        part.tie_word_embeddings = True
    model = family_case.model_class.from_config(copy.deepcopy(config))
    adapter, engine = model.state_dict_adapter, HFEngine(family_case.reference_class._from_config(config))
    weights = {
        name: tensor.detach() + 1 if tensor.is_floating_point() else tensor
        for name, tensor in adapter.iter_export(model)
    }
    for tied, kept in declared_ties(model).items():
        (head,), (source,) = adapter.tensors_in(tied, "hub"), adapter.tensors_in(kept, "hub")
        for value, is_equal in ((weights[source.name] * 2, False), (weights[source.name].clone(), True)):
            extra = {head.name: value}
            sent = extra | weights if is_first else weights | extra
            with nullcontext() if is_equal else pytest.raises(MixedWeightsError, match=f"{head.name} differs from"):
                engine.refit(sent.items())
        held = held_values(engine, model)
        assert_same({name: held[name] for name in weights}, weights)
