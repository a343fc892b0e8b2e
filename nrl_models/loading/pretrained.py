"""`from_pretrained` and `from_config`, for families and for plain Hugging Face classes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.checkpoint.dequantized import quantized_part
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.checkpoint.generations import (
    Identity,
)
from nrl_models.common.checkpoint.given_tensors import GivenTensors
from nrl_models.common.checkpoint.limits import limited_build
from nrl_models.common.checkpoint.local_path import GENERATION_NAME, is_gguf
from nrl_models.common.config.at_fault import blaming
from nrl_models.common.config.generation import add_settings_of_config
from nrl_models.common.config.validate import check_config
from nrl_models.common.gguf.gguf_files import GGUFFiles
from nrl_models.common.logs import get_logger
from nrl_models.common.process_state import BUILDING
from nrl_models.common.upstream import device_in_context
from nrl_models.distributed.mesh import agreed
from nrl_models.errors import (
    CheckpointError,
    Problem,
    ProblemKind,
    UnknownArgumentError,
    shown,
)
from nrl_models.loading.fit import Tolerance
from nrl_models.loading.keywords import ALIASES, by_own_names, unknown_keywords
from nrl_models.loading.options import LoadOptions
from nrl_models.loading.placement import dispatch, on_cpu, present_device
from nrl_models.loading.quantized import is_known_method, is_read_plain, load_quantized, plain_files, require_plain_gguf
from nrl_models.loading.read_config import IMPLEMENTATIONS, config_for, generation_config
from nrl_models.loading.sharded import load_sharded
from nrl_models.loading.skeleton import build_skeleton, checked_dtype, construction, resolve_dtype
from nrl_models.loading.source import Source, outside_inference_mode
from nrl_models.loading.weights import load_weights

logger = get_logger(__name__)

ModelT = TypeVar("ModelT", bound=PreTrainedModel)


def load(model_class: type[PreTrainedModel], source: Source) -> Any:
    """Build `model_class`, load the checkpoint's weights, place it on its device, and switch to evaluation mode.

    Returns:
        The model. With `output_loading_info`, also the missing and unused tensors.
    """
    model, info = _loaded(model_class, source)
    return (model, info) if source.options.output_loading_info else model


def _loaded(model_class: type[PreTrainedModel], source: Source) -> tuple[PreTrainedModel, dict[str, Any]]:
    options, folder, device = source.options, source.folder, source.options.destination()
    with on_cpu(), ExitStack() as opened:
        with agreed(options.mesh, "prepare the model"):
            config = config_for(model_class, source.config)
            composite = source.config if config is not source.config else None
            if composite is not None and quantized_part(config) is None and (part := quantized_part(composite)):
                config.quantization_config = part.quantization_config
            with blaming(config, f"check {model_class.__name__}", source.overrides):
                check_config(model_class, config, options.ignore_config_keys)
            built_with = construction(model_class, options.combine, options.backend, device)
            built_with |= _implementations(source.overrides)
            files: CheckpointFiles
            if options.state_dict is not None or folder is None:
                _require_plain_tensors(options, quantized_part(config))
                files = GivenTensors(options.state_dict or {})
            elif is_gguf(folder):
                require_plain_gguf(folder, options)
                files = GGUFFiles(folder)
            elif (part := quantized_part(config)) is not None and is_read_plain(config, options):
                files = plain_files(folder, part.quantization_config, options.variant)
                del part.quantization_config  # neither the model nor its saved files are quantized
            elif options.quantization_config is not None or is_known_method(config):
                _refuse_sharding(source)
                generation_config(model_class, folder)
                files = CheckpointFiles(folder, options.variant)
                opened.callback(files.close)
                quantized = load_quantized(model_class, files, config, options, built_with, source.overrides, composite)
                _require_in_place(source)
                _require_unchanged(source, files.seen)
                return quantized
            else:
                files = CheckpointFiles(folder, options.variant)
            opened.callback(files.close)
            building = blaming(config, f"build {model_class.__name__}", source.overrides)
            with building, limited_build(len(files.tensors)):
                dtype = resolve_dtype(options.dtype, config, files)
                model = build_skeleton(model_class, config, dtype, **built_with)
            generation = None if folder is None else generation_config(model_class, folder)
            _require_in_place(source)
        passed = tuple(name for name in source.overrides if name not in IMPLEMENTATIONS)
        tolerance = Tolerance(options, composite, passed)
        if options.mesh is None:
            fit = load_weights(model, files, dtype=dtype, device=device, tolerance=tolerance)
        else:
            plan: Any = "auto" if options.plan is None else options.plan
            fit = load_sharded(model, files, options.mesh, plan, dtype=dtype, device=device, tolerance=tolerance)
        narrowed = fit.narrowed(files)
        if narrowed and options.dtype == "auto":
            logger.warning(
                f"{source.name} stores {len(narrowed)} tensors ({narrowed[0]}, ...) in a wider dtype than {dtype}, "
                f"in which they are loaded. Pass a wider dtype to keep their values, or dtype={dtype} if intended."
            )
        if generation is not None:
            model.generation_config = generation
        elif folder is not None and model.can_generate():
            add_settings_of_config(model.generation_config, folder)
        with agreed(options.mesh, "read one checkpoint"):
            _require_unchanged(source, files.seen)
        model.eval()
        model.has_default_dtype = options.dtype == "auto"  # type: ignore[assignment]
        if options.device_map is not None:
            dispatch(
                model,
                options.device_map,
                options.offload_folder,
                max_memory=options.max_memory,
                offload_buffers=options.offload_buffers,
            )
        return model, fit.info()


def _require_in_place(source: Source) -> None:
    """Raise if a save moved the generation settings before they were read. Without them, the defaults would count."""
    if source.watch is not None:
        source.watch.require(GENERATION_NAME)


def _require_unchanged(source: Source, seen: Mapping[str, Identity | None]) -> None:
    """Raise if the files that were read have changed in the directory. A state dict has no files."""
    if source.watch is not None:
        source.watch.saw(seen)
        source.watch.check()


def _require_plain_tensors(options: LoadOptions, quantized: PreTrainedConfig | None) -> None:
    """Raise UnknownArgumentError if options would quantize or dequantize the tensors of a state dict."""
    others = [name for name in ("gguf_file", "variant", "quantization_config") if getattr(options, name)]
    if quantized is not None and "quantization_config" not in others:
        others.append("the configuration's quantization_config")
    if others:
        raise UnknownArgumentError(
            f"{', '.join(others)} with state_dict=: a state dict is loaded as the unquantized tensors that it holds. "
            "Leave out one of them"
        )


def _implementations(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of implementations that are passed. They take precedence over `backend`."""
    return {name: keywords[name] for name in IMPLEMENTATIONS if keywords.get(name) is not None}


