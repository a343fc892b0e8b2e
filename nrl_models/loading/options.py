"""The options of `from_pretrained`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from nrl_models.common.backend import BackendConfig, Combine
from nrl_models.common.dtypes import named_dtype
from nrl_models.common.state_dict.mtp import CHOICES, MTP
from nrl_models.distributed.mesh import check_mesh
from nrl_models.errors import UnknownArgumentError
from nrl_models.loading.keywords import NAMES, by_own_names
from nrl_models.loading.placement import (
    DeviceMap,
    checked_map,
    checked_memory,
    checked_offload_folder,
    device_around,
    present_device,
    refuse_meta,
    require_offload_folder,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Keywords of `from_pretrained`, other than configuration values.

    Args:
        config: Configuration to use instead of the checkpoint's: an object or a path.
        dtype: Dtype of the parameters, e.g. `torch.bfloat16`, "bfloat16" or "bf16". "auto" is the configuration's, else
            the checkpoint's. Parameters that transformers keeps in fp32 stay in fp32.
        device: Device of the model. None is the device of an enclosing `torch.device(...)`, else the CPU; with a mesh,
            this rank's device.
        device_map: Devices of the model, as in transformers: "auto", "balanced", "balanced_low_0" or "sequential"; one
            device as a name, a `torch.device` or an accelerator's number; or a device for each module by name.
        offload_folder, offload_buffers, max_memory: Directory for modules on "disk" (a subdirectory per model), whether
            buffers are offloaded, and the memory limit of each device.
        quantization_config: Quantize linears while loading (QLoRA), as in transformers.
        combine: Fuse projections that share an input: True, False, or "auto" (where that was measured to be faster: on
            no device at present, see docs/benchmarks.md and docs/gpu.md). Changes only speed. With tensor
            parallelism they are always fused, because their input is then exchanged once.
            `nrl_models.common.projections.report` lists fused projections.
        backend: Attention and expert implementations, and `combine` unless that is given.
        mesh: Device mesh to shard the model over, with dimensions `fsdp`, `ep`, `tp` in this order, or `pp`. Every rank
            makes this call and reads only its slices. See `nrl_models.distributed.parallelize`.
        plan: How to shard: "auto" (the same as None), rules that override it, or a
            `nrl_models.distributed.ParallelPlan`.
        strict: Require that the checkpoint matches the model exactly. False initializes missing tensors and skips
            unknown ones, with a warning that lists both.
        new_head: Put a new head on the model in the checkpoint, for example a reward model on a causal language model.
            A head that the checkpoint lacks or has in another shape is initialized as in transformers. Other heads in
            the checkpoint are skipped. A warning lists both. A head that fits is loaded. Everything else must match.
        ignore_mismatched_sizes: Initialize tensors that have another shape in the checkpoint, with a warning, as in
            transformers. Missing and unexpected tensors still raise.
        state_dict: Tensors to load instead of files, as in transformers. With `config=` the path may be None. They are
            matched strictly, and copied.
        key_mapping: Regular expressions and replacements that rename the checkpoint's tensors first, as in
            transformers. Saved files have the checkpoint's names.
        variant: Variant of the weight files: "fp16" reads `model.fp16.safetensors`.
        output_loading_info: Return `(model, info)` with transformers' keys: `missing_keys`, `unexpected_keys`,
            `mismatched_keys`, `error_msgs`. Combine with `strict=False`; otherwise missing tensors raise.
        revision, token, cache_dir, subfolder, local_files_only: As in transformers, for Hub repositories.
        gguf_file: Name of a GGUF file in the directory or repository, as in transformers. It is dequantized.
        trust_remote_code: Run the checkpoint's code if neither transformers nor a registered family has its
            `model_type` or architecture.
        mtp: Weights of multi-token prediction, which the model does not use: "keep" leaves them in the files' pages and
            saves and exports them unchanged; "drop" leaves them out, with a warning. If the checkpoint has only some of
            the layers that the configuration declares, loading raises; if it has none, it warns. Models without output
            embeddings leave them out.
        ignore_config_keys: Configuration keys, by name or path (`text_config.use_x`), that no code needs to implement;
            see `nrl_models.common.config.validate.check_config`.
    """

    config: PreTrainedConfig | str | Path | None = None
    dtype: str | torch.dtype = "auto"
    device: str | int | torch.device | None = None
    device_map: DeviceMap | None = None
    offload_folder: str | Path | None = None
    offload_buffers: bool = False
    max_memory: Mapping[int | str, int | str] | None = None
    quantization_config: Any = None
    combine: Combine = "auto"
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
        """Split `keywords` into validated options, and configuration values.

        Without a device in the keywords, the one of an enclosing `torch.device(...)` context is used.

        Raises:
            UnknownArgumentError: If keywords exclude each other, or have invalid values.
            DeviceError: If the device is meta or does not exist.
            ShardingError: If the mesh has unknown dimensions.
        """
        named = by_own_names(keywords)  # None is the default, as in transformers
        rest = {name: value for name, value in named.items() if name not in OPTIONS}
        options = cls(**{name: value for name, value in named.items() if name in OPTIONS and value is not None})
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
        """Replace a map to a single device by that device, which needs no dispatching."""
        device_map = None if self.device_map is None else checked_map(self.device_map)
        if isinstance(device_map, dict) and "disk" in device_map.values():
            require_offload_folder(device_map, self.offload_folder)
        elif isinstance(device_map, str) and self.offload_folder is not None:
            checked_offload_folder(self.offload_folder)
        if isinstance(device_map, dict) and device_map.keys() == {""} and device_map[""] != "disk":
            return replace(self, device=device_map[""], device_map=None)
        return replace(self, device_map=device_map)

    def _check_destination(self) -> None:
        """Raise for contradictory or impossible destinations."""
        refuse_meta(self.device, self.device_map)
        if self.device is not None:
            present_device(self.device)
        destinations = [name for name in ("device", "device_map", "mesh") if getattr(self, name) is not None]
        if len(destinations) > 1 and destinations != ["device", "mesh"]:
            raise UnknownArgumentError(
                f"{' and '.join(destinations)}: expected only one of them, because each sets the model's device"
            )
        if self.plan is not None and self.mesh is None:
            raise UnknownArgumentError("plan needs a mesh to shard over: also pass mesh")
        if self.mesh is not None:
            check_mesh(self.mesh)
        if self.max_memory is not None:
            checked_memory(self.max_memory)

    def destination(self) -> torch.device:
        """Return the requested device. The default is the CPU, or with a mesh the device of this rank."""
        if self.device is not None:
            return torch.device(self.device)
        if self.mesh is None or self.mesh.device_type == "cpu":
            return torch.device("cpu")
        kind = self.mesh.device_type
        return torch.device(kind, torch.get_device_module(kind).current_device())


