"""Compare the effect of one changed configuration key on a model and on its transformers reference class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.core_model_loading import revert_weight_conversion

from nrl_models.common.config.keys import (
    BOOKKEEPING,
    declared_keys,
    generation_keys,
    keys_in_class,
    keys_in_model,
)
from nrl_models.common.config.walk import walk
from nrl_models.errors import NRLModelsError
from nrl_models.inputs.model_inputs import Inputs, inputs_for
from nrl_models.testing.case import SEED, FamilyCase, randomize
from nrl_models.testing.shrink import default_values
from tools.ledger.ledger import KeyKind
from tools.ledger.perturbations import perturbed

TOLERANCE = 1e-5

Tensors = dict[str, torch.Tensor]


Reads = set[tuple[str, str]]
"""Keys that were read: the name of the configuration class, and the key's name in that class."""


@dataclass
class Behavior:
    """The behavior of a model with one configuration.

    Args:
        config: The configuration.
        model: The model. None if it could not be built.
        refused: The stage and the error that stopped it. Empty without an error.
        weights: Newly initialized weights under a fixed seed, by transformers' names.
        outputs: The tensors that a forward returns, by position.
        training: The tensors that a forward in training mode returns, by position.
        other_inputs: Whether it needed other inputs than the model with the unchanged configuration.
        read: The keys read during the build and the forward.
    """

    config: PreTrainedConfig
    model: Any = None
    refused: str = ""
    weights: Tensors = field(default_factory=dict)
    outputs: Tensors = field(default_factory=dict)
    training: Tensors = field(default_factory=dict)
    other_inputs: bool = False
    read: Reads = field(default_factory=set)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.weights.items()}


@dataclass(frozen=True)
class Finding:
    """The result for one key.

    Args:
        kind: The effect of the key. Never `DEFAULT_ONLY` or `UNTRIED`.
        difference: How the model under test changed differently from its reference. Empty if it did not.
    """

    kind: KeyKind
    difference: str = ""


ENOUGH = 2
"""Stop after this many values of a key without an effect."""