def _refuse_sharding(source: Source) -> None:
    if source.options.mesh is not None:
        problem = Problem(ProblemKind.DTYPE, "quantization_config", "a quantized model cannot be sharded")
        raise CheckpointError(f"cannot load {source.name}", [problem], ["load it without mesh"])


NEW_MODEL_OPTIONS = ("dtype", "device", "combine", "backend", "ignore_config_keys", *IMPLEMENTATIONS)
"""The options of `from_config`."""


def require_config(config: object) -> None:
    """Raise if the first argument of `from_config` is not a configuration.

    Raises:
        UnknownArgumentError: It is not.
    """
    if not isinstance(config, PreTrainedConfig):
        raise UnknownArgumentError(
            f"config={shown(config)}: expected a configuration, such as AutoConfig.from_pretrained(path). To load a "
            "checkpoint with its weights, call from_pretrained(path)"
        )


def from_config(model_class: type[ModelT], config: PreTrainedConfig, **keywords: Any) -> ModelT:
    """Create a model with new weights. With a given seed, they are bitwise equal to transformers' initialization.

    Args:
        model_class: Class of the model.
        config: The configuration; not modified.
        keywords: Options from `NEW_MODEL_OPTIONS`. The default `dtype` is the configuration's. The default `device` is
            that of an enclosing `torch.device(...)` context; on `"meta"`, the model has shapes without weights. For
            others, see `LoadOptions`.

    Raises:
        UnknownArgumentError: If there are other keywords, or values are invalid.
        ConfigurationError: If the model's code cannot use a value of the configuration.
    """
    named = by_own_names(keywords)
    if unknown := [name for name in named if name not in NEW_MODEL_OPTIONS]:
        raise UnknownArgumentError(unknown_keywords(unknown, (*NEW_MODEL_OPTIONS, *ALIASES)))
    config = config_for(model_class, copy.deepcopy(config))
    with blaming(config, f"check {model_class.__name__}"):
        check_config(model_class, config, named.get("ignore_config_keys", ()))
    device = present_device(named.get("device") or device_in_context() or "cpu")
    options = construction(model_class, named.get("combine", "auto"), named.get("backend"), device)
    passed = _implementations(named)
    options |= passed
    if named.get("dtype") not in (None, "auto"):
        options["dtype"] = config.dtype = checked_dtype(named["dtype"])
    building = blaming(config, f"build {model_class.__name__}", passed)
    with outside_inference_mode(), BUILDING, device, building:
        return model_class._from_config(config, **options)
