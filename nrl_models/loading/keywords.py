"""Keywords of transformers' `from_pretrained` and `from_config` that are not options of this library.

Some are aliases of an option, some have no effect, and some raise an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from nrl_models.common.backend import BackendConfig
from nrl_models.common.config.ignored import key_names
from nrl_models.common.dtypes import named_dtype
from nrl_models.common.logs import get_logger
from nrl_models.errors import UnknownArgumentError, did_you_mean, shown

logger = get_logger(__name__)

ALIASES = {"torch_dtype": "dtype", "backend_config": "backend"}
"""Aliases of options: the former name in transformers, and the name in NeMo AutoModel."""

ALWAYS = ("low_cpu_mem_usage",)
"""Keywords without effect, because the behavior is always on. transformers also ignores them."""

_SHARDING = (
    "transformers' own sharded loading is not used here. Pass mesh=init_device_mesh(device, sizes, "
    "mesh_dim_names=('fsdp', 'tp')) and plan='auto' to from_pretrained (docs/scaling.md)"
)

UNSUPPORTED: Mapping[str, tuple[Any, str]] = {
    "weights_only": (True, "only safetensors are read, which hold nothing but tensors"),
    **dict.fromkeys(("from_tf", "from_flax"), (False, "only safetensors are read")),
    "force_download": (False, "not supported. Delete the repository from the cache, or pass another cache_dir="),
    **dict.fromkeys(("use_kernels", "allow_all_kernels"), (False, "not supported. Leave it out")),
    "kernel_config": (None, "not supported. Leave it out"),
    "disable_mmap": (False, "not supported, because files are memory-mapped"),
    "adapter_name": (
        "default",
        "not supported. Load the model, then call peft.PeftModel.from_pretrained(model, folder)",
    ),
    "tqdm_class": (None, "not supported. transformers.utils.logging.disable_progress_bar() hides the progress bar"),
    "proxies": (None, "not supported. Set the environment variables HTTP_PROXY and HTTPS_PROXY"),
    "code_revision": (
        None,
        "not supported. A checkpoint's own code is read from the revision of its weights (revision=)",
    ),
    "generation_config": (None, "not supported. Set model.generation_config after loading"),
    "fusion_config": (None, "not supported. combine= fuses projections"),
    **dict.fromkeys(("tp_plan", "tp_size", "device_mesh", "distributed_config"), (None, _SHARDING)),
}
"""transformers' keywords that have no effect with None or their default value, and the error for other values."""

_FROM_AUTO = ("_from_auto", "_commit_hash", "adapter_kwargs")
"""Keywords that transformers' auto classes pass to registered classes. For the folder of an adapter, they pass its base
model as path, and the adapter in `adapter_kwargs`."""

REPLACED = {"use_flash_attention_2": 'attn_implementation="flash_attention_2"'} | {
    f"load_in_{bits}bit": f"quantization_config=transformers.BitsAndBytesConfig(load_in_{bits}bit=True)"
    for bits in (4, 8)
}
"""Former keywords of transformers, and their replacements."""

NAMES = (*ALIASES, *ALWAYS, "use_safetensors")
"""Keywords that are accepted."""


def unknown_keywords(
    unknown: Iterable[str],
    known: Iterable[str],
    more: Iterable[str] = (),
    or_else: str = "",
    replaced: Mapping[str, str] | None = None,
) -> str:
    """Return the error message for unknown keywords, with the most similar known ones.

    Args:
        unknown: The unknown keywords.
        known: The options.
        more: Other names to suggest.
        or_else: Other accepted values, for the message.
        replaced: Replacements for unknown keywords, in addition to `REPLACED`.
    """
    replaced = REPLACED | dict(replaced or {})
    options, lines = list(known), []
    names = list(dict.fromkeys([*options, *more]))
    for name in unknown:
        hint = did_you_mean(name, names, count=3, cutoff=0.7)
        lines.append(name + (f" (pass {replaced[name]})" if name in replaced else hint))
    plural = "s" if len(lines) > 1 else ""
    return f"unknown keyword{plural} {', '.join(lines)}: expected one of {', '.join(options)}{or_else}"


_KINDS: Mapping[type, tuple[str, ...]] = {
    bool: (
        "strict",
        "new_head",
        "ignore_mismatched_sizes",
        "output_loading_info",
        "local_files_only",
        "trust_remote_code",
        "offload_buffers",
    ),
    str: ("subfolder", "gguf_file", "variant", "revision"),
    os.PathLike: ("config", "cache_dir", "offload_folder"),
    Mapping: ("key_mapping", "max_memory"),
}
"""Types of options that are only used later. Paths may also be strings. None is the default of each."""

_OBJECTS = {"config": PreTrainedConfig, "backend": BackendConfig, "mesh": DeviceMesh}
"""Options that are objects of a class."""


