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
from nrl_models.common.dtypes import named_dtype
from nrl_models.common.state_dict.mtp import CHOICES, MTP
from nrl_models.distributed.mesh import check_mesh
from nrl_models.errors import UnknownArgumentError
from nrl_models.loading.keywords import NAMES, by_own_names
from nrl_models.loading.placement import DeviceMap, checked_map, device_around, present_device, refuse_meta


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What `from_pretrained` takes beside configuration values.

    Args:
        config: used instead of the checkpoint's configuration; an object, or where one is.
        dtype: of the parameters, also by a name ("bfloat16", "bf16"); "auto" is the configuration's, else the
            checkpoint's. What transformers keeps in fp32 stays fp32.
        device: where to put the model; None is the device of a `torch.device(...)` around the call, else the CPU,
            or with a mesh this rank's device.
        device_map: how to distribute the model over the devices of this process, the CPU and the disk, as in
            transformers: "auto", "balanced", "balanced_low_0" or "sequential"; a single device, by name, as a
            `torch.device` or as an accelerator's number; or a device for each module by name.
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
            is unknown, with a warning that lists both.
        new_head: put a new head on the model in the checkpoint: a reward model from a causal language model. A head
            that the checkpoint lacks, or has in another shape, is initialized as in transformers; other heads in the
            checkpoint are skipped; a warning lists both. Everything else must match. A head that fits is loaded.
        ignore_mismatched_sizes: initialize tensors that have another shape in the checkpoint, with a warning that lists
            them, as in transformers. Missing and unexpected tensors are errors all the same.
        state_dict: tensors to load in place of the checkpoint's files, as in transformers. With `config=` the path may
            be None. They are matched as strictly as files are, and copied.
        key_mapping: renames the checkpoint's tensors before anything else, as in transformers: regular expressions,
            each with what replaces it. What is saved has the checkpoint's names.
        variant: of the weights' files: "fp16" reads `model.fp16.safetensors`.
        output_loading_info: return `(model, info)`, with transformers' keys: `missing_keys`, `unexpected_keys`,
            `mismatched_keys`, `error_msgs`. With `strict` nothing may be missing or unexpected.
        revision, token, cache_dir, subfolder, local_files_only: as in transformers, for hub repositories.
        gguf_file: the name of a GGUF file in the directory or repository, as in transformers. It is loaded as the plain
            weights that it stands for.
        trust_remote_code: run the checkpoint's own code if neither transformers nor a registered family knows its
            `model_type`.
        mtp: what becomes of the checkpoint's weights of multi-token prediction, with which the model does not compute:
            "keep" leaves them in the files' pages, and saves and exports them with the model, bit for bit; "drop" does
            not, with a note. Where the checkpoint has some of the layers that the configuration announces, it is
            refused; where it has none, there is a note. Models without output embeddings leave them out with the head.
        ignore_config_keys: configuration keys, by name or path (`text_config.use_x`), that may have values that
            nothing reads or honours; see `nrl_models.common.config.validate.check_config`.
    """

    config: PreTrainedConfig | str | Path | None = None
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
    new_head: bool = False
    ignore_mismatched_sizes: bool = False
    state_dict: Mapping[str, Any] | None = None
    key_mapping: Mapping[str, str] | None = None
    variant: str | None = None
    output_loading_info: bool = False
    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | Path | None = None
    subfolder: str = ""
    gguf_file: str | None = None
    local_files_only: bool = False
    trust_remote_code: bool = False
    mtp: MTP = "keep"
    ignore_config_keys: Collection[str] | str = ()

    @classmethod
    def split(cls, keywords: Mapping[str, Any]) -> tuple[LoadOptions, dict[str, Any]]:
        """The options among `keywords`, checked, and the rest, which are values of the configuration.

        If they name no destination, it is the device of a `torch.device(...)` around the call.

        Raises:
            UnknownArgumentError: keywords that exclude one another, or have values that mean nothing.
            DeviceError: the destination is meta, or is not there.
            ShardingError: the mesh has unknown dimensions.
        """
        named = by_own_names(keywords)
        rest = {name: value for name, value in named.items() if name not in OPTIONS}
        options = cls(**{name: value for name, value in named.items() if name in OPTIONS})
        if options.mtp not in CHOICES:
            raise UnknownArgumentError(f"mtp={options.mtp!r}: expected one of {', '.join(map(repr, CHOICES))}")
        options._check_destination()
        if options.device is None and options.device_map is None:
            around = device_around()
            if options.mesh is None:
                options = replace(options, device=around)
        return replace(
            options, dtype=named_dtype("auto" if options.dtype is None else options.dtype)
        )._with_single_device(), rest

    def _with_single_device(self) -> LoadOptions:
        """A map of the whole model to a device as that device: what is loaded there needs no dispatching."""
        device_map = None if self.device_map is None else checked_map(self.device_map)
        if isinstance(device_map, dict) and device_map.keys() == {""} and device_map[""] != "disk":
            return replace(self, device=device_map[""], device_map=None)
        return replace(self, device_map=device_map)

    def _check_destination(self) -> None:
        """Refuse contradictory or impossible destinations."""
        refuse_meta(self.device, self.device_map)
        if self.device is not None:
            present_device(self.device)
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


OPTIONS = tuple(field.name for field in fields(LoadOptions))

KEYWORDS = (*OPTIONS, *NAMES)
"""Everything that is taken beside values of the configuration."""
