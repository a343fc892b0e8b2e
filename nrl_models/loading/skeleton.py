"""Build a model without weights: parameters on meta and uninitialized, buffers with values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.backend import BackendConfig, Combine, should_combine
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.dtypes import dtype_names, named_dtype
from nrl_models.common.modules import owner_of
from nrl_models.common.process_state import BUILDING, replaced_here
from nrl_models.common.state_dict.matching import is_wide_float
from nrl_models.common.upstream import mark_initialized
from nrl_models.errors import ConfigurationError, Problem, ProblemKind, UnknownArgumentError, shown


def build_skeleton(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype, **options: Any
) -> PreTrainedModel:
    """Build a model with parameters on meta and buffers with values, tied according to its configuration.

    So parameters are allocated only once, and all buffers (RoPE tables, scales) are set.

    Args:
        model_class, config: Class and configuration of the model.
        dtype: Dtype of the parameters.
        options: Options from `construction`.
    """
    config.dtype = dtype  # classifiers build their inner model with it; older `_from_config` versions do not set it
    with _parameters_on_meta():
        model = model_class._from_config(config, dtype=dtype, **options)
    for parameter in model.parameters():
        mark_initialized(parameter)
    compute_buffers(model)
    model.tie_weights()
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put parameters that modules register on meta and leave them uninitialized, in this thread only.

    accelerate's `init_empty_weights` and transformers' `no_init_weights` do so in every thread.
    """

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            attributes = vars(parameter)
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            vars(parameter).update(attributes)
        register_parameter(module, name, parameter)

    with (
        BUILDING,
        replaced_here(nn.Module, "register_parameter", register_on_meta) as register_parameter,
        replaced_here(PreTrainedModel, "init_weights", lambda model: None),
    ):
        yield


def compute_buffers(model: PreTrainedModel) -> None:
    """Compute non-persistent buffers again in full precision, as transformers does when it loads.

    A table computed while bf16 was the default dtype carries bf16 rounding even if it is stored in fp32 (`inv_freq`
    and the like).
    """
    for module in model.modules():
        derived = any(module._buffers.get(name) is not None for name in module._non_persistent_buffers_set)
        mark_initialized(module, not derived)
    with BUILDING:  # other builds replace functions of torch.nn.init
        model.initialize_weights()


def construction(
    model_class: type[PreTrainedModel], combine: Combine, backend: BackendConfig | None, device: torch.device
) -> dict[str, Any]:
    """Return the keyword arguments for `model_class._from_config`."""
    backend_config = backend or BackendConfig()
    combined = should_combine(backend_config.combine if combine == "auto" else combine, device)
    options: dict[str, Any] = backend_config.implementations()
    # A Hugging Face class that is not rewritten has no linears to fuse.
    return options | {"combine": combined} if hasattr(model_class, "rewrites") else options


def resolve_dtype(dtype: str | torch.dtype, config: PreTrainedConfig, files: CheckpointFiles) -> torch.dtype:
    """Return the dtype to load in. "auto" is the dtype of the configuration, or else that of the files.

    As in transformers, a dtype that only a part of the configuration has (`text_config.dtype`) does not count.

    Raises:
        UnknownArgumentError: If parameters cannot have this dtype.
        ConfigurationError: The same for the dtype of the configuration.
    """
    if dtype != "auto":
        return checked_dtype(dtype)
    if config.dtype is None:
        return files.dtype or torch.get_default_dtype()
    try:
        return checked_dtype(config.dtype)
    except UnknownArgumentError as error:
        detail = f"is {config.dtype}, expected a floating-point dtype such as bfloat16"
        problem = Problem(ProblemKind.CONFIG, "dtype", detail)
        where = config.name_or_path or "the configuration"
        advice = "correct it, or pass dtype= to from_pretrained"
        raise ConfigurationError(f"cannot load {where}", [problem], [advice]) from error


def checked_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Validate a dtype for parameters, passed as a name or a `torch.dtype`.

    Raises:
        UnknownArgumentError: If parameters cannot have this dtype.
    """
    dtype = named_dtype(dtype)
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not is_wide_float(resolved):
        raise UnknownArgumentError(f"dtype={shown(dtype)}{dtype_names(dtype)}")
    return resolved


def share_copies(model: nn.Module, copies: Mapping[str, str]) -> None:
    """Tie parameters: each key of `copies` becomes the parameter that its value names."""
    for name, source_name in copies.items():
        module, attribute = owner_of(model, name)
        module._parameters[attribute] = model.get_parameter(source_name)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move a model's buffers to a device, except buffers on meta."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and buffer.device.type != "meta":
                module._buffers[name] = buffer.to(device)
