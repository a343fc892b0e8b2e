"""Parts of transformers without a stability promise that this library uses, for versions from 5.5 to the newest.

They are collected here, in `upstream_conversions` and in `model_components.upstream_peft`, so that only these files
change for a new version. Names that a version lacks get a replacement.

Attributes that model classes declare (`_no_split_modules`, `_tied_weights_keys`, `_tp_plan`, ...) are read elsewhere,
because classes outside of transformers declare them as well.

If a new version changes one of them, `make test TRANSFORMERS=X` fails in the tests named here:

| name | used for | tests |
|---|---|---|
| `core_model_loading`, `conversion_mapping` | the hub's names and shapes, as views | `tests/unit/state_dict` |
| `_weight_conversions` | the layout that a model was loaded from, in which it is saved | `test_files` |
| `_is_hf_initialized`, `PreTrainedModel.init_weights` | tensors that initialization must skip | `test_weights` |
| `modeling_gguf_pytorch_utils` | GGUF's names of tensors and configuration values | `test_gguf` |
| `_get_dtype_plan` | parameters that stay in fp32 | `test_dtypes` of the generated suite |
| `_get_device_map`, `accelerate_dispatch`, ... | `device_map` | `tests/unit/loading` |
| `_gradient_checkpointing_func`, `ENABLE_CHECKPOINTING` | activation checkpointing | `tests/unit/forward`, `recipes` |
| closures of `masking_utils` (in `mask_functions.py`) | parts of a mask | `tests/unit/documents/test_masks.py` |
| `POSITIONS_FROM_TOKENS`, `POSITIONS_FROM_MEDIA` | positions of padded batches | `tests/unit/logprobs/test_tokens.py` |
| `KEEPS_PADDING_OUT_OF_SINGLE_ROWS` | states without padding | `tests/unit/forward` |
| `_decode_special_floats` | values of configurations | `tests/unit/config/test_comparison.py` |
| `_model_mapping`, `_extra_content` | classes of auto classes by configuration | `tests/unit/adapters` |
| `MIN_PEFT_VERSION`, `_hf_peft_config_loaded` | adapters (in `upstream_peft`) | `tests/unit/integrations` |
| `_CAN_RECORD_REGISTRY` | `output_hidden_states` of a rewritten class | `test_model` of the generated suite |
| `SERVED_MAPPINGS` | model types that another family's class serves | `tests/unit/loading/test_shared_classes.py` |
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import (
    _add_variant,
    _get_device_map,
    accelerate_dispatch,
    check_and_set_device_map,
    get_torch_context_manager_or_global_device,
    str_to_torch_dtype,
)
from transformers.models.auto import modeling_auto
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

__all__ = [
    "CACHE_NAMES",
    "CHECKPOINT_FUNCTIONS",
    "ENABLE_CHECKPOINTING",
    "KEEPS_PADDING_OUT_OF_SINGLE_ROWS",
    "SERVED_MAPPINGS",
    "accelerate_dispatch",
    "architectures_of",
    "cache_in",
    "cache_input",
    "cache_name",
    "check_and_set_device_map",
    "classes_by_config",
    "computed_device_map",
    "computes_positions",
    "config_from_json",
    "config_value",
    "device_in_context",
    "dtype_plan",
    "gguf_reading",
    "has_reached",
    "is_initialized",
    "mark_initialized",
    "named_arguments",
    "record_as",
    "register_class",
    "str_to_torch_dtype",
    "text_part",
    "with_additive_masks",
    "with_variant",
]


computed_device_map: Callable[..., dict[str, Any]] = _get_device_map
with_variant: Callable[[str, str | None], str] = _add_variant
device_in_context: Callable[[], torch.device | None] = get_torch_context_manager_or_global_device
"""Returns the device of an enclosing `torch.device(...)` or of `torch.set_default_device`; None if there is none."""


# Arguments of upstream's functions, whose names and order differ between versions

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names of the argument and of the output field for a key-value cache. transformers 5.24 renamed the last two to
`cache` and drops them in 5.40."""


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def cache_name(function: Callable[..., Any]) -> str:
    """Return the name of the key-value cache argument of `function`.

    Args:
        function: A model's or module's forward, or the class of an output. If it passes its keywords on, the result is
            the name that the installed transformers uses.
    """
    names = _parameters(function)
    return next((name for name in CACHE_NAMES if name in names), _DEFAULT_CACHE_NAME)


