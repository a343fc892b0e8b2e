"""A trainable module for a model's layer of multi-token prediction (MTP).

The layer takes the last hidden state of each token and the embedding of the next token, and predicts the token after
that (https://arxiv.org/abs/2412.19437, section 2.2). Engines use it for drafting. Its decoder layer is a copy of a
decoder layer of the model with the same tensors, so it uses the family's code for experts, latents and hub names. The
computation is the same as in vLLM's drafters: hidden states after the model's final norm, position ids of the hidden
states, and the model's input and output embeddings.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import PreTrainedModel

from nrl_models.common.flags import MTPForm
from nrl_models.common.projections import join
from nrl_models.common.state_dict.kept_tensors import KeptTensor, keep
from nrl_models.common.state_dict.layouts import TensorSpec
from nrl_models.common.state_dict.mtp import MTPParts
from nrl_models.common.views.view import HFTensor
from nrl_models.errors import ShardingError, UnknownArgumentError
from nrl_models.loading.mtp_layers.mtp_parts import form_of, layer_like, parts_of, path_of
from nrl_models.loading.skeleton import build_skeleton

IGNORED = -100
"""Label index ignored by the loss, as in transformers."""


class MTPOutput(NamedTuple):
    """Output of the layer.

    Args:
        loss: Mean cross-entropy over the labeled tokens; zero if there are none.
        logits: `(batch, seq_len - 2, vocab_size)`, for the third and later tokens.
    """

    loss: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class TrainedTensor(KeptTensor):
    """A kept tensor that is computed from a module's parameters on each read, instead of a file's pages.

    Args:
        source: Returns the tensor.
    """

    source: Callable[[], torch.Tensor] = torch.Tensor

    def read(self) -> torch.Tensor:
        """Return the current values: a view of the parameters, unless their dtype differs from `spec`.

        Raises:
            ShardingError: If the layer was sharded.
        """
        tensor = self.source().detach()
        if isinstance(tensor, DTensor):
            raise ShardingError("an MTP layer is sharded, which is not supported: train it unsharded, or with DDP", [])
        return tensor.to(self.spec.dtype)

    def __deepcopy__(self, memo: dict[int, object]) -> KeptTensor:
        return KeptTensor(self.spec, (self.read().clone(),), is_mtp=True)  # training does not change a copy

    def __reduce__(self) -> Any:
        return KeptTensor, (self.spec, (self.read().clone(),), None, True)


def _trained(source: Callable[[], torch.Tensor]) -> TrainedTensor:
    now = source()
    return TrainedTensor(TensorSpec(tuple(now.shape), now.dtype), (), is_mtp=True, source=source)


class MTPLayer(nn.Module):
    """The layer of multi-token prediction of a model. Does not modify the model's parameters.

    After this call, the model saves and exports this layer's parameters instead of the kept tensors, with the
    checkpoint's names and shapes. If the checkpoint has copies of the embeddings in the layer, the model's embeddings
    are saved in their place. To keep the MTP weights frozen, do not create this layer.

    Args:
        model: A model of a family with an `mtp_form`, loaded with `mtp="keep"`, unsharded and without adapters.

    Raises:
        UnknownArgumentError: If the layer cannot be trained: the family does not support it, or the model was loaded
            without MTP weights, is sharded, or accepts images.
        StateDictError: If the layer lacks tensors, or their shapes differ from those of the model's decoder layers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        decoder, names, mtp_tensors = parts_of(model)
        layer_index, table = layer_like(model, names, mtp_tensors)
        self._model = weakref.ref(model)
        self._blanks_first = form_of(model) is MTPForm.NUMBERED
        self.embedding_norm = copy.deepcopy(decoder.norm)
        self.hidden_norm = copy.deepcopy(decoder.norm)
        width = decoder.config.hidden_size
        self.joint = nn.Linear(2 * width, width, bias=False, device=decoder.device, dtype=decoder.dtype)
        self.decoder = _alone(decoder, layer_index)
        self.train(model.training).requires_grad_(True)  # even if the model is frozen
        live = _install(self, names, table, f"{path_of(model, decoder)}layers.{layer_index}.", mtp_tensors)
        for name, embeddings in (
            (names.input, model.get_input_embeddings()),
            (names.output, model.get_output_embeddings()),
        ):
            if f"{name}.weight" in mtp_tensors:
                live[f"{name}.weight"] = partial(_copied, embeddings)
        join(self.decoder)
        keep(model, {name: _trained(live[name]) for name in mtp_tensors})

    def forward(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        *,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        through_model: bool = False,
    ) -> MTPOutput:
        """Predict the token after the next one, for each token except the last two.

        Args:
            hidden_states: The model's last hidden states after its final norm, `(batch, seq_len, hidden_size)`:
                `model(..., output_hidden_states=True).hidden_states[-1]`.
            input_ids: Token ids, `(batch, seq_len)` with `seq_len >= 3`.
            labels: Tokens to predict, `(batch, seq_len)`, -100 to ignore a token; default: all tokens. Not shifted.
            attention_mask: `(batch, seq_len)`, the mask that the model received; None if it received none.
            position_ids: `(batch, seq_len)`, as the model received them. In packed rows, each document starts at 0, and
                its first two tokens are not predicted from the previous document.
            through_model: Whether the loss also backpropagates into hidden states and embeddings, as in pretraining.
                By default it trains only this layer.

        Raises:
            ValueError: If shapes differ, or there are fewer than three tokens.
        """
        shape = tuple(hidden_states.shape[:2])
        inputs = (input_ids, labels, attention_mask, position_ids)
        if any(tensor is not None and tuple(tensor.shape) != shape for tensor in inputs) or shape[1] < 3:
            input_shapes = ", ".join(str(None if tensor is None else tuple(tensor.shape)) for tensor in inputs)
            raise ValueError(
                f"expected (batch, length) of input_ids, labels, attention_mask and position_ids, as of hidden_states "
                f"{shape}, with at least three tokens: got {input_shapes}"
            )
        model = self._its_model()
        with nullcontext() if through_model else torch.no_grad():
            embeddings = model.get_input_embeddings()(input_ids[:, 1:-1])
        hidden = (hidden_states if through_model else hidden_states.detach())[:, :-2]
        mask, positions = (None if t is None else t[:, :-2] for t in (attention_mask, position_ids))
        if self._blanks_first:
            embeddings = embeddings.masked_fill(_first(input_ids[:, :-2], mask, positions)[..., None], 0.0)
        joined = self.joint(torch.cat([self.embedding_norm(embeddings), self.hidden_norm(hidden)], -1))
        predicted = self.decoder(
            inputs_embeds=joined, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        head = model.get_output_embeddings()
        parameters = {name: tensor if through_model else tensor.detach() for name, tensor in head.named_parameters()}
        logits = functional_call(head, parameters, (predicted,))
        targets = (input_ids if labels is None else labels)[:, 2:]
        if attention_mask is not None:
            targets = targets.masked_fill((attention_mask[:, 2:] == 0) | (attention_mask[:, :-2] == 0), IGNORED)
        if position_ids is not None:
            targets = targets.masked_fill(position_ids[:, 2:] < 2, IGNORED)
        total = F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )  # fmt: skip
        return MTPOutput(total / (targets != IGNORED).sum().clamp(min=1), logits)

    def _its_model(self) -> PreTrainedModel:
        model = self._model()
        if model is None:
            raise UnknownArgumentError("the model of this MTP layer is gone: keep it as long as the layer")
        return model


