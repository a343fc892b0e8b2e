"""transformers' keywords of `from_pretrained` and `from_config` that are no options of their own here.

Some have another name, some ask for what is always so, and some ask for what is never done.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from nrl_models.common.logs import get_logger
from nrl_models.errors import UnknownArgumentError, did_you_mean

logger = get_logger(__name__)

ALIASES = {"torch_dtype": "dtype", "backend_config": "backend"}
"""Other names of options: transformers' former one, and NeMo AutoModel's."""

ALWAYS = ("low_cpu_mem_usage",)
"""What asks for no more than is always so; transformers takes and drops it, too."""

_NEVER = {
    "weights_only": "only safetensors are read, which hold nothing but tensors",
    "from_tf": "only safetensors are read",
    "from_flax": "only safetensors are read",
}
"""What transformers does and is not done here, with what to do."""

_FROM_AUTO = ("_from_auto", "_commit_hash", "adapter_kwargs")
"""What transformers' auto classes add, for classes registered with them. Of an adapter's folder they pass on the model
it was trained on, and the adapter in the last of these."""

NAMES = (*ALIASES, *ALWAYS, "use_safetensors")
"""The keywords that are taken here."""


def unknown_keywords(unknown: Iterable[str], known: Iterable[str], more: Iterable[str] = (), or_else: str = "") -> str:
    """What an error says of unknown keywords, with the nearest of those that are known.

    Args:
        unknown: they.
        known: the options.
        more: other names that may have been meant.
        or_else: what else may be given.
    """
    options, lines = list(known), []
    for name in unknown:
        lines.append(name + did_you_mean(name, [*options, *more], count=3, cutoff=0.7))
    plural = "s" if len(lines) > 1 else ""
    return f"unknown keyword{plural} {', '.join(lines)}: expected one of {', '.join(options)}{or_else}"


def by_own_names(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords by the names they have here, without those that ask for what is always so.

    Raises:
        UnknownArgumentError: what is not done here, or two names of one option with different values; all of them.
    """
    wrong = [f"{name}: {_NEVER[name]}" for name in keywords if name in _NEVER]
    if keywords.get("use_safetensors") is False:
        wrong.append(
            "use_safetensors=False: asks for pickled weights, which can run code, and only safetensors are read. "
            "Leave it out; weights that are only there as a pickle are converted once by transformers"
        )
    if adapter := (keywords.get("adapter_kwargs") or {}).get("_adapter_model_path"):
        wrong.append(
            f"adapter_kwargs: {adapter} is an adapter. Load what it was trained on, then model.load_adapter(folder)"
        )
    for pattern in keywords.get("key_mapping") or ():
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            wrong.append(f"key_mapping: {pattern!r} is no regular expression ({error})")
    found: dict[str, Any] = {}
    for name, value in keywords.items():
        if name in ALWAYS or name in _FROM_AUTO or name == "use_safetensors":
            continue
        own = ALIASES.get(name, name)
        if own in found and found[own] != value:
            wrong.append(f"{name}={value!r}: {own} is given otherwise, too, as {found[own]!r}")
        found[own] = value
    if wrong:
        raise UnknownArgumentError("; ".join(wrong))
    if "torch_dtype" in keywords:
        logger.warning_once("`torch_dtype` is deprecated, in transformers, too: it is called `dtype`.")
    return found