_DEFAULT_CACHE_NAME = next(name for name in CACHE_NAMES if name in _parameters(create_causal_mask))


def cache_input(function: Callable[..., Any], cache: Any) -> dict[str, Any]:
    """Return the keyword argument that passes `cache` to `function`; see `cache_name`."""
    return {cache_name(function): cache}


def cache_in(values: Mapping[str, Any]) -> Any:
    """Return the key-value cache in a call's keyword arguments or in a model's output; None without one."""
    present = set(values.keys())  # 5.24 outputs also accept old names, with a warning
    return next((values[name] for name in CACHE_NAMES if name in present and values[name] is not None), None)


def cache_requires_grad(cache: Any) -> bool:
    """Return True if a tensor in a key-value cache requires a gradient."""
    if cache is None or isinstance(cache, torch.Tensor):
        return cache is not None and cache.requires_grad
    if isinstance(cache, (list, tuple)):
        return any(map(cache_requires_grad, cache))
    names = ("layers", "keys", "values", "self_attention_cache", "cross_attention_cache")
    return any(cache_requires_grad(getattr(cache, name, None)) for name in names)


def named_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name, as the installed signature of `function` names them.

    Args:
        function: A bound method, or a function without `self`.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    return dict(zip(_parameters(function), args, strict=False)) | dict(kwargs) if args else dict(kwargs)


def gguf_reading() -> ModuleType:
    """Return transformers' module that reads GGUF files and maps their names. Imported on the first call."""
    from transformers import modeling_gguf_pytorch_utils

    return modeling_gguf_pytorch_utils


def has_quantizer(settings: Mapping[str, Any]) -> bool:
    """Return True if transformers quantizes or dequantizes by these settings. It ignores those of unknown methods."""
    try:
        return AutoHfQuantizer.supports_quant_method(dict(settings))
    except (TypeError, ValueError):  # not a name of a method; transformers raises on loading
        return True


def quantizer_name(quant_method: Any) -> Any:
    """Return the name of a quantization method. transformers reads `mxfp8` as `fp8`."""
    name = getattr(quant_method, "value", quant_method)
    return "fp8" if name == "mxfp8" else name


def requests_dequantization(quantization_config: Any, quant_method: str | None) -> bool:
    """Return True if transformers' object for a method, or its dictionary, requests dequantized weights.

    In compressed-tensors, `dequantize` has replaced `run_compressed`, which has the opposite meaning.
    """
    names = ("quant_method", "dequantize", "run_compressed")
    if isinstance(quantization_config, Mapping):
        settings = dict(quantization_config)
    else:
        settings = {name: getattr(quantization_config, name, None) for name in names}
    if quantizer_name(settings.get("quant_method")) != quantizer_name(quant_method):
        return False
    return bool(settings.get("dequantize")) or settings.get("run_compressed") is False


# Configurations


def config_value(config: PreTrainedConfig, key: str, default: Any) -> Any:
    """Return a value of a configuration, also the common value of a key that has separate values for each layer.

    Newer versions raise an error if such a key is read as an attribute.
    """
    read = getattr(config, "_getattr_without_heterogeneous_validation", None)
    return getattr(config, key, default) if read is None else read(key, default)


def config_from_json(config_class: type[PreTrainedConfig], values: Mapping[str, Any]) -> PreTrainedConfig:
    """Build a configuration from the content of a `config.json`, in which infinity is `{"__float__": "Infinity"}`."""
    return config_class.from_dict(config_class._decode_special_floats(values))


