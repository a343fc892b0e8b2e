"""Record the experts chosen for each token in one forward, and replay them in another.

Two models with equal weights may choose different experts if two scores differ only by rounding, and all later values
then differ. Replaying uses recorded choices. The model still computes routing weights, their normalization and
gradients. Trainers replay the engine's choices (rollout routing replay, https://arxiv.org/abs/2510.11370). Parity
checks replay the reference's.

Routers are not identified by name: each `topk` in any module counts as a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nrl_models.common.forward.random_states import random_states_kept
from nrl_models.common.forward.routing_records import (
    RoutingRecord as RoutingRecord,
)
from nrl_models.common.forward.routing_records import (
    engine_choices,
    require_existing,
    require_records,
)
from nrl_models.common.forward.routing_records import (
    flip_rate as flip_rate,
)
from nrl_models.common.forward.token_places import TokenPlaces
from nrl_models.common.modules import device_of
from nrl_models.common.recording import forward_replaced, modules_running
from nrl_models.common.upstream_torch import current_graph_task_id
from nrl_models.errors import UnknownArgumentError

_TOPK = (torch.topk, torch.Tensor.topk)


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """Record the choices of `model`'s forwards in this thread. Keeps the last call of each module.

    During a replay, this records the model's own choices, not the replayed ones. `rollout_logprobs` records the choices
    of its sequences padded on the right, -1 for padding.
    """
    with _recorder(model) as recorder:
        yield recorder.record


@dataclass(slots=True, eq=False)
class _Observer:
    """An open record or replay.

    Attributes:
        modules: Modules of its model.
        places: Places of the tokens that run at present in the batch of the record; None if the batch itself runs.
        suspended: Whether it ignores calls at present.
        unknown: Why `places` are not known at present; empty if they are.
    """

    modules: frozenset[nn.Module]
    places: TokenPlaces | None = None
    suspended: bool = False
    unknown: str = ""

    def known_places(self) -> TokenPlaces | None:
        """Return `places`.

        Raises:
            UnknownArgumentError: If they are not known.
        """
        if self.unknown:
            raise UnknownArgumentError(self.unknown)
        return self.places


_observing: list[_Observer] = []
"""Open records and replays, of any thread."""


@contextmanager
def _observed(model: nn.Module) -> Iterator[_Observer]:
    observer = _Observer(frozenset(model.modules()))
    _observing.append(observer)
    try:
        yield observer
    finally:
        _observing.remove(observer)


def routing_is_observed() -> bool:
    """Return True while choices are recorded or replayed, in any thread."""
    return bool(_observing)


def own_routing(*models: nn.Module) -> AbstractContextManager[None]:
    """Let models make their own choices, without a record, even during a record or replay. For tests."""
    return _observers_with(models, "suspended", True)


def tokens_placed(places: TokenPlaces, *models: nn.Module) -> AbstractContextManager[None]:
    """Record and replay choices of models at other places, because they run a part of a batch, or another layout.

    Backward passes with activation checkpointing must run while the context is open.
    """
    return _observers_with(models, "places", places)


def places_unknown(reason: str, *models: nn.Module) -> AbstractContextManager[None]:
    """Raise `UnknownArgumentError` with a reason if choices of models are recorded or replayed."""
    return _observers_with(models, "unknown", reason)


@contextmanager
def _observers_with(models: Sequence[nn.Module], name: str, value: Any) -> Iterator[None]:
    """Set an attribute of all open records and replays of `models`, for all threads, while the context is open."""
    modules = {module for model in models for module in model.modules()} if _observing else set()
    before = [(each, getattr(each, name)) for each in _observing if not each.modules.isdisjoint(modules)]
    for observer, _ in before:
        setattr(observer, name, value)
    try:
        yield
    finally:
        for observer, old in before:
            setattr(observer, name, old)


def can_replay(model: nn.Module) -> bool:
    """Return True if replaying a record changes `model`'s results, according to its family's limits."""
    return "router replay" not in getattr(model, "limits", {})


@contextmanager
def replay_routing(model: nn.Module, record: Mapping[str, list[torch.Tensor]]) -> Iterator[None]:
    """Make `model`'s modules use the recorded choices, in all threads and in recomputation.

    Args:
        model: A model with modules of the recorded names, called on the recorded number of tokens.
        record: Record from `record_routing` for a model of this architecture, or from `engine_routing`. For negative
            indices, the model's choice is used.

    Raises:
        KeyError: If `model` lacks a recorded module.
        UnknownArgumentError: If `record` is not a mapping to lists of integer tensors.
        ValueError: If `model` declares that replaying has no effect (`limits`). In a forward, if a choice has another
            shape than the recorded one, or a recorded expert does not exist.
    """
    require_records(record=record)
    if not can_replay(model):
        reason = cast(Any, model).limits["router replay"]
        raise ValueError(f"the routing of {type(model).__name__} cannot be replayed: {reason}")
    modules = dict(model.named_modules())
    if unknown := sorted(record.keys() - modules.keys()):
        raise KeyError(f"the record names modules the model lacks: {', '.join(unknown)}")
    with ExitStack() as stack:
        observer = stack.enter_context(_observed(model))
        for name, choices in record.items():
            replayer = partial(_Replayer, name, choices, observer, set())
            stack.enter_context(_running_under(modules[name], replayer, observer))
        yield


def engine_routing(
    model: nn.Module, routed: Sequence[Any], length: int | None = None, *, left: bool = False
) -> RoutingRecord:
    """Convert an engine's choices of experts for a batch to a record for `replay_routing`.

    An engine reports no choice for the last token of a sequence, which is sampled but not processed, and for padding.
    There the model chooses. It also makes all other choices of its routers (such as groups of experts).

    Args:
        model: The model that will replay the record, on the padded batch.
        routed: Integer arrays or tensors `(tokens, layers, experts_per_token)`, one per sequence, as in vLLM's
            `CompletionOutput.routed_experts`. `layers` includes layers without experts.
        length: Sequence length of the batch. Default: the longest sequence, including its last token.
        left: Whether rows are padded on the left.

    Raises:
        UnknownArgumentError: If the engine returned no choices (None).
        ValueError: If the sizes differ from the model's choices, a sequence is longer than `length`, or an expert does
            not exist. Also if the model's routers cannot be distinguished from other `topk` calls in a layer.
    """
    choices = engine_choices(routed)
    longest = max(map(len, choices))
    length = longest + 1 if length is None else length
    if longest > length:
        raise ValueError(f"the engine has choices for {longest} tokens of a sequence, but length is {length}")
    layers, count = choices[0].shape[1:]
    table = torch.full((len(choices), length, layers, count), -1)
    for row, choice in zip(table, choices, strict=True):
        # The last token has no choice.
        start = length - 1 - len(choice) if left and len(choice) < length else 0
        row[start : start + len(choice)] = choice
    record: RoutingRecord = {}
    for layer, (name, shapes, experts) in _routers(model, count).items():
        if layer >= layers:
            raise ValueError(f"{name} is in layer {layer}, and the engine has {layers} layers")
        chosen = table[:, :, layer]
        if (highest := int(chosen.max())) >= experts:
            raise ValueError(f"the engine chose expert {highest} in layer {layer}, and {name} has {experts}")
        *before, _ = shapes
        model_choices = [torch.full(_on_batch(shape, len(choices), length), -1) for shape in before]
        record[name] = [*model_choices, chosen.reshape(_on_batch(shapes[-1], len(choices), length))]
    return record


_PROBE = 3
"""Number of tokens of the forward that finds a model's routers."""


