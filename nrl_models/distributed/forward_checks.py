"""Checks of a sharded model at each forward that trains: later parameters, and batches that must be equal.

Both faults are silent without a check: each rank trains its own values, and the loss looks normal.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nrl_models.common.modules import class_name
from nrl_models.distributed.mesh import gather_over, reporting_dead_ranks, size_of
from nrl_models.errors import Problem, ProblemKind, ShardingError

SAME_BATCH = ("ep", "tp")
"""Dimensions of a mesh whose ranks process the same batch."""


class ChecksForward(nn.Module):
    """Mixin for a sharded model that checks parameters and batch before a forward with gradients.

    Attributes:
        sharding: Sharding state of the model (a `Sharding`; transformers evaluates annotations of model classes here).
    """

    sharding: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check, then run hooks and `forward`. The check runs before FSDP's hooks gather parameters."""
        if torch.compiler.is_compiling() or self.sharding.is_checking:
            return super().__call__(*args, **kwargs)
        check_forward(self, args, kwargs)
        self.sharding.is_checking = True
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self.sharding.is_checking = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Check if `forward` is called directly, as PEFT does."""
        if not torch.compiler.is_compiling() and not self.sharding.is_checking:
            check_forward(self, args, kwargs)
        return super().forward(*args, **kwargs)


def check_forward(model: ChecksForward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check a forward of a sharded model. Every rank has to call this.

    Raises:
        ShardingError: If trainable parameters were added after sharding, or ranks that must process the same batch got
            different ones.
    """
    if not torch.is_grad_enabled():
        return
    require_no_later_parameters(model)
    if model.sharding.stages is None:
        inputs = {f"argument {number}": value for number, value in enumerate(args)} | dict(kwargs)
        require_same_batch(model.sharding.mesh, inputs)


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

    def is_of(self, model: nn.Module) -> bool:
        """Return True for the model itself. A copy, such as one without wrappers, has other modules."""
        return self._model() is model

    def has(self, module: nn.Module, attribute: str) -> bool:
        """Return True if the model had this parameter when it was sharded."""
        known = self._modules.get(id(module))
        return known is not None and known() is module and attribute in self._attributes[id(module)]


def later_parameters(model: nn.Module, mesh: DeviceMesh, slots: Slots) -> Iterator[str]:
    """Names of the trainable parameters that no rank divides, reduces or keeps equal.

    `fsdp` reduces the gradients of the parameters that it divided. Over other dimensions a DTensor does so itself, for
    example in a copy of a head.

    Args:
        model: A sharded model.
        mesh: The mesh that it is sharded over.
        slots: Its parameters when it was sharded.
    """
    over_fsdp = "fsdp" in (mesh.mesh_dim_names or ())
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or slots.has(module, attribute):
                continue
            if over_fsdp or not isinstance(parameter, DTensor):
                yield f"{prefix}.{attribute}" if prefix else attribute


def require_no_later_parameters(model: nn.Module) -> None:
    """Check that every trainable parameter was in the model when it was sharded. Copies of the model are not checked.

    Raises:
        ShardingError: Some were added later, with all their names.
    """
    sharding = cast(Any, model).sharding
    if not sharding.slots.is_of(model):
        return
    if names := list(later_parameters(model, sharding.mesh, sharding.slots)):
        detail = "was added after sharding: each rank would train its own values"
        raise ShardingError(
            f"{class_name(model)} has trainable parameters that are not sharded",
            [Problem(ProblemKind.RANK, name, detail) for name in names],
            [
                "load the model without a mesh, add adapters or heads, and then call "
                "nrl_models.distributed.parallelize(model, mesh); with LoRA over fsdp alone"
            ],
        )


# Batches


def require_same_batch(mesh: DeviceMesh, inputs: Mapping[str, Any]) -> None:
    """Check that the ranks of each `ep` and each `tp` group have the same tensors. Every rank calls it.

    Costs a hash of the inputs, and an exchange of one number in each group.

    Raises:
        ShardingError: They differ; on every rank of the group, with the inputs that differ.
    """
    for name in SAME_BATCH:
        if size_of(mesh, name) > 1:
            _require_same_batch_in(mesh[name], name, inputs)


def _require_same_batch_in(group: DeviceMesh, name: str, inputs: Mapping[str, Any]) -> None:
    tensors = {key: value for key, value in inputs.items() if type(value) is torch.Tensor and not value.is_meta}
    device = next((value.device for value in tensors.values()), torch.device("cpu"))
    if device.type != group.device_type:
        device = torch.device(group.device_type)
    shapes = zlib.crc32(repr([(key, value.shape, value.dtype) for key, value in tensors.items()]).encode())
    digests = [torch.tensor(shapes, device=device), *(exact_digest(value).to(device) for value in tensors.values())]
    own = exact_digest(torch.stack(digests))  # of one size on all ranks, which may have different numbers of tensors
    everyone = [torch.empty_like(own) for _ in range(group.size())]
    with reporting_dead_ranks(f"compare the batches of {name}"):
        dist.all_gather(everyone, own, group=group.get_group())
    if bool((torch.stack(everyone) == everyone[0]).all()):
        return
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
