"""The experts chosen for each token: recorded in one forward, replayed in another.

Two models of equal weights may still choose different experts where two scores differ by a rounding error, and then
everything after it differs. Replaying takes the choice from a record and leaves all else to the model: weights, their
normalisation and their gradients are its own. Trainers replay what the engine chose (rollout routing replay,
https://arxiv.org/abs/2510.11370); parity checks replay what the reference chose.

No router is known by name: a choice is a `topk`, in whichever module it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nrl_models.common.forward.random_states import random_states_kept
from nrl_models.common.recording import forward_replaced, modules_running

RoutingRecord = dict[str, list[torch.Tensor]]
"""For each module that chose, by name, the indices of each `topk` of its last call, in order."""

_TOPK = (torch.topk, torch.Tensor.topk)


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """While open, record what is chosen in `model`'s forwards in this thread; a module's last call counts.

    While a record is replayed, this records what the model would have chosen itself.
    """
    record: RoutingRecord = {}
    with modules_running(model, lambda name, *_: record.pop(name, None)) as running, _Recorder(record, running):
        yield record


@contextmanager
def own_routing() -> Iterator[None]:
    """While open, models choose for themselves in this thread, also where a record is replayed: for tests of them."""
    before = getattr(_aside, "open", False)
    _aside.open = True
    try:
        yield
    finally:
        _aside.open = before


_aside = threading.local()


def can_replay(model: nn.Module) -> bool:
    """Whether replaying a record changes what `model` computes: its family's limits may say that it does not."""
    return "router replay" not in getattr(model, "limits", {})


@contextmanager
def replay_routing(model: nn.Module, record: Mapping[str, list[torch.Tensor]]) -> Iterator[None]:
    """While open, `model`'s modules choose what `record` says, in any thread and in recomputation.

    Args:
        model: a model with modules of the recorded names, called on as many tokens as were recorded.
        record: what `record_routing` gave for a model of this architecture, or `engine_routing` for an engine's
            answers. Where an index is negative, the model chooses itself.

    Raises:
        KeyError: a recorded module that `model` does not have.
        ValueError: `model` says that replaying would change nothing (`limits`); in a forward, a choice of another shape
            than the recorded one.
    """
    if not can_replay(model):
        reason = cast(Any, model).limits["router replay"]
        raise ValueError(f"the routing of {type(model).__name__} cannot be replayed: {reason}")
    modules = dict(model.named_modules())
    if unknown := sorted(record.keys() - modules.keys()):
        raise KeyError(f"the record names modules the model lacks: {', '.join(unknown)}")
    with ExitStack() as stack:
        for name, choices in record.items():
            stack.enter_context(_running_under(modules[name], partial(_Replayer, name, choices)))
        yield


def engine_routing(
    model: nn.Module, routed: Sequence[Any], length: int | None = None, *, left: bool = False
) -> RoutingRecord:
    """The record, for `replay_routing`, of what an engine chose for the sequences of a batch.

    An engine reports no choice for a sequence's last token, which it sampled and never read, nor for padding: there the
    model chooses itself, as it does in what else its routers choose (groups of experts, before experts in them).

    Args:
        model: the model that the record is for, on the sequences in one batch, padded.
        routed: for each sequence `(tokens, layers, experts per token)`, arrays or tensors of whole numbers: vLLM's
            `CompletionOutput.routed_experts`. Its layers are counted with those that have no experts.
        length: tokens of a row of the batch; by default those of the longest sequence, with its last token.
        left: whether rows are padded at the left.

    Raises:
        ValueError: sequences of other sizes than the model chooses, longer than `length`, or with experts that it
            lacks; or the model's routers cannot be told from what else chooses in a layer.
    """
    choices = [torch.as_tensor(each.astype("int64") if hasattr(each, "astype") else each).long() for each in routed]
    if not choices or {choice.ndim for choice in choices} != {3} or len({choice.shape[1:] for choice in choices}) > 1:
        raise ValueError(
            f"routed experts of shapes {[tuple(choice.shape) for choice in choices]}: expected (tokens, layers, "
            "experts per token) for each sequence, with the same layers and experts"
        )
    longest = max(map(len, choices))
    length = longest + 1 if length is None else length
    if longest > length:
        raise ValueError(f"the engine chose for {longest} tokens of a sequence, and a row of the batch has {length}")
    layers, count = choices[0].shape[1:]
    table = torch.full((len(choices), length, layers, count), -1)
    for row, choice in zip(table, choices, strict=True):
        # The last token is there without a choice.
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
        own = [torch.full(_on_batch(shape, len(choices), length), -1) for shape in before]
        record[name] = [*own, chosen.reshape(_on_batch(shapes[-1], len(choices), length))]
    return record