class Differential:
    """Try other values for each key of a tiny configuration, in the model and in its reference.

    A key that is not read when a model is built or run has no effect, so only the other keys are tried. Some keys are
    read only after another key changes: a window, for example, if windows are switched on. Such keys are tried on top
    of that change.

    Args:
        case: The class under test.
    """

    def __init__(self, case: FamilyCase) -> None:
        self.case = case
        self._inputs = case.inputs(labels=True)
        self._base = self._based_on(_copy(case.config), None)
        self._base.read |= self._read_here()
        self._opened: dict[tuple[str, str], PreTrainedConfig] = {}

    def keys(self) -> list[str]:
        """Return the paths of all keys."""
        return ledger_keys(self._base.config)

    def run(self) -> dict[str, Finding]:
        """Return the finding for each key, by its path."""
        found = {path: self.try_key(path) for path in self.keys()}
        for path, finding in found.items():
            config = self._opened.get(_place(self._base.config, path))
            if finding.kind == KeyKind.INERT and config is not None:
                found[path] = self._try_values(self._based_on(config, self._base), path)
        return found

    def survey(self) -> dict[str, KeyKind]:
        """Return the kind of each key before any value is tried: inert if nothing reads the key, otherwise untried."""
        return {
            path: KeyKind.UNTRIED
            if any(
                isinstance(config, Exception) or self._can_matter(self._base, config, path)
                for config in perturbed(self._base.config, path)
            )
            else KeyKind.INERT
            for path in self.keys()
        }

    def try_key(self, path: str) -> Finding:
        """Change one key to other values until one has an effect."""
        return self._try_values(self._base, path)

    def _based_on(self, config: PreTrainedConfig, near: Behavior | None) -> Behavior:
        """Build the reference with which changed configurations are compared."""
        base = self._reference(config, near, training=True)
        if base.refused:
            raise RuntimeError(f"the tiny {self.case.architecture} itself is refused: {base.refused}")
        return base

    def _read_here(self) -> Reads:
        """Return the keys that the model under test reads, without the reads of the validation in `from_config`."""
        found = Behavior(_copy(self._base.config))
        with keys_that_are_read() as read:
            found.model = self.case.model_class._from_config(found.config, dtype=torch.float32)
            for training in (False, True):
                self._run(found, training=training)
        return read

    def _try_values(self, base: Behavior, path: str) -> Finding:
        kinds: list[KeyKind] = []
        for config in perturbed(base.config, path):
            if isinstance(config, Exception):
                finding = Finding(KeyKind.REFUSED)
            elif self._can_matter(base, config, path):
                finding = self._try(base, config)
            else:
                finding = Finding(KeyKind.INERT)
            kinds.append(finding.kind)
            if finding.difference or finding.kind not in (KeyKind.INERT, KeyKind.REFUSED):
                return finding
            if kinds.count(KeyKind.INERT) >= ENOUGH:
                break
        return Finding(KeyKind.REFUSED if set(kinds) == {KeyKind.REFUSED} else KeyKind.INERT)

    def _can_matter(self, base: Behavior, config: PreTrainedConfig, path: str) -> bool:
        """Return True if the key is read, or if the configuration class derives other values from it."""
        if _place(base.config, path) in base.read:
            return True
        before = {name: value for name, _, _, value in walk(base.config)}
        after = {name: value for name, _, _, value in walk(config)}
        return {**before, path: None} != {**after, path: None}

    def _try(self, base: Behavior, config: PreTrainedConfig) -> Finding:
        expected = self._reference(config, base)
        if not (expected.refused or expected.other_inputs):
            for place in expected.read - base.read:
                self._opened.setdefault(place, config)
        actual = self._model(expected)
        if actual.refused and not expected.refused:
            with _refusal(expected, "save"):  # our class converts weights when it is built
                revert_weight_conversion(expected.model, expected.weights)
        kind = _moved(expected, base)
        run = not (expected.refused or actual.refused)
        trains = kind is None and run
        if trains:
            self._run(expected, training=True)
            self._run(actual, training=True)
            kind = _moved(expected, base)
        if kind is None:
            kind = KeyKind.INERT if _same(expected.weights, base.weights) else KeyKind.WEIGHTS
        difference = _difference(actual, expected)
        if difference and run:
            # Repeat with other weights. A difference from rounding (another expert or token chosen) then disappears.
            expected = self._reference(config, None, seed=SEED + 1)
            actual = self._model(expected)
            if trains and not (expected.refused or actual.refused):
                self._run(expected, training=True)
                self._run(actual, training=True)
            difference = _difference(actual, expected)
        return Finding(kind, difference)

    def _reference(
        self, config: PreTrainedConfig, near: Behavior | None, training: bool = False, seed: int = SEED
    ) -> Behavior:
        """Run the reference with the weights of `near` if their shapes match, otherwise with random weights."""
        found, copied = Behavior(config), _copy(config)
        with keys_that_are_read() as found.read:
            with _refusal(found, "build"):
                torch.manual_seed(SEED)
                found.model = self.case.reference_class._from_config(copied, dtype=torch.float32)
                found.weights = {name: tensor.clone() for name, tensor in found.model.state_dict().items()}
                if near is not None and found.shapes == near.shapes:
                    found.model.load_state_dict(near.model.state_dict())
                else:
                    torch.manual_seed(seed)
                    randomize(found.model)
            self._run(found)
            if training:
                self._run(found, training=True)
        return found

    def _model(self, expected: Behavior) -> Behavior:
        """Run the model under test with the reference's weights."""
        found = Behavior(expected.config)
        with _refusal(found, "build"):
            torch.manual_seed(SEED)
            allowed = {key for _, _, key, _ in walk(found.config)}  # test values that validation rejects
            found.model = self.case.model_class.from_config(
                _copy(found.config), dtype=torch.float32, ignore_config_keys=allowed
            )
            adapter = found.model.state_dict_adapter
            weights = adapter.to_hf(found.model.state_dict(), layout="transformers")
            found.weights = {name: tensor.clone() for name, tensor in weights.items()}
            if not expected.refused and found.shapes == expected.shapes:
                found.model.load_state_dict(adapter.from_hf(expected.model.state_dict()))
        if found.shapes == expected.shapes:
            self._run(found)
        return found

    def _run(self, found: Behavior, *, training: bool = False) -> None:
        """Run a forward unless an earlier stage failed. Training mode passes labels, evaluation mode does not."""
        model = found.model
        if found.refused or model is None:
            return

        def forward(inputs: Inputs) -> Tensors:
            torch.manual_seed(SEED)
            given = {name: value for name, value in inputs.items() if training or name != "labels"}
            with torch.no_grad():
                return dict(_tensors(model(**given), ""))

        with _refusal(found, "training" if training else "forward"):
            model.train(training)
            try:
                result = forward(self._inputs)
            except Exception:  # the key may change the inputs: retry with inputs for the present configuration
                found.other_inputs = True
                result = forward(inputs_for(model, labels=True))
            setattr(found, "training" if training else "outputs", result)


def ledger_keys(config: PreTrainedConfig) -> list[str]:
    """Return the paths of the keys in a ledger. Excludes undeclared keys and keys that do not describe the model."""
    return [
        path
        for path, part, key, _ in walk(config)
        if key not in BOOKKEEPING
        and (key in declared_keys(type(part)) or (not key.startswith("_") and key in default_values(type(part))))
    ]


