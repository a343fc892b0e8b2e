"""Choices for a run that are not stored in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Combine = bool | Literal["auto"]
"""Whether projections of one input are computed in one matmul; "auto" decides by device."""


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """How a model computes what it computes.

    Args:
        attn: transformers' `attn_implementation` ("sdpa", "eager", "flash_attention_2", ...); None
            leaves its default.
        experts: transformers' `experts_implementation` ("eager", "grouped_mm", "batched_mm"); None
            leaves its default.
        combine: whether projections of one input run as one matmul, see `should_combine`.
    """

    attn: str | None = None
    experts: str | None = None
    combine: Combine = True

    def implementations(self) -> dict[str, str]:
        """What is set, as keywords of transformers' model construction."""
        chosen = {"attn_implementation": self.attn, "experts_implementation": self.experts}
        return {name: value for name, value in chosen.items() if value is not None}


def should_combine(combine: Combine, device: torch.device | None) -> bool:
    """Whether to combine projections on `device` (None is the CPU).

    It affects speed only. "auto" follows docs/benchmarks.md: one matmul in place of three does not pay on a CPU, where
    it is bound by memory and arithmetic, not by launches; on an accelerator projections are combined.

    Raises:
        ValueError: `combine` is neither a bool nor "auto".
    """
    if combine == "auto":
        return device is not None and device.type != "cpu"
    if not isinstance(combine, bool):
        raise ValueError(f"combine={combine!r}: expected True, False or 'auto'")
    return combine