def with_additive_masks(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a configuration for which transformers' masks are numbers to add, and are never left out."""
    copied = copy.copy(config)
    copied._attn_implementation_internal = "eager"
    return copied


# Dtypes and initialization


def dtype_plan(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes of tensors that stay in another dtype when a model is loaded in `dtype`, by name pattern."""
    return dict(model._get_dtype_plan(dtype))


def mark_initialized(target: nn.Module | torch.Tensor, initialized: bool = True) -> None:
    """Mark whether transformers' initialization must skip a module or tensor."""
    target.__dict__["_is_hf_initialized"] = initialized


def is_initialized(target: nn.Module | torch.Tensor) -> bool:
    """Return True if transformers' initialization skips a module or tensor."""
    return bool(getattr(target, "_is_hf_initialized", False))


def text_part(config: PreTrainedConfig, *, decoder: bool | None = None) -> PreTrainedConfig:
    """Return the text configuration in `config`, or `config` itself if it has none, or several.

    Args:
        config: A configuration.
        decoder: Passed to transformers' `get_text_config`: True to look for decoders only.
    """
    try:
        return config.get_text_config(decoder=decoder)
    except ValueError:  # several text parts
        return config


def has_reached(version: str) -> bool:
    """Return True if the installed transformers is this version or a later one."""
    return Version(transformers.__version__) >= Version(version)


KEEPS_PADDING_OUT_OF_SINGLE_ROWS = has_reached("5.15")
"""Whether layers with a state ignore padding in a batch of one row. Older versions only do so with several rows."""

CHECKPOINT_FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Attributes with a module's checkpoint function: in transformers' layers, and in torch's `CheckpointWrapper`."""

_NEW_NAME = "activation_checkpointing_enable"
ENABLE_CHECKPOINTING = _NEW_NAME if hasattr(PreTrainedModel, _NEW_NAME) else "gradient_checkpointing_enable"
"""Method of a model that switches activation checkpointing on. 5.24 deprecates the name with `gradient`."""

MEDIA = ("pixel_values", "pixel_values_videos", "input_features")
"""Arguments that hold the media of placeholder tokens."""

POSITIONS_FROM_TOKENS = ("create_position_ids_from_input_ids", "create_position_ids_from_inputs_embeds")
"""Methods of modules that compute positions from token ids (RoBERTa and its relatives)."""

POSITIONS_FROM_MEDIA = ("get_rope_index",)
"""Methods of modules that compute positions from images and the mask (M-RoPE)."""


def computes_positions(model: nn.Module, *, media: bool) -> bool:
    """Return True if a model computes positions when none are passed, other than by counting columns.

    Args:
        model: The model.
        media: Whether its forward gets images, videos or audio.
    """
    names = POSITIONS_FROM_TOKENS + (POSITIONS_FROM_MEDIA if media else ())
    classes = {type(module) for module in model.modules()}
    return any(hasattr(module_class, name) for module_class in classes for name in names)


def record_as(model_class: type[nn.Module], module: PreTrainedModel) -> None:
    """Let a class record the same outputs (hidden states, router logits) as a module's class. They are set by class.

    Args:
        model_class: The current class of `module`.
        module: A model that was constructed as another class.
    """
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(model_class), module._can_record_outputs)


def register_class(mapping: Any, config_class: type[PreTrainedConfig], classes: Any) -> None:
    """Make a mapping of transformers' auto classes return these classes for a configuration.

    In some versions (5.18), the mapping's `register` silently ignores configurations from transformers.

    Args:
        mapping: `classes_by_config` of an auto class, or a similar mapping.
        config_class: The configuration's class.
        classes: A class, or a tuple of classes for the configuration.
    """
    mapping._extra_content[config_class] = classes


# Auto classes


def classes_by_config(auto_class: Any) -> Any:
    """Return the mapping of a transformers auto class from configuration classes to a model class, or to a tuple."""
    return auto_class._model_mapping


SERVED_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
"""transformers' mappings from model types to class names, of the auto classes that this package has; heads first."""


def class_of_transformers(name: str) -> type[PreTrainedModel] | None:
    """Return transformers' model class of a name; None if it has none."""
    model_class = getattr(transformers, name, None)
    return model_class if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel) else None


@cache
def architectures_of(model_type: str) -> tuple[str, ...]:
    """Return the class names in transformers' auto classes for a model type. Heads come first."""
    names: dict[str, None] = {}
    for mapping in SERVED_MAPPINGS:
        classes = getattr(modeling_auto, mapping, {}).get(model_type, ())
        names.update(dict.fromkeys((classes,) if isinstance(classes, str) else classes))
    return tuple(names)