def _wrong_types(keywords: Mapping[str, Any]) -> list[str]:
    """Return a message for each option with a value of another type."""
    allowed: dict[str, tuple[type, ...]] = {name: (kind,) for kind, names in _KINDS.items() for name in names}
    for name in _KINDS[os.PathLike]:
        allowed[name] += (str,)
    for name, kind in _OBJECTS.items():
        allowed[name] = (*allowed.get(name, ()), kind)
    return [
        f"{name}={shown(value)}: expected {' or '.join(kind.__name__ for kind in allowed[option])}"
        for name, value in keywords.items()
        if (option := ALIASES.get(name, name)) in allowed
        and value is not None
        and not isinstance(value, allowed[option])
    ]


def _wrong_keys(keys: Any) -> str:
    """Return the problem with `ignore_config_keys`, or an empty string."""
    try:
        key_names(() if keys is None else keys)
    except UnknownArgumentError as error:
        return str(error)
    return ""


def _wrong_quantization(value: Any) -> str:
    """Return the problem with the type of `quantization_config`, or an empty string."""
    if value is None or isinstance(value, Mapping) or (hasattr(value, "quant_method") and not isinstance(value, type)):
        return ""
    return (
        f"quantization_config={shown(value)}: expected a configuration of transformers, for example "
        "transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4'), or its dictionary"
    )


def _wrong_renaming(pattern: object, target: object) -> str:
    """Return the problem with an entry of `key_mapping`, or an empty string."""
    try:
        re.compile(pattern)  # type: ignore[call-overload]
    except (re.error, TypeError) as error:
        return f"key_mapping: {pattern!r} is not a regular expression ({error})"
    subject = f"key_mapping[{pattern!r}]={target!r}"
    if not isinstance(target, str):
        return f"{subject}: expected the name to replace it by"
    try:
        re.sub(pattern, target, "")  # type: ignore[call-overload]
    except (re.error, IndexError) as error:
        return f"{subject}: expected a replacement of re.sub with groups of the pattern ({error})"
    return ""


def _is_neutral(name: str, value: Any) -> bool:
    """Return True for a keyword of `UNSUPPORTED` with a value that has no effect."""
    default, _ = UNSUPPORTED.get(name, (None, ""))
    return name in UNSUPPORTED and (value is None or (type(value) is type(default) and value == default))


def _are_same(option: str, first: Any, second: Any) -> bool:
    """Return True if two values of an option are equal: for a dtype also a name and the dtype itself."""
    if option == "dtype" and None not in (first, second):
        names = {str(named_dtype(value)).removeprefix("torch.") for value in (first, second)}
        return len(names) == 1
    return bool(first == second)


def by_own_names(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Rename aliases to the options' names, and drop keywords without effect.

    Raises:
        UnknownArgumentError: If a keyword is not supported, or two names of an option have different values. Lists all.
    """
    keywords = {name: value for name, value in keywords.items() if not _is_neutral(name, value)}
    by_reason: dict[str, list[str]] = {}
    for name in filter(UNSUPPORTED.__contains__, keywords):
        by_reason.setdefault(UNSUPPORTED[name][1], []).append(name)
    wrong = [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    if keywords.get("use_safetensors") is False:
        wrong.append(
            "use_safetensors=False: requests pickled weights, which can run code. Only safetensors are supported. "
            "Leave it out; if the repository only has pickled weights, convert them once with transformers"
        )
    if adapter := (keywords.get("adapter_kwargs") or {}).get("_adapter_model_path"):
        wrong.append(
            f"adapter_kwargs: {adapter} is an adapter. Load its base model, then call "
            "peft.PeftModel.from_pretrained(model, folder)"
        )
    wrong += _wrong_types(keywords)
    of_keys, of_quantization = keywords.get("ignore_config_keys"), keywords.get("quantization_config")
    wrong += filter(None, (_wrong_keys(of_keys), _wrong_quantization(of_quantization)))
    if isinstance(mapping := keywords.get("key_mapping"), Mapping):
        wrong += filter(None, (_wrong_renaming(*renaming) for renaming in mapping.items()))
    options: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in keywords.items():
        if name in ALWAYS or name in _FROM_AUTO or name == "use_safetensors":
            continue
        option = ALIASES.get(name, name)
        if option in options and not _are_same(option, options[option], value):
            wrong.append(
                f"{names[option]}={shown(options[option])} and {name}={shown(value)}: two names of the same option, "
                f"with different values. Pass only {option}"
            )
        options[option], names[option] = value, name
    if wrong:
        raise UnknownArgumentError("; ".join(wrong))
    if "torch_dtype" in keywords:
        logger.warning_once("`torch_dtype` is deprecated here and in transformers: use `dtype`.")
    return options