@torch.no_grad()
def _routers(model: nn.Module, count: int) -> dict[int, tuple[str, list[tuple[int, ...]], int]]:
    """Find modules whose last choice has `count` experts. By layer: name, shapes of choices, number of experts."""
    tokens = torch.arange(_PROBE, device=device_of(model))[None]
    with random_states_kept(), own_routing(model), _recorder(model) as recorder:
        model(input_ids=tokens, use_cache=False)
    routers: dict[int, tuple[str, list[tuple[int, ...]], int]] = {}
    for name, choices in recorder.record.items():
        shapes = [tuple(choice.shape) for choice in choices]
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        per_token = shapes[-1] in ((_PROBE, count), (1, _PROBE, count))
        if number is None or not per_token:
            continue
        if number in routers:
            raise ValueError(f"{routers[number][0]} and {name} both choose {count} for each token: which are experts?")
        routers[number] = name, shapes, recorder.among[name]
    if not routers:
        raise ValueError(f"no module of {type(model).__name__} chooses {count} experts for each token")
    return routers


def _on_batch(shape: tuple[int, ...], rows: int, length: int) -> tuple[int, ...]:
    """Return the shape, for a batch, of a choice that has `shape` for `_PROBE` tokens of one sequence."""
    return (rows, length, *shape[2:]) if shape[:2] == (1, _PROBE) else (rows * length, *shape[1:])


