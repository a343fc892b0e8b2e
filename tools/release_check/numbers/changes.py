"""Changes of transformers' results between two versions, with the transformers functions that may cause them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tools.release_check.numbers import library_cases
from tools.release_check.numbers.cases import NumberCase
from tools.release_check.numbers.facts import Change, Section
from tools.release_check.numbers.facts import Kind as Fact
from tools.release_check.upstream_code.sources import Sources, changed_functions, imported_modules

_LOADING = ("conversion_mapping", "core_model_loading", "modeling_utils")
_GENERATION = ("cache_utils", "masking_utils", "generation.utils")

SHARED: dict[Fact, tuple[str, ...]] = {
    **dict.fromkeys((Fact.NAMES, Fact.LOADING, Fact.FILES, Fact.DTYPES, Fact.TIES), _LOADING),
    Fact.ERROR: (*_LOADING, *_GENERATION),
    **dict.fromkeys((Fact.INITIALIZATION, Fact.INITIALIZATION_SCALE), ("initialization", "modeling_utils")),
    **dict.fromkeys((Fact.CONFIG_KEYS, Fact.CONFIG_DEFAULTS), ("configuration_utils", "modeling_rope_utils")),
    **dict.fromkeys((Fact.TOKENS, Fact.NUMBERS), _GENERATION),
    Fact.GRADIENTS: ("loss.loss_utils", "modeling_layers"),
    Fact.FIELDS: ("modeling_outputs", "utils.generic"),
}
"""Modules that influence a kind of fact although a model's module may not import from them."""

_QUANTIZED = ("integrations.compressed_tensors", "quantizers.quantizer_compressed_tensors", "quantizers.base")
OF_SECTION: dict[Section, tuple[str, ...]] = {
    Section.EXPERT_PARALLEL: ("integrations.moe", "integrations.tensor_parallel", "distributed.tensor_parallel"),
    Section.INT4_EXPERTS: _QUANTIZED,
    Section.FP4_EXPERTS: _QUANTIZED,
}
"""Modules that run in a section although a model's module may not import from them. Listed first."""

EVERY_MODEL = "transformers.models."


