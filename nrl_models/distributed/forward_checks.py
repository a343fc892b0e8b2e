"""Checks in each forward of a sharded model: later parameters, and batches and random numbers that must be equal.

These faults are silent without a check: each rank computes with its own values, and the loss looks normal.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nrl_models.common.modules import class_name
from nrl_models.common.upstream import CACHE_NAMES, cache_in, cache_requires_grad
from nrl_models.distributed.mesh import gather_over, reporting_dead_ranks, size_of
from nrl_models.distributed.tensor.regions import observed_by
from nrl_models.errors import Problem, ProblemKind, ShardingError

SAME_BATCH = ("ep", "tp")
"""Dimensions of a mesh whose ranks process the same batch."""


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

    Batches are not compared if a forward without gradients continues a key-value cache, because decoding steps are
    short.

    Raises:
        ShardingError: If trainable parameters were added after sharding, ranks that must process the same batch got
            different ones, or they drew different random numbers for activations that must be equal.
    """
    sharding = model.checked_by
    draws: RandomDraws | None = None
    if torch.is_grad_enabled():
        require_no_later_parameters(model, sharding.mesh, sharding.slots)
        _require_no_trained_prefix(model, sharding.mesh, kwargs)
    if sharding.stages is None and (torch.is_grad_enabled() or not _continues_cache(kwargs)):
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


# Parameters that appear after sharding


class Slots:
    """Locations of a model's parameters as `(module, attribute)`, independent of wrappers added later.

    Args:
        model: The model when it is sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._modules = {id(module): weakref.ref(module) for module in model.modules()}
        self._attributes = {id(module): frozenset(module._parameters) for module in model.modules()}

    def model_of(self, module: nn.Module) -> nn.Module | None:
        """Return the model that `module` is in. None for a copy, such as one without wrappers: it has other modules."""
        known = self._modules.get(id(module))
        return self._model() or module if known is not None and known() is module else None

    def has(self, module: nn.Module, attribute: str) -> bool:
        """Return True if the model had this parameter when it was sharded."""
        known = self._modules.get(id(module))
        return known is not None and known() is module and attribute in self._attributes[id(module)]


def later_parameters(model: nn.Module, mesh: DeviceMesh, slots: Slots) -> Iterator[str]:
    """Yield names of trainable parameters that no rank divides, reduces or keeps equal.

    `fsdp` only reduces gradients of parameters that it divided. DTensors reduce their gradients over other dimensions,
    for example in a copy of a head.

    Args:
        model: A sharded model.
        mesh: The mesh that it is sharded over.
        slots: Parameters of the model when it was sharded.
    """
    over_fsdp = "fsdp" in (mesh.mesh_dim_names or ())
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or slots.has(module, attribute):
                continue
            if over_fsdp or not isinstance(parameter, DTensor):
                yield f"{prefix}.{attribute}" if prefix else attribute


@torch.compiler.disable
def require_no_later_parameters(module: nn.Module, mesh: DeviceMesh, slots: Slots) -> None:
    """Check that every trainable parameter was in the model when it was sharded. Copies of the model are not checked.

    Args:
        module: A sharded model, or a model inside it.
        mesh: The mesh that it is sharded over.
        slots: Parameters of the model when it was sharded.

    Raises:
        ShardingError: If some were added later. Lists all their names.
    """
    model = slots.model_of(module)
    if model is None:
        return
    if names := list(later_parameters(model, mesh, slots)):
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
def _require_no_trained_prefix(model: nn.Module, mesh: DeviceMesh, kwargs: Mapping[str, Any]) -> None:
    """Check that a frozen model does not get a key-value cache with gradients, as from PEFT's prefix tuning.

    Raises:
        ShardingError: If it does.
    """
    cache = cache_in(kwargs) if mesh.size() > 1 else None
    if cache is None or not cache_requires_grad(cache) or any(each.requires_grad for each in model.parameters()):
        return
    detail = "has gradients of parameters outside the sharded model: each rank would train its own values"
    advice = "train LoRA instead of a prefix: add the adapter before sharding, and use fsdp alone"
    problem = Problem(ProblemKind.RANK, next(name for name in CACHE_NAMES if name in kwargs), detail)
    raise ShardingError(f"{class_name(model)} is sharded, but the trained prefix is not", [problem], [advice])


# Batches and random numbers


@torch.compiler.disable
def require_same_batch(mesh: DeviceMesh, inputs: Mapping[str, Any]) -> RandomDraws:
    """Check that the ranks of each `ep` and each `tp` group have the same tensors. Every rank has to call this.

    Costs a hash of the inputs and of the random state, and an exchange of two numbers in each group.

    Returns:
        A check of the random numbers that are drawn from now on.

    Raises:
        ShardingError: If they differ, on every rank of the group. Lists the inputs that differ.
    """
    names = [name for name in SAME_BATCH if size_of(mesh, name) > 1]
    state = _random_state(mesh.device_type) if names else 0
    return RandomDraws(mesh, state, [name for name in names if _states_differ_in(mesh[name], name, inputs, state)])


class RandomDraws:
    """Check of the random numbers that ranks of one batch draw. Observes sharded regions.

    Ranks may draw different numbers for their own shares of activations, such as dropout of their heads' attention.

    Args:
        mesh: Mesh of the model.
        state: Digest of the random state at the start.
        differing: Dimensions of the mesh whose ranks had different states at the start.

    Attributes:
        drew_for_all: Whether numbers were drawn for activations that must be equal on all ranks.
    """

    def __init__(self, mesh: DeviceMesh, state: int, differing: Sequence[str]) -> None:
        self.mesh, self.state, self.differing = mesh, state, differing
        self.drew_for_all = False
        self._in_region = False

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Observe the draws of forwards in this context. Costs nothing if the states were equal."""
        with observed_by(self) if self.differing else nullcontext():
            yield

    def entered(self, dimension: str) -> None:
        """Assign draws up to here to all ranks."""
        if list(self.differing) == [dimension]:
            self._note_draws()
            self._in_region = True

    def left(self, dimension: str) -> None:
        """Assign draws since `entered` to the region."""
        if list(self.differing) == [dimension] and self._in_region:
            self.state = _random_state(self.mesh.device_type)
            self._in_region = False

    def _note_draws(self) -> None:
        self.drew_for_all |= _random_state(self.mesh.device_type) != self.state

    def require_same_states(self, purpose: str) -> None:
        """Check that the states were equal at the start. Does not communicate.

        Raises:
            ShardingError: If they were not, on every rank of the group.
        """
        if self.differing:
            detail = "differs between the ranks of"
            problems = [Problem(ProblemKind.RANK, "the random state", f"{detail} {name}") for name in self.differing]
            advice = "seed ranks that process the same batch alike: torch.manual_seed(seed + index of the rank in fsdp)"
            raise ShardingError(f"{purpose} needs the same random numbers on ranks of one batch", problems, [advice])

    @torch.compiler.disable
    def require_none_if_states_differ(self) -> None:
        """Check that nothing was drawn for all ranks since the start if states differed. Does not communicate.

        Raises:
            ShardingError: If dropout or a router's noise drew numbers, on every rank of the group.
        """
        if self.differing:
            self._note_draws()
            if self.drew_for_all:
                self.require_same_states("dropout (or noise of a router)")


