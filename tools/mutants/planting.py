"""Plant a bug into our models and code within a `with` block. The reference stays correct.

There are three kinds of bugs. `in_code` replaces one of our functions. `in_modules` changes the class of modules in our
models, as an incorrect rewrite would. `misread` changes a configuration value that our model reads when it is built and
when it runs.
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
"""An object (a class or module), the name of its attribute, and the replacement."""


@dataclass(frozen=True)
class Bug:
    """A bug that can be planted.

    Args:
        is_possible: Returns whether the tiny model has the structure that the bug needs.
        plant: Plants the bug into a case with patches that are undone later, and returns the case to test.
        probed: Whether the bug may be inert. If it is not, a forward shows it.
    """

    is_possible: Callable[[FamilyCase], bool]
    plant: Callable[[FamilyCase, pytest.MonkeyPatch], FamilyCase]
    probed: bool = True

    @contextmanager
    def planted(self, case: FamilyCase) -> Iterator[FamilyCase]:
        """Plant the bug within a `with` block. Yields the case to test."""
        with pytest.MonkeyPatch.context() as patch:
            yield self.plant(case, patch)

    def is_inert(self, case: FamilyCase, expected: Sequence[torch.Tensor]) -> bool:
        """Return True if the bug does not change this model, for example because a value is read and not used.

        Compares the results of `probe`, which uses longer and more varied inputs than the suite. The bug is inert if
        they agree up to rounding. Bugs that are not `probed` are never inert.

        Args:
            case: The case without the bug.
            expected: The result of `probe` for it.
        """
        if not self.probed:
            return False
        with self.planted(case) as mutated:
            return same(probe(mutated), expected)


def in_code(
    where: Callable[[FamilyCase], bool], patches: Callable[[FamilyCase], Iterable[Patch]], *, probed: bool = False
) -> Bug:
    """Replace one or several of our functions.

    Args:
        where: Returns whether a case has the structure the functions are for.
        patches: Returns the patches for a case.
        probed: See `Bug`.
    """

    def plant(case: FamilyCase, patch: pytest.MonkeyPatch) -> FamilyCase:
        for owner, name, replacement in patches(case):
            patch.setattr(owner, name, replacement, raising=False)
        return case

    return Bug(where, plant, probed)


def in_modules(
    wanted: Callable[[str, nn.Module], bool], wrong: Callable[[nn.Module], Mapping[str, Any]], *, probed: bool = True
) -> Bug:
    """Change the class of modules in our models, in existing models and in those built within the block.

    Tests compare our rewritten classes with a family's declaration. Therefore those classes are patched in place, and
    every instance has the bug. If some instances must stay correct, the attributes have to check the instance.

    Args:
        wanted: Selects modules by name and module.
        wrong: Returns the attributes (methods, properties) of the changed class for a module. May be empty.
        probed: See `Bug`.
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

        for model in list(case._models.values()):  # those built so far
            plant_in(model)
        patch.setattr(*wrapped(case.model_class, "__init__", init))
        return case

    return Bug(is_possible, plant, probed)


def _with_new_models(case: FamilyCase) -> FamilyCase:
    """Return a copy of a case that shares its references, but builds the models under test again."""
    copied = copy.copy(case)
    copied._models = {}
    return copied


def _keep_apart(model: nn.Module, right: Sequence[nn.Module]) -> None:
    """Replace modules that all models share by copies. transformers creates some activations only once."""
    shared = {id(module) for module in right}
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if id(module) in shared:
                parent.add_module(name, copy.deepcopy(module))


def misread(change: Callable[[str, Any], Any]) -> Bug:
    """Change a configuration value while our model is built and while it runs. It is correct at all other times.

    Args:
        change: Takes a key (without its enclosing mappings) and its value, and returns the value to read instead,
            which is the same value for all other keys.
    """

    def misreading(configs: Callable[..., list[PreTrainedConfig]]) -> Callable[..., Any]:
        """Return a function that calls the original with changed configurations in its arguments.

        It bypasses `__setattr__`, which would propagate the change to objects that keep it.
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
        return _with_new_models(case)

    return Bug(lambda case: any(True for _ in _changes(configurations_of(case.model()), change)), plant)


def _changes(
    configs: Iterable[PreTrainedConfig], change: Callable[[str, Any], Any]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the mappings, keys and values to set, in configurations and everything nested in them."""
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
    """Return every configuration that a module of `model` holds, copies included."""
    configs = (vars(module).get("config") for module in model.modules())
    return list({id(config): config for config in configs if isinstance(config, PreTrainedConfig)}.values())


def around(original: Callable[..., Any], wrong: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `wrong(original, ...)` instead of `original(...)`."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrong(original, *args, **kwargs)

    return replacement


def wrapped(owner: Any, name: str, wrong: Callable[..., Any]) -> Patch:
    """Return a patch that applies `around` to a function or method."""
    return owner, name, around(getattr(owner, name), wrong)


def called_with(change: Callable[[nn.Module, dict[str, Any]], dict[str, Any]]) -> Callable[..., Any]:
    """Return a forward for `around` that changes its arguments. `change` receives them by name."""

    def forward(original: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        names = parameters_of(type(self))[1:]
        return original(self, **change(self, dict(zip(names, args, strict=False)) | kwargs))

    return forward


@cached
def parameters_of(layer: type) -> list[str]:
    """Return the parameter names of a layer's forward, or of its base's if it only takes `*args, **kwargs`."""
    for base in layer.__mro__:
        if "forward" in vars(base):
            names = list(inspect.signature(vars(base)["forward"]).parameters)
            if names != ["self", "args", "kwargs"]:
                return names
    return []


_numbers = itertools.count()


def _subclass(layer: type[nn.Module], attributes: Mapping[str, Any]) -> type[nn.Module]:
    """Create a subclass of `layer` with other `attributes`, registered in this module so that pickle finds it."""
    made = type(layer.__name__, (layer,), {"__module__": __name__, "__doc__": layer.__doc__, **attributes})
    made.__qualname__ = f"{layer.__name__}_{next(_numbers)}"
    globals()[made.__qualname__] = made
    return made


def reads(name: str, change: Callable[[Any], Any]) -> property:
    """Return a property that reads the instance's value under `name`, changed. The stored value does not change."""
    return property(lambda module: change(own_attribute(module, name)))


def own_attribute(module: nn.Module, name: str) -> Any:
    """Return the value, parameter, buffer or module that a module itself holds under `name`.

    Raises:
        AttributeError: The module holds nothing under this name.
    """
    return vars(module)[name] if name in vars(module) else nn.Module.__getattr__(module, name)


@dataclass(frozen=True)
class Mutant:
    """A named bug that the generated tests must find.

    Args:
        name: A short unique description of the bug.
        stands_for: The real mistake that it represents.
        bug: How to plant it, and into which models.
        killers: The generated tests expected to find it, the likeliest and fastest first. All other tests run after
            them.
    """

    name: str
    stands_for: str
    bug: Bug
    killers: tuple[str, ...] = ("test_logits_equivalence",)
