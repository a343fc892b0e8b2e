"""Where a model goes: `device_map`, as transformers dispatches it, and what `torch.device(...)` around a call means."""

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
"""As transformers takes it: how to spread a model, the one device for all of it, or that of each module by name."""


def dispatch(
    model: PreTrainedModel,
    device_map: DeviceMap,
    offload_folder: str | Path | None = None,
    *,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_buffers: bool = False,
) -> PreTrainedModel:
    """Put the modules of a model that is on the CPU on several devices, in place, as transformers does.

    Only a model that is in several places gets accelerate's hooks.

    Args:
        model: the model.
        device_map: see `DeviceMap`; "disk" and "cpu" are devices too.
        offload_folder: where what is on "disk" goes.
        max_memory: of each device, for maps that are to be found.
        offload_buffers: whether buffers go where their modules' parameters are.

    Raises:
        ValueError: a map that leaves modules out, or puts some on disk without a folder.
    """
    memory = None if max_memory is None else dict(max_memory)
    found = _get_device_map(model, check_and_set_device_map(device_map), memory, None)  # type: ignore[arg-type]
    places = set(found.values())
    if len(places) == 1 and places != {"disk"}:
        return model.to(*places)
    accelerate_dispatch(model, None, dict(found), offload_folder, None, offload_buffers)
    return model


def device_in_context() -> torch.device | None:
    """The device of the `torch.device(...)` or `torch.set_default_device` around a call; None if there is neither."""
    return get_torch_context_manager_or_global_device()


def device_around() -> torch.device | None:
    """Where `torch.device(...)` around a load has the model go; None if there is none.

    Raises:
        DeviceError: meta, where no weights can be.
    """
    around = device_in_context()
    if around is not None:
        try:
            check_and_set_device_map(None)
        except RuntimeError as error:
            raise DeviceError(str(error)) from error
    return around


def on_cpu() -> AbstractContextManager[Any]:
    """What is made inside is made on the CPU, whatever `torch.device(...)` is around it."""
    return nullcontext() if device_in_context() is None else torch.device("cpu")


def refuse_meta(*places: object) -> None:
    """Refuse to load weights to where none can be.

    Args:
        places: devices, and device maps.

    Raises:
        DeviceError: meta is among them.
    """
    devices = [device for place in places for device in (place.values() if isinstance(place, Mapping) else [place])]
    if any(isinstance(device, str | torch.device) and str(device).startswith("meta") for device in devices):
        raise DeviceError(
            "from_pretrained loads weights, and meta has no place for them: for a model without weights call "
            "from_config(config, device='meta')"
        )
