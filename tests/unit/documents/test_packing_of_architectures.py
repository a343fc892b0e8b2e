"""Packed rows, masks with holes, and activation checkpointing of every architecture, parametrized like the suite."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from nrl_models.errors import NRLModelsError
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.features import applies_to
from nrl_models.testing.suite.asserts import assert_close, assert_same_outcome
from nrl_models.testing.suite.conditions import reads_what_it_writes, scores_every_token, takes_text
from nrl_models.testing.suite.sequence_inputs import documents_of, pack


def packs(case: FamilyCase) -> bool:
    return "packed sequences" not in case.model_class.limits


def pads(case: FamilyCase) -> bool:
    """Return True if the class takes text without images, in padded rows."""
    return "right padding" not in case.model_class.limits


def checkpoints(case: FamilyCase) -> bool:
    return "activation checkpointing" not in case.model_class.limits


# Inner models


def inner_models(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """Return the decoder and the models around it, by name, without the complete model."""
    decoder = model.get_decoder()
    return {
        name: part
        for name, part in model.named_modules()
        if name
        and isinstance(part, PreTrainedModel)
        and any(inside is decoder for inside in part.modules())
        and {"input_ids", "position_ids"} <= inspect.signature(part.forward).parameters.keys()
    }


@applies_to(scores_every_token, reads_what_it_writes, packs)
def test_inner_models_keep_documents_apart(family_case: FamilyCase) -> None:
    """Trainers with fused heads call `model.model`, and `get_decoder()` of vision-language models."""
    documents = documents_of(family_case)
    for name, inner in inner_models(family_case.model()).items():
        packed = pack(family_case)
        for mask in ({}, {"attention_mask": packed.pop("attention_mask")}):
            with torch.no_grad():
                if getattr(inner.config, "use_bidirectional_attention", None) is True and inner is inner.get_decoder():
                    with pytest.raises(ValueError, match="attends in both directions"):
                        inner(**packed, **mask, use_cache=False)
                    continue
                hidden = inner(**packed, **mask, use_cache=False)[0][0]
                alone = [inner(input_ids=document[None], use_cache=False)[0][0] for document in documents]
            assert_close(hidden, torch.cat(alone), scale=10, message=f"{name or 'model'} with {list(mask)}")


# Masks with holes


@applies_to(scores_every_token, reads_what_it_writes, takes_text)
@pytest.mark.parametrize(
    ("positions", "dtype"),
    [
        ("none", torch.bool),
        ("filled with 1", torch.long),
        pytest.param("counted", torch.long, marks=pytest.mark.long),
        pytest.param("columns", torch.bool, marks=pytest.mark.long),
    ],
)
def test_mask_with_holes_matches_transformers(family_case: FamilyCase, positions: str, dtype: torch.dtype) -> None:
    ids = family_case.inputs(length=12, images=False)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 1] = mask[1, 3] = mask[1, 5:7] = 0
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask.to(dtype)}
    if positions != "none":
        if "position_ids" not in inspect.signature(family_case.reference_class.forward).parameters:
            return
        counted = mask.cumsum(-1) - 1
        inputs["position_ids"] = {
            "counted": counted * mask,
            "filled with 1": counted.masked_fill(mask == 0, 1),
            "columns": torch.arange(ids.shape[1], device=ids.device).expand_as(ids),
        }[positions]

    def run(model: PreTrainedModel) -> Callable[[], list[torch.Tensor]]:
        @torch.no_grad()
        def outputs() -> list[torch.Tensor]:
            found = [model(**inputs, use_cache=False).logits, model.base_model(**inputs, use_cache=False)[0]]
            return [each[mask.bool()] if each.shape[:2] == mask.shape else each for each in found]

        return outputs

    assert_same_outcome(run(family_case.model()), run(family_case.reference()), scale=10)


# Activation checkpointing

MODES = (
    "not reentrant",
    "reentrant wrappers",
    pytest.param("reentrant", marks=pytest.mark.long),
    pytest.param("not reentrant wrappers", marks=pytest.mark.long),
)


@contextmanager
def checkpointed(model: PreTrainedModel, mode: str) -> Iterator[None]:
    """Checkpoint the layers of a copy of a model. Only layers are in training mode, so there is no dropout."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if "wrappers" in mode:
        impl = CheckpointImpl.NO_REENTRANT if "not" in mode else CheckpointImpl.REENTRANT
        inner = {id(layer) for layer in layers}
        apply_activation_checkpointing(
            model, lambda module: checkpoint_wrapper(module, checkpoint_impl=impl), lambda module: id(module) in inner
        )
        yield
        return
    model.gradient_checkpointing_enable({"use_reentrant": not mode.startswith("not")})
    for layer in layers:
        layer.training = True
    yield
    model.gradient_checkpointing_disable()


def gradients(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients of the trained parameters by name."""
    model.zero_grad()
    model(**inputs, use_cache=False).logits.float().square().mean().backward()
    return {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def checkpointed_gradients(model: PreTrainedModel, mode: str, batches: list[Any]) -> list[dict[str, torch.Tensor]]:
    """Return the gradients for each batch, after a pass without gradients."""
    with checkpointed(model, mode):
        with torch.no_grad():
            model(**batches[-1], use_cache=False)
        return [gradients(model, batch) for batch in batches]


@applies_to(scores_every_token, reads_what_it_writes, takes_text, checkpoints)
@pytest.mark.parametrize("mode", MODES)
def test_checkpointing_keeps_gradients_or_raises(family_case: FamilyCase, mode: str) -> None:
    """Packed passes without gradients come first, then padded and packed training, and checkpointing off and on."""
    packed = pack(family_case)
    padded = family_case.inputs(length=12, images=not pads(family_case))
    if pads(family_case):
        padded["attention_mask"] = torch.ones_like(padded["input_ids"])
        padded["attention_mask"][1, -3:] = 0
    batches = [padded, packed] if packs(family_case) else [padded]
    model = copy.deepcopy(family_case.model())
    model.get_input_embeddings().weight.requires_grad_()
    expected = [gradients(model, batch) for batch in batches]
    refusal = ""
    for _ in range(1 if "wrappers" in mode else 2):
        try:
            found = checkpointed_gradients(model, mode, batches)
        except NRLModelsError as error:
            refusal = str(error)
            break
        except RuntimeError:  # of torch
            with pytest.raises(RuntimeError):
                checkpointed_gradients(copy.deepcopy(family_case.reference()), mode, batches)
            return
        for own, others in zip(found, expected, strict=True):
            assert own.keys() == others.keys()
            largest = max(gradient.abs().max().item() for gradient in others.values())
            for name, gradient in others.items():
                torch.testing.assert_close(own[name], gradient, rtol=1e-3, atol=1e-4 * largest, msg=name)
    assert not refusal or ("eentrant" in refusal and mode.startswith("reentrant")), refusal
