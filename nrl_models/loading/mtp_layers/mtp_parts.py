"""Parts of a checkpoint's MTP layer, and a decoder layer with the same tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.flags import MTPForm
from nrl_models.common.modules import class_name
from nrl_models.common.state_dict.adapter import adapter_of
from nrl_models.common.state_dict.kept_tensors import KeptTensor, kept_by
from nrl_models.common.state_dict.mtp import MTPNames, MTPParts
from nrl_models.common.views.view import HFTensor
from nrl_models.errors import Problem, ProblemKind, StateDictError, UnknownArgumentError


def form_of(model: PreTrainedModel) -> MTPForm | None:
    """Return the form of the MTP layers that a model's family declares, if any."""
    return getattr(model, "mtp_form", None)


def parts_of(model: PreTrainedModel) -> tuple[Any, MTPParts, Mapping[str, KeptTensor]]:
    """Return the model's decoder, the checkpoint's names of the MTP layer's parts, and their tensors.

    Raises:
        UnknownArgumentError: See `MTPLayer`.
    """
    name, form, mtp_tensors = class_name(model), form_of(model), kept_by(model, mtp_only=True)
    known, decoder = MTPNames(model), model.base_model
    if form is None:
        raise UnknownArgumentError(
            f"{name}: its MTP layers cannot be trained here. Training needs a family whose MTP layer consists of a "
            "decoder layer, norms and a projection (`mtp_form`)"
        )
    if not mtp_tensors:
        raise UnknownArgumentError(
            f"this {name} was loaded without MTP weights: its checkpoint has none, or mtp='drop'"
        )
    if getattr(model, "sharding", None) is not None:
        raise UnknownArgumentError(f"this {name} is sharded: an MTP layer is trained in one process, or under DDP")
    if known.announced > 1:
        raise UnknownArgumentError(f"{known.key}={known.announced}: one MTP layer can be trained, not several")
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise UnknownArgumentError(
            f"{name} accepts images: its MTP layer needs their embeddings, which are not available here"
        )
    return decoder, MTPParts.of(form, known.first), mtp_tensors


def path_of(model: PreTrainedModel, decoder: nn.Module) -> str:
    """Return the prefix of the decoder's names in a model."""
    return next(f"{name}." if name else "" for name, module in model.named_modules() if module is decoder)


def layer_like(
    model: PreTrainedModel, names: MTPParts, mtp_tensors: Mapping[str, KeptTensor]
) -> tuple[int, Mapping[str, HFTensor]]:
    """Return the number of a decoder layer with the same tensors as the MTP layer, and these tensors by short name.

    Raises:
        StateDictError: If no layer has the same tensors. Lists the differences from the last layer.
    """
    others = {f"{part}.weight" for part in names.others}
    shapes = {name.removeprefix(names.layer): t.spec.shape for name, t in mtp_tensors.items() if name not in others}
    decoder: Any = model.base_model
    hub = adapter_of(model).hub
    for number in reversed(range(len(decoder.layers))):
        path = f"layers.{number}."  # the prefix on the hub may be longer than in memory
        inside = f"{path_of(model, decoder)}{path}"
        table = {
            name.partition(path)[2]: tensor
            for name, tensor in hub.items()
            if any(parameter.startswith(inside) for parameter in tensor.parameters)
        }
        if shapes == {name: tensor.shape for name, tensor in table.items()}:
            break
        if number == len(decoder.layers) - 1:
            last = table
    else:
        raise StateDictError(
            f"the MTP layer of this {class_name(model)} has other tensors than its decoder layers",
            list(_differences(names.layer, shapes, last)),
        )
    width = decoder.config.hidden_size
    norms = (names.embedding_norm, names.hidden_norm, names.norm)
    expected = {f"{norm}.weight": (width,) for norm in norms} | {f"{names.joint}.weight": (width, 2 * width)}
    ends = {names.input: model.get_input_embeddings().weight, names.output: model.get_output_embeddings().weight}
    problems = [
        Problem(ProblemKind.MISSING, name, "is not among the MTP weights") for name in expected.keys() - mtp_tensors
    ]
    problems += [
        Problem(ProblemKind.SHAPE, name, f"has shape {mtp_tensors[name].spec.shape}, expected {shape}")
        for name, shape in expected.items()
        if name in mtp_tensors and mtp_tensors[name].spec.shape != shape
    ]
    problems += [
        Problem(ProblemKind.TIED, f"{part}.weight", "is not the model's own embedding, of which it should be a copy")
        for part, weight in ends.items()
        if part and f"{part}.weight" in mtp_tensors and not _is_copy(mtp_tensors[f"{part}.weight"].read(), weight)
    ]
    if problems:
        raise StateDictError(f"the MTP layer of this {class_name(model)} is not as its family's is", problems)
    return number, table


def _is_copy(stored: torch.Tensor, weight: torch.Tensor) -> bool:
    return stored.shape == weight.shape and torch.equal(stored.to(weight.device, weight.dtype), weight.detach())


def _differences(layer: str, shapes: Mapping[str, Any], table: Mapping[str, HFTensor]) -> Iterator[Problem]:
    for name in sorted(shapes.keys() ^ table.keys()):
        kind = ProblemKind.UNEXPECTED if name in shapes else ProblemKind.MISSING
        yield Problem(
            kind, layer + name, "no decoder layer has it" if name in shapes else "the decoder's last layer has it"
        )
    for name in sorted(shapes.keys() & table.keys()):
        if shapes[name] != table[name].shape:
            yield Problem(ProblemKind.SHAPE, layer + name, f"has shape {shapes[name]}, expected {table[name].shape}")
