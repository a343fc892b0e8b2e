"""The model for a quirk's predicate: its configuration and the declarations of its classes, but not its name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from nrl_models.auto import auto_class_for
from nrl_models.common.checkpoint.local_path import CONFIG_NAME
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.flags import ModelFlag
from nrl_models.loading.read_config import read_config


@dataclass(frozen=True, eq=False)
class Subject:
    """A model whose quirks are requested.

    Args:
        model: A model with values or on meta.
        any_size: Whether it represents all models of its class. Then values that differ between a family's checkpoints,
            such as the number of layers that share keys and values, exclude nothing.
    """

    model: PreTrainedModel
    any_size: bool = False

    @classmethod
    def of_checkpoint(cls, path: str | Path) -> Subject:
        """Build the model of a checkpoint on meta, without reading weights.

        `path` is a checkpoint, a directory with a `config.json`, or that file.

        Raises:
            CheckpointError, UnknownArchitectureError, ...: See `from_pretrained`.
        """
        path = Path(path)
        folder = resolve_folder(path.parent if path.name == CONFIG_NAME and path.is_file() else path)
        return cls(auto_class_for(folder).from_config(read_config(folder), device="meta"))

    @property
    def text(self) -> Any:
        """Configuration of the model's decoder."""
        return self.model.config.get_text_config()

    @property
    def flags(self) -> ModelFlag:
        """Flags that the family declares for trainers."""
        return getattr(self.model, "flags", ModelFlag.NONE)

    @cached_property
    def handled(self) -> frozenset[str]:
        """Names of the quirks that the model's classes declare to handle (`handles_quirks`)."""
        names: set[str] = set(getattr(type(self.model).forward, "handles_quirks", ()))
        for kind in {type(module) for module in self.model.modules()}:
            for base in kind.__mro__:
                names.update(vars(base).get("handles_quirks", ()))
        return frozenset(names)
