"""Hashes of tensors, to check that a trainer and an engine hold the same weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import xxhash

from nrl_models.common.dtypes import dtype_name
from nrl_models.common.logs import get_logger
from nrl_models.engines.engine_types import NamedTensor, RefitReport
from nrl_models.errors import listed

logger = get_logger(__name__)

NO_DIGESTS = "the engine reports no digests of received weights"
"""Note for engines that cannot compute digests."""


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the XXH3 hash (128 bits, 32 hexadecimal digits) of a tensor's dtype, shape and elements.

    Device and strides make no difference. It detects errors of transport and software, not forgery, and takes less time
    than one copy of the tensor.
    """
    digest = xxhash.xxh3_128()
    value = tensor.detach().cpu().contiguous()
    digest.update(f"{dtype_name(value.dtype)} {tuple(value.shape)} ".encode())
    if value.numel():
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digested(tensors: Iterable[NamedTensor], digests: dict[str, str]) -> Iterable[NamedTensor]:
    """Yield the tensors of a refit, and add the digest of each to `digests` when the next one is requested.

    By then the receiver has checked the tensor. Arguments that are not pairs of name and tensor are passed on, so that
    the receiver's error describes them.

    Args:
        tensors: Pairs of Hub name and tensor.
        digests: Digests by name; filled.
    """
    if isinstance(tensors, Mapping) or not isinstance(tensors, Iterable):
        return tensors

    def stream() -> Iterator[NamedTensor]:
        for pair in tensors:
            yield pair
            name, tensor = pair
            digests[name] = tensor_digest(tensor)

    return stream()


def refit_problems(
    report: RefitReport, sent: Mapping[str, str], plan: Sequence[tuple[str, tuple[int, ...], torch.dtype]]
) -> list[str]:
    """Return the problems of a refit: tensors that were not sent, did not arrive, or were not written.

    Args:
        report: The engine's report.
        sent: Digest of each sent tensor by name.
        plan: Tensors that were to be sent, as from `StateDictAdapter.export_plan`.
    """
    problems, planned, arrived = [], [name for name, _, _ in plan], report.digests
    if list(sent) != planned:
        different = [f"{name} for {wanted}" for name, wanted in zip(sent, planned, strict=False) if name != wanted]
        problems.append(f"other tensors were sent than planned: {len(sent)} for {len(planned)}; {different[:3]}")
    sides = {
        "tensors did not arrive": [name for name in sent if name not in arrived],
        "tensors arrived changed": [name for name in sent if name in arrived and arrived[name] != sent[name]],
        "tensors arrived but were not sent": [name for name in arrived if name not in sent],
    }
    unwritten = {
        "parameters of the engine were not written": report.unwritten,
        "buffers of the engine were not written": report.stale_buffers,
    }
    if sent and not arrived:
        logger.warning_once(f"{NO_DIGESTS}: log-probabilities compare the weights instead")
    for problem, names in ((sides if arrived else {}) | unwritten).items():
        if names:
            problems.append(f"{problem}: {listed(names)}")
    return problems


class HeldWeights:
    """A hash per row of the floating-point weights of an engine, to find rows that a refit did not change.

    A row is the last dimension of a tensor, or one element of a vector. Fused tensors consist of complete rows, so
    hashes per row work for them.

    Args:
        tensors: Tensors by the engine's names.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._rows = {name: _row_numbers(tensor) for name, tensor in tensors.items() if tensor.is_floating_point()}

    def unchanged(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return names of tensors with unchanged rows, and how many rows. Rows of zeros are padding and not counted."""
        unchanged = []
        for name, before in self._rows.items():
            now = _row_numbers(tensors[name])
            rows = (now != 0) | (before != 0)
            same, count = int((rows & (now == before)).sum()), int(rows.sum())
            if same:
                unchanged.append(f"{name} ({same:,} of {count:,} rows)" if same < count else name)
        return unchanged


def _row_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Hash the bits of each row to 64 bits; 0 for a row of zeros."""
    value = tensor.detach().contiguous()
    rows = value.reshape(-1, 1 if value.dim() < 2 else value.shape[-1])
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    factors = torch.arange(1, 2 * rows.shape[1], 2, device=rows.device) * 0x9E3779B97F4A7C1
    chunks = rows.view(bits).split(max(1, 2**22 // rows.shape[1])) if rows.numel() else []
    parts = [((chunk.long() * factors) ^ ((chunk.long() * factors) >> 29)).sum(1) for chunk in chunks]
    return torch.cat(parts).cpu() if parts else torch.zeros(0, dtype=torch.int64)


HEAD = "lm_head.weight"
"""Name of the weights that a configuration ties to the embeddings, without the names of parent modules."""


def tied_apart(name: str, source: str) -> str:
    """Return the message for a tensor that differs from the tensor that the engine's configuration ties it to."""
    return (
        f"{name} differs from {source}, and the engine's configuration ties them (tie_word_embeddings), so it has one "
        "tensor for both: set tie_word_embeddings=False in the model's configuration, save the "
        "model, and start another engine on the saved checkpoint"
    )
