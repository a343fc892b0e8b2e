"""Planting a bug into our models and our code, for as long as a `with` lasts; the reference stays right.

A bug is one of three kinds. `InCode`: one of our functions is replaced by a wrong one. `InModules`: modules of our
models are of a wrong class, as if a family had rewritten them badly. `Misread`: our model reads a value of the
configuration otherwise than transformers does, when it is built and when it runs.
"""

from __future__ import annotations

import copy
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.testing.case import FamilyCase
from nrl_models.testing.mutants.probe import probe, same

Patch = tuple[Any, str, Any]
"""An object (a class, a module), the name of one of its attributes, and what to put there."""


class Bug(ABC):
    """What is planted."""

    probed: bool = True
    """Whether it may be inert, and shows in a forward if it is not."""

    @abstractmethod
    def is_possible(self, case: FamilyCase) -> bool:
        """Whether the tiny model has what the bug is about."""

    @abstractmethod
    def planted(self, case: FamilyCase) -> Any:
        """A context manager, with the bug in; gives the case to test."""

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


@dataclass(frozen=True)
class InCode(Bug):
    """One or several of our functions are wrong.

    Args:
        where: whether a case has what they are for.
        patches: what to replace for it.
        probed: see `Bug`.
    """

    where: Callable[[FamilyCase], bool]
    patches: Callable[[FamilyCase], Iterable[Patch]]
    probed: bool = False

    def is_possible(self, case: FamilyCase) -> bool:
        """See `where`."""
        return self.where(case)

    @contextmanager
    def planted(self, case: FamilyCase) -> Iterator[FamilyCase]:
        """With the functions replaced."""
        with pytest.MonkeyPatch.context() as patch:
            for owner, name, replacement in self.patches(case):
                patch.setattr(owner, name, replacement, raising=False)
            yield case


@dataclass(frozen=True)
class InModules(Bug):
    """Modules of our models are of a class that is wrong in some attributes.

    Args:
        wanted: which modules, by name and module.
        wrong: for one of them the attributes (methods, properties) of the wrong class; none if it is no such module.
        probed: see `Bug`.
    """

    wanted: Callable[[str, nn.Module], bool]
    wrong: Callable[[nn.Module], Mapping[str, Any]]
    probed: bool = True

    def is_possible(self, case: FamilyCase) -> bool:
        """Whether the model has such modules."""
        return any(self.wanted(name, module) for name, module in case.model().named_modules())

    @contextmanager
    def planted(self, case: FamilyCase) -> Iterator[FamilyCase]:
        """With the modules wrong in the models that the case has built, and in those built meanwhile.

        Our own rewritten classes are made wrong where they are, because tests compare them with what a family declares:
        then every instance is wrong, and attributes have to look at theirs if some are right.
        """
        model_class = case.model_class
        right = list(case.reference().modules())
        ours = {new for module in right if (new := model_class.rewrite_of(type(module)))}
        made: dict[type, type] = {}
        with pytest.MonkeyPatch.context() as patch:

            def plant(model: nn.Module) -> None:
                _keep_apart(model, right)
                for name, module in list(model.named_modules()):
                    layer = type(module)
                    if layer in made.values() or not self.wanted(name, module):
                        continue
                    if layer not in made:
                        attributes = self.wrong(module)
                        made[layer] = layer if layer in ours else _subclass(layer, attributes)
                        if layer in ours:
                            for attribute, value in attributes.items():
                                patch.setattr(layer, attribute, value, raising=False)
                    patch.setattr(module, "__class__", made[layer])

            def init(original: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
                original(model, *args, **kwargs)
                plant(model)

            for model in case.built_models():
                plant(model)
            patch.setattr(*wrapped(model_class, "__init__", init))
            yield case


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
        model_class = case.model_class

        def init(original: Any, model: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
            with self._changed([config]):
                original(model, config, *args, **kwargs)

        def forward(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            with self._changed(configurations_of(model)):
                return original(model, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*wrapped(model_class, "__init__", init))
            patch.setattr(*wrapped(model_class, "forward", forward))
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
        with pytest.MonkeyPatch.context() as patch:
            for values, key, wrong in list(self._changes(configs)):
                patch.setitem(values, key, wrong)
            yield


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