def _random_state(device_type: str) -> int:
    """Hash the random state of the device's generator, from which modules draw. Does not wait for the GPU."""
    state = torch.get_rng_state() if device_type == "cpu" else torch.get_device_module(device_type).get_rng_state()
    return zlib.crc32(state.numpy().tobytes())


def _states_differ_in(group: DeviceMesh, name: str, inputs: Mapping[str, Any], state: int) -> bool:
    """Check that ranks of a group have the same inputs. Returns True if they have different random states."""
    tensors = {key: value for key, value in inputs.items() if type(value) is torch.Tensor and not value.is_meta}
    device = next((value.device for value in tensors.values()), torch.device("cpu"))
    if device.type != group.device_type:
        device = torch.device(group.device_type)
    shapes = zlib.crc32(repr([(key, value.shape, value.dtype) for key, value in tensors.items()]).encode())
    digests = [torch.tensor(shapes, device=device), *(exact_digest(value).to(device) for value in tensors.values())]
    # Same size on all ranks, even if they have different numbers of tensors.
    own = torch.stack([exact_digest(torch.stack(digests)), torch.tensor(state, device=device)])
    everyone = [torch.empty_like(own) for _ in range(group.size())]
    with reporting_dead_ranks(f"compare the batches of {name}"):
        dist.all_gather(everyone, own, group=group.get_group())
    batches, states = torch.stack(everyone).T.tolist()
    if len(set(batches)) == 1:
        return len(set(states)) > 1
    facts = {key: (tuple(value.shape), str(value.dtype), int(exact_digest(value))) for key, value in tensors.items()}
    (first, *others) = gather_over(group, facts)
    differing = [
        key
        for key in dict.fromkeys([*first, *(key for other in others for key in other)])
        if any(key not in other or key not in first or other[key] != first[key] for other in others)
    ]
    problems = [Problem(ProblemKind.RANK, key, f"differs between the ranks of {name}") for key in differing]
    advice = "pass the same batch to ranks that differ in ep or tp: split the data over fsdp only"
    raise ShardingError(f"the ranks of {name} got different batches", problems, [advice])


_CHUNK = 2**24
"""Elements that `exact_digest` hashes at once. Bounds its memory to 256 MB."""


def exact_digest(value: torch.Tensor) -> torch.Tensor:
    """Hash the bits of a tensor and their order. Does not wait for the GPU.

    Equal tensors have equal digests, also with NaN and infinite values.

    Returns:
        Digest of shape `()`, int64.
    """
    value = value.detach().flatten().contiguous()
    bits = value.view({1: torch.uint8, 2: torch.int16}.get(value.element_size(), torch.int32))
    digest = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, len(bits), _CHUNK):
        part = bits[start : start + _CHUNK]
        hashes = torch.arange(start + 1, start + 1 + len(part), device=value.device)
        hashes.mul_(0x1E3779B97F4A7C15).add_(part)
        hashes.bitwise_xor_(hashes >> 32)
        digest += hashes.mul_(hashes).sum()  # overflows wrap around
    return digest
