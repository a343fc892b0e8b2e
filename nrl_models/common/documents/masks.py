"""Masks of packed batches that are only built if they are read.

transformers creates masks through one registry, and passes them to attention functions of a second registry. While a
packed batch runs, this module makes the first registry return a `DocumentMask`. Attention functions of the second
registry, and torch's SDPA, recognize it and attend per document. All other code that reads the mask gets the mask that
transformers would create. The mask is an argument of layers, so activation checkpointing passes it to recomputation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from nrl_models.common.documents.attention import attend
from nrl_models.common.documents.boundaries import Documents
from nrl_models.common.documents.current_documents import documents_running
from nrl_models.common.documents.mask_functions import at_columns, mask_parts
from nrl_models.common.switches import is_off
from nrl_models.common.upstream_torch import DisableTorchFunctionSubclass, tree_map

Function = Callable[..., Any]

sdpa_attention: Function = AttentionInterface()["sdpa"]
flash_attention: Function = AttentionInterface()["flash_attention_2"]

METADATA = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "is_cuda")
) | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.__len__,
    torch.Tensor.is_floating_point,
}
"""Functions and attributes of a mask that do not need its values."""


class DocumentMask(torch.Tensor):
    """The mask of causal attention within documents, `(batch, 1, seq_len, seq_len)` bool. Built when it is read.

    Attributes:
        documents: Documents, within which tokens attend to each other.
        window: Number of tokens that a token attends to, including itself. None for all previous tokens.
    """

    documents: Documents
    window: int | None
    _build: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(
        cls: Any, documents: Documents, window: int | None, build: Callable[[], torch.Tensor], device: Any
    ) -> DocumentMask:
        """Create a mask on `device`. `build` returns its values, and is called when they are read."""
        batch, length = documents.shape
        made = torch.Tensor._make_wrapper_subclass(cls, (batch, 1, length, length), dtype=torch.bool, device=device)
        made.documents, made.window, made._build = documents, window, build
        return cast(DocumentMask, made)

    def built(self) -> torch.Tensor:
        """Return the mask that transformers creates."""
        return self._build()

    def fits(self, *tensors: torch.Tensor) -> bool:
        """Return True if these are plain tensors `(batch, heads, seq_len, head_size)` that match the mask."""
        expected = 4, self.shape[0], self.shape[-1]
        return all(
            type(tensor) in (torch.Tensor, nn.Parameter) and (tensor.ndim, *tensor.shape[::2][:2]) == expected
            for tensor in tensors
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Attend per document, run functions that need no values, and build the mask for all other functions."""
        kwargs = kwargs or {}
        if func in METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is nn.functional.scaled_dot_product_attention:
            bound = _SDPA.bind(*args, **kwargs)
            bound.apply_defaults()
            query, key, value, mask, dropout, is_causal, scale, _ = bound.args
            if isinstance(mask, cls) and not is_causal and mask.fits(query, key, value):
                options = {"window": mask.window, "scale": scale, "dropout": dropout}
                return attend(query, key, value, mask.documents, **options).transpose(1, 2)
        if _changes_nothing(func, args, kwargs):
            return args[0]
        return func(*_built(args), **_built(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Handle torch's own calls: it detaches tensors that checkpoints save."""
        if func is torch.ops.aten.detach.default:
            (mask,) = args
            return cls(mask.documents, mask.window, mask._build, mask.device)
        return func(*_built(args), **_built(kwargs or {}))


def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False): ...  # type: ignore[no-untyped-def]


_SDPA = inspect.signature(_sdpa)


def _built(values: Any) -> Any:
    return tree_map(lambda value: value.built() if isinstance(value, DocumentMask) else value, values)


def _changes_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a call returns the mask unchanged: a complete slice (as for caches), or detaching."""
    if func is torch.Tensor.__getitem__:
        mask, index = args
        index = index if isinstance(index, tuple) else (index,)
        return len(index) <= mask.ndim and all(
            isinstance(part, slice) and part.indices(size) == (0, size, 1)
            for part, size in zip(index, mask.shape, strict=False)
        )
    return func in (torch.Tensor.contiguous, torch.Tensor.detach)


# transformers' registries

_UNDERSTOOD = {"causal_mask_function", "packed_sequence_mask_function", "sliding_window_overlay", "chunked_overlay"}
"""Parts of masks that `attend` supports. Masks with other parts are built."""


_QUIRKS = ("masks-without-positions", "mrope-packed-documents")
"""Quirks of models whose masks ignore documents."""


def attend_by_document() -> None:
    """Register `DocumentMask` with transformers' registries for packed batches. Other batches are unaffected.

    The attention functions of a model and its configuration do not change.
    """
    for name, make in ALL_MASK_ATTENTION_FUNCTIONS.items():
        if make in _MASKS:
            ALL_MASK_ATTENTION_FUNCTIONS[name] = _MASKS[make]
        function = ALL_ATTENTION_FUNCTIONS.get(name)
        if function in _ATTENTION:
            ALL_ATTENTION_FUNCTIONS[name] = _ATTENTION[function]


def _keeping_apart(make: Function, *, built: bool) -> Function:
    """Wrap a mask function so that documents of a packed batch stay apart, even if it does not receive their positions.

    Args:
        make: A mask function of transformers.
        built: Whether the attention function needs the built mask.
    """
    names = tuple(inspect.signature(make).parameters)

    @functools.wraps(make)
    def mask_of(*args: Any, **kwargs: Any) -> Any:
        documents = documents_running()
        asked = dict(zip(names, args, strict=False)) | kwargs
        if documents is None or not _is_of(documents, asked):
            if documents is None or not _has_its_shape(documents, asked):
                return make(*args, **kwargs)
            if documents.prompts is not None:
                raise ValueError(_CANNOT_SHARE.format(", ".join(sorted(mask_parts(asked["mask_function"])))))
            return make(**asked | {"mask_function": at_columns(asked["mask_function"])})
        parts = mask_parts(asked["mask_function"])
        has_documents = "packed_sequence_mask_function" in parts
        if not has_documents and any(map(is_off, _QUIRKS)):
            return make(*args, **kwargs)
        asked["attention_mask"] = None  # some models create a mask of ones if they receive none
        understood = parts.keys() <= _UNDERSTOOD
        window = parts.get("sliding_window_overlay", {}).get("sliding_window")
        if understood and "chunked_overlay" in parts:
            # Chunks start with their document. transformers up to 5.18 counts them from the start of the row.
            documents, has_documents = documents.chunked(parts["chunked_overlay"]["chunk_size"]), False
            asked["mask_function"] = (
                masking_utils.causal_mask_function
                if window is None
                else masking_utils.sliding_window_causal_mask_function(window)
            )
        if documents.prompts is not None:
            if not understood:
                raise ValueError(_CANNOT_SHARE.format(", ".join(sorted(parts.keys() - _UNDERSTOOD))))
            asked["mask_function"] = _continuing(documents, window, asked["device"])
        elif not has_documents:
            apart = masking_utils.packed_sequence_mask_function(documents.index.to(asked["device"]))
            asked["mask_function"] = masking_utils.and_masks(apart, asked["mask_function"])
        elif not understood:
            asked["mask_function"] = at_columns(asked["mask_function"])
        if built or not understood:
            return make(**(asked | {"allow_is_causal_skip": False}))
        build: Any = functools.partial(masking_utils.sdpa_mask, **(asked | {"allow_is_causal_skip": False}))
        return DocumentMask(documents, window, build, asked["device"])

    return mask_of


def _continuing(documents: Documents, window: int | None, device: Any) -> Function:
    """Return the mask function of documents that continue shared prompts. Windows count positions, not columns."""
    assert documents.prompts is not None
    index, positions = documents.index[0].long().to(device), documents.positions[0].to(device)
    spans = torch.tensor(documents.prompts.spans, device=device)
    starts, ends = spans[index].unbind(-1)

    def mask(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        sees = (index[q_idx] == index[kv_idx]) & (kv_idx <= q_idx) | (kv_idx >= starts[q_idx]) & (kv_idx < ends[q_idx])
        return sees if window is None else sees & (positions[kv_idx] > positions[q_idx] - window)

    return mask


def _is_of(documents: Documents, asked: dict[str, Any]) -> bool:
    """Return True if the mask is for causal attention among the batch's tokens, and not for a tower or an encoder."""
    return (
        _has_its_shape(documents, asked)
        and (asked.get("attention_mask") is None or bool(asked["attention_mask"].all()))
        and "device" in asked
        and not mask_parts(asked["mask_function"]).keys().isdisjoint({"causal_mask_function"})
    )


def _has_its_shape(documents: Documents, asked: dict[str, Any]) -> bool:
    return (asked["batch_size"], asked["q_length"], asked["kv_length"]) == (*documents.shape, documents.shape[1])


_BOTH_DIRECTIONS = (
    "{} attends in both directions in rows without padding (is_causal=False, from use_bidirectional_attention=True of "
    "its configuration), but packed documents need causal attention: put each document in a separate row, or call the "
    "complete model if this is the decoder of a model with images."
)
_CANNOT_SHARE = "documents with masks of {} cannot share a prompt: pass share_prompts=False"

_MASKS = {
    masking_utils.sdpa_mask: _keeping_apart(masking_utils.sdpa_mask, built=False),
    masking_utils.flash_attention_mask: _keeping_apart(masking_utils.flash_attention_mask, built=False),
    masking_utils.eager_mask: _keeping_apart(masking_utils.eager_mask, built=True),
    masking_utils.flex_attention_mask: _keeping_apart(masking_utils.flex_attention_mask, built=True),
}
"""Replacements of transformers' mask functions."""


def can_share_prompts(attention: str | None) -> bool:
    """Return True if documents can share prompts with an attention implementation, a key of transformers' registries.

    Flex attention cannot: on a CPU, torch does not compile the mask.
    """
    make, flex = ALL_MASK_ATTENTION_FUNCTIONS.get(attention), masking_utils.flex_attention_mask
    return make in {*_MASKS, *_MASKS.values()} - {flex, _MASKS[flex]}


_NOT_PLAIN = ("softcap", "position_bias", "cache")
"""Keywords of attention that need the built mask or are not supported."""


@functools.wraps(sdpa_attention)
def _sdpa_by_document(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> Any:
    """Run SDPA without repeating key heads. transformers repeats and copies them if there is a mask."""
    mask, plain = attention_mask, all(kwargs.get(name) is None for name in _NOT_PLAIN)
    if not isinstance(mask, DocumentMask) or not plain or not mask.fits(query, key, value):
        return sdpa_attention(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    causal = kwargs.get("is_causal")
    if (getattr(module, "is_causal", True) if causal is None else causal) is False:
        raise ValueError(_BOTH_DIRECTIONS.format(type(module).__name__))
    return attend(query, key, value, mask.documents, window=mask.window, scale=scaling, dropout=dropout), None


@functools.wraps(flash_attention)
def _flash_by_document(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Pass document boundaries to the flash kernel. transformers only derives them from positions for a single row."""
    if isinstance(attention_mask, DocumentMask):
        documents, window = attention_mask.documents, attention_mask.window
        kwargs |= documents.boundaries(query.device) | {"sliding_window": window}
        if documents.prompts is not None:
            key, value = (documents.prompts.repeated(tensor, 2) for tensor in (key, value))
        attention_mask = None
    return flash_attention(module, query, key, value, attention_mask, *args, **kwargs)


_ATTENTION = {sdpa_attention: _sdpa_by_document, flash_attention: _flash_by_document}
"""Replacements of transformers' attention functions."""