_PROBE = 3
"""Tokens of the forward that shows what a model's routers choose."""


@torch.no_grad()
def _routers(model: nn.Module, count: int) -> dict[int, tuple[str, list[tuple[int, ...]], int]]:
    """By number of its layer each module that chooses `count` experts last: name, shapes of its choices, experts."""
    record: RoutingRecord = {}
    tokens = torch.arange(_PROBE, device=next(model.parameters()).device)[None]
    with (
        random_states_kept(),
        own_routing(),
        modules_running(model, lambda name, *_: record.pop(name, None)) as running,
        _Recorder(record, running) as recorder,
    ):
        model(input_ids=tokens, use_cache=False)
    found: dict[int, tuple[str, list[tuple[int, ...]], int]] = {}
    for name, choices in record.items():
        shapes = [tuple(choice.shape) for choice in choices]
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        per_token = shapes[-1] in ((_PROBE, count), (1, _PROBE, count))
        if number is None or not per_token:
            continue
        if number in found:
            raise ValueError(f"{found[number][0]} and {name} both choose {count} for each token: which are experts?")
        found[number] = name, shapes, recorder.among[name]
    if not found:
        raise ValueError(f"no module of {type(model).__name__} chooses {count} experts for each token")
    return found


def _on_batch(shape: tuple[int, ...], rows: int, length: int) -> tuple[int, ...]:
    """The shape, on a batch, of a choice that has `shape` for `_PROBE` tokens of one sequence."""
    return (rows, length, *shape[2:]) if shape[:2] == (1, _PROBE) else (rows * length, *shape[1:])


def flip_rate(first: Mapping[str, list[torch.Tensor]], second: Mapping[str, list[torch.Tensor]]) -> float:
    """The share of tokens, over all modules, for which two records do not hold the same set of choices."""
    flipped, tokens = 0, 0
    for name, choices in first.items():
        ours, theirs = choices[-1], second[name][-1].to(choices[-1].device)
        different = (ours.sort(-1).values != theirs.sort(-1).values).any(-1)
        flipped += int(different.sum())
        tokens += different.numel()
    return flipped / tokens if tokens else 0.0


def _running_under(module: nn.Module, mode: Callable[[], TorchFunctionMode]) -> AbstractContextManager[None]:
    """While open, `module`'s forward runs under a new `mode()` each time: in whatever thread it is called."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if getattr(_aside, "open", False) else mode():
            return forward(*args, **kwargs)

    return forward_replaced(module, run)


class _Recorder(TorchFunctionMode):
    def __init__(self, record: RoutingRecord, running: list[str]) -> None:
        super().__init__()
        self.record, self.running = record, running
        self.among: dict[str, int] = {}
        """Of how many each module's last choice was."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOPK and self.running:
            self.record.setdefault(self.running[-1], []).append(result[1].detach().clone())
            values, dim = _chosen_from(args, kwargs or {})
            self.among[self.running[-1]] = values.shape[dim]
        return result


class _Replayer(TorchFunctionMode):
    """Made for a single call of a module."""

    def __init__(self, name: str, choices: list[torch.Tensor]) -> None:
        super().__init__()
        self.name, self.choices, self.made = name, choices, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in _TOPK:
            return result
        shape = tuple(result[1].shape)
        recorded = [tuple(choice.shape) for choice in self.choices]
        if self.made == len(recorded) or shape != recorded[self.made]:
            raise ValueError(
                f"{self.name} makes choice {self.made} of shape {shape}, but recorded are {recorded}: "
                "replay the record of a forward on the same tokens"
            )
        chosen = self.choices[self.made].to(result[1].device)
        chosen = torch.where(chosen < 0, result[1], chosen)
        self.made += 1
        values, dim = _chosen_from(args, kwargs)
        return torch.return_types.topk((values.gather(dim, chosen), chosen))


def _chosen_from(args: Any, kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
    """What a `topk` was called on: the values, and the dimension."""
    return args[0] if args else kwargs["input"], args[2] if len(args) > 2 else kwargs.get("dim", -1)
