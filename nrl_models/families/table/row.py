"""A row of the table: which linears of which layers read the same input, for families that need nothing else.

A row is a package of transformers (`transformers.models.NAME.modeling_NAME`): the architectures served, and for each
layer class the linears that are combined, a string for a group. The generated tests hold every row against a trace of
the model, so a row that is wrong or lacks a group fails. Importing this imports no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from nrl_models.common.flags import MTPForm
from nrl_models.families.facts import Family


@dataclass(frozen=True)
class Row:
    """One package of transformers.

    Args:
        prefix: common prefix of its class names, left out in all other arguments; empty if there is none.
        heads: the model classes that are served.
        layers: for each layer class of the package its groups, with commas between: the names of linears, as
            `nrl_models.common.projections.combine_groups` takes them; before them, with a colon, what the module that
            computes them is called, where that is not the rule's name; after them, with an `@`, where they are
            combined, if the class reads one input in some places and two in others. A class of another module of the
            package has that module's name before its own (`vision.VisionAttention`).
        limits: as `FamilyModel.limits`; a limit of one architecture has the key `"Architecture: feature"`.
        limited_since: For features of `limits` that older versions of transformers have, the first version without.
        mixins: for classes of the package, also of `layers`, another mixin of `nrl_models.family.MIXINS` that goes
            before them.
        tiny: as `FamilyModel.tiny`.
        ignored: as `FamilyModel.ignored_config_keys`.
        since: the first version of transformers that serves the classes, if later than this package's minimum; by head,
            where they differ.
        aliases: as `Family.aliases`.
        modeling: the module with the classes, if it is not named after the package.
        config_values: as `FamilyModel.config_values`.
        tensor_parallel: as `FamilyModel.tensor_parallel`.
        published: as `FamilyModel.published`, of the first of `heads`.
        mtp_form: as `FamilyModel.mtp_form`.
        repairs: by head, the key in `nrl_models.families.table.classes.REPAIRS` of a function that fixes a bug which
            keeps the Hugging Face class from running. The generated tests compare with the repaired class.
    """

    prefix: str
    heads: tuple[str, ...]
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
    limited_since: Mapping[str, str] = field(default_factory=dict)
    repairs: Mapping[str, str] = field(default_factory=dict)

    @property
    def architectures(self) -> tuple[str, ...]:
        """The full names of the classes that are served."""
        return tuple(self.prefix + head for head in self.heads)

    @property
    def family(self) -> Family:
        """The registry's facts about the row."""
        since = dict.fromkeys(self.heads, self.since) if isinstance(self.since, str) else self.since
        requires = {self.prefix + head: (f"transformers>={first}",) for head, first in since.items() if first}
        return Family(self.architectures, aliases=self.aliases, requires=requires)

    def module(self, package: str) -> str:
        """The full name of the module that has the classes."""
        return f"transformers.models.{package}.{self.modeling or f'modeling_{package}'}"

    def layer(self, package: str, name: str) -> type | None:
        """A class that the row names; None if the installed transformers lacks it."""
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
