"""Device placement: `device_map`, as transformers dispatches it, and `torch.device(...)` around a call."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import (
    _get_device_map,
    accelerate_dispatch,
    check_and_set_device_map,
    get_torch_context_manager_or_global_device,
)

from nrl_models.errors import DeviceError

Device = int | str | torch.device
DeviceMap = Literal["auto", "balanced", "balanced_low_0", "sequential"] | Device | Mapping[str, Device]
"""As in transformers: a strategy, a single device, or a device for each module by name."""


def dispatch(
    model: PreTrainedModel,
    device_map: DeviceMap,
    offload_folder: str | Path | None = None,
    *,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_buffers: bool = False,
) -> PreTrainedModel:
    """Distribute the modules of a model over devices, in place, as transformers does.

    Only a model on several devices gets accelerate's hooks.

    Args:
        model: a model on the CPU.
        device_map: see `DeviceMap`; "disk" and "cpu" are devices too.
        offload_folder: directory for modules on "disk".
        max_memory: limit for each device, for maps that are computed.
        offload_buffers: whether buffers are offloaded with their parameters.

    Raises:
        ValueError: a map that misses modules, or uses "disk" without `offload_folder`.
    """
    memory = None if max_memory is None else dict(max_memory)
    found = _get_device_map(model, check_and_set_device_map(device_map), memory, None)  # type: ignore[arg-type]
    places = set(found.values())
    if len(places) == 1 and places != {"disk"}:
        return model.to(*places)
    accelerate_dispatch(model, None, dict(found), offload_folder, None, offload_buffers)
    return model


def device_in_context() -> torch.device | None:
    """The device set by `torch.device(...)` or `torch.set_default_device` around a call; None if there is none."""
    return get_torch_context_manager_or_global_device()


def device_around() -> torch.device | None:
    """The device that `torch.device(...)` around a load asks for; None if there is none.

    Raises:
        DeviceError: meta, which holds no weights.
    """
    around = device_in_context()
    if around is not None:
        try:
            check_and_set_device_map(None)
        except RuntimeError as error:
            raise DeviceError(str(error)) from error
    return around


def on_cpu() -> AbstractContextManager[Any]:
    """Create tensors on the CPU inside, whatever `torch.device(...)` is around it."""
    return nullcontext() if device_in_context() is None else torch.device("cpu")


def refuse_meta(*places: object) -> None:
    """Refuse to load weights to meta.

    Args:
        places: devices, and device maps.

    Raises:
        DeviceError: meta is among them.
    """
    devices = [device for place in places for device in (place.values() if isinstance(place, Mapping) else [place])]
    if any(isinstance(device, str | torch.device) and str(device).startswith("meta") for device in devices):
        raise DeviceError(
            "from_pretrained loads weights, which the meta device cannot hold: for a model without weights call "
            "from_config(config, device='meta')"
        )
