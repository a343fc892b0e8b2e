"""Planting a bug into our models and our code, for as long as a `with` lasts; the reference stays right.

A bug is one of three kinds. `in_code`: one of our functions is replaced by a wrong one. `in_modules`: modules of our
models are of a wrong class, as if a family had rewritten them badly. `misread`: our model reads a value of the
configuration differently from transformers, when it is built and when it runs.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from nrl_models.common.cached import cached
from nrl_models.testing.case import FamilyCase
from tools.mutants.probe import probe, same

Patch = tuple[Any, str, Any]
"""An object (a class, a module), the name of one of its attributes, and what to put there."""


@dataclass(frozen=True)
class Bug:
    """What is planted.

    Args:
        is_possible: whether the tiny model has what the bug is about.
        plant: puts it into a case, by patches that are taken back, and gives the case to test.
        probed: whether it may be inert, and shows in a forward if it is not.
    """

    is_possible: Callable[[FamilyCase], bool]
    plant: Callable[[FamilyCase, pytest.MonkeyPatch], FamilyCase]
    probed: bool = True

    @contextmanager
    def planted(self, case: FamilyCase) -> Iterator[FamilyCase]:
        """While open, the bug is in; gives the case to test."""
        with pytest.MonkeyPatch.context() as patch:
            yield self.plant(case, patch)

    def is_inert(self, case: FamilyCase, expected: Sequence[torch.Tensor]) -> bool:
        """Whether nothing comes of it in this model: a value that is read and not used, say.

        Decided by `probe`, whose inputs are longer and of more kinds than the suite's: the same there, to rounding.
        Those that are not `probed` are not.

        Args:
            case: without the bug.
            expected: what `probe` gives for it.
        """
        if not self.probed:
            return False
        with self.planted(case) as mutated:
            return same(probe(mutated), expected)


def in_code(
    where: Callable[[FamilyCase], bool], patches: Callable[[FamilyCase], Iterable[Patch]], *, probed: bool = False
) -> Bug:
    """One or several of our functions are wrong.

    Args:
        where: whether a case has what they are for.
        patches: what to replace for it.
        probed: see `Bug`.
    """

    def plant(case: FamilyCase, patch: pytest.MonkeyPatch) -> FamilyCase:
        for owner, name, replacement in patches(case):
            patch.setattr(owner, name, replacement, raising=False)
        return case

    return Bug(where, plant, probed)


def in_modules(
    wanted: Callable[[str, nn.Module], bool], wrong: Callable[[nn.Module], Mapping[str, Any]], *, probed: bool = True
) -> Bug:
    """Modules of our models are of a class that is wrong in some attributes: those built by now, and meanwhile.

    Our own rewritten classes are made wrong where they are, because tests compare them with what a family declares:
    then every instance is wrong, and attributes have to look at theirs if some are right.

    Args:
        wanted: which modules, by name and module.
        wrong: for one of them the attributes (methods, properties) of the wrong class; none if it is no such module.
        probed: see `Bug`.
    """

    def is_possible(case: FamilyCase) -> bool:
        return any(wanted(name, module) for name, module in case.model().named_modules())

    def plant(case: FamilyCase, patch: pytest.MonkeyPatch) -> FamilyCase:
        right = list(case.reference().modules())
        ours = {new for module in right if (new := case.model_class.rewrite_of(type(module)))}
        made: dict[type, type] = {}

        def plant_in(model: nn.Module) -> None:
            _keep_apart(model, right)
            for name, module in list(model.named_modules()):
                layer = type(module)
                if layer in made.values() or not wanted(name, module):
                    continue
                if layer not in made:
                    attributes = wrong(module)
                    made[layer] = layer if layer in ours else _subclass(layer, attributes)
                    if layer in ours:
                        for attribute, value in attributes.items():
                            patch.setattr(layer, attribute, value, raising=False)
                patch.setattr(module, "__class__", made[layer])

        def init(original: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            plant_in(model)

        for model in case.built_models():
            plant_in(model)
        patch.setattr(*wrapped(case.model_class, "__init__", init))
        return case

    return Bug(is_possible, plant, probed)


def _keep_apart(model: nn.Module, right: Sequence[nn.Module]) -> None:
    """Give `model` copies of modules that all models share (an activation that transformers makes once)."""
    shared = {id(module) for module in right}
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if id(module) in shared:
                parent.add_module(name, copy.deepcopy(module))


def misread(change: Callable[[str, Any], Any]) -> Bug:
    """Our model takes a value of the configuration for another when it is built and when it runs; at rest it is right.

    Args:
        change: for a key (without those of the mappings it is in) and its value the value to read in its place; the
            value itself for all other keys.
    """

    def misreading(configs: Callable[..., list[PreTrainedConfig]]) -> Callable[..., Any]:
        """A function in whose place to call the original with the configurations changed that are among its arguments.

        Past `__setattr__`, which would tell others of the change, and they keep it.
        """

        def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                for values, key, wrong in list(_changes(configs(*args, **kwargs), change)):
                    patch.setitem(values, key, wrong)
                return original(*args, **kwargs)

        return call

    def plant(case: FamilyCase, patch: pytest.MonkeyPatch) -> FamilyCase:
        patch.setattr(*wrapped(case.model_class, "__init__", misreading(lambda model, config, *_, **__: [config])))
        patch.setattr(
            *wrapped(case.model_class, "forward", misreading(lambda model, *_, **__: configurations_of(model)))
        )
        return case.with_new_models()

    return Bug(lambda case: any(True for _ in _changes(configurations_of(case.model()), change)), plant)


def _changes(
    configs: Iterable[PreTrainedConfig], change: Callable[[str, Any], Any]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The mappings, keys and values to set, in configurations and all that is in them."""
    seen: set[int] = set()
    queue: list[dict[str, Any]] = [vars(config) for config in configs]
    while queue:
        values = queue.pop()
        if id(values) in seen:
            continue
        seen.add(id(values))
        for key, value in values.items():
            if isinstance(value, PreTrainedConfig):
                queue.append(vars(value))
            elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
                queue.append(value)
            elif (wrong := change(key, value)) is not value and wrong != value:
                yield values, key, wrong


