"""The experts chosen for each token: recorded in one forward, replayed in another.

Two models of equal weights may still choose different experts where two scores differ by a rounding error, and then
everything after it differs. Replaying takes the choice from a record and leaves all else to the model: weights, their
normalisation and their gradients are its own. Trainers replay what the engine chose (rollout routing replay,
https://arxiv.org/abs/2510.11370); parity checks replay what the reference chose.

No router is known by name: a choice is a `topk`, in whichever module it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

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


def can_replay(model: nn.Module) -> bool:
    """Whether replaying a record changes what `model` computes: its family's limits may say that it does not."""
    return "router replay" not in getattr(model, "limits", {})


@contextmanager
def replay_routing(model: nn.Module, record: Mapping[str, list[torch.Tensor]]) -> Iterator[None]:
    """While open, `model`'s modules choose what `record` says, in any thread and in recomputation.

    Args:
        model: a model with modules of the recorded names, called on as many tokens as were recorded.
        record: what `record_routing` gave for a model of this architecture.

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
        with mode():
            return forward(*args, **kwargs)

    return forward_replaced(module, run)


class _Recorder(TorchFunctionMode):
    def __init__(self, record: RoutingRecord, running: list[str]) -> None:
        super().__init__()
        self.record, self.running = record, running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOPK and self.running:
            self.record.setdefault(self.running[-1], []).append(result[1].detach().clone())
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
        self.made += 1
        values = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        return torch.return_types.topk((values.gather(dim, chosen), chosen))
