"""Choices for a run that are not stored in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any, Literal

import torch

from nrl_models.errors import UnknownArgumentError, UnknownOptionError

Combine = bool | Literal["auto"]
"""Whether projections of one input are computed in one matmul; "auto" decides by device."""


_TE = "TransformerEngine's layers are not Hugging Face's, which all layers here are"
_DEEP_EP = (
    "experts are divided over ranks by torch's collectives here, not by DeepEP's kernels: pass a mesh with a dimension "
    "`ep` (docs/scaling.md)"
)

_RENAMED: Mapping[str, Mapping[str, str]] = {
    "attn": {"flex": "flex_attention"},
    "experts": {"torch": "eager", "gmm": "grouped_mm", "torch_mm": "grouped_mm"},
}
"""NeMo AutoModel's names of what transformers names otherwise, by field."""

_REFUSED: Mapping[str, Mapping[str, str]] = {
    "attn": {"te": _TE},
    "linear": {"te": _TE},
    "rms_norm": {"te": _TE},
    "experts": {"te": _TE},
    "dispatcher": {"deepep": _DEEP_EP, "hybridep": _DEEP_EP},
}
"""NeMo AutoModel's values that no code here gives, by field, each with the reason."""


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """How a model computes what it computes.

    Values of NeMo AutoModel's `BackendConfig` are taken where they mean something here, and refused where they do not.

    Args:
        attn: transformers' `attn_implementation` ("sdpa", "eager", "flash_attention_2", ...); None
            leaves its default.
        experts: transformers' `experts_implementation` ("eager", "grouped_mm", "batched_mm"), or AutoModel's name for
            one ("torch", "gmm"); None leaves its default.
        combine: whether projections of one input run as one matmul, see `should_combine`.
        linear, rms_norm, dispatcher: AutoModel's; here they are always "torch".
        enable_deepep: AutoModel's older name for `dispatcher="deepep"`; here it is always False.

    Raises:
        UnknownArgumentError: values that ask for TransformerEngine or DeepEP, or for what nobody has; all of them.
    """

    attn: str | None = None
    experts: str | None = None
    combine: Combine = True
    linear: InitVar[str] = "torch"
    rms_norm: InitVar[str] = "torch"
    dispatcher: InitVar[str] = "torch"
    enable_deepep: InitVar[bool] = False

    def __post_init__(self, linear: str, rms_norm: str, dispatcher: str, enable_deepep: bool) -> None:
        """Check the values, and give AutoModel's the names that transformers has."""
        fixed = {"linear": linear, "rms_norm": rms_norm, "dispatcher": dispatcher}
        given: dict[str, Any] = {"attn": self.attn, "experts": self.experts} | fixed
        wrong = [
            f"{name}={value!r}: {_REFUSED[name][value]}" for name, value in given.items() if value in _REFUSED[name]
        ]
        wrong += [
            f"{name}={value!r}: expected 'torch'"
            for name, value in fixed.items()
            if value != "torch" and value not in _REFUSED[name]
        ]
        if enable_deepep:
            wrong.append(f"enable_deepep={enable_deepep!r}: {_DEEP_EP}")
        if wrong:
            raise UnknownArgumentError(f"BackendConfig asks for what is not there: {'; '.join(wrong)}")
        for name, renamed in _RENAMED.items():
            object.__setattr__(self, name, renamed.get(given[name], given[name]))

    def implementations(self) -> dict[str, str]:
        """What is set, as keywords of transformers' model construction."""
        chosen = {"attn_implementation": self.attn, "experts_implementation": self.experts}
        return {name: value for name, value in chosen.items() if value is not None}


def should_combine(combine: Combine, device: torch.device | None) -> bool:
    """Whether to combine projections on `device` (None is the CPU).

    It affects speed only. "auto" follows docs/benchmarks.md: one matmul in place of three does not pay on a CPU, where
    it is bound by memory and arithmetic, not by launches; on an accelerator projections are combined.

    Raises:
        UnknownOptionError: `combine` is neither a bool nor "auto".
    """
    if combine == "auto":
        return device is not None and device.type != "cpu"
    if not isinstance(combine, bool):
        raise UnknownOptionError(f"combine={combine!r}: expected True, False or 'auto'")
    return combine
