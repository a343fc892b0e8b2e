"""Device placement: `device_map`, as transformers dispatches it, and `torch.device(...)` around a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import check_device_map
from transformers import PreTrainedModel

from nrl_models.common.upstream import (
    accelerate_dispatch,
    check_and_set_device_map,
    computed_device_map,
    device_in_context,
)
from nrl_models.errors import DeviceError, UnknownArgumentError

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
        device_map: from `checked_map`; "disk" and "cpu" are devices too.
        offload_folder: directory for modules on "disk".
        max_memory: limit for each device, for maps that are computed.
        offload_buffers: whether buffers are offloaded with their parameters.

    Raises:
        ValueError: a map that misses modules, or uses "disk" without `offload_folder`.
    """
    memory = None if max_memory is None else dict(max_memory)
    found = computed_device_map(model, device_map, memory, None)
    places = set(found.values())
    if len(places) == 1 and places != {"disk"}:
        if places != {"cpu"}:  # where all that the map leaves out is, too
            check_device_map(model, dict(found))
        return model.to(*places)
    accelerate_dispatch(model, None, dict(found), offload_folder, None, offload_buffers)
    return model


STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def checked_map(device_map: DeviceMap) -> str | dict[str, Any]:
    """A strategy, or a device for each module by name, as transformers reads `device_map`.

    Raises:
        UnknownArgumentError: it names no strategy and no device.
        DeviceError: it names a device that is not there.
    """
    if isinstance(device_map, str) and device_map in STRATEGIES:
        return device_map
    if not isinstance(device_map, str | int | torch.device | Mapping):
        raise _no_device("device_map", device_map, [*STRATEGIES, "a device for each module"])
    if isinstance(device_map, Mapping):
        places = dict(device_map)
    else:
        present_device(device_map, "device_map")
        as_map: Any = check_and_set_device_map(device_map)
        places = dict(as_map)
    for name, place in places.items():
        if place != "disk":
            present_device(place, f"device_map[{name!r}]")
    return places


def present_device(device: Device, keyword: str = "device") -> torch.device:
    """A device that is there.

    Args:
        device: by name, as a `torch.device`, or as an accelerator's number.
        keyword: that it was given by, for errors.

    Raises:
        UnknownArgumentError: it is no device.
        DeviceError: it is not there.
    """
    there = ["cpu", *(str(torch.device(index)) for index in range(torch.accelerator.device_count()))]
    if isinstance(device, int) and not isinstance(device, bool):
        if not 0 <= device < len(there) - 1:
            raise DeviceError(f"{keyword}={device}: there is no accelerator of this number, but {', '.join(there)}")
        return torch.device(device)
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        more = STRATEGIES if keyword == "device_map" else ()
        raise _no_device(keyword, device, more) from error
    numbered = found if found.index is not None else torch.device(found.type, 0)
    if found.type not in ("cpu", "meta") and str(numbered) not in there:
        raise DeviceError(f"{keyword}={str(device)!r}: there is no such device, but {', '.join(there)}")
    return found


def _no_device(keyword: str, given: object, more: Iterable[str]) -> UnknownArgumentError:
    others = "".join(f", {other}" for other in more)
    return UnknownArgumentError(f"{keyword}={given!r}: expected a device (cpu, cuda:0, 0){others}")


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
