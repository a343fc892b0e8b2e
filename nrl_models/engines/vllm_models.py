"""Properties of a checkpoint that decide which options vLLM needs."""

from __future__ import annotations

from pathlib import Path

import torch

from nrl_models import registry
from nrl_models.common.checkpoint.files import resolve_folder
from nrl_models.common.flags import ModelFlag
from nrl_models.common.switches import is_off
from nrl_models.loading.read_config import read_config

_TRANSFORMERS_BACKEND = "vllm.model_executor.models.transformers"


def needs_tokenizer(path: str | Path) -> bool:
    """Return True if vLLM needs the tokenizer to start, because its processors of images and audio use it."""
    if is_off("engine-tokenizer"):
        return False
    config = read_config(resolve_folder(path))
    parts = (getattr(config, name, None) for name in ("vision_config", "audio_config"))
    return config.get_text_config() is not config or any(part is not None for part in parts)


def needs_its_weights(path: str | Path) -> bool:
    """Return True if dummy weights would leave buffers that no refit reaches, as declared by the family."""
    if is_off("engine-dummy-buffers"):
        return False
    classes = map(registry.model_class, read_config(resolve_folder(path)).architectures or [])
    return any(ModelFlag.VLLM_LOAD_FORMAT_AUTO in getattr(found, "flags", ModelFlag.NONE) for found in classes)


def runs_transformers_classes(path: str | Path) -> bool:
    """Return True if vLLM has no class for a checkpoint's architecture and would use transformers' class."""
    from vllm import ModelRegistry

    names = read_config(resolve_folder(path)).architectures or []
    known = [ModelRegistry.models[name] for name in names if name in ModelRegistry.models]
    return not any(getattr(model, "module_name", "") != _TRANSFORMERS_BACKEND for model in known)


def attends_to_latents_beyond_bf16(path: str | Path, dtype: torch.dtype | None) -> bool:
    """Return True if attention is latent (MLA) and not in bf16. On CPUs with Intel AMX, vLLM selects attention kernels
    that only support bf16; its kernels for other CPUs support all dtypes.
    """
    config = read_config(resolve_folder(path))
    latent = getattr(config.get_text_config(), "kv_lora_rank", None) is not None
    return latent and (dtype or config.dtype or torch.float32) != torch.bfloat16
