"""Device placement: `device_map` as in transformers, and `torch.device(...)` as a context manager."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import check_device_map, convert_file_size_to_int
from transformers import PreTrainedModel

from nrl_models.common.checkpoint.writing import check_size, path_to_write
from nrl_models.common.upstream import (
    accelerate_dispatch,
    check_and_set_device_map,
    computed_device_map,
    device_in_context,
)
from nrl_models.errors import DeviceError, UnknownArgumentError, listed

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

    accelerate's hooks are only added if there are several devices.

    Args:
        model: A model on the CPU.
        device_map: Map from `checked_map`. "disk" and "cpu" are also devices.
        offload_folder: Directory for modules on "disk".
        max_memory: Memory limit per device, for computed maps.
        offload_buffers: Whether to offload buffers together with their parameters.

    Raises:
        ValueError: If modules are missing in the map.
        UnknownArgumentError: If the map uses "disk" without `offload_folder`.
    """
    memory = None if max_memory is None else dict(max_memory)
    module_devices = dict(computed_device_map(model=model, device_map=device_map, max_memory=memory, hf_quantizer=None))
    places = set(module_devices.values())
    if "disk" in places:
        offload_folder = _own_folder(module_devices, offload_folder)
        if module_devices == {"": "disk"}:  # accelerate finds no tensors below an empty name
            module_devices = {name: "disk" for name, _ in model.named_children()}
    if len(places) == 1 and places != {"disk"}:
        if places != {"cpu"}:  # modules that are missing in the map are already on the CPU
            check_device_map(model, module_devices)
        return model.to(*places)
    accelerate_dispatch(
        model=model,
        hf_quantizer=None,
        device_map=module_devices,
        offload_folder=offload_folder,
        offload_index=None,
        offload_buffers=offload_buffers,
    )
    return model


def require_offload_folder(places: Mapping[str, object], offload_folder: str | Path | None) -> Path:
    """Return `offload_folder`, which need not exist.

    Args:
        places: A device for each module by name. "disk" needs a folder.
        offload_folder: The folder.

    Raises:
        UnknownArgumentError: If it is None, or a part of its path is a file.
    """
    if offload_folder is None:
        names = [name or "the model" for name, device in places.items() if device == "disk"]
        raise UnknownArgumentError(f"device_map: {listed(names)} on 'disk': pass offload_folder, the directory for it")
    return checked_offload_folder(offload_folder)


def checked_offload_folder(offload_folder: str | Path) -> Path:
    """Return `offload_folder`, which need not exist, with `~` expanded.

    Raises:
        UnknownArgumentError: If a part of its path is a file, or no directory can have that path.
    """
    folder = path_to_write("offload_folder", offload_folder)
    if files := [path for path in (folder, *folder.parents) if path.is_file()]:
        raise UnknownArgumentError(
            f"offload_folder={str(folder)!r}: {files[0]} is a file, expected a directory: pass another directory"
        )
    return folder


def _own_folder(places: Mapping[str, object], offload_folder: str | Path | None) -> Path:
    """Create a directory in `offload_folder` for one model, which is removed when the interpreter exits.

    accelerate does not write weights to a directory that already has some. So a second model would read the weights of
    the first.
    """
    folder = require_offload_folder(places, offload_folder)
    folder.mkdir(parents=True, exist_ok=True)
    model_folder = Path(tempfile.mkdtemp(prefix="model-", dir=folder))
    atexit.register(shutil.rmtree, model_folder, ignore_errors=True)
    return model_folder


def checked_memory(max_memory: Mapping[int | str, int | str]) -> None:
    """Check memory limits by device.

    Raises:
        UnknownArgumentError: If a key is not a device as accelerate names them, or a value is not a size.
        DeviceError: If a device does not exist.
    """
    for device, size in max_memory.items():
        if device not in MEMORY_DEVICES and (not isinstance(device, int) or isinstance(device, bool)):
            raise UnknownArgumentError(
                f"max_memory[{device!r}]: expected the number of an accelerator (0), or "
                f"{' or '.join(map(repr, MEMORY_DEVICES))}"
            )
        if device != "disk":
            present_device(device, "max_memory: device")
        check_size(f"max_memory[{device!r}]", size, convert_file_size_to_int)


