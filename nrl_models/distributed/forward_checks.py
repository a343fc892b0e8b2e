"""Checks in each forward of a sharded model: other parameters, and batches and random numbers that must be equal.

These faults are silent without a check: each rank computes with its own values, and the loss looks normal.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nrl_models.common.modules import class_name
from nrl_models.common.upstream import CACHE_NAMES, cache_in, cache_requires_grad
from nrl_models.distributed.batch_checks import RandomDraws, require_same_batch
from nrl_models.distributed.replaced_parameters import require_no_replaced_parameters
from nrl_models.errors import Problem, ProblemKind, ShardingError


class ChecksForward(nn.Module):
    """Mixin for a sharded model that checks parameters, batches and random numbers of a forward.

    The models inside that lead to the decoder also have it, because trainers with fused heads (TRL, Liger, verl) call
    them directly. Forwards inside a checked forward are not checked again.

    Attributes:
        checked_by: Sharding state of the model, or of the model around it (a `Sharding`; transformers evaluates
            annotations of model classes here).
    """

    checked_by: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check, then run hooks and `forward`. Checks run before FSDP's hooks gather parameters."""
        if self.checked_by.is_checking:
            return super().__call__(*args, **kwargs)
        return _checked(self, super().__call__, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Check if `forward` is called directly, as PEFT does."""
        if self.checked_by.is_checking:
            return super().forward(*args, **kwargs)
        return _checked(self, super().forward, args, kwargs)

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> Any:
        """Check random states once per `generate` that samples. Its forwards continue a cache, which has no check."""
        generation_config, others = super()._prepare_generation_config(*args, **kwargs)  # type: ignore[misc]
        if generation_config.do_sample:
            require_same_batch(self.checked_by.mesh, {}).require_same_states("sampling")
        return generation_config, others


@contextmanager
def checked_forward(model: ChecksForward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Run checks around a forward of a sharded model. Every rank has to enter the context.

    Nothing is checked if a forward without gradients continues a key-value cache, because decoding steps are short.

    Raises:
        ShardingError: If parameters were replaced or trainable ones added after sharding, ranks that must process the
            same batch got different ones, or they drew different random numbers for activations that must be equal.
    """
    sharding = model.checked_by
    draws: RandomDraws | None = None
    is_checked = torch.is_grad_enabled() or not _continues_cache(kwargs)
    if is_checked:
        sharding.slots.require_same_parameters(model)
    if torch.is_grad_enabled():
        sharding.slots.require_no_later_parameters(model)
        _require_no_trained_inputs(model, sharding.mesh, kwargs)
    if sharding.stages is None and is_checked:
        inputs = {f"argument {number}": value for number, value in enumerate(args)} | dict(kwargs)
        draws = require_same_batch(sharding.mesh, inputs)
    sharding.is_checking = True
    try:
        with nullcontext() if draws is None else draws.observed():
            yield
    finally:
        sharding.is_checking = False
    if draws is not None:
        draws.require_none_if_states_differ()


def _checked(model: ChecksForward, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run `call` with checks. They break the graph of a compiled model, because a graph cannot compare ranks."""
    if torch.compiler.is_exporting():
        return call(*args, **kwargs)
    run = _run_outside_graph if torch.compiler.is_compiling() else _run
    return run(model, call, args, kwargs)


def _run(model: ChecksForward, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with checked_forward(model, args, kwargs):
        return call(*args, **kwargs)


_run_outside_graph = torch.compiler.disable(
    _run,
    recursive=False,
    reason="a sharded model compares batches between ranks before its forward. Leave out fullgraph=True",
)


def _continues_cache(kwargs: Mapping[str, Any]) -> bool:
    """Return True if a forward gets a cache with tokens. Does not wait for the GPU, as the number of tokens might."""
    cache = cache_in(kwargs)
    return cache is not None and bool(getattr(cache, "is_initialized", True))


# Parameters that appear or are replaced after sharding


class Slots:
    """Locations of a model's parameters as module and attribute, independent of wrappers added later.

    Args:
        model: The model when it is sharded.
        mesh: The mesh that it is sharded over.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._model, self._mesh = weakref.ref(model), mesh
        self._is_divided: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary(
            {
                module: {
                    attribute: isinstance(parameter, DTensor)
                    for attribute, parameter in module._parameters.items()
                    if parameter is not None
                }
                for module in model.modules()
            }
        )

    def _model_of(self, module: nn.Module) -> nn.Module | None:
        """Return the model that `module` is in. None for a copy, such as one without wrappers: it has other modules."""
        return self._model() or module if module in self._is_divided else None

    @torch.compiler.disable
    def require_same_parameters(self, module: nn.Module) -> None:
        """Check that no parameter was replaced, see `require_no_replaced_parameters`. Copies are not checked.

        Args:
            module: A sharded model, or a model inside it.
        """
        if (model := self._model_of(module)) is not None:
            require_no_replaced_parameters(model, self._is_divided)

    @torch.compiler.disable
    def require_no_later_parameters(self, module: nn.Module) -> None:
        """Check that every trainable parameter was in the model when it was sharded. Copies are not checked.

        `fsdp` only reduces gradients of parameters that it divided. DTensors reduce their gradients over other
        dimensions, for example in a copy of a head.

        Args:
            module: A sharded model, or a model inside it.

        Raises:
            ShardingError: If some were added later. Lists all their names.
        """
        if (model := self._model_of(module)) is None:
            return
        over_fsdp = "fsdp" in (self._mesh.mesh_dim_names or ())
        names = [
            f"{prefix}.{attribute}" if prefix else attribute
            for prefix, inside in model.named_modules()
            for attribute, parameter in inside._parameters.items()
            if parameter is not None and parameter.requires_grad and attribute not in self._is_divided.get(inside, ())
            if over_fsdp or not isinstance(parameter, DTensor)
        ]
        if names:
            detail = "was added after sharding: each rank would train its own values"
            raise ShardingError(
                f"{class_name(model)} has trainable parameters that are not sharded",
                [Problem(ProblemKind.RANK, name, detail) for name in names],
                [
                    "load the model without a mesh, add adapters or heads, and then call "
                    "nrl_models.distributed.parallelize(model, mesh); with LoRA over fsdp alone"
                ],
            )


@torch.compiler.disable
def _require_no_trained_inputs(model: nn.Module, mesh: DeviceMesh, kwargs: Mapping[str, Any]) -> None:
    """Check that a frozen model gets no inputs that PEFT trains: the cache of a prefix, or embeddings of a prompt.

    Raises:
        ShardingError: If it does.
    """
    if mesh.size() == 1:
        return
    embeddings: torch.Tensor | None = kwargs.get("inputs_embeds")
    trained = [name for name in CACHE_NAMES if cache_requires_grad(kwargs.get(name))]
    if embeddings is not None and embeddings.requires_grad and not embeddings.is_leaf:
        trained.append("inputs_embeds")
    if not trained or any(each.requires_grad for each in model.parameters()):
        return
    detail = "has gradients of parameters outside the sharded model: each rank would train its own values"
    advice = "train LoRA instead of a prefix or prompt: add the adapter before sharding, and use fsdp alone"
    problems = [Problem(ProblemKind.RANK, name, detail) for name in trained]
    raise ShardingError(f"{class_name(model)} is sharded, but its trained inputs are not", problems, [advice])
