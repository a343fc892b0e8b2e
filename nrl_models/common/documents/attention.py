"""Attention per document in a packed batch, without a mask and without computing scores between documents."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from nrl_models.common.documents.boundaries import Documents

MOST_VALUES = 256
"""Maximum head size of the flash kernels with variable lengths."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    *,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute causal attention within each document.

    Shapes: B batch, H heads, K key-value heads (H is a multiple of K), T sequence length, D head size, V value head
    size.

    On a CPU, each document runs separately, with the result of a batch of only that document. On a GPU, one kernel for
    variable lengths processes all documents, if it supports these tensors. Otherwise `documents.batches` run.

    Args:
        query: `(B, H, T, D)`.
        key: `(B, K, T, D)`.
        value: `(B, K, T, V)`.
        documents: Documents of the `(B, T)` batch.
        window: Number of tokens that a token attends to, including itself. None for all previous tokens.
        scale: Scale of the scores. None for `1 / sqrt(D)`.
        dropout: Dropout probability of the attention weights.

    Returns:
        Contiguous tensor `(B, T, H, V)`.
    """
    kernel = _kernel() if _fits_kernel(query, key, value, dropout) else None
    if kernel is not None and (documents.prompts is None or _aligns_ends(kernel, query.device)):
        return _all_at_once(kernel, query, key, value, documents, window, scale)
    options: dict[str, Any] = {"window": window, "scale": scale, "dropout_p": dropout}
    options["enable_gqa"] = query.shape[1] != key.shape[1]
    if (batches := documents.batches) is not None:
        parts = batches.split_queries(query), batches.split_keys(key), batches.split_keys(value)
        output = batches.join([_causal(*part, **options) for part in zip(*parts, strict=True)])
        return output.unflatten(0, documents.shape)
    queries = documents.split_without_prompts(query, 2)  # tokens of a shared prompt attend once
    parts = queries, documents.split(key, 2), documents.split(value, 2)
    return documents.join([_causal(*part, **options).transpose(1, 2) for part in zip(*parts, strict=True)], 1)


TILE = 1024
"""Number of queries per mask for documents that continue a shared prompt."""


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, window: int | None, **options: Any
) -> torch.Tensor:
    """Compute causal attention of documents `(B, ...)`. With a window, runs one window of queries per call.

    The queries are the last tokens. The keys before them are the keys of a shared prompt.
    """
    if window is not None and window < 1:
        raise ValueError(f"the attention window has {window} tokens, expected at least 1: set sliding_window to null")
    length, total = query.shape[2], key.shape[2]
    prompt = total - length
    if not prompt and (window is None or length <= window):
        return scaled_dot_product_attention(query, key, value, is_causal=length > 1, **options)
    tiles = []
    size, window = (TILE, total) if window is None else (window, window)
    for start in range(prompt, total, size):
        end, first = min(start + size, total), max(0, start - window + 1)
        queries = torch.arange(start, end, device=query.device)[:, None]
        keys = torch.arange(first, end, device=query.device)
        sees = (keys <= queries) & (keys > queries - window)
        tile = query[:, :, start - prompt : end - prompt], key[:, :, first:end], value[:, :, first:end]
        tiles.append(scaled_dot_product_attention(*tile, attn_mask=sees, **options))
    return torch.cat(tiles, 2)


def _fits_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] == value.shape[-1] <= MOST_VALUES
        and query.shape[-1] % 8 == 0
        and not dropout
    )


Kernel = Callable[..., torch.Tensor]


@cache
def _kernel() -> Kernel | None:
    """Return torch's kernel for variable lengths, else flash-attention's; None if neither is installed."""
    if importlib.util.find_spec("torch.nn.attention.varlen"):
        varlen_attn: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        # Some versions of torch have the kernel without windows. Do not use it there.
        if {"window_size", "enable_gqa", "scale"} <= inspect.signature(varlen_attn).parameters.keys():
            return _torch_kernel
    return _flash_kernel if importlib.util.find_spec("flash_attn") else None


def _torch_kernel(
    tensors: tuple[torch.Tensor, ...], boundaries: tuple[Any, ...], left: int, scale: float | None
) -> torch.Tensor:
    varlen_attn: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    options = {"scale": scale, "window_size": (left, 0), "enable_gqa": True}
    output: torch.Tensor = varlen_attn(*tensors, *boundaries, **options)
    return output


def _flash_kernel(
    tensors: tuple[torch.Tensor, ...], boundaries: tuple[Any, ...], left: int, scale: float | None
) -> torch.Tensor:
    flash_attn_varlen_func: Any = importlib.import_module("flash_attn").flash_attn_varlen_func
    options = {"softmax_scale": scale, "causal": True, "window_size": (left, 0 if left >= 0 else -1)}
    output: torch.Tensor = flash_attn_varlen_func(*tensors, *boundaries, **options)
    return output


def _all_at_once(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Compute attention of all rows in one kernel call, on flattened tokens `(tokens, heads, head_size)`."""
    if documents.prompts is not None:
        key, value = (documents.prompts.repeated(tensor, 2) for tensor in (key, value))
    flat = tuple(tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    left = -1 if window is None else window - 1
    output = kernel(flat, tuple(documents.boundaries(query.device).values()), left, scale)
    return output.unflatten(0, documents.shape)


@cache
@torch.no_grad()
def _aligns_ends(kernel: Kernel, device: torch.device) -> bool:
    """Return True if a kernel aligns the last query with the last key where a document has more keys than queries."""
    queries, keys = 2, 5
    numbers = torch.randn(queries + 2 * keys, 2, 64, generator=torch.Generator().manual_seed(0)).to(device).half()
    query, key, value = numbers.split((queries, keys, keys))
    starts = (torch.tensor([0, length], dtype=torch.int32, device=device) for length in (queries, keys))
    output = kernel((query, key, value), (*starts, queries, keys), -1, None)
    sees = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    query, key, value = (tensor.transpose(0, 1)[None].float() for tensor in (query, key, value))
    expected = scaled_dot_product_attention(query, key, value, sees)[0].transpose(0, 1)
    return torch.allclose(output.float(), expected, atol=1e-2)