MEMORY_DEVICES = ("cpu", "disk", "mps")
"""Keys of `max_memory` besides numbers of accelerators, as in accelerate."""


STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def checked_map(device_map: DeviceMap) -> str | dict[str, Any]:
    """Validate `device_map`. Returns a strategy, or a device for each module by name.

    Raises:
        UnknownArgumentError: If it is neither a strategy nor a device.
        DeviceError: If a device does not exist.
    """
    if isinstance(device_map, str) and device_map in STRATEGIES:
        return device_map
    if not isinstance(device_map, str | int | torch.device | Mapping):
        raise _no_device("device_map", device_map, [*STRATEGIES, "a device for each module"])
    if isinstance(device_map, Mapping):
        places = dict(device_map)
        if not places:
            raise UnknownArgumentError("device_map={}: expected a device for each module, or {'': device} for all")
    else:
        present_device(device_map, "device_map")
        as_map: Any = check_and_set_device_map(device_map)
        places = dict(as_map)
    first: dict[torch.device, Device] = {torch.device("cpu"): "cpu"}
    for name, requested_device in places.items():
        if requested_device != "disk":  # accelerate treats two names of a device as two devices
            device = present_device(requested_device, f"device_map[{name!r}]")
            places[name] = first.setdefault(torch.empty(0, device=device).device, requested_device)
    return places


def present_device(device: Device, keyword: str = "device") -> torch.device:
    """Return a device that exists.

    Args:
        device: Name, `torch.device`, or number of an accelerator.
        keyword: Name of the argument, for errors. If it is empty, errors start with the device.

    Raises:
        UnknownArgumentError: If it is not a device.
        DeviceError: If the device does not exist.
    """
    there = ["cpu", *(str(torch.device(index)) for index in range(torch.accelerator.device_count()))]
    if isinstance(device, int) and not isinstance(device, bool):
        if not 0 <= device < len(there) - 1:
            raise DeviceError(f"{_subject(keyword, device)}: no such accelerator; available: {', '.join(there)}")
        return torch.device(device)
    try:
        torch_device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        more = STRATEGIES if keyword == "device_map" else ()
        raise _no_device(keyword, device, more) from error
    numbered = torch_device if torch_device.index is not None else torch.device(torch_device.type, 0)
    if torch_device.type not in ("cpu", "meta") and str(numbered) not in there:
        kinds = {name.partition(":")[0] for name in there}
        reason = (
            "no such device" if torch_device.type in kinds else f"{torch_device.type.upper()} is not available to torch"
        )
        raise DeviceError(f"{_subject(keyword, str(device))}: {reason}; available: {', '.join(there)}")
    return torch_device


def _no_device(keyword: str, device: object, more: Iterable[str]) -> UnknownArgumentError:
    others = "".join(f", {other}" for other in more)
    return UnknownArgumentError(f"{_subject(keyword, device)}: expected a device (cpu, cuda:0, 0){others}")


def _subject(keyword: str, device: object) -> str:
    return f"{keyword}={device!r}" if keyword else repr(device)


def device_around() -> torch.device | None:
    """Return the device of an enclosing `torch.device(...)` context; None if there is none.

    Raises:
        DeviceError: If the device is meta, which cannot store weights.
    """
    around = device_in_context()
    if around is not None:
        try:
            check_and_set_device_map(None)
        except RuntimeError as error:
            raise DeviceError(str(error)) from error
    return around


def on_cpu() -> AbstractContextManager[Any]:
    """Return a context manager that creates tensors on the CPU, even inside `torch.device(...)`."""
    return nullcontext() if device_in_context() is None else torch.device("cpu")


def refuse_meta(*places: object) -> None:
    """Raise if weights would be loaded to meta.

    Args:
        places: Devices and device maps.

    Raises:
        DeviceError: If one of them is meta.
    """
    devices = [
        device
        for destination in places
        for device in (destination.values() if isinstance(destination, Mapping) else [destination])
    ]
    if any(isinstance(device, str | torch.device) and str(device).startswith("meta") for device in devices):
        raise DeviceError(
            "from_pretrained loads weights, which the meta device cannot hold: for a model without weights call "
            "from_config(config, device='meta')"
        )
