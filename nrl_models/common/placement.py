"""`device_map`: one model over several devices of one process, the CPU and the disk, by accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from transformers import PreTrainedModel

DeviceMap = Literal["auto", "balanced", "sequential"] | Mapping[str, int | str | torch.device]
"""As transformers takes it: how to spread a model, or the device of each module by name."""


def dispatch(
    model: PreTrainedModel, device_map: DeviceMap, offload_folder: str | Path | None = None
) -> PreTrainedModel:
    """Put the modules of a model that is on the CPU on several devices, in place.

    Args:
        model: the model.
        device_map: see `DeviceMap`; "disk" and "cpu" are devices too.
        offload_folder: where what is on "disk" goes.

    Raises:
        ValueError: a map that leaves modules out, or puts some on disk without a folder.
    """
    if isinstance(device_map, str):
        whole = sorted(
            {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        )
        memory = None
        if device_map != "sequential":
            memory = get_balanced_memory(model, no_split_module_classes=whole, low_zero=False)
        device_map = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=whole)
    model = dispatch_model(
        model, dict(device_map), offload_dir=None if offload_folder is None else str(offload_folder), force_hooks=True
    )
    model.hf_device_map = dict(device_map)
    return model