@dataclass(frozen=True)
class UpstreamDifference:
    """The functions that differ between two versions of transformers.

    Args:
        before: Sources of the earlier version.
        after: Sources of the later version.
    """

    before: Sources
    after: Sources
    _changed: dict[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    _used: dict[str, tuple[str, ...]] = field(default_factory=dict, compare=False)

    def functions(self, architecture: str, fact: Fact, section: Section | None = None) -> tuple[str, ...]:
        """Return functions that a class uses and that differ, as `module:qualname`. Its model's functions come first.

        Args:
            architecture: Name of the class.
            fact: Kind of fact that changed.
            section: The section that changed. Modules that only this section runs come first.
        """
        if architecture not in self._used:
            self._used[architecture] = tuple(self._used_functions(architecture))
        found = [*self._in(OF_SECTION.get(section, ()) if section else ()), *self._used[architecture]]
        found += self._in(SHARED.get(fact, ()))
        return tuple(dict.fromkeys(found))

    def _in(self, modules: Iterable[str]) -> list[str]:
        """Return differing functions in modules of transformers."""
        names = (f"transformers.{name}" for name in modules)
        return [f"{name}:{changed}" for name in names for changed in self._changes(name)]

    def _used_functions(self, architecture: str) -> list[str]:
        """Return differing functions in a class's own modules and in modules that these import names from."""
        own = self._modules_of(architecture)
        found = [f"{module}:{name}" for module in own for name in self._changes(module)]
        for module, names in self._imports(own).items():
            tops = ((name, name.partition(".")[0]) for name in self._changes(module))
            found += [f"{module}:{name}" for name, top in tops if top in names]
        return found

    def _changes(self, module: str) -> tuple[str, ...]:
        if module not in self._changed:
            self._changed[module] = changed_functions(self.before, self.after, module)
        return self._changed[module]

    def _modules_of(self, architecture: str) -> list[str]:
        """Return the modules of a class's model, and modules of other models that they import from."""
        if architecture in library_cases.CASES:
            return list(library_cases.CASES[architecture].modules)
        start = NumberCase.from_file(architecture).module
        found, waiting = [], [start, start.replace(".modeling_", ".configuration_")]
        while waiting:
            module = waiting.pop(0)
            if module not in found and self.after.file_of(module):
                found.append(module)
                imported = imported_modules(self.after, module, "transformers")
                waiting += sorted(name for name in imported if name.startswith(EVERY_MODEL) and ".auto" not in name)
        return found

    def _imports(self, modules: Iterable[str]) -> dict[str, set[str]]:
        """Return the names that modules import from the rest of transformers, by module."""
        names: dict[str, set[str]] = defaultdict(set)
        for module in modules:
            tree = self.after.parsed(module)
            for node in ast.walk(tree) if tree else ():
                if isinstance(node, ast.ImportFrom):
                    source = self.after.absolute(module, node)
                    if source.startswith("transformers.") and not source.startswith(EVERY_MODEL):
                        names[source].update(alias.name for alias in node.names)
        return names


@dataclass(frozen=True)
class ChangeGroup:
    """Changes of one kind with the same cause, or the same change in several models.

    Args:
        version: The later version.
        fact: Kind of the facts that changed.
        functions: Differing functions that all of the changes' classes use, or otherwise that some of them use.
        changes: The changes.
        name: Key of the fact if the same change occurs in several models; "new classes" or "removed classes".
            Otherwise empty.
        since: The earlier version.
    """

    version: str
    fact: Fact
    functions: tuple[str, ...]
    changes: tuple[Change, ...]
    name: str = ""
    since: str = ""

    @property
    def key(self) -> str:
        """A stable name that judgments refer to."""
        if self.name:
            return f"{self.version} {self.fact} {self.name}"
        return f"{self.version} {self.fact} {self.functions[0] if self.functions else 'no function'}"

    @cached_property
    def architectures(self) -> tuple[str, ...]:
        """The classes that changed."""
        return tuple(sorted({change.architecture for change in self.changes}))

    @property
    def max_diff(self) -> float | None:
        """The largest relative difference; None if the facts are not numbers."""
        return max((change.max_diff for change in self.changes if change.max_diff is not None), default=None)


def groups_of(
    changes: Iterable[Change], difference: UpstreamDifference, version: str, since: str = ""
) -> list[ChangeGroup]:
    """Group changes by kind and by the first function behind them; equal changes of several models are one group.

    New classes are one group, and removed classes another. Both have no functions.
    """
    changes = list(changes)
    loaded_otherwise = {change.architecture for change in changes if change.kind is Fact.LOADING}

    def functions_of(change: Change) -> tuple[str, ...]:
        if change.kind is Fact.CLASS:
            return ()
        found = difference.functions(change.architecture, change.kind, change.section)
        if change.architecture in loaded_otherwise:  # if weights were not loaded, everything else also differs
            found += difference.functions(change.architecture, Fact.LOADING)
        return tuple(dict.fromkeys(found))

    behind = {key: functions_of(key.change) for key in map(_Key, changes)}
    first: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    models: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for key in behind:
        first[_content(key.change)].add(behind[key][0] if behind[key] else "")
        models[_content(key.change)].add(key.architecture)
    found: dict[tuple[Any, ...], list[_Key]] = defaultdict(list)
    for key in behind:
        content, kind = _content(key.change), key.change.kind
        if kind is Fact.CLASS:
            found[kind, "new classes" if key.change.after else "removed classes"].append(key)
        elif key.change.max_diff is None and len(first[content]) > 1:
            found[kind, key.change.section, tuple(sorted(models[content]))].append(key)
        else:
            found[(kind, *behind[key][:1])].append(key)
    groups = []
    for identity, keys in found.items():
        common = [name for name in behind[keys[0]] if all(name in behind[key] for key in keys)]
        functions = common or list(dict.fromkeys(name for key in keys for name in behind[key]))
        name = f"{keys[0].change.section}: {keys[0].change.key}" if len(identity) > 2 else ""
        name = identity[1] if identity[0] is Fact.CLASS else name
        groups.append(
            ChangeGroup(version, keys[0].change.kind, tuple(functions), tuple(key.change for key in keys), name, since)
        )
    return sorted(groups, key=lambda group: (group.fact, group.key))


class _Key:
    """A change as a key. Its values may be lists."""

    def __init__(self, change: Change) -> None:
        self.change = change
        self.architecture, self.kind = change.architecture, change.kind


def _content(change: Change) -> tuple[Any, ...]:
    """Return the content of a change without its class, which is equal for the same change in several models."""
    return change.kind, change.section, change.key, repr(change.before), repr(change.after)
