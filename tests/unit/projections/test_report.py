"""Why a group does not run as one matmul: each reason is reported, and the output equals that of separate linears."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize, prune
from toy_attention import HIDDEN, KV, PARTS, Attention, CombinedAttention, assert_same, combined_from, matmuls

from nrl_models.common.projections import (
    CombinedQKV,
    GroupReport,
    ObstacleKind,
    groups_of,
    join,
    neighboring_parameters,
    report,
)

NAME, MOVED = "qkv_proj", "weights do not share one buffer"


class Scaled(nn.Linear):
    """A custom linear class."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return twice the expected output."""
        return 2 * super().forward(input)


class Halved(nn.Module):
    """A parametrization that halves the weight."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return half the weight."""
        return weight / 2


class Traced(nn.Parameter):
    """A Parameter subclass."""


def _replace(**linears: Callable[[], nn.Module]) -> Callable[[Attention], None]:
    def change(module: Attention) -> None:
        torch.manual_seed(3)
        for name, make in linears.items():
            setattr(module, name, make())

    return change


class Doubling(nn.Module):
    """A linear whose call doubles the weights of other linears without changing their version counters."""

    def __init__(self, linear: nn.Linear, others: list[nn.Linear]) -> None:
        super().__init__()
        self.linear, self.others = linear, tuple(others)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for other in self.others:
            other.weight.data *= 2
        return self.linear(x)


def _wrapped(module: Attention) -> None:
    module.q_proj = Doubling(module.q_proj, [module.k_proj, module.v_proj])


def _checkpointed(module: Attention) -> None:
    module.v_proj = checkpoint_wrapper(module.v_proj)


def _share(module: Attention) -> None:
    module.v_proj.weight = module.k_proj.weight


def _subclass(module: Attention) -> None:
    module.k_proj.__class__ = Scaled


def _replaced_forward(module: Attention) -> None:
    module.v_proj.forward = lambda input: 2 * nn.Linear.forward(module.v_proj, input)


def _compiled(module: Attention) -> None:
    module.q_proj.compile(backend="eager")


def _data(module: Attention) -> None:
    module.k_proj.weight.data = module.k_proj.weight.data * 2


def _parameter(module: Attention) -> None:
    module.k_proj.weight = nn.Parameter(module.k_proj.weight.detach() * 2)


def _one_bias(module: Attention) -> None:
    module.v_proj.register_parameter("bias", None)


def _each_cast(module: Attention) -> None:
    module.apply(lambda child: child.double() if isinstance(child, nn.Linear) else child).float()
    module.k_proj.double().float()


def _transposed(module: Attention) -> None:
    weight = module.k_proj.weight
    weight.data = weight.data.t().contiguous().t()


def _no_parameter(module: Attention) -> None:
    for part in (module.q_proj, module.v_proj):
        values = part.weight.detach() * 2
        del part.weight
        part.weight = values


def _typed(module: Attention) -> None:
    module.k_proj.weight = Traced(module.k_proj.weight.detach().clone())


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "subclass": (_subclass, "k_proj is a Scaled"),
    "replaced": (_replace(k_proj=lambda: nn.Linear(HIDDEN, KV)), "replaced: k_proj"),
    "two replaced": (
        _replace(k_proj=lambda: nn.Linear(HIDDEN, KV), v_proj=lambda: Scaled(HIDDEN, KV)),
        "replaced: k_proj, v_proj",
    ),
    "parametrized": (lambda module: parametrize.register_parametrization(module.k_proj, "weight", Halved()), "k_proj"),
    "pruned": (lambda module: prune.l1_unstructured(module.q_proj, "weight", 0.5), "q_proj does not own its weight"),
    "weight norm": (lambda module: nn.utils.parametrizations.weight_norm(module.v_proj), "v_proj is a Param"),
    "no parameter": (_no_parameter, "q_proj does not own its weight"),
    "parameter subclass": (_typed, "the weight of k_proj is a Traced"),
    "shared": (_share, "linears share a parameter"),
    "bias removed": (_one_bias, "disagree in having a bias: q_proj True, k_proj True, v_proj False"),
    "transposed": (_transposed, "the weight of k_proj is not contiguous"),
    "wrapped": (_wrapped, "wrapped, so that other code runs between their calls: q_proj (in a Doubling)"),
    "checkpointed": (_checkpointed, "v_proj (in a CheckpointWrapper)"),
    "forward": (_replaced_forward, "the forward of v_proj was replaced"),
    "compiled": (_compiled, "the forward of q_proj was replaced"),
    "hook": (lambda module: module.q_proj.register_forward_hook(lambda *_: None), "q_proj has forward hooks"),
    "forward hook that edits": (
        lambda module: module.k_proj.register_forward_hook(lambda module, args, output: output * 2),
        "k_proj has forward hooks",
    ),
    "pre-hook": (
        lambda module: module.v_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        "v_proj has forward pre hooks",
    ),
    "backward hook": (
        lambda module: module.q_proj.register_full_backward_hook(lambda module, given, _: (given[0] * 2,)),
        "q_proj has backward hooks",
    ),
    "backward pre-hook": (
        lambda module: module.k_proj.register_full_backward_pre_hook(lambda module, given: (given[0] * 2,)),
        "k_proj has backward pre hooks",
    ),
    "one frozen": (
        lambda module: module.q_proj.requires_grad_(False),
        "of some linears only the weight is trained: k_proj, v_proj",
    ),
    "one bias frozen": (
        lambda module: module.k_proj.bias.requires_grad_(False),
        "of some linears only the bias is trained: q_proj, v_proj",
    ),
    "data": (_data, MOVED),
    "parameter": (_parameter, MOVED),
    "each cast": (_each_cast, MOVED),
}


