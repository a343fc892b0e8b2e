"""Check that the ranks of one batch have the same batch, and draw the same random numbers.

These faults are silent without a check: each rank computes with its own values, and the loss looks normal.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nrl_models.common.upstream import CACHE_NAMES
from nrl_models.distributed.mesh import gather_over, reporting_dead_ranks, size_of
from nrl_models.distributed.tensor.regions import observed_by
from nrl_models.errors import Problem, ProblemKind, ShardingError

SAME_BATCH = ("ep", "tp")
"""Dimensions of a mesh whose ranks process the same batch."""


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
    # In caches, each rank has the keys and values of its heads.
    tensors = dict(_tensors_in({key: value for key, value in inputs.items() if key not in CACHE_NAMES}))
    device = next((value.device for value in tensors.values()), torch.device("cpu"))
    if device.type != group.device_type:
        device = torch.device(group.device_type)
    shapes = zlib.crc32(repr([(key, value.shape, value.dtype) for key, value in tensors.items()]).encode())
    digests = [torch.tensor(shapes, device=device), *(exact_digest(value).to(device) for value in tensors.values())]
    # Same size on all ranks, even if they have different numbers of tensors.
    local_hashes = torch.stack([exact_digest(torch.stack(digests)), torch.tensor(state, device=device)])
    gathered_hashes = [torch.empty_like(local_hashes) for _ in range(group.size())]
    with reporting_dead_ranks(f"compare the batches of {name}"):
        dist.all_gather(gathered_hashes, local_hashes, group=group.get_group())
    batches, states = torch.stack(gathered_hashes).T.tolist()
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


def _tensors_in(inputs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a forward's inputs by name, also those in lists and dictionaries (`images[0]`)."""
    for key, value in inputs.items():
        if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta:
            yield key, value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in({f"{key}[{number}]": each for number, each in enumerate(value)})
        elif isinstance(value, Mapping):
            yield from _tensors_in({f"{key}[{name!r}]": each for name, each in value.items()})


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
