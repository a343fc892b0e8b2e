"""`from_pretrained` and `from_config`, for families and for plain Hugging Face classes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from nrl_models.common.backend import BackendConfig, Combine
from nrl_models.common.checkpoint.dequantised import DequantisedFiles
from nrl_models.common.checkpoint.files import CheckpointFiles, resolve_folder
from nrl_models.common.checkpoint.gguf_files import GGUFFiles
from nrl_models.common.checkpoint.local_path import is_gguf
from nrl_models.common.config.validate import check_config
from nrl_models.distributed.mesh import agreed
from nrl_models.errors import CheckpointError, Problem, ProblemKind
from nrl_models.loading.options import LoadOptions
from nrl_models.loading.placement import device_in_context, dispatch, on_cpu
from nrl_models.loading.quantised import is_read_plain, load_quantised, require_plain_gguf
from nrl_models.loading.read_config import config_for, override, read_config
from nrl_models.loading.sharded import load_sharded
from nrl_models.loading.skeleton import build_skeleton, construction, resolve_dtype
from nrl_models.loading.weights import load_weights

logger = logging.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint to load, of which only the configuration has been read.

    Attributes:
        name: what was asked for: a directory, or the name of a hub repository.
        folder: where it is.
        config: its configuration, with the values that were passed as keywords.
        options: how to load it.
    """

    name: str
    folder: Path
    config: PreTrainedConfig
    options: LoadOptions


def open_source(path_or_id: str | Path, keywords: Mapping[str, Any]) -> Source:
    """Find a checkpoint and read its configuration: enough to choose a class for it.

    Args:
        path_or_id: a directory, a GGUF file, or the name of a hub repository.
        keywords: options, see `LoadOptions`, and values of the configuration.

    Raises:
        CheckpointError, UnknownArchitectureError, RemoteCodeError, UnknownArgumentError, DeviceError, ShardingError:
            as `nrl_models.AutoModelForCausalLM.from_pretrained`.
    """
    options, overrides = LoadOptions.split(keywords)
    with on_cpu(), agreed(options.mesh, "read the checkpoint's configuration"):
        folder = resolve_folder(
            path_or_id,
            subfolder=options.subfolder,
            revision=options.revision,
            token=options.token,
            cache_dir=options.cache_dir,
            gguf_file=options.gguf_file,
        )
        if options.config is None:
            config = read_config(folder, trust_remote_code=options.trust_remote_code)
        else:
            config = copy.deepcopy(options.config)
        override(config, overrides)
        config.name_or_path = str(path_or_id)
    return Source(str(path_or_id), folder, config, options)


def load(model_class: type[PreTrainedModel], source: Source) -> PreTrainedModel:
    """Build `model_class`, fill it with the checkpoint's weights, and place it; in evaluation mode."""
    options, folder, device = source.options, source.folder, source.options.destination()
    with on_cpu(), ExitStack() as opened:
        with agreed(options.mesh, "prepare the model"):
            config = config_for(model_class, source.config)
            check_config(model_class, config, options.ignore_config_keys)
            built_with = construction(model_class, options.combine, options.backend, device)
            files: CheckpointFiles
            if is_gguf(folder):
                require_plain_gguf(folder, options)
                files = GGUFFiles(folder)
            elif is_read_plain(config, options):
                files = DequantisedFiles(folder, config.quantization_config)
                del config.quantization_config  # the model is not quantised, nor what it saves
            elif options.quantization_config is not None or getattr(config, "quantization_config", None) is not None:
                _refuse_sharding(source)
                return load_quantised(model_class, folder, config, options, built_with)
            else:
                files = CheckpointFiles(folder)
            opened.callback(files.close)
            dtype = resolve_dtype(options.dtype, config, files)
            model = build_skeleton(model_class, config, dtype, **built_with)
        if options.mesh is None:
            narrowed = load_weights(model, files, dtype=dtype, device=device, strict=options.strict)
        else:
            plan: Any = "auto" if options.plan is None else options.plan
            narrowed = load_sharded(model, files, options.mesh, plan, dtype=dtype, device=device, strict=options.strict)
        if narrowed and options.dtype == "auto":
            logger.warning(
                f"{source.name} stores {len(narrowed)} tensors ({narrowed[0]}, ...) in a wider dtype than {dtype}, "
                f"in which they are loaded. Pass a wider dtype to keep their values, or dtype={dtype} if intended."
            )
        if model.can_generate() and (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        model.eval()
        if options.device_map is None:
            return model
        return dispatch(
            model,
            options.device_map,
            options.offload_folder,
            max_memory=options.max_memory,
            offload_buffers=options.offload_buffers,
        )


def _refuse_sharding(source: Source) -> None:
    if source.options.mesh is not None:
        problem = Problem(ProblemKind.DTYPE, "quantization_config", "a quantised model is not sharded")
        raise CheckpointError(f"cannot load {source.name}", [problem], ["load it without mesh"])


def from_config(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype | None = None,
    device: str | int | torch.device | None = None,
    combine: Combine = True,
    backend: BackendConfig | None = None,
    ignore_config_keys: Collection[str] | str = (),
) -> PreTrainedModel:
    """A model with new weights: for a given seed, bit-identical to transformers' initialisation.

    Args:
        model_class: its class.
        config: left unchanged.
        dtype: of the parameters; None is the configuration's.
        device: where to build it; None is as in `from_pretrained`, `"meta"` gives shapes without weights.
        combine, backend, ignore_config_keys: as in `LoadOptions`.
    """
    config = config_for(model_class, copy.deepcopy(config))
    check_config(model_class, config, ignore_config_keys)
    torch_device = torch.device(device_in_context() or "cpu" if device is None else device)
    options = construction(model_class, combine, backend, torch_device)
    if dtype is not None:
        options["dtype"] = dtype
    with torch_device:
        return model_class._from_config(config, **options)
