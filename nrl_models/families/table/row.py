"""A row of the table: groups of linears with a common input, for families that need no other code.

A row describes a package of transformers (`transformers.models.NAME.modeling_NAME`): the architectures, and for each
layer class the groups of fused linears. The generated tests compare each row with a trace of the model, so a wrong or
missing group fails. Importing this module imports no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nrl_models.common.flags import MTPForm
from nrl_models.families.facts import Family

if TYPE_CHECKING:
    from nrl_models.common.views.hub_parts import PartSizes


@dataclass(frozen=True)
class Row:
    """One package of transformers.

    Args:
        heads: Full names of the supported model classes, separated by spaces.
        layers: Groups of each layer class, separated by commas, in the format of
            `nrl_models.common.projections.combine_groups`: names of linears, optionally with the group's name and a
            colon in front (if it is not the default name), and an `@` with a place at the end (if the linears have a
            common input only in some modules). For a class in another module of the package, the key has the module's
            name as prefix (`vision.IdeficsVisionAttention`).
        limits: See `FamilyModel.limits`. The key for a limit of one architecture is `"Architecture: feature"`.
        mixins: A mixin from `nrl_models.common.forward.rewriting.MIXINS` for classes of the package, including those in
            `layers`. It precedes their groups.
        tiny: See `FamilyModel.tiny`.
        ignored: See `FamilyModel.ignored_config_keys`.
        since: First version of transformers with the classes, if later than this package's minimum; by head if they
            differ.
        aliases: See `Family.aliases`.
        modeling: Module with the classes, if it does not have the package's name.
        config_values: See `FamilyModel.config_values`.
        tensor_parallel: See `FamilyModel.tensor_parallel`.
        published: See `FamilyModel.published`, for the first of `heads`.
        mtp_form: See `FamilyModel.mtp_form`.
        repairs: By head, the key in `nrl_models.families.table.classes.REPAIRS` of a function that fixes a bug which
            prevents the Hugging Face class from running. The generated tests compare with the repaired class.
        part_sizes: See `nrl_models.common.views.hub_parts.register_part_sizes`.
    """

    heads: str
    layers: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    mixins: Mapping[str, str] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    since: str | Mapping[str, str] = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    modeling: str = ""
    config_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tensor_parallel: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    mtp_form: MTPForm | None = None
    repairs: Mapping[str, str] = field(default_factory=dict)
    part_sizes: Mapping[str, PartSizes] = field(default_factory=dict)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the supported model classes."""
        return tuple(self.heads.split())

    @property
    def family(self) -> Family:
        """Registry entry of the row."""
        since = dict.fromkeys(self.architectures, self.since) if isinstance(self.since, str) else self.since
        requires = {head: (f"transformers>={first}",) for head, first in since.items() if first}
        return Family(self.architectures, aliases=self.aliases, requires=requires)

    def module(self, package: str) -> str:
        """Return the full name of the module with the classes."""
        return f"transformers.models.{package}.{self.modeling or f'modeling_{package}'}"

    def layer(self, package: str, name: str) -> type | None:
        """Return a class that the row names, or None if the installed transformers lacks it."""
        module, _, class_name = name.rpartition(".")
        path = f"transformers.models.{package}.{module}" if module else self.module(package)
        return getattr(import_module(path), class_name, None)

    def limits_of(self, architecture: str) -> dict[str, str]:
        """Return the limits of one architecture: the reason for each feature."""
        limits = {}
        for key, reason in self.limits.items():
            name, _, feature = key.rpartition(": ")
            if name in ("", architecture):
                limits[feature] = reason
        return limits


QKV = "q_proj k_proj v_proj"
LATENTS = "q_a_proj kv_a_proj_with_mqa"
GATE_UP = "gate_proj up_proj"
DELTA_NET = "in_proj: in_proj_qkv in_proj_z in_proj_b in_proj_a"
QFORMER = "query key value @ attention.attention, key value @ crossattention"
