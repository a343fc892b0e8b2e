"""Find the values that pass between a model's layers, by a forward on meta that tracks the inputs of each tensor.

A pipeline only passes hidden states between layers. No declaration says whether later layers also read other values, so
they are traced: each storage has labels, and every operation propagates them to its results.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, masking_utils

from nrl_models.common.process_state import replaced_here
from nrl_models.common.upstream_torch import TorchDispatchMode, local_scalar_dense, tree_leaves
from nrl_models.errors import Problem, ProblemKind, listed, one_line

BATCH, LENGTH = 3, 11
"""Batch size and sequence length of the traced forward. No other dimension is likely to have these sizes."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """Values that a model's forward passes between layers.

    Attributes:
        stack: Name of the list of layers.
        count: Number of layers.
        features: Sizes of the hidden states after batch and sequence length.
        dtype: Dtype of the hidden states.
        needs: For each layer, and for the modules after the last, names of the parameters outside layers whose values
            it reads other than through the hidden states. For the first layer, also those in its hidden states.
        reads: For each layer, and for the modules after the last, earlier layers of which it reads more than the
            hidden states.
        returns: Index of the hidden states in a layer's results, and the number of results. None if a layer returns
            only the hidden states.
        outside: Number of elements of each parameter outside layers, by all of its names.
        inside: Number of elements of each layer's parameters.
    """

    stack: str
    count: int
    features: tuple[int, ...]
    dtype: torch.dtype
    needs: tuple[frozenset[str], ...]
    reads: tuple[frozenset[int], ...]
    returns: tuple[int, int] | None
    outside: Mapping[tuple[str, ...], int]
    inside: tuple[int, ...]


class NotALineError(ValueError):
    """Error for a model whose layers are not a sequence connected only by hidden states.

    Attributes:
        problems: The reasons.
    """

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("; ".join(map(str, problems)))


def find_stack(model: PreTrainedModel) -> str:
    """Return the name of a model's list of layers: the largest list with the configured number of layers.

    Raises:
        NotALineError: If there is none.
    """
    depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    sizes = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    }
    if not sizes:
        detail = f"has no list of its {depth} layers"
        raise NotALineError(Problem(ProblemKind.PIPELINE, type(model).__name__, detail))
    return max(sizes, key=lambda name: sizes[name])


def crossing_of(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Crossing:
    """Trace the values that pass between a model's layers. The model may be on meta, and is not modified.

    Args:
        model: The model.
        dtype: Compute dtype; None uses the dtype of its parameters.

    Raises:
        NotALineError: If there is no stack of layers, layers do not run one after the other, a forward on text does not
            use some parameters, hidden states do not start with batch and sequence length, or the forward depends on
            values, which tensors on meta do not have.
    """
    stack = find_stack(model)
    traced = copy_on_meta(model, dtype)
    trace = _Trace(traced, stack)
    try:
        trace.run()
    except NotALineError:
        raise
    except Exception as error:  # any error of code that reads values
        detail = (
            f"the values that pass between its layers cannot be traced without weights (on meta): {one_line(error)}"
        )
        raise NotALineError(Problem(ProblemKind.PIPELINE, type(model).__name__, detail)) from error
    return trace.crossing()


def copy_on_meta(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Copy a model onto the meta device, optionally with another dtype of its parameters."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        is_parameter = isinstance(tensor, nn.Parameter)
        empty = torch.empty_like(tensor, device="meta", dtype=dtype if is_parameter else None)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)


class _Labels(TorchDispatchMode):
    """Track the inputs of each storage. Code that reads a value gets 1, because tensors on meta have no values."""

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[int, frozenset[Any]] = {}
        self._kept: list[torch.Tensor] = []  # keeps storages alive, so that addresses are unique

    def of(self, tensor: torch.Tensor) -> frozenset[Any]:
        return self._of.get(tensor.untyped_storage()._cdata, frozenset())

    def put(self, tensor: torch.Tensor, labels: frozenset[Any]) -> None:
        self._kept.append(tensor)
        self._of[tensor.untyped_storage()._cdata] = labels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is local_scalar_dense:
            return 1
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _WITHOUT_VALUES:
            return result
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        labels = frozenset().union(*map(self.of, inputs))
        changed = inputs[:1] if func._schema.is_mutable else []
        for tensor in (*tree_leaves(result), *changed):
            if labels and isinstance(tensor, torch.Tensor):
                self.put(tensor, labels | self.of(tensor))
        return result


_WITHOUT_VALUES = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
}
"""Operations whose results only depend on the shape and dtype of their inputs."""


@dataclass(frozen=True, slots=True)
class _Inside:
    """Label of values computed in a layer."""

    layer: int


@dataclass(frozen=True, slots=True)
class _After:
    """Label of the hidden states that a layer returns."""

    layer: int


class _Trace:
    """One traced forward.

    Args:
        model: A model on meta; modified.
        stack: Name of its list of layers.
    """

    def __init__(self, model: PreTrainedModel, stack: str) -> None:
        self.model, self.stack = model, stack
        self.layers: list[nn.Module] = list(model.get_submodule(stack))  # type: ignore[call-overload]
        self.labels = _Labels()
        self.calls: list[int] = []
        self.needs: dict[int, set[str]] = defaultdict(set)
        self.reads: dict[int, set[int]] = defaultdict(set)
        self.hidden: torch.Tensor | None = None
        self.returns: tuple[int, int] | None = None
        self.parameters: dict[int, nn.Parameter] = {}
        self.outside = self._outside()

    def run(self) -> None:
        """Run the traced forward."""
        with ExitStack() as stack, torch.no_grad():
            _without_routing(self.model)
            # The function reads values, which tensors on meta do not have.
            stack.enter_context(replaced_here(masking_utils, "find_packed_sequence_indices", lambda position_ids: None))
            for index, layer in enumerate(self.layers):
                layer.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True)
                layer.register_forward_hook(partial(self._leave, index))
            stack.enter_context(self.labels)
            tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
            output = self.model(input_ids=tokens, use_cache=False)
            last = self.labels.of(output.logits if hasattr(output, "logits") else output[0])
        self._note(len(self.layers), last, _After(len(self.layers) - 1))

    def crossing(self) -> Crossing:
        """Return the traced values.

        Raises:
            NotALineError: See `crossing_of`.
        """
        count, problems = len(self.layers), []
        if self.calls != list(range(count)):
            order = f"its {count} layers run in an unexpected order: {self.calls[: count + 1]}"
            detail = order if self.calls else f"none of its {count} layers runs in a forward pass on text"
            problems.append(Problem(ProblemKind.PIPELINE, self.stack, detail))
        used = set().union(*self.needs.values())
        if unused := [name for names in self.outside.values() for name in names if name not in used]:
            detail = "are not used in a forward pass on text"
            problems.append(Problem(ProblemKind.PIPELINE, listed(unused), detail))
        shape = () if self.hidden is None else tuple(self.hidden.shape)
        if shape[:2] != (BATCH, LENGTH):
            detail = f"its hidden states do not have the shape (batch, length, ...): {list(shape)}"
            problems.append(Problem(ProblemKind.PIPELINE, self.stack, detail))
        if problems or self.hidden is None:
            raise NotALineError(*problems)
        return Crossing(
            self.stack,
            count,
            shape[2:],
            self.hidden.dtype,
            tuple(frozenset(self.needs[index]) for index in range(count + 1)),
            tuple(frozenset(self.reads[index]) for index in range(count + 1)),
            self.returns,
            {tuple(names): self.parameters[storage].numel() for storage, names in self.outside.items()},
            tuple(sum(parameter.numel() for parameter in layer.parameters()) for layer in self.layers),
        )

    def _outside(self) -> dict[int, list[str]]:
        """Label parameters outside layers, and return their names by storage. Records layers that share parameters."""
        owner: dict[int, int] = {}
        for index, layer in enumerate(self.layers):
            for parameter in layer.parameters():
                storage = parameter.untyped_storage()._cdata
                if owner.setdefault(storage, index) != index:
                    self.reads[index].add(owner[storage])
        names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if not name.startswith(f"{self.stack}."):
                storage = parameter.untyped_storage()._cdata
                names[storage].append(name)
                self.parameters[storage] = parameter
        for storage, parameter in self.parameters.items():
            self.labels.put(parameter, frozenset(names[storage]))
            if storage in owner:
                detail = f"is also a parameter of layer {owner[storage]}"
                raise NotALineError(Problem(ProblemKind.PIPELINE, names[storage][0], detail))
        return names

    def _enter(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.calls.append(index)
        key, hidden = hidden_of(args, kwargs)
        if index == 0:
            self.needs[0] |= {label for label in self.labels.of(hidden) if isinstance(label, str)}
        else:
            if _After(index - 1) not in self.labels.of(hidden):
                detail = f"layer {index} does not take the result of layer {index - 1}"
                raise NotALineError(Problem(ProblemKind.PIPELINE, self.stack, detail))
            self._note(index, self.labels.of(hidden), _After(index - 1))
        self.hidden = hidden
        fresh = torch.empty_like(hidden)
        self.labels.put(fresh, frozenset({_Inside(index)}))
        return replaced(args, kwargs, key, fresh)

    def _leave(self, index: int, module: nn.Module, args: Any, output: Any) -> Any:
        results = list(output) if isinstance(output, tuple | list) else [output]
        position = next(number for number, value in enumerate(results) if isinstance(value, torch.Tensor))
        self.returns = (position, len(results)) if isinstance(output, tuple | list) else None
        labels = self.labels.of(results[position])
        self._note(index, labels, _Inside(index))
        results[position] = torch.empty_like(results[position])
        self.labels.put(results[position], frozenset({_After(index)}))
        return type(output)(results) if isinstance(output, tuple | list) else results[0]

    def _note(self, index: int, labels: frozenset[Any], hidden_label: _Inside | _After) -> None:
        """Record values that a layer reads other than its hidden states."""
        for label in labels - {hidden_label}:
            if isinstance(label, str):
                # Values added between two layers are computed on the stage of the first one.
                before = isinstance(hidden_label, _After) and index < len(self.layers)
                self.needs[index - 1 if before else index].add(label)
            else:
                self.reads[index].add(label.layer)


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, torch.Tensor]:
    """Find the hidden states in a layer's arguments: the first tensor. Returns its position or name, and the tensor."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in arguments:
        if isinstance(value, torch.Tensor):
            return key, value
    raise NotALineError(Problem(ProblemKind.PIPELINE, "a layer", "is called without hidden states"))


def replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str, value: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the hidden states in a layer's arguments."""
    if isinstance(key, str):
        return args, {**kwargs, key: value}
    return (*args[:key], value, *args[key + 1 :]), kwargs


def _without_routing(model: nn.Module) -> None:
    """Replace stacks of experts, which choose by values, by the identity."""
    for module in model.modules():
        if any(parameter is not None and parameter.ndim == 3 for parameter in module._parameters.values()):
            module.forward = lambda hidden, *_, **__: hidden * 1
