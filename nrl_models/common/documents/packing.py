"""Keep packed documents in a row apart, also with an attention mask or `use_cache`.

Documents are separated by `position_ids` that start again at 0. transformers only checks for that if there is neither
an attention mask nor a cache. With a mask of ones, or with the default `use_cache`, documents silently attend to each
other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.cached import cached
from nrl_models.common.documents.boundaries import Documents, starts_of
from nrl_models.common.documents.current_documents import (
    carry_documents,
    documents_are_known,
    running,
    some_layer_ran_packed,
)
from nrl_models.common.documents.masks import attend_by_document
from nrl_models.common.documents.media_positions import computes_media_positions, text_positions
from nrl_models.common.documents.packing_checks import check_padding, check_starts, why_not_packed
from nrl_models.common.modules import innermost
from nrl_models.common.switches import is_off
from nrl_models.common.upstream import cache_in

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Signature:
    """Arguments of a model's forward.

    Args:
        names: Positional argument names without `self`.
        takes_more: Whether it has `**kwargs`. Multimodal models in transformers pass `use_cache` through them.
    """

    names: tuple[str, ...]
    takes_more: bool

    @classmethod
    def of(cls, forward: Forward) -> _Signature:
        """Read the signature of an unbound forward."""
        parameters = inspect.signature(forward).parameters
        names = [name for name, parameter in parameters.items() if parameter.kind != parameter.VAR_KEYWORD]
        return cls(tuple(names[1:]), len(names) < len(parameters))

    def takes(self, name: str) -> bool:
        """Return True if the forward accepts the keyword `name`."""
        return name in self.names or self.takes_more


def keep_documents_apart(forward: Forward, *, defined_by: type[nn.Module] | None = None) -> Forward:
    """Wrap a model's `forward` so that packed documents stay apart.

    Where positions start again, the wrapper drops a 2-D mask, makes no cache, and runs the forward with the documents
    (`documents_running()`). The mask is then redundant, because padding is never in one document with a later token.
    Inside a wrapped forward, further wrapped forwards change nothing. A packed row with a cache raises `ValueError`.

    `torch.compile` cannot read positions. The wrapper therefore breaks the graph where a batch may be packed: with
    `cu_seq_lens_q`, or `position_ids` of several tokens. Under `fullgraph=True` that raises torch's `Unsupported`.

    Boundaries `cu_seq_lens_q`, which transformers' collators return, must agree with the positions, or replace them.

    Args:
        forward: Unbound, taking `attention_mask`, `position_ids` `(batch, length)` and a cache by name.
        defined_by: The class that `forward` comes from. Its `forward` at the time of the call runs, so a later patch of
            that class takes effect. None always runs `forward`.
    """
    known_signature = _Signature.of(forward)

    @functools.wraps(forward)
    def with_documents_apart(self: Any, *args: Any, **kwargs: Any) -> Any:
        current: Forward = forward if defined_by is None else defined_by.forward
        if is_off("packed-documents"):
            return current(self, *args, **kwargs)
        signature = known_signature if current is forward else _signature_of(current)
        if not torch.compiler.is_compiling():
            return _run(current, signature, self, args, kwargs)
        inputs = dict(zip(signature.names, args, strict=False)) | kwargs
        if torch.compiler.is_exporting() or not _may_be_packed(inputs):
            return current(self, *args, **kwargs)
        return _run_outside_graph(current, signature, self, args, kwargs)

    with_documents_apart.keeps_documents_apart = True  # type: ignore[attr-defined]
    return with_documents_apart


_signature_of = functools.cache(_Signature.of)


def _may_be_packed(inputs: Mapping[str, Any]) -> bool:
    """Return True if the values of a call's arguments decide whether its batch is packed."""
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    is_row = isinstance(positions, torch.Tensor) and positions.ndim > 1 and positions.shape[-1] > 1
    positions_decide = is_row and (mask is None or _is_2d(mask))
    return positions_decide or inputs.get("cu_seq_lens_q") is not None


