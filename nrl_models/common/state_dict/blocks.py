"""Checks that a rank's shards hold what it reads and writes.

A view that splits the sharded dimension spans several ranks. Torch would gather the complete `DTensor` for each such
view. An adapter never communicates, so it raises an error instead (`check_reads`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from nrl_models.common.views.view import HFTensor, View
from nrl_models.errors import Problem, ProblemKind, ShardingError

ADVICE = (
    "gather it first (`tensor.full_tensor()`, on every rank), or export the model with "
    "`model.state_dict_adapter.iter_export(model)`"
)


def check_reads(table: Iterable[HFTensor], model_tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that Hugging Face tensors can be read from `model_tensors` without other ranks.

    Raises:
        ShardingError: If a tensor is a region that splits a sharded dimension, or is concatenated from several
            parameters of which one is sharded.
    """
    sharded = {name: tensor for name, tensor in model_tensors.items() if isinstance(tensor, DTensor)}
    problems = []
    for tensor in table if sharded else ():
        for name in tensor.parameters:
            if name in sharded and (tensor.view is None or cuts_shards(tensor.view, sharded[name])):
                detail = f"is sharded as {sharded[name].placements}, and {tensor.name} is a part of it on several ranks"
                problems.append(Problem(ProblemKind.MESH, name, detail, advice=ADVICE))
    if problems:
        raise ShardingError("tensors are sharded, and their views are not", problems)


def check_writes(state_dict: Mapping[str, torch.Tensor], names: Iterable[str], target_name: str) -> None:
    """Check that own tensor `target_name` can be assembled from the tensors `names` without other ranks.

    Raises:
        ShardingError: If some of them are sharded.
    """
    if sharded := [name for name in names if isinstance(state_dict[name], DTensor)]:
        detail = f"is sharded, and only a part of {target_name}"
        problems = [Problem(ProblemKind.MESH, name, detail, advice=ADVICE) for name in sharded]
        raise ShardingError("sharded tensors cannot be joined", problems)


def cuts_shards(view: View, tensor: DTensor) -> bool:
    """Return True if reading the view of a sharded tensor needs values of other ranks."""
    if not view.steps:
        return False
    if any(type(placement) not in (Shard, Replicate) for placement in tensor.placements):
        return True  # unreduced partial sums, and interleaved shards
    sharded = {placement.dim for placement in tensor.placements if isinstance(placement, Shard)}
    for method, args in view.steps:
        if method == "transpose":
            swapped = {args[0]: args[1], args[1]: args[0]}
            sharded = {swapped.get(dim, dim) for dim in sharded}
        elif sharded and (method == "reshape" or args[0] in sharded):
            return True
        elif method == "select":
            sharded = {dim - (dim > args[0]) for dim in sharded}
    return False