def _running_under(
    module: nn.Module, mode: Callable[[], TorchFunctionMode], observer: _Observer
) -> AbstractContextManager[None]:
    """Run each call of `module`'s forward, in any thread, under a new `mode()` while the context is open."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if observer.suspended else mode():
            return forward(*args, **kwargs)

    return forward_replaced(module, run)


@contextmanager
def _recorder(model: nn.Module) -> Iterator[_RoutingRecorder]:
    """Record the choices of `model`'s forwards in this thread."""
    with _observed(model) as observer:
        recorder = _RoutingRecorder(observer)
        with modules_running(model, recorder.begin) as recorder.running, recorder:
            yield recorder


class _RoutingRecorder(TorchFunctionMode):
    """Records the last call of each module, and all calls with parts of one batch (`tokens_placed`)."""

    def __init__(self, observer: _Observer) -> None:
        super().__init__()
        self.observer = observer
        self.record: RoutingRecord = {}
        self.running: list[str] = []
        self.among: dict[str, int] = {}
        """Number of candidates of each module's last choice."""
        self.calls: dict[str, tuple[torch.Tensor | None, int]] = {}
        """Lengths of the batch (`TokenPlaces`) of each module's last call, and the number of its choices."""

    def begin(self, name: str, *_: Any) -> None:
        """Begin a call of a module."""
        if self._ignores():
            return
        places = self.observer.places
        if places is None or self.calls.get(name, (None,))[0] is not places.lengths:
            self.record.pop(name, None)
        self.calls[name] = None if places is None else places.lengths, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOPK and self.running and not self._ignores():
            name, places = self.running[-1], self.observer.known_places()
            values, dim = _chosen_from(args, kwargs or {})
            self.among[name] = values.shape[dim]
            choices, (batch, made) = self.record.setdefault(name, []), self.calls[name]
            choice = result[1].detach()
            earlier = choices[made] if made < len(choices) else None
            recorded = choice.clone() if places is None else places.placed(choice, values.shape[dim], earlier)
            choices[made : made + 1] = [recorded]
            self.calls[name] = batch, made + 1
        return result

    def _ignores(self) -> bool:
        """Return True in calls that are not recorded. Activation checkpointing repeats calls in backward passes."""
        return self.observer.suspended or current_graph_task_id() != -1


class _Replayer(TorchFunctionMode):
    """Replays the choices of a single call of a module.

    `checked` has the numbers of choices whose indices were checked in this or an earlier call.
    """

    def __init__(self, name: str, choices: list[torch.Tensor], observer: _Observer, checked: set[int]) -> None:
        super().__init__()
        self.name, self.choices, self.observer, self.checked, self.made = name, choices, observer, checked, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in _TOPK:
            return result
        values, dim = _chosen_from(args, kwargs)
        chosen = self._recorded(tuple(result[1].shape), values.shape[dim]).to(result[1].device)
        chosen = torch.where(chosen < 0, result[1], chosen)
        self.made += 1
        return torch.return_types.topk((values.gather(dim, chosen), chosen))

    def _recorded(self, shape: tuple[int, ...], candidates: int) -> torch.Tensor:
        """Return the recorded choices for a choice of this shape from `candidates` values."""
        places = self.observer.known_places()
        chosen = self.choices[self.made] if self.made < len(self.choices) else None
        if chosen is not None and places is not None:
            chosen = places.taken(chosen, shape, candidates)
        if chosen is None or chosen.shape != shape:
            raise ValueError(
                f"{self.name} makes choice {self.made} of shape {shape}, but recorded are "
                f"{[tuple(choice.shape) for choice in self.choices]}: replay the record of a forward on the same tokens"
                + ("" if places is None else " (the sequences padded on the right, or in one row), only of experts")
            )
        if self.made not in self.checked:  # once per record, because it synchronizes a GPU
            require_existing(self.name, self.choices[self.made], candidates)
            self.checked.add(self.made)
        return chosen


def _chosen_from(args: Any, kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
    """Return the input and the dimension of a `topk` call."""
    return args[0] if args else kwargs["input"], args[2] if len(args) > 2 else kwargs.get("dim", -1)