def keys_at_default_only(case: FamilyCase) -> list[str]:
    """Return the paths of switches and activations that neither the model nor the configuration reads.

    Another value than the default would request a computation that no code performs.
    """
    config = case.config
    read = keys_in_model(case.reference_class, config)
    return [
        path
        for path, part, key, value in walk(config)
        if key in declared_keys(type(part))
        and key not in BOOKKEEPING | generation_keys() | declared_keys(PreTrainedConfig)
        and key not in read
        and key not in keys_in_class(type(part))
        and not any(other in read for other, own in type(part).attribute_map.items() if own == key)
        and (isinstance(value, bool) or (isinstance(value, str) and value in ACT2FN))
    ]


def _place(config: PreTrainedConfig, path: str) -> tuple[str, str]:
    *parents, key = path.split(".")
    return type(reduce(getattr, parents, config)).__name__, key


@contextmanager
def keys_that_are_read() -> Iterator[Reads]:
    """Record the keys that are read from any configuration within a `with` block."""
    read: Reads = set()
    original = PreTrainedConfig.__getattribute__

    def noting(config: PreTrainedConfig, key: str) -> Any:
        owner = type(config)
        read.add((owner.__name__, owner.attribute_map.get(key, key)))
        return original(config, key)

    with patch.object(PreTrainedConfig, "__getattribute__", noting):
        yield read


@contextmanager
def _refusal(found: Behavior, stage: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # models raise any exception for a bad value
        raised = error.__cause__ if isinstance(error, NRLModelsError) and error.__cause__ else error  # the model's
        found.refused = f"{stage}: {type(raised).__name__}: {raised}"


def _copy(config: PreTrainedConfig) -> PreTrainedConfig:
    return type(config).from_dict(config.to_dict())


def _tensors(value: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in a model's output, its cache included."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{place}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{place}.{index}")
    elif hasattr(value, "layers"):
        layers = value.layers.values() if isinstance(value.layers, Mapping) else value.layers
        yield from _tensors([vars(layer) for layer in layers], place)
    elif hasattr(value, "__dict__") and type(value).__name__.endswith("Cache"):
        yield from _tensors(vars(value), place)


def _same(actual: Tensors, expected: Tensors) -> bool:
    return not _far(actual, expected, tolerance=0.0)


def _moved(behavior: Behavior, base: Behavior) -> KeyKind | None:
    """Return the kind of difference between two behaviors, or None if they agree."""
    if behavior.refused:
        return KeyKind.REFUSED
    if behavior.shapes != base.shapes:
        return KeyKind.SHAPES
    if not _same(behavior.outputs, base.outputs):
        return KeyKind.OUTPUTS
    if behavior.training and not _same(behavior.training, base.training):
        return KeyKind.TRAINING
    return None


def _difference(actual: Behavior, expected: Behavior) -> str:
    """Describe the difference between two behaviors. Empty if they agree."""
    if bool(actual.refused) != bool(expected.refused):
        return f"refused with {actual.refused or 'nothing'!r}, the reference with {expected.refused or 'nothing'!r}"
    if expected.refused:  # each fails at its own stage
        return ""
    if expected.weights and actual.shapes != expected.shapes:
        names = sorted(set(actual.shapes.items()) ^ set(expected.shapes.items()))
        return f"other parameters: {names[:4]}"
    if expected.weights and not _same(actual.weights, expected.weights):
        return "other new weights under the same seed"
    for kind in ("outputs", "training"):
        if problem := _far(getattr(actual, kind), getattr(expected, kind)):
            return f"{kind}: {problem}"
    return ""


def _far(actual: Tensors, expected: Tensors, tolerance: float = TOLERANCE) -> str:
    """Describe how tensors differ by more than a tolerance. Empty if they agree."""
    if actual.keys() != expected.keys():
        return f"returns {sorted(set(actual) ^ set(expected))[:4]} on one side only"
    for name, wanted in expected.items():
        found = actual[name]
        if found.shape != wanted.shape:
            return f"{name} has shape {tuple(found.shape)}, the reference's {tuple(wanted.shape)}"
        if found.dtype != wanted.dtype:
            return f"{name} is of {found.dtype}, the reference's of {wanted.dtype}"
        if not wanted.is_floating_point():
            if not torch.equal(found, wanted):
                return f"{name} differs"
            continue
        scale = max(1.0, wanted.nan_to_num(0.0, 0.0, 0.0).abs().max().item()) if wanted.numel() else 1.0
        if not torch.allclose(found, wanted, atol=tolerance * scale, rtol=tolerance, equal_nan=True):
            return f"{name} differs by {(found - wanted).abs().max().item():.1e} (largest {scale:.1e})"
    return ""