def _run(forward: Forward, signature: _Signature, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a model's forward, and make the documents of its batch available to its layers."""
    if documents_are_known():  # a model around this one has read the positions
        return forward(model, *args, **kwargs)
    inputs = dict(zip(signature.names, args, strict=False)) | kwargs
    documents = _documents_of(model, inputs)
    if torch.is_grad_enabled() and (documents is not None or some_layer_ran_packed()):
        carry_documents(model)
    if documents is None:
        with running(None):
            return forward(model, *args, **kwargs)
    attend_by_document()
    rows = documents.shape[0]
    inputs["attention_mask"] = None
    if signature.takes("use_cache"):
        inputs["use_cache"] = False
    is_2d = _is_2d(inputs["position_ids"])
    if not signature.takes("position_ids") or (is_2d and computes_media_positions(model, inputs)):
        del inputs["position_ids"]  # the documents contain the same information
    with running(documents):
        output = forward(model, **inputs)
    _check_scores(model, output, rows)
    return output


_run_outside_graph = torch.compiler.disable(
    _run,
    recursive=False,
    reason="position_ids decide whether a batch is packed, and a graph cannot read them. Leave out fullgraph=True, or "
    "pass no position_ids (then a row is one document)",
)


@torch.compiler.disable
def _documents_of(model: Any, inputs: dict[str, Any]) -> Documents | None:
    """Return the documents of a packed batch; None if every row has one. Sets positions from boundaries in `inputs`.

    Raises:
        ValueError: If the model cannot keep documents apart, the row has a cache, or arguments contradict each other.
    """
    mask, cache = inputs.get("attention_mask"), cache_in(inputs)
    if inputs.get("cu_seq_lens_q") is not None:
        inputs["position_ids"] = checked_positions(inputs, mask)
    planes = inputs.get("position_ids")
    if not isinstance(planes, torch.Tensor) or planes.shape[-1:] == (1,):  # a step of decoding
        return None
    positions = text_positions(model, planes)
    if positions is None or not _is_2d(positions):
        return None
    if mask is None:
        mask = torch.ones_like(positions)
    elif cache is not None and _is_2d(mask):
        mask = mask[:, -positions.shape[1] :]  # the mask also covers the tokens in the cache
    if not _is_2d(mask) or mask.shape != positions.shape or not start_again(mask, positions):
        return None
    if reason := getattr(model, "limits", {}).get("packed sequences"):
        raise ValueError(
            f"{type(model).__name__} cannot keep documents apart that are packed into one row: {reason}. "
            "position_ids start again inside a row: put each document in a separate row, and pad."
        )
    if cache is not None:
        raise ValueError(
            "position_ids start again inside a row, and a key-value cache was passed, which cannot keep documents "
            "apart. Call the model without a cache, or put each document in a separate row, and pad."
        )
    on_host = mask.cpu(), positions.cpu()  # one wait for a GPU, instead of one for each check
    check_padding(*on_host)
    check_starts(*on_host)
    documents = Documents.from_positions(on_host[1], on_host[0])
    if reason := why_not_packed(getattr(model, "config", None), documents, *on_host):
        raise ValueError(f"{type(model).__name__} cannot keep documents apart that are packed into one row: {reason}")
    documents = documents.to(positions.device)
    # Padding has any positions. Decoders that compute their own compare them with those of the documents.
    positions = torch.where(mask.bool(), positions, documents.positions)
    inputs["position_ids"] = positions if _is_2d(planes) else torch.cat([positions[None], planes[1:]])
    return documents


class WrapsReplacedForward(nn.Module):
    """Mixin for a model with a wrapped forward. A forward that replaces it on the instance is also wrapped."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`. If it was replaced on the instance, wrap the replacement."""
        replaced = self.__dict__.get("forward")
        if replaced is None or is_off("packed-documents") or torch.compiler.is_compiling() or documents_are_known():
            return super().__call__(*args, **kwargs)
        signature = _signature_of(type(self).forward)
        call = super().__call__
        return _run(lambda _, *args, **kwargs: call(*args, **kwargs), signature, self, args, kwargs)


# Models inside a model, which trainers call directly


class KeepsDocumentsApart(WrapsReplacedForward):
    """Mixin that wraps the forward of a model inside a model (`model.model`, `model.base_model`, the decoder).

    Trainers with fused heads (TRL, Liger, verl) call the inner model directly. `inner_models_keep_documents_apart`
    creates the classes, with the names of the Hugging Face classes. Copies and pickles refer to those.

    Attributes:
        wraps: The Hugging Face class.
        limits: The `limits` of the outer model, if it cannot keep documents apart.
    """

    wraps: ClassVar[type[nn.Module]]
    limits: ClassVar[Mapping[str, str]] = {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an instance of upstream's class, which can be imported."""
        reduced: Any = super().__reduce_ex__(protocol)
        function, arguments, *state = reduced
        if arguments != (type(self),) or "wraps" not in vars(type(self)):
            return function, arguments, *state
        return _new_inner_model, (self.wraps, self.limits.get("packed sequences")), *state


def inner_models_keep_documents_apart(model: PreTrainedModel) -> None:
    """Wrap the forwards of the models inside `model` that lead to its decoder, in place. Its own is already wrapped."""
    for module in models_to_decoder(model):
        if isinstance(module, KeepsDocumentsApart):
            continue
        if _Signature.of(type(module).forward).takes("position_ids"):
            limit = getattr(model, "limits", {}).get("packed sequences")
            module.__class__ = _inner_model_class(type(module), limit)


def models_to_decoder(model: PreTrainedModel) -> list[nn.Module]:
    """Return the models inside `model` that trainers call directly: its base model, and those with the decoder."""
    decoder = innermost(model.get_decoder())
    models: list[nn.Module] = [innermost(model.base_model)]
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and any(inner is decoder for inner in module.modules()):
            models.append(module)
    return [module for module in dict.fromkeys(models) if module is not model]


@cached
def _inner_model_class(upstream: Any, limit: str | None) -> type[nn.Module]:
    names = {"__module__": upstream.__module__, "__qualname__": upstream.__qualname__, "__doc__": upstream.__doc__}
    home: Any = next(base for base in upstream.__mro__ if "forward" in vars(base))
    attributes = {
        "wraps": upstream,
        "limits": {} if limit is None else {"packed sequences": limit},
        "forward": keep_documents_apart(home.forward, defined_by=home),
    }
    return type(upstream.__name__, (KeepsDocumentsApart, upstream), names | attributes)


def _new_inner_model(upstream: type[nn.Module], limit: str | None) -> nn.Module:
    made = _inner_model_class(upstream, limit)
    return made.__new__(made)


def token_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return positions that count tokens without padding, `(batch, seq_len)`; zero for padding, as in `generate`."""
    return (attention_mask.long().cumsum(-1) - 1).masked_fill(~attention_mask.bool(), 0)


def start_again(mask: torch.Tensor, positions: torch.Tensor) -> bool:
    """Return True if a row has tokens of two documents: a document starts between its first and last token.

    Args:
        mask: `(batch, seq_len)`, False or 0 for padding.
        positions: `(batch, seq_len)`.
    """
    token = mask.bool()
    inside = token & (token.cumsum(-1) > 1)
    return bool((starts_of(positions, mask) & inside).any())


def _is_2d(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2


def _check_scores(model: nn.Module, output: Any, rows: int) -> None:
    """Raise if a row is packed but the model has one score per row, because other documents would have no score."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor) and logits.ndim == 2 and len(logits) == rows:
        raise ValueError(
            f"{type(model).__name__} returns one score per row, and position_ids start again inside a row: put each "
            "document in a separate row, and pad."
        )


def checked_positions(inputs: dict[str, Any], mask: Any) -> Any:
    """Return positions `(batch, seq_len)` computed from boundaries, or passed ones that agree. Others are unchanged.

    Raises:
        ValueError: If the boundaries do not match the batch or its positions.
    """
    tokens = inputs.get("input_ids")
    tokens = inputs.get("inputs_embeds") if tokens is None else tokens
    boundaries, positions = inputs["cu_seq_lens_q"].tolist(), inputs.get("position_ids")
    if tokens is None or (positions is not None and not _is_2d(positions)):
        return positions
    batch, length = tokens.shape[:2]
    late = [index for index in range(1, len(boundaries)) if boundaries[index] <= boundaries[index - 1]]
    if boundaries[:1] != [0] or boundaries[-1] != batch * length or late:
        problem = f"{boundaries[late[0]]} follows {boundaries[late[0] - 1]} (number {late[0]}); " if late else ""
        raise ValueError(
            f"cu_seq_lens_q is not a list of document starts: {problem}expected increasing numbers from 0 to the "
            f"{batch * length} tokens of the batch, got {boundaries[:1]} to {boundaries[-1:]}"
        )
    lengths = torch.tensor(boundaries).diff().tolist()
    counted = torch.cat([torch.arange(size) for size in lengths]).view(batch, length).to(tokens.device)
    if positions is None:
        return counted
    words = mask if _is_2d(mask) else torch.ones_like(counted)
    differ = (starts_of(positions) != (counted == 0)) & words.bool()
    differ[:, 0] = counted[:, 0] != 0
    if differ.any():
        row, column = differ.nonzero()[0].tolist()
        raise ValueError(
            f"cu_seq_lens_q and position_ids disagree at token {column} of row {row}: a document starts there in only "
            "one of them."
        )
    return positions
