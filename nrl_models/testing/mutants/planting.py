"""Planting a bug into our models and our code, for as long as a `with` lasts; the reference stays right.

A bug is one of three kinds. `InCode`: one of our functions is replaced by a wrong one. `InModules`: modules of our
models are of a wrong class, as if a family had rewritten them badly. `Misread`: our model reads a value of the
configuration otherwise than transformers does, when it is built and when it runs.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.testing.case import FamilyCase
from nrl_models.testing.mutants import planted
from nrl_models.testing.mutants.probe import probe, same

Patch = tuple[Any, str, Any]
"""An object (a class, a module), the name of one of its attributes, and what to put there."""


class Bug(ABC):
    """What is planted."""

    @abstractmethod
    def is_possible(self, case: FamilyCase) -> bool:
        """Whether the tiny model has what the bug is about."""

    @abstractmethod
    def planted(self, case: FamilyCase) -> Any:
        """A context manager, with the bug in; gives the case to test."""

    def is_inert(self, case: FamilyCase, expected: Sequence[torch.Tensor]) -> bool:
        """Whether nothing comes of it in this model: a value that is read and not used, say.

        Decided by `probe`, whose inputs are longer and of more kinds than the suite's: the same there, to rounding.

        Args:
            case: without the bug.
            expected: what `probe` gives for it.
        """
        with self.planted(case) as mutated:
            return same(probe(mutated), expected)


@dataclass(frozen=True)
class InCode(Bug):
    """One or several of our functions are wrong.

    Args:
        where: whether a case has what they are for.
        patches: what to replace for it.
        probed: whether it may be inert, and shows in a forward if it is not.
    """

    where: Callable[[FamilyCase], bool]
    patches: Callable[[FamilyCase], Iterable[Patch]]
    probed: bool = False

    def is_possible(self, case: FamilyCase) -> bool:
        """See `where`."""
        return self.where(case)

    def is_inert(self, case: FamilyCase, expected: Sequence[torch.Tensor]) -> bool:
        """Only if probed."""
        return self.probed and super().is_inert(case, expected)

    @contextmanager
    def planted(self, case: FamilyCase) -> Iterator[FamilyCase]:
        """With the functions replaced."""
        with ExitStack() as stack:
            for owner, name, replacement in self.patches(case):
                stack.enter_context(replaced(owner, name, replacement))
            yield case


@dataclass(frozen=True)
class InModules(Bug):
    """Modules of our models are of a class that is wrong in some attributes.

    Args:
        wanted: which modules, by name and module.
        wrong: for one of them the attributes (methods, properties) of the wrong class; none if it is no such module.
        probed: whether it may be inert, and shows in a forward if it is not.
    """

    wanted: Callable[[str, nn.Module], bool]
    wrong: Callable[[nn.Module], Mapping[str, Any]]
    probed: bool = True

    def is_possible(self, case: FamilyCase) -> bool:
        """Whether the model has such modules."""
        return any(self.wanted(name, module) for name, module in case.model().named_modules())

    def is_inert(self, case: FamilyCase, expected: Sequence[torch.Tensor]) -> bool:
        """Only if probed."""
        return self.probed and super().is_inert(case, expected)

    @contextmanager
    def planted(self, case: FamilyCase) -> Iterator[FamilyCase]:
        """With the modules wrong in the models that the case has built, and in those built meanwhile."""
        model_class = case.model_class
        with ExitStack() as stack:
            right = list(case.reference().modules())
            ours = {new for module in right if (new := model_class.rewrite_of(type(module)))}
            made: dict[type, type] = {}
            for model in case.built_models():
                _keep_apart(model, right)
                for module, wrong_class in self._wrong_classes(model, ours, made, stack):
                    stack.callback(setattr, module, "__class__", type(module))
                    module.__class__ = wrong_class
            original = model_class.__init__

            @functools.wraps(original)
            def init(model: Any, *args: Any, **kwargs: Any) -> None:
                original(model, *args, **kwargs)
                _keep_apart(model, right)
                for module, wrong_class in self._wrong_classes(model, ours, made, stack):
                    module.__class__ = wrong_class

            stack.enter_context(replaced(model_class, "__init__", init))
            yield case

    def _wrong_classes(
        self, model: nn.Module, ours: set[type], made: dict[type, type], stack: ExitStack
    ) -> list[tuple[nn.Module, type]]:
        """Modules and the classes they are to be of.

        Our own rewritten classes are made wrong where they are, because tests compare them with what a family declares:
        then every instance is wrong, and attributes have to look at theirs if some are right.
        """
        result = []
        for name, module in list(model.named_modules()):
            if not self.wanted(name, module):
                continue
            layer = type(module)
            if layer in made.values():
                continue
            if layer not in made:
                attributes = self.wrong(module)
                if layer in ours:
                    for attribute, value in attributes.items():
                        stack.enter_context(replaced(layer, attribute, value))
                    made[layer] = layer
                    continue
                made[layer] = planted.subclass(layer, attributes)
            result.append((module, made[layer]))
        return result


def _keep_apart(model: nn.Module, right: Sequence[nn.Module]) -> None:
    """Give `model` copies of modules that all models share (an activation that transformers makes once)."""
    shared = {id(module) for module in right}
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if id(module) in shared:
                parent.add_module(name, copy.deepcopy(module))


@dataclass(frozen=True)
class Misread(Bug):
    """Our model takes a value of the configuration for another.

    Args:
        change: for a key (without those of the mappings it is in) and its value the value to read in its place; the
            value itself for all other keys.
    """

    change: Callable[[str, Any], Any]

    def is_possible(self, case: FamilyCase) -> bool:
        """Whether some key's value changes."""
        return bool(list(self._changes(configurations_of(case.model()))))

    @contextmanager
    def planted(self, case: FamilyCase) -> Iterator[FamilyCase]:
        """With models that read the wrong value when they are built and when they run; at rest it is the right one."""
        model_class, change = case.model_class, self._changed
        init, forward = model_class.__init__, model_class.forward

        @functools.wraps(init)
        def wrong_init(model: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
            with change([config]):
                init(model, config, *args, **kwargs)

        @functools.wraps(forward)
        def wrong_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            with change(configurations_of(model)):
                return forward(model, *args, **kwargs)

        with replaced(model_class, "__init__", wrong_init), replaced(model_class, "forward", wrong_forward):
            yield BuiltAnew(case)

    def _changes(self, configs: Iterable[PreTrainedConfig]) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """The mappings, keys and values to set."""
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
                elif isinstance(value, dict) and all(isinstance(one, str) for one in value):
                    queue.append(value)
                elif (wrong := self.change(key, value)) is not value and wrong != value:
                    yield values, key, wrong

    @contextmanager
    def _changed(self, configs: Iterable[PreTrainedConfig]) -> Iterator[None]:
        # Past `__setattr__`, which would tell others of the change, and they keep it.
        changes = [(values, key, wrong, values[key]) for values, key, wrong in self._changes(configs)]
        for values, key, wrong, _ in changes:
            values[key] = wrong
        try:
            yield
        finally:
            for values, key, _, right in changes:
                values[key] = right


@dataclass(frozen=True)
class ForCase(Bug):
    """A bug that is made for a case.

    Args:
        make: the bug; None if there is nothing in the case for it.
    """

    make: Callable[[FamilyCase], Bug | None]

    def is_possible(self, case: FamilyCase) -> bool:
        """Whether there is one, and it is."""
        bug = self.make(case)
        return bug is not None and bug.is_possible(case)

    def planted(self, case: FamilyCase) -> Any:
        """With the bug of this case."""
        bug = self.make(case)
        assert bug is not None, "asked only where it is possible"
        return bug.planted(case)


class BuiltAnew(FamilyCase):
    """A case whose models are built again (with whatever is wrong now) and have the given case's weights."""

    def __init__(self, clean: FamilyCase) -> None:
        super().__init__(clean.model_class, clean.device, clean.tiny)
        self._clean = clean
        self._models: dict[torch.dtype, PreTrainedModel] = {}

    def reference(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """The clean case's."""
        return self._clean.reference(dtype)

    def model(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Built anew, on the clean model's tensors."""
        if dtype not in self._models:
            weights = self._clean.model(dtype).state_dict()
            with init_empty_weights(include_buffers=False):
                model = self.model_class.from_config(self.config, dtype=dtype)
            model.load_state_dict(weights, assign=True)
            model.tie_weights()
            self._models[dtype] = model.to(self.device).eval()
        return self._models[dtype]


def configurations_of(model: nn.Module) -> list[PreTrainedConfig]:
    """Every configuration that some module of `model` keeps; copies too."""
    found = {id(config): config for module in model.modules() if (config := _config_of(module)) is not None}
    return list(found.values())


def _config_of(module: nn.Module) -> PreTrainedConfig | None:
    config = vars(module).get("config")
    return config if isinstance(config, PreTrainedConfig) else None


@contextmanager
def replaced(owner: type | ModuleType, name: str, value: Any) -> Iterator[None]:
    """While open, `owner` has `value` as its own attribute `name`."""
    before, had = vars(owner).get(name), name in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def reads(name: str, change: Callable[[Any], Any]) -> property:
    """A property that gives what the instance has under `name`, changed; what it saves is as it was."""

    def wrong(module: nn.Module) -> Any:
        return change(own_attribute(module, name))

    return property(wrong)


def own_attribute(module: nn.Module, name: str) -> Any:
    """What a module itself holds under `name`: a value, a parameter, a buffer or a module.

    Raises:
        AttributeError: nothing.
    """
    for held in (vars(module), module._parameters, module._buffers, module._modules):
        if name in held:
            return held[name]
    raise AttributeError(name)
