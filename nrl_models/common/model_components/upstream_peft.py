"""Parts of transformers' and PEFT's adapters without a stability promise; see `nrl_models.common.upstream`."""

from __future__ import annotations

import functools
import sys
from importlib.metadata import version
from typing import Any

import transformers
from packaging.version import Version
from transformers import PreTrainedModel
from transformers.utils import is_peft_available

from nrl_models.errors import PackageVersionError


def has_adapter(model: PreTrainedModel) -> bool:
    """Return True if transformers added an adapter to a model (`add_adapter`, `load_adapter`)."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def require_peft(method: str, instead: str) -> None:
    """Check that transformers' adapter methods accept the installed PEFT.

    Args:
        method: The method that is called, for the message.
        instead: A call of PEFT itself that does the same with any version.

    Raises:
        PackageVersionError: transformers requires a newer PEFT.
    """
    from transformers.integrations.peft import MIN_PEFT_VERSION

    if is_peft_available() and Version(installed := version("peft")) < Version(MIN_PEFT_VERSION):
        raise PackageVersionError(
            f"{method} of transformers {transformers.__version__} needs peft>={MIN_PEFT_VERSION}; peft {installed} is "
            f"installed. Use {instead}, which works with it, or install a newer peft or an older transformers."
        )


def have_peft_name_references() -> None:
    """Make PEFT record transformers' class instead of ours in adapters without a task type.

    `AutoPeftModel` imports the class that an adapter names, from trusted packages. PEFT determines the class in one
    method, which is wrapped for our models. No effect if PEFT is not imported.
    """
    peft_model = getattr(sys.modules.get("peft"), "PeftModel", None)
    if peft_model is None or hasattr(peft_model._get_base_model_class, "names_references"):
        return
    original = peft_model._get_base_model_class

    @functools.wraps(original)
    def base_model_class(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return found.reference_class() if hasattr(found, "reference_class") else found

    base_model_class.names_references = True  # type: ignore[attr-defined]
    peft_model._get_base_model_class = base_model_class
