"""A row of the table: which linears of which layers read one input, for families that need nothing else said.

A row is a package of transformers (`transformers.models.NAME.modeling_NAME`): the architectures served, and for each
layer class the linears that are combined, a string for a group. The generated tests hold every row against a trace of
the model, so a row that is wrong or lacks a group fails. Importing this imports no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from nrl_models.families.facts import Family


@dataclass(frozen=True)
class Row:
    """One package of transformers.

    Args:
        prefix: how the names of its classes begin; all other arguments leave it out. Empty where they have none in
            common.
        heads: the classes of the package that are served.
        layers: for each layer class of the package its groups, with commas between: the names of linears, as
            `nrl_models.common.projections.combine_groups` takes them; before them, with a colon, what the module that
            computes them is called, where that is not the rule's name; after them, with an `@`, where they are
            combined, if the class reads one input in some places and two in others. A class of another module of the
            package has that module's name before its own (`vision.VisionAttention`).
        limits: as `FamilyModel.limits`; what holds for one architecture only stands under `"Architecture: feature"`.
        mixins: for each other class of the package that is rewritten the mixin of `common.forward.mrope` that goes
            before it.
        tiny: as `FamilyModel.tiny`.
        ignored: as `FamilyModel.ignored_config_keys`.
        since: the version of transformers that the classes need, where this package goes back further.
        aliases: as `Family.aliases`.
        modeling: the module that has the classes, where it is not called as the package.
        config_values: as `FamilyModel.config_values`.
        tensor_parallel: as `FamilyModel.tensor_parallel`.
        published: as `FamilyModel.published`, of the first of `heads`.
    """

    prefix: str
    heads: tuple[str, ...]
    layers: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    mixins: Mapping[str, str] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    since: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    modeling: str = ""
    config_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tensor_parallel: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def architectures(self) -> tuple[str, ...]:
        """The full names of the classes that are served."""
        return tuple(self.prefix + head for head in self.heads)

    @property
    def family(self) -> Family:
        """What the registry has to know of the row."""
        requires = dict.fromkeys(self.architectures, f"transformers>={self.since}") if self.since else {}
        return Family(self.architectures, aliases=self.aliases, requires=requires)

    def module(self, package: str) -> str:
        """The full name of the module that has the classes."""
        return f"transformers.models.{package}.{self.modeling or f'modeling_{package}'}"

    def layer(self, package: str, name: str) -> type | None:
        """A class that the row names; None if the installed transformers has no such class."""
        module, _, own_name = name.rpartition(".")
        found = f"transformers.models.{package}.{module}" if module else self.module(package)
        return getattr(import_module(found), self.prefix + own_name, None)

    def limits_of(self, architecture: str) -> dict[str, str]:
        """The limits of one architecture, by feature."""
        found = {}
        for key, reason in self.limits.items():
            name, _, feature = key.rpartition(": ")
            if name in ("", architecture):
                found[feature] = reason
        return found


CAUSAL = ("ForCausalLM",)
CONDITIONAL = ("ForConditionalGeneration",)
CAUSAL_AND_CONDITIONAL = (*CAUSAL, *CONDITIONAL)
CAUSAL_AND_SEQUENCE = (*CAUSAL, "ForSequenceClassification")
ALL_HEADS = (*CAUSAL_AND_SEQUENCE, "ForTokenClassification")
QKV = "q_proj k_proj v_proj"
LATENTS = "q_a_proj kv_a_proj_with_mqa"
GATE_UP = "gate_proj up_proj"
DELTA_NET = "in_proj: in_proj_qkv in_proj_z in_proj_b in_proj_a"
QFORMER = "query key value @ attention.attention, key value @ crossattention"
