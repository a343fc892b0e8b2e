"""Choices for a run that are not stored in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any, Literal

import torch

from nrl_models.errors import UnknownArgumentError, UnknownOptionError

Combine = bool | Literal["auto"]
"""Whether to fuse projections with a common input into one matmul; "auto" fuses on `FUSING_DEVICES`."""

FUSING_DEVICES: frozenset[str] = frozenset()
"""Types of devices on which fused projections were measured to be faster: neither CPUs (docs/benchmarks.md) nor CUDA
GPUs (docs/gpu.md)."""

_TE = "TransformerEngine's layers are not Hugging Face's, which all layers here are"
_DEEP_EP = (
    "experts are divided over ranks by torch's collectives here, not by DeepEP's kernels: pass a mesh with a dimension "
    "`ep` (docs/scaling.md)"
)

_RENAMED: Mapping[str, Mapping[str, str]] = {
    "attn": {"flex": "flex_attention"},
    "experts": {"torch": "eager", "gmm": "grouped_mm", "torch_mm": "grouped_mm"},
}
"""Names in NeMo AutoModel for values that have another name in transformers, by field."""

_REFUSED: Mapping[str, Mapping[str, str]] = {
    "attn": {"te": _TE},
    "linear": {"te": _TE},
    "rms_norm": {"te": _TE},
    "experts": {"te": _TE},
    "dispatcher": {"deepep": _DEEP_EP, "hybridep": _DEEP_EP},
}
"""Values of NeMo AutoModel that are not supported, by field, with the reason."""


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """Implementations of attention, experts and linears.

    Values of NeMo AutoModel's `BackendConfig` are accepted if they have an equivalent here, and raise otherwise.

    Args:
        attn: `attn_implementation` of transformers ("sdpa", "eager", "flash_attention_2", ...). None keeps the default.
        experts: `experts_implementation` of transformers ("eager", "grouped_mm", "batched_mm"), or its name in
            AutoModel ("torch", "gmm"). None keeps the default.
        combine: Whether to fuse projections with a common input into one matmul, see `should_combine`.
        linear, rms_norm, dispatcher: Fields of AutoModel. Must be "torch".
        enable_deepep: Older field of AutoModel for `dispatcher="deepep"`. Must be False.

    Raises:
        UnknownArgumentError: If values are unknown, or request TransformerEngine or DeepEP. Lists all of them.
    """

    attn: str | None = None
    experts: str | None = None
    combine: Combine = "auto"
    linear: InitVar[str] = "torch"
    rms_norm: InitVar[str] = "torch"
    dispatcher: InitVar[str] = "torch"
    enable_deepep: InitVar[bool] = False

    def __post_init__(self, linear: str, rms_norm: str, dispatcher: str, enable_deepep: bool) -> None:
        """Check the values, and convert AutoModel's names to those of transformers."""
        fixed = {"linear": linear, "rms_norm": rms_norm, "dispatcher": dispatcher}
        options: dict[str, Any] = {"attn": self.attn, "experts": self.experts} | fixed
        wrong = [
            f"{name}={value!r}: {_REFUSED[name][value]}" for name, value in options.items() if value in _REFUSED[name]
        ]
        wrong += [
            f"{name}={value!r}: expected 'torch'"
            for name, value in fixed.items()
            if value != "torch" and value not in _REFUSED[name]
        ]
        if enable_deepep:
            wrong.append(f"enable_deepep={enable_deepep!r}: {_DEEP_EP}")
        if wrong:
            raise UnknownArgumentError(f"BackendConfig has unsupported values: {'; '.join(wrong)}")
        for name, renamed in _RENAMED.items():
            object.__setattr__(self, name, renamed.get(options[name], options[name]))

    def implementations(self) -> dict[str, str]:
        """Return the fields that are set, as keyword arguments of transformers' constructors."""
        chosen = {"attn_implementation": self.attn, "experts_implementation": self.experts}
        return {name: value for name, value in chosen.items() if value is not None}


def should_combine(combine: Combine, device: torch.device | None) -> bool:
    """Return whether to fuse projections on `device` (None is the CPU). This only affects speed.

    Raises:
        UnknownOptionError: If `combine` is neither a bool nor "auto".
    """
    if combine == "auto":
        return ("cpu" if device is None else device.type) in FUSING_DEVICES
    if not isinstance(combine, bool):
        raise UnknownOptionError(f"combine={combine!r}: expected True, False or 'auto'")
    return combine
