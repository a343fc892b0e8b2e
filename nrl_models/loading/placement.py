"""Where a model goes: `device_map`, as transformers dispatches it, and what `torch.device(...)` around a call means."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

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

Arguments = ParamSpec("Arguments")
Loaded = TypeVar("Loaded")


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


def minding_context(load: Callable[Arguments, Loaded]) -> Callable[Arguments, Loaded]:
    """Have a function that loads a model mind `torch.device(...)` around it, as transformers does.

    That device is where the model goes, if its keywords (`device`, `device_map`, `mesh`) do not say where. What the
    function makes on its way is on the CPU.

    Raises:
        DeviceError: of the function that is returned: the model is to go to meta, where no weights can be.
    """

    @functools.wraps(load)
    def loads(*args: Any, **options: Any) -> Loaded:
        around = device_in_context()
        if around is None:
            return load(*args, **options)
        if options.get("device") is None and options.get("device_map") is None:
            try:
                check_and_set_device_map(None)
            except RuntimeError as error:
                raise DeviceError(str(error)) from error
            if options.get("mesh") is None:
                options["device"] = around
        with torch.device("cpu"):
            return load(*args, **options)

    return loads


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
