"""The options of `from_pretrained`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from nrl_models.common.backend import BackendConfig, Combine
from nrl_models.distributed.mesh import check_mesh
from nrl_models.errors import UnknownArgumentError
from nrl_models.loading.placement import DeviceMap, device_around, refuse_meta


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What `from_pretrained` takes beside configuration values.

    Args:
        config: used instead of the checkpoint's configuration.
        dtype: of the parameters; "auto" is the configuration's, else the checkpoint's. What transformers keeps in
            fp32 stays fp32.
        device: where to put the model; None is the device of a `torch.device(...)` around the call, else the CPU,
            or with a mesh this rank's device.
        device_map: how to distribute the model over the devices of this process, the CPU and the disk, as in
            transformers: "auto", a single device, or a device for each module.
        offload_folder, offload_buffers, max_memory: directory for modules on "disk", whether buffers are offloaded,
            and the memory limit of each device.
        quantization_config: how transformers quantises linears while loading (QLoRA).
        combine: whether projections of the same input run as one matmul: True, False, or "auto", which follows the
            measurements in docs/benchmarks.md. It affects speed only: parameters, names and files are the same.
            `nrl_models.common.projections.report` shows what was combined.
        backend: attention and expert implementations, and `combine` unless that is given.
        mesh: the ranks to shard the model over; every rank makes this call and reads only the slices it holds. The
            dimensions are any of `fsdp`, `ep`, `tp`, in this order; see `nrl_models.distributed.parallelize`.
        plan: how to shard it: "auto" (the same as None), rules that override it, or a
            `nrl_models.distributed.ParallelPlan`.
        strict: whether the checkpoint must match the model exactly. False initialises what is missing and skips what
            is unknown, with a warning that lists both: for a new head on a base model.
        revision, token, cache_dir, subfolder: as in transformers, for hub repositories.
        gguf_file: the name of a GGUF file in the directory or repository, as in transformers. It is loaded as the plain
            weights that it stands for.
        trust_remote_code: run the checkpoint's own code if neither transformers nor a registered family knows its
            `model_type`.
        ignore_config_keys: configuration keys, by name or path (`text_config.use_x`), that may have values that
            nothing reads or honours; see `nrl_models.common.config.validate.check_config`.
    """

    config: PreTrainedConfig | None = None
    dtype: str | torch.dtype = "auto"
    device: str | int | torch.device | None = None
    device_map: DeviceMap | None = None
    offload_folder: str | Path | None = None
    offload_buffers: bool = False
    max_memory: Mapping[int | str, int | str] | None = None
    quantization_config: Any = None
    combine: Combine = True
    backend: BackendConfig | None = None
    mesh: DeviceMesh | None = None
    plan: Any = None
    strict: bool = True
    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | Path | None = None
    subfolder: str = ""
    gguf_file: str | None = None
    trust_remote_code: bool = False
    ignore_config_keys: Collection[str] | str = ()

    @classmethod
    def split(cls, keywords: Mapping[str, Any]) -> tuple[LoadOptions, dict[str, Any]]:
        """The options among `keywords`, checked, and the rest, which are values of the configuration.

        If they name no destination, it is the device of a `torch.device(...)` around the call.

        Raises:
            UnknownArgumentError: keywords that exclude one another.
            DeviceError: the destination is meta.
            ShardingError: the mesh has unknown dimensions.
        """
        options = cls(**{name: value for name, value in keywords.items() if name in KEYWORDS})
        options._check_destination()
        if options.device is None and options.device_map is None:
            around = device_around()
            if options.mesh is None:
                options = replace(options, device=around)
        return options, {name: value for name, value in keywords.items() if name not in KEYWORDS}

    def _check_destination(self) -> None:
        """Refuse contradictory or impossible destinations."""
        refuse_meta(self.device, self.device_map)
        given = [name for name in ("device", "device_map", "mesh") if getattr(self, name) is not None]
        if len(given) > 1 and given != ["device", "mesh"]:
            raise UnknownArgumentError(
                f"{' and '.join(given)}: expected only one of them, as each says where the model goes"
            )
        if self.plan is not None and self.mesh is None:
            raise UnknownArgumentError("plan says how to shard over a mesh: pass mesh, too")
        if self.mesh is not None:
            check_mesh(self.mesh)

    def destination(self) -> torch.device:
        """The requested device; by default the CPU, or with a mesh this rank's device."""
        if self.device is not None:
            return torch.device(self.device)
        if self.mesh is None or self.mesh.device_type == "cpu":
            return torch.device("cpu")
        kind = self.mesh.device_type
        return torch.device(kind, torch.get_device_module(kind).current_device())


KEYWORDS = tuple(field.name for field in fields(LoadOptions))