OPTIONS = tuple(field.name for field in fields(LoadOptions))

KEYWORDS = (*OPTIONS, *NAMES)
"""All keywords other than configuration values."""


PathOrId = str | Path
"""A directory, a GGUF file, or the name of a hub repository."""


class NewModelKeywords(TypedDict, total=False):
    """Keywords of `from_config`, for type checkers."""

    attn_implementation: str
    experts_implementation: str
    dtype: str | torch.dtype | None
    torch_dtype: str | torch.dtype | None
    device: str | int | torch.device | None
    combine: Combine
    backend: BackendConfig | None
    backend_config: BackendConfig | None
    ignore_config_keys: Collection[str] | str


class LoadKeywords(NewModelKeywords, total=False):
    """Keywords of `from_pretrained` except `output_loading_info`, for type checkers.

    Has the fields of `LoadOptions`, transformers' names for them, and the configuration values that the documentation
    uses. At run time `from_pretrained` also accepts every other configuration value. To pass one in checked code, use
    `config=` or unpack a dictionary: `overrides: dict[str, Any] = {"attention_dropout": 0.1}`, then `**overrides`.
    """

    pretrained_model_name_or_path: PathOrId
    config: PreTrainedConfig | str | Path | None
    device_map: DeviceMap | None
    offload_folder: str | Path | None
    offload_buffers: bool
    max_memory: Mapping[int | str, int | str] | None
    quantization_config: Any
    mesh: DeviceMesh | None
    plan: Any
    strict: bool
    new_head: bool
    ignore_mismatched_sizes: bool
    state_dict: Mapping[str, Any] | None
    key_mapping: Mapping[str, str] | None
    variant: str | None
    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    subfolder: str
    gguf_file: str | None
    local_files_only: bool
    trust_remote_code: bool
    mtp: MTP
    low_cpu_mem_usage: bool
    use_safetensors: bool | None
    architectures: list[str]
    num_labels: int
