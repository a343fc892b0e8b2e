"""Parts of transformers' and PEFT's adapters without a stability promise; see `nrl_models.common.upstream`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from traceback import extract_tb
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.utils import is_peft_available

from nrl_models.errors import PackageVersionError


def has_adapter(model: PreTrainedModel) -> bool:
    """Return True if transformers added an adapter to a model (`add_adapter`, `load_adapter`)."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextmanager
def explaining_peft_version(method: str, instead: str) -> Iterator[None]:
    """Raise an error with both versions if transformers does not accept the installed PEFT.

    Which adapter methods check the version depends on the version of transformers.

    Args:
        method: The method that is called, for the message.
        instead: A call of PEFT itself that does the same with any version.

    Raises:
        PackageVersionError: transformers requires a newer PEFT.
    """
    from transformers.integrations.peft import MIN_PEFT_VERSION

    try:
        yield
    except ValueError as error:
        if not is_peft_available() or extract_tb(error.__traceback__)[-1].name != "check_peft_version":
            raise
        raise PackageVersionError(
            f"{method} of transformers {transformers.__version__} needs peft>={MIN_PEFT_VERSION}; peft "
            f"{version('peft')} is installed. Use {instead}, which works with it, or install a newer peft or an older "
            "transformers."
        ) from error


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
        base_class = original(self, *args, **kwargs)
        return base_class.reference_class() if hasattr(base_class, "reference_class") else base_class

    base_model_class.names_references = True  # type: ignore[attr-defined]
    peft_model._get_base_model_class = base_model_class
