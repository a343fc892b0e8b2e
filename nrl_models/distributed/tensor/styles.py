"""Styles of tensor and expert parallelism: the sharded dimension of a module, and the exchange of activations.

Names and meaning are those of transformers (values of `base_model_tp_plan` in a configuration), so its plans can be
used. The implementation is based on DTensor. Parameters are DTensors, and modules compute on their rank's plain
tensors. Activations are exchanged through a DTensor, whose `redistribute` has a forward and a backward:

- `entering` a sharded region: identity in the forward, sum over ranks in the backward.
- `leaving` it: sum over ranks in the forward, identity in the backward.

These are `f` and `g` of Megatron-LM (https://arxiv.org/abs/1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

from nrl_models.distributed.tensor.regions import observing


def entering(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return `tensor`, which is equal on all ranks of `mesh`. Its gradient is summed over the ranks."""
    if (observer := observing()) is not None:
        observer.entered(_dimension(mesh))
    replicated = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return _in_own_memory(replicated.to_local(grad_placements=[Partial()]))


def leaving(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the sum of the tensors of all ranks. The gradient of the sum is the gradient of each tensor."""
    return _redistributed(tensor, mesh, Partial(), Replicate())


def _redistributed(tensor: torch.Tensor, mesh: DeviceMesh, before: Placement, after: Placement) -> torch.Tensor:
    """Redistribute a local tensor from placement `before` to `after`, and return the local result."""
    if after.is_replicate() and (observer := observing()) is not None:
        observer.left(_dimension(mesh))
    placed = DTensor.from_local(tensor, mesh, [before], run_check=False)
    return _in_own_memory(placed.redistribute(placements=[after]).to_local())


def _dimension(mesh: DeviceMesh) -> str:
    """Return the name of a one-dimensional mesh."""
    (name,) = mesh.mesh_dim_names or ("",)
    return name


def _in_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Copy `tensor` in a compiled graph.

    If a graph ends with a view of its input, AOTAutograd returns the input and makes the view again outside the graph.
    The view's backward (here: a sum over ranks) would then not run.
    """
    return tensor.clone() if torch.compiler.is_compiling() else tensor


class _Parallel(nn.Module):
    """Mixin for a module whose computation is split over ranks.

    Attributes:
        tp_mesh, ep_mesh: One-dimensional meshes of those ranks.
    """

    tp_mesh: DeviceMesh
    ep_mesh: DeviceMesh


class LinearOfWholeInput(_Parallel):
    """A linear with an unsharded input, which a fused group supports.

    Attributes:
        is_divided: Whether ranks compute different features, so that each has a part of the input's gradient.
    """

    is_divided: ClassVar[bool] = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute the linear on `input` `(..., I)`, equal on every rank. `exchange` defines the output."""
        return self.exchange(super().forward(entering(input, self.tp_mesh) if self.is_divided else input))

    def exchange(self, output: torch.Tensor) -> torch.Tensor:
        """Return this module's output, given the linear's `output`."""
        return output


class Colwise(LinearOfWholeInput):
    """A linear with a shard of the output features: returns `(..., O / ranks)`."""

    is_divided = True


class ColwiseGathered(Colwise):
    """A linear with a shard of the output features, which are then gathered: returns `(..., O)`."""

    def exchange(self, output: torch.Tensor) -> torch.Tensor:
        """Gather the features of all ranks, from `(..., O / ranks)` to `(..., O)`."""
        return _redistributed(output, self.tp_mesh, Shard(output.ndim - 1), Replicate())


class Rowwise(_Parallel):
    """A linear with a shard of the input features. The bias is added once, after the sum."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute `(..., O)`, equal on every rank, from this rank's shard `(..., I / ranks)` of the input."""
        output = leaving(F.linear(input, self.weight), self.tp_mesh)
        return output if self.bias is None else output + self.bias


class RowwiseSplit(Rowwise):
    """`Rowwise` with an unsharded input."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute `(..., O)` from an input `(..., I)`. Both are equal on every rank."""
        return super().forward(_redistributed(input, self.tp_mesh, Replicate(), Shard(input.ndim - 1)))


class VocabularyParallel(_Parallel):
    """An embedding with a shard of the vocabulary. Tokens of other ranks are zeros until the sum.

    Attributes:
        first_token: First token id of this rank's shard.
    """

    first_token: int
    weight: torch.Tensor

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the vectors of tokens. Tokens and vectors are equal on every rank."""
        inside = (input >= self.first_token) & (input < self.first_token + self.weight.shape[0])
        local = torch.where(inside, input - self.first_token, 0)
        vectors = super().forward(local, *args, **kwargs).masked_fill(~inside.unsqueeze(-1), 0)
        summed = leaving(vectors, self.tp_mesh)
        # A copy, because models may modify the vectors in place, which autograd refuses for views.
        return summed if torch.compiler.is_compiling() else summed.clone()


class SummedOutput(_Parallel):
    """A module whose output is summed over the ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the module, and sum its output over the ranks. Same arguments."""
        return leaving(super().forward(*args, **kwargs), self.tp_mesh)


class LatentKeys(LinearOfWholeInput):
    """The projection to latent keys of multi-head latent attention, which is not sharded.

    Its rotary features go directly to each rank's heads, so their gradient must be summed over ranks. The other
    features pass through a sharded projection, which sums its gradient.

    Attributes:
        rotary_features: Number of rotary features at the end of the output.
    """

    rotary_features: int

    def exchange(self, output: torch.Tensor) -> torch.Tensor:
        """Return `output`, `(..., O)`, which is equal on every rank. Sums the gradient of its rotary features."""
        latent, rotary = output.split([output.shape[-1] - self.rotary_features, self.rotary_features], dim=-1)
        return torch.cat([latent, entering(rotary, self.tp_mesh)], dim=-1)


class DividedExperts(_Parallel):
    """A stack of experts, each with a shard of the intermediate features."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the stack, and sum over the ranks. Arguments and result are equal on every rank."""
        shared = [entering(value, self.tp_mesh) if _is_float(value) else value for value in args]
        named = {key: entering(value, self.tp_mesh) if _is_float(value) else value for key, value in kwargs.items()}
        return leaving(super().forward(*shared, **named), self.tp_mesh)


class ScaledIdentity(_Parallel):
    """An expert that returns its input, on ranks whose outputs are summed."""

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return this rank's part of the result: the expert's output for `input / ranks`."""
        return super().forward(input / self.tp_mesh.size(), *args, **kwargs)


class ExpertsOfThisRank(_Parallel):
    """A stack with a shard of the experts. Each rank computes the tokens that are routed to its experts.

    Attributes:
        first_expert: First expert of this rank's shard.
        num_experts: Number of experts of this rank.
    """

    first_expert: int
    num_experts: int

    def forward(self, hidden_states: torch.Tensor, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        """Run this rank's experts, and sum over ranks. All arguments are equal on every rank.

        Args:
            hidden_states: Tokens, `(..., D)`.
            args: Experts of each token (integers), and the weight of each of these experts, both `(tokens, k)`.
            kwargs: The same by name. Names and order differ between architectures.

        Returns:
            Sum over all experts, `(..., D)`.
        """
        first, second = (*args, *kwargs.values())
        chosen, weights = (second, first) if _is_float(first) else (first, second)
        tokens = entering(hidden_states, self.ep_mesh).reshape(-1, hidden_states.shape[-1])
        weights = entering(weights, self.ep_mesh)
        token, choice = ((chosen >= self.first_expert) & (chosen < self.first_expert + self.num_experts)).nonzero(
            as_tuple=True
        )
        if token.numel() == 0:  # a token of weight zero, so that every parameter has a gradient on every rank
            token = choice = chosen.new_zeros(1)
            expert, weight = token, weights[token, choice] * 0
        else:
            expert, weight = chosen[token, choice] - self.first_expert, weights[token, choice]
        experts, ones = expert.unsqueeze(-1), torch.ones_like(weight).unsqueeze(-1)
        outputs = super().forward(
            tokens[token],
            *(ones if _is_float(value) else experts for value in args),
            **{name: ones if _is_float(value) else experts for name, value in kwargs.items()},
        )
        weighted = (outputs * weight.unsqueeze(-1)).to(tokens.dtype)
        summed = torch.zeros_like(tokens).index_add(0, token, weighted)
        return leaving(summed, self.ep_mesh).reshape(hidden_states.shape)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@dataclass(frozen=True, slots=True)
class Style:
    """A value in a plan, for a module or a parameter.

    Args:
        name: Name of the style in transformers.
        dim: Function from a parameter's number of dimensions to the sharded one; None if it is not sharded.
        compute: Mixin that exchanges activations; None if nothing is exchanged.
        blocks: Number of equal blocks in the sharded dimension. Each rank has a part of every block.
        sums_gradient: Whether the parameters are not sharded, but each rank computes only a part of their gradient.
    """

    name: str
    dim: Callable[[int], int | None] = lambda ndim: None
    compute: type[_Parallel] | None = None
    blocks: int = 1
    sums_gradient: bool = False

    @property
    def divides_linears(self) -> bool:
        """Whether the style shards the weight of a linear."""
        return self.dim(2) is not None

    def has_shares(self, is_parameter: bool) -> bool:
        """Return True if each rank has a share of the activations around a module or parameter of this style."""
        if is_parameter:
            return self.sums_gradient or self.dim(2) is not None
        return self.sums_gradient or self.compute not in (None, ColwiseGathered, RowwiseSplit, VocabularyParallel)


def _output(ndim: int) -> int:
    return max(ndim - 2, 0)


def _input(ndim: int) -> int | None:
    return ndim - 1 if ndim > 1 else None


def _first(ndim: int) -> int:
    return 0


def _by_name(*styles: Style) -> dict[str, Style]:
    return {style.name: style for style in styles}


REPLICATE = Style("replicate")
DIVIDED_EMBEDDING = Style("embedding_rowwise", _first, VocabularyParallel)
DIVIDED_HEAD = Style("colwise_gather_output", _output, ColwiseGathered)

TENSOR_STYLES = _by_name(
    REPLICATE,
    DIVIDED_EMBEDDING,
    DIVIDED_HEAD,
    Style("colwise", _output, Colwise),
    Style("colwise_rep", _output, ColwiseGathered),
    Style("rowwise", _input, Rowwise),
    Style("rowwise_split_input", _input, RowwiseSplit),
    Style("rowwise_rep", _input, RowwiseSplit),
    Style("packed_colwise", _output, Colwise, blocks=2),
    Style("packed_rowwise", _input, Rowwise, blocks=2),
    Style("moe_tp_experts", compute=DividedExperts),
    Style("moe_identity_expert", compute=ScaledIdentity),
    Style("mla_kv_a_proj", compute=LatentKeys),
    Style("all_reduce", compute=SummedOutput),
    Style("replicated_with_grad_allreduce", sums_gradient=True),
    Style("local_params"),  # no effect: all modules compute on local tensors here
)
"""Styles of a tensor-parallel plan."""

EXPERT_STYLES = _by_name(
    REPLICATE,
    Style("grouped_gemm", _first),
    Style("ep_dispatch_experts", compute=ExpertsOfThisRank),
    Style("moe_tp_experts", compute=ExpertsOfThisRank),  # name before transformers 5.2x
    Style("replicated_with_grad_allreduce", sums_gradient=True),
    Style("ep_router"),  # no effect: the stack selects this rank's experts here
)
"""Styles of an expert-parallel plan."""