KINDS = {
    "subclass": ObstacleKind.CLASS,
    "replaced": ObstacleKind.REPLACED,
    "pruned": ObstacleKind.PARAMETER,
    "shared": ObstacleKind.SHARED,
    "bias removed": ObstacleKind.UNLIKE,
    "wrapped": ObstacleKind.WRAPPED,
    "forward": ObstacleKind.FORWARD,
    "hook": ObstacleKind.HOOK,
    "one frozen": ObstacleKind.TRAINING,
    "data": ObstacleKind.MOVED,
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_disables_group_with_reason(plain: Attention, x: torch.Tensor, change: str) -> None:
    edit, reason = CHANGES[change]
    combined = combined_from(plain)
    assert report(combined) == [GroupReport(NAME, PARTS, None)]
    for module in (plain, combined):
        edit(module)
    (group,) = report(combined)
    assert group.name == NAME
    assert not group.joined
    assert group.reason is not None
    assert reason in group.reason.message
    assert group.reason.kind is KINDS.get(change, group.reason.kind)
    assert_same(plain, combined, x)
    assert matmuls(combined) == matmuls(plain)
    join(combined)
    assert report(combined)[0].joined == (reason == MOVED)
    assert_same(plain, combined, x)


@pytest.mark.parametrize(
    ("linear", "reason"),
    [
        (
            lambda: nn.Linear(HIDDEN, KV, dtype=torch.bfloat16),
            "linears disagree in dtype: q_proj torch.float32, k_proj",
        ),
        (lambda: nn.Linear(HIDDEN + 1, KV), "linears disagree in input size: q_proj 16, k_proj 16, v_proj 17"),
        (lambda: nn.Linear(HIDDEN, KV, device="meta"), "the weight of v_proj has no values (it is on meta)"),
        (lambda: nn.Linear(HIDDEN, 0), "the weight of v_proj is not contiguous, or empty"),
        (
            lambda: nn.Linear(HIDDEN, KV).requires_grad_(False),
            "of some linears only the weight is trained: q_proj, k_proj",
        ),
        (lambda: Scaled(HIDDEN, KV), "v_proj is a Scaled"),
        (lambda: nn.LazyLinear(KV), "v_proj is a LazyLinear"),
    ],
    ids=["dtype", "input size", "meta", "empty", "frozen", "subclass", "lazy"],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_incompatible_linears_run_separately(
    plain: Attention, x: torch.Tensor, linear: Callable[[], nn.Module], reason: str
) -> None:
    """If separate linears work, the result is the same. If they fail, the error message is the same."""
    torch.manual_seed(3)
    plain.v_proj = linear()
    combined = combined_from(plain)
    (group,) = report(combined)
    assert not group.joined
    assert reason in str(group.reason)
    results = []
    for module in (plain, combined):
        torch.manual_seed(3)
        try:
            results.append(module(x))
        except Exception as error:
            results.append((type(error), str(error)))
    if isinstance(results[0], tuple):
        assert results[1] == results[0]
    else:
        torch.testing.assert_close(*results)


def test_weights_and_biases_with_different_dtypes(plain: Attention) -> None:
    for name in PARTS:
        getattr(plain, name).bias.data = getattr(plain, name).bias.data.double()
    assert str(report(combined_from(plain))[0].reason) == "weights and biases differ in dtype"


def test_parameters_created_in_inference_mode_are_not_fused(plain: Attention, x: torch.Tensor) -> None:
    with torch.inference_mode():
        combined = CombinedAttention()
        combined.load_state_dict(plain.state_dict())
    assert str(report(combined)[0].reason) == "the weight of q_proj was made in inference mode"
    with torch.no_grad():
        torch.testing.assert_close(combined(x), plain(x))


def test_linear_that_is_never_called_disables_group(plain: Attention, x: torch.Tensor) -> None:
    """The unused output is computed once. Afterwards the linears run separately."""

    class WithoutValues(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.o_proj(torch.cat([self.q_proj(x), self.k_proj(x), self.k_proj(x)], dim=-1))

    class CombinedWithoutValues(CombinedQKV, WithoutValues):
        pass

    plain.__class__ = WithoutValues
    combined = combined_from(plain, CombinedWithoutValues)
    assert_same(plain, combined, x)
    assert (
        str(report(combined)[0].reason) == "ran separately, or not at all, while others used the fused matmul: v_proj"
    )
    assert matmuls(combined) == matmuls(plain) == 4
    assert_same(plain, combined, x)


def test_report_lists_groups_by_name(plain: Attention) -> None:
    layers = nn.ModuleDict({"first": combined_from(plain), "other": plain, "last": combined_from(plain)})
    layers["last"].v_proj.requires_grad_(False)
    assert [(group.name, group.joined) for group in report(layers)] == [
        ("first.qkv_proj", True),
        ("last.qkv_proj", False),
    ]
    assert [(owner, name) for owner, name, _ in groups_of(layers)] == [("first", NAME), ("last", NAME)]


def test_neighboring_parameters(plain: Attention) -> None:
    layers = nn.ModuleDict(
        {"a": combined_from(plain), "b": combined_from(Attention(bias=False)), "c": combined_from(plain)}
    )
    _subclass(layers["c"])  # this layer no longer has a group
    layers["b"].to("meta")  # this layer will receive values
    names = [
        tuple(f"{owner}.{part}.{kind}" for part in PARTS)
        for owner, kind in (("a", "weight"), ("a", "bias"), ("b", "weight"))
    ]
    assert neighboring_parameters(layers) == names