def _first(words: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> torch.Tensor:
    """Return a mask that is True at the first token of each sequence, `(batch, seq_len)` bool."""
    if positions is not None:
        return positions == 0
    there = torch.ones_like(words) if mask is None else mask.long()
    return (there.cumsum(1) == 1) & (there > 0)


def _alone(decoder: Any, layer_index: int) -> Any:
    """Return the model's decoder with a copy of one layer and without embeddings. Computes masks and rotations.

    Args:
        decoder: The model's decoder.
        layer_index: Index of the layer.
    """
    config = copy.deepcopy(decoder.config)
    config.num_hidden_layers = 1
    for key, value in vars(config).items():  # types of attention and of MLP for each layer
        if isinstance(value, list) and len(value) == len(decoder.layers):
            setattr(config, key, [value[layer_index]])
    alone: Any = build_skeleton(type(decoder), config, decoder.dtype)
    shared = {id(decoder.config): decoder.config}
    alone.layers[0] = copy.deepcopy(decoder.layers[layer_index], shared)
    alone.norm = copy.deepcopy(decoder.norm)
    alone.embed_tokens = None
    for buffer_owner in alone.modules():
        for name, buffer in buffer_owner._buffers.items():
            if buffer is not None:
                buffer_owner._buffers[name] = buffer.to(decoder.norm.weight.device)
    return alone


@torch.no_grad()
def _install(
    layer: MTPLayer, names: MTPParts, table: Mapping[str, HFTensor], inside: str, mtp_tensors: Mapping[str, KeptTensor]
) -> dict[str, Callable[[], torch.Tensor]]:
    """Load the checkpoint's tensors into the layer. Returns functions that read them, by the checkpoint's names."""
    live: dict[str, Callable[[], torch.Tensor]] = {}
    for name, module in (
        (names.embedding_norm, layer.embedding_norm),
        (names.hidden_norm, layer.hidden_norm),
        (names.joint, layer.joint),
        (names.norm, layer.decoder.norm),
    ):
        module.weight.copy_(mtp_tensors[f"{name}.weight"].read())
        live[f"{name}.weight"] = partial(getattr, module, "weight")
    decoder_layer = layer.decoder.layers[0]
    for name, tensor in table.items():
        stored = mtp_tensors[names.layer + name].read()
        for parameter in tensor.parameters:
            tensor.write_into(parameter, _inside(decoder_layer, parameter.removeprefix(inside)), stored)
        live[names.layer + name] = partial(_read, decoder_layer, tensor, inside)
    return live


def _copied(embeddings: Any) -> torch.Tensor:
    return embeddings.weight.detach().clone()  # transformers saves tensors that share memory only once


def _inside(layer: nn.Module, name: str) -> torch.Tensor:
    owner, _, attribute = name.rpartition(".")
    return getattr(layer.get_submodule(owner), attribute)


def _read(layer: nn.Module, tensor: HFTensor, inside: str) -> torch.Tensor:
    return tensor.read({name: _inside(layer, name.removeprefix(inside)).detach() for name in tensor.parameters})