def configurations_of(model: nn.Module) -> list[PreTrainedConfig]:
    """Every configuration that some module of `model` keeps; copies too."""
    configs = (vars(module).get("config") for module in model.modules())
    return list({id(config): config for config in configs if isinstance(config, PreTrainedConfig)}.values())


def around(original: Callable[..., Any], wrong: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `wrong(original, ...)` in the place of `original(...)`."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrong(original, *args, **kwargs)

    return replacement


def wrapped(owner: Any, name: str, wrong: Callable[..., Any]) -> Patch:
    """A patch that puts `around` in the place of a function or method."""
    return owner, name, around(getattr(owner, name), wrong)


def called_with(change: Callable[[nn.Module, dict[str, Any]], dict[str, Any]]) -> Callable[..., Any]:
    """A forward for `around` that makes other arguments, by name, of those it is given."""

    def forward(original: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        names = parameters_of(type(self))[1:]
        return original(self, **change(self, dict(zip(names, args, strict=False)) | kwargs))

    return forward


@cached
def parameters_of(layer: type) -> list[str]:
    """What a layer's forward takes, in order; of a rewritten one the layer it replaces, as its own takes anything."""
    for base in layer.__mro__:
        if "forward" in vars(base):
            names = list(inspect.signature(vars(base)["forward"]).parameters)
            if names != ["self", "args", "kwargs"]:
                return names
    return []


_numbers = itertools.count()


def _subclass(layer: type[nn.Module], attributes: Mapping[str, Any]) -> type[nn.Module]:
    """A subclass of `layer`, of its name, with other `attributes`; held by this module, where pickle finds it."""
    made = type(layer.__name__, (layer,), {"__module__": __name__, "__doc__": layer.__doc__, **attributes})
    made.__qualname__ = f"{layer.__name__}_{next(_numbers)}"
    globals()[made.__qualname__] = made
    return made


def reads(name: str, change: Callable[[Any], Any]) -> property:
    """A property that gives what the instance has under `name`, changed; what it saves is as it was."""
    return property(lambda module: change(own_attribute(module, name)))


def own_attribute(module: nn.Module, name: str) -> Any:
    """What a module itself holds under `name`: a value, a parameter, a buffer or a module.

    Raises:
        AttributeError: nothing.
    """
    return vars(module)[name] if name in vars(module) else nn.Module.__getattr__(module, name)


@dataclass(frozen=True)
class Mutant:
    """A bug with a name, which the generated tests have to find.

    Args:
        name: what is wrong, in a few words; unique.
        stands_for: the mistake of the real world it stands for.
        bug: how it is planted, and where it can be.
        killers: the generated tests that ought to find it, the likeliest and quickest first; all others come after.
    """

    name: str
    stands_for: str
    bug: Bug
    killers: tuple[str, ...] = ("test_logits_equivalence",)
