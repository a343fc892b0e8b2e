"""One matmul, many parts: linears that read the same input, computed together.

Llama's attention computes three matmuls of one input (`q_proj`, `k_proj`, `v_proj`). Here one
`CombinedLinear` holds the three weights as rows of one, and each original linear stays where it
was as a `ProjectionPart`: an `nn.Linear` without parameters of its own. The Hugging Face forward
runs unmodified; the first part it calls runs the combined matmul, the others take their slice.

Shape suffixes: `I` in_features, `O` out_features of a part, `C` the sum of the parts' `O`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F


class PartTensor(torch.Tensor):
    """A part's rows of a combined weight or bias: a live view, also when assigned through `.data`.

    Libraries that edit weights in place (PEFT's merging, PiSSA, ...) write `weight.data = new`.
    On a plain view that would rebind a temporary and lose the update without a word; here it
    copies into the combined parameter. Everything else behaves as on the plain view, and
    operations return plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> PartTensor:
        """The rows, detached."""
        return _part_tensor(self.detach())

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape:
            raise ValueError(
                f"cannot set the data of a part of shape {tuple(self.shape)} to shape {tuple(value.shape)}: "
                "it is a view of a combined weight. Load the model with combine=False to change a projection's shape."
            )
        with torch.no_grad():
            self.copy_(value)

    @property
    def requires_grad(self) -> bool:
        """Whether the combined parameter is trained."""
        return super().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> PartTensor:
        """Refuse to train or freeze these rows alone: on a view that is an error at best, and lost at worst."""
        if requires_grad != self.requires_grad:
            raise TypeError(
                f"cannot {'train' if requires_grad else 'freeze'} a part alone: it is rows of a combined parameter, "
                f"whose requires_grad is {self.requires_grad}. Set that of the combined parameter, for all its parts, "
                "or load the model with combine=False."
            )
        return self


def _part_tensor(view: torch.Tensor) -> PartTensor:
    return view.as_subclass(PartTensor)


class CombinedLinear(nn.Module):
    """Several linears of one input as one: `y = x W^T + b` with the parts' rows one after the other.

    Not an `nn.Linear`, so that whatever walks a model's linears (weight initialisation, PEFT's
    `all-linear`, quantisers) finds the parts, under their Hugging Face names, once.

    Args:
        linears: the linears by name, in the order their rows take. Each must be a plain
            `nn.Linear`; all must agree on `in_features`, dtype, device and on having a bias.

    Attributes:
        weight: `(C, I)`, the plain row concatenation of the parts' weights; `(I, C)` if `transposed`.
        bias: `(C,)` or None.
        rows: for each part's name its `(start, length)` in the rows.
        shards: how many ranks tensor parallelism divides every part's rows over; 1 without. Each rank holds
            its rows of every part, one part after the other: `C` is then `[q0 k0 v0 q1 k1 v1 ...]`, of
            which a rank has one `[q k v]`.
        transposed: whether the weight is held as `(I, C)`, see `transpose`.
        has_bias: whether there is a bias, here or (when sharded) in the parts.

    Raises:
        TypeError: if a linear is not a plain `nn.Linear`.
        ValueError: if the linears disagree; the message names which and how.
    """

    def __init__(self, linears: Mapping[str, nn.Linear]) -> None:
        super().__init__()
        _check_combinable(linears)
        parts = list(linears.values())
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)
        self.rows: dict[str, tuple[int, int]] = {}
        start = 0
        for name, part in linears.items():
            self.rows[name] = (start, part.out_features)
            start += part.out_features
        self.shards = 1
        self.transposed = False
        self.has_bias = parts[0].bias is not None
        self.weight = _concatenated([part.weight for part in parts])
        self.bias = _concatenated([part.bias for part in parts]) if self.has_bias else None
        # In a dict and a list, which do not adopt: each part stays where it was, or where PEFT puts it.
        self._parts: dict[str, ProjectionPart] = {}
        self._biased_parts: list[ProjectionPart] = []  # those that hold their biases themselves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: `(..., I)`. Returns `(..., C)`."""
        bias = self.bias
        if self._biased_parts:
            bias = torch.cat([part._parameters["bias"] for part in self._biased_parts])
        return F.linear(x, self.by_rows("weight"), bias)

    def by_rows(self, name: str) -> torch.Tensor:
        """The `weight` as `(C, I)`, or the `bias`: a view if it is held otherwise."""
        parameter = getattr(self, name)
        return parameter.t() if self.transposed and name == "weight" else parameter

    def transpose(self) -> None:
        """Hold the weight as `(I, C)`: the same values, and the same matmul.

        FSDP gathers what it divides along the first dimension without a further copy. Input features have to be that
        dimension here, so that the rows of each part stay whole.
        """
        weight = self._parameters["weight"]
        assert weight is not None
        transposed = nn.Parameter(weight.detach().t().contiguous(), requires_grad=weight.requires_grad)
        if getattr(weight, "_is_hf_initialized", False):
            transposed._is_hf_initialized = True
        self._parameters["weight"] = transposed
        self.transposed = not self.transposed

    def local_rows(self, part: str) -> tuple[int, int]:
        """The `(start, length)` of a part in the rows that one rank of tensor parallelism holds."""
        start, length = self.rows[part]
        return start // self.shards, length // self.shards

    def split(self, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts' outputs `(..., O)`, in order, as slices of `output` `(..., C)`.

        `unsafe_split` is `split` whose slices may be changed in place (OLMo clamps its queries so),
        and whose backward is one concatenation instead of a zero-padded sum for each part.
        """
        return torch.unsafe_split_with_sizes(output, [length // self.shards for _, length in self.rows.values()], -1)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        parts = ", ".join(f"{name}={length}" for name, (_, length) in self.rows.items())
        return f"in_features={self.in_features}, {parts}, bias={self.has_bias}"


def _check_combinable(linears: Mapping[str, nn.Linear]) -> None:
    not_plain = [f"{name} is a {type(part).__name__}" for name, part in linears.items() if type(part) is not nn.Linear]
    if not_plain:
        raise TypeError(
            f"only plain nn.Linear layers combine, but {', '.join(not_plain)}. "
            "Quantised or otherwise replaced linears need combine=False."
        )
    for what, of in {
        "in_features": lambda part: part.in_features,
        "dtype": lambda part: part.weight.dtype,
        "device": lambda part: part.weight.device,
        "bias": lambda part: part.bias is not None,
    }.items():
        values = {name: of(part) for name, part in linears.items()}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{name}: {value}" for name, value in values.items())
            raise ValueError(
                f"linears that combine must agree on {what}, but they have {listed}. combine=False leaves them apart."
            )


def _concatenated(tensors: list[nn.Parameter]) -> nn.Parameter:
    with torch.no_grad():
        return nn.Parameter(torch.cat(list(tensors)), requires_grad=any(tensor.requires_grad for tensor in tensors))


class ProjectionPart(nn.Linear):
    """One of the linears of a `CombinedLinear`, at its Hugging Face place and name.

    `weight` `(O, I)` and `bias` `(O,)` are live views of the combined parameters' rows; of a sharded
    model they are DTensors, whose local tensors are views of this rank's shard. Inside its
    owner's forward a call takes its slice of the combined matmul; elsewhere it computes its own rows.
    Made by `CombinedProjections.combine_projections`, not by hand.
    """

    # The owner is kept in `__dict__`, not as a submodule: it contains this part already. The
    # combined module is looked up by name at each call, so that a wrapper put in its place is called.
    _owner: CombinedProjections
    _combined_name: str
    _part_name: str

    @classmethod
    def adopt(cls, linear: nn.Linear, owner: CombinedProjections, combined_name: str, part_name: str) -> None:
        """Turn `linear` (the same object) into a part of `owner.<combined_name>`."""
        linear.__class__ = cls
        del linear._parameters["weight"], linear._parameters["bias"]
        linear.__dict__.update(_owner=owner, _combined_name=combined_name, _part_name=part_name)

    @property
    def combined(self) -> CombinedLinear:
        """The module that computes this part (or what wraps it)."""
        return self._owner._modules[self._combined_name]  # type: ignore[return-value]

    @property
    def weight(self) -> torch.Tensor:
        """This part's rows of the combined weight, `(O, I)`."""
        return self._rows_of("weight")

    @property
    def bias(self) -> torch.Tensor | None:
        """This part's elements of the combined bias, `(O,)`, or None. A sharded part holds it itself."""
        if (own := self._parameters.get("bias")) is not None:
            return own
        return None if self.combined.bias is None else self._rows_of("bias")

    def _rows_of(self, name: str) -> torch.Tensor:
        combined = self.combined
        parameter = getattr(combined, name)
        if isinstance(parameter, DTensor):
            return self._shard_of(combined.by_rows(name))  # type: ignore[arg-type]
        view = combined.by_rows(name).narrow(0, *combined.local_rows(self._part_name))
        if torch.compiler.is_compiling():
            return view
        part = _part_tensor(view)
        if getattr(parameter, "_is_hf_initialized", False):  # transformers must not initialise what was loaded
            part._is_hf_initialized = True
        return part

    def _shard_of(self, parameter: DTensor) -> DTensor:
        """This part's rows of a sharded parameter, over the shard this rank holds: nothing is communicated."""
        combined = self.combined
        mesh, placements = parameter.device_mesh, parameter.placements
        by_rows = [mesh.size(dim) for dim, one in enumerate(placements) if getattr(one, "dim", None) == 0]
        if by_rows not in ([], [combined.shards]):
            raise RuntimeError(
                f"{self._part_name} cannot be seen alone: the rows of {self._combined_name}, which hold several "
                f"linears, are sharded as {placements}, so that a rank's rows are of any of them. Shard the model "
                "with nrl_models.distributed.parallelize, which keeps rows whole, or load it with combine=False."
            )
        local = parameter.to_local().narrow(0, *combined.local_rows(self._part_name))
        shape = torch.Size((combined.rows[self._part_name][1], *parameter.shape[1:]))
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=parameter.stride())

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse a parameter of its own: it would not be the one that computes."""
        raise TypeError(
            f"cannot set {name!r} of {self._part_name}: it is a part of {self._combined_name}. Write into it "
            f"(`part.{name}.data = ...` or `part.{name}.copy_(...)`), or load the model with combine=False."
        )

    def requires_grad_(self, requires_grad: bool = True) -> ProjectionPart:
        """Refuse to train or freeze a part alone: having no parameters, it would do nothing."""
        for tensor in (self.weight, self.bias):
            if isinstance(tensor, PartTensor):
                tensor.requires_grad_(requires_grad)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """With its owner, a part of the owner's copy; alone (PEFT's `modules_to_save`), a plain linear of its own."""
        alone = id(self._owner) not in memo
        copied = nn.Linear.__new__(nn.Linear if alone else type(self))
        memo[id(self)] = copied
        left_out = ("_owner", "_combined_name", "_part_name") if alone else ()
        state = {name: value for name, value in self.__dict__.items() if name not in left_out}
        copied.__dict__.update(copy.deepcopy(state, memo))
        if alone:
            for name, tensor in (("weight", self.weight), ("bias", self.bias)):
                own = None if tensor is None else nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
                copied.register_parameter(name, own)
        return copied

    def extra_repr(self) -> str:
        """What `print(model)` shows; of a sharded model, too, whose bias may not be seen alone."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.combined.has_bias}"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input`: `(..., I)`. Returns `(..., O)`."""
        # Read once: another thread's forward of the same owner may end, or begin, at any time.
        outputs = self._owner._outputs
        if outputs is None:
            combined = self.combined
            if combined.shards > 1 or combined._biased_parts:  # rows of a shard have meaning only in its own forward
                return dict(zip(combined.rows, combined.split(combined(input)), strict=True))[self._part_name]
            return F.linear(input, self.weight, self.bias)
        return self._owner._take_output(outputs, self._combined_name, self._part_name, input)


Outputs = dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""For each combined name the input of its last matmul, and the parts' outputs that are not taken yet."""


class CombinedProjections(nn.Module):
    """Mixin for a Hugging Face module whose linears of one input are computed in one matmul.

    A family names it as what becomes of the module (`FamilyModel.rewrites`); in a class written out it goes before
    the Hugging Face class:

        class DeepseekV3Attention(CombinedProjections, hf.DeepseekV3Attention):
            combined = {"qkv_a_proj": ("q_a_proj", "q_proj", "kv_a_proj_with_mqa")}

    A group's linears that a module lacks (absent or None: a configuration without `q_a_proj`, a
    layer that reuses another's keys) are left out; fewer than two left, and the group is not formed. Where a
    configuration gives a bias to some of them only, those that are more are combined, and the others stay as they are.

    Where a class serves self-attention and cross-attention alike, its linears read one input here and two there. A
    group then has a place: a piece of the dotted names of the modules it holds for (`crossattention`).

    Attributes:
        combined: for each combined module's name the linears it computes, in row order.
        places: for some of those names the place of the group.
    """

    combined: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    places: ClassVar[Mapping[str, str]] = {}

    # During this module's forward; None at any other time: nothing is remembered.
    _outputs: Outputs | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.combine_projections()

    def combine_projections(self, name: str = "") -> None:
        """Form every group of `combined`, in place. Parameters keep their values, dtype and device.

        Args:
            name: of this module in its model; groups that have a place elsewhere are not formed.
        """
        for combined_name, part_names in self.combined.items():
            if combined_name in self.places and not is_at(name, self.places[combined_name]):
                continue
            linears = {name: part for name in part_names if (part := getattr(self, name, None)) is not None}
            linears = _alike_in_bias(linears)
            if len(linears) >= 2 and combined_name not in self._modules:
                self._combine(combined_name, linears)

    def _combine(self, combined_name: str, linears: Mapping[str, nn.Linear]) -> None:
        combined = CombinedLinear(linears)
        self.add_module(combined_name, combined)
        for name, linear in linears.items():
            ProjectionPart.adopt(linear, self, combined_name, name)
            combined._parts[name] = linear  # type: ignore[assignment]

    def separate_projections(self, combined_name: str) -> None:
        """Undo one group, in place: its parts are plain linears again, with weights of their own."""
        combined: CombinedLinear = self._modules.pop(combined_name)  # type: ignore[assignment]
        for name, (start, length) in combined.rows.items():
            part = combined._parts[name]
            for attribute in ("_owner", "_combined_name", "_part_name"):
                del part.__dict__[attribute]
            part.__class__ = nn.Linear
            for kind in ("weight", "bias"):
                whole = combined.by_rows(kind)
                part._parameters[kind] = None
                if whole is not None:
                    rows = whole.detach().narrow(0, start, length).clone()
                    part._parameters[kind] = nn.Parameter(rows, requires_grad=whole.requires_grad)

    def separate_biases(self, combined_name: str) -> None:
        """Let each part of a group hold its bias itself; the forward joins them.

        What shards a combined weight along its rows or its columns has no such choice for a bias, whose only
        dimension is the rows: parts that hold their own can be sharded each by its own rule.
        """
        combined: CombinedLinear = self._modules[combined_name]  # type: ignore[assignment]
        bias = combined._parameters.get("bias")
        if bias is None:
            return
        for name, (start, length) in combined.rows.items():
            part = combined._parts[name]
            own = nn.Parameter(bias.detach().narrow(0, start, length).clone(), requires_grad=bias.requires_grad)
            part._parameters["bias"] = own
            combined._biased_parts.append(part)
        combined._parameters["bias"] = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The Hugging Face forward, with one matmul for each group. Arguments and results are its own."""
        self._outputs = {}
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._outputs = None

    def _take_output(self, outputs: Outputs, combined_name: str, part_name: str, input: torch.Tensor) -> torch.Tensor:
        """The output of one part for `input`, running the combined matmul unless it ran for this very tensor.

        Threads that run one module at a time may share `outputs`. What they take is right all the same, being
        taken by the input, and taken once; they may run a matmul more than they would alone.
        """
        source, left = outputs.get(combined_name, (None, {}))
        output = left.pop(part_name, None) if source is input else None
        if output is None:
            combined = self._modules[combined_name]
            left = dict(zip(combined.rows, combined.split(combined(input)), strict=True))
            output = left.pop(part_name)
            outputs[combined_name] = (input, left)
        if not left:  # let the memory go with the last part's user
            outputs.pop(combined_name, None)
        return output


def _alike_in_bias(linears: Mapping[str, nn.Linear]) -> Mapping[str, nn.Linear]:
    """Those with a bias or those without, whichever are more."""
    without = {name: linear for name, linear in linears.items() if getattr(linear, "bias", None) is None}
    with_bias = {name: linear for name, linear in linears.items() if name not in without}
    return without if len(without) >= len(with_bias) else with_bias


def is_at(name: str, place: str) -> bool:
    """Whether a module's dotted name has the components of `place` in it, one after the other."""
    return f".{place}." in f".{name}."


def combine(**groups: tuple[str, ...]) -> type[CombinedProjections]:
    """A `CombinedProjections` for other groups: `combine(qkv_a_proj=("q_a_proj", "kv_a_proj_with_mqa"))`.

    Args:
        groups: for each combined module's name the linears it computes, in row order.
    """
    return type("Combined", (CombinedProjections,), {"combined": groups})


class CombinedQKV(CombinedProjections):
    """Attention with one projection, `qkv_proj`, for `q_proj`, `k_proj` and `v_proj`."""

    combined = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}


class CombinedGateUp(CombinedProjections):
    """A gated MLP with one projection, `gate_up_proj`, for `gate_proj` and `up_proj`."""

    combined = {"gate_up_proj": ("gate_proj", "up_proj")}


KNOWN_GROUPS: Mapping[tuple[str, ...], type[CombinedProjections]] = {
    tuple(parts): made for made in (CombinedQKV, CombinedGateUp) for parts in made.combined.values()
}
"""Groups that have a class of their own."""


def combine_groups(*groups: str) -> type[CombinedProjections]:
    """A `CombinedProjections` for groups written as text: `"q_proj k_proj v_proj"`, or `"qkv: q_proj k_proj v_proj"`.

    Args:
        groups: names of linears, in row order, after the name of the module that computes them (see `combined_name`
            where there is none), before the place they are combined in, if they are not everywhere:
            `"key value @ crossattention"`.
    """
    named, places = {}, {}
    for group in groups:
        linears, _, place = group.partition("@")
        name, _, linears = linears.rpartition(":")
        parts = tuple(linears.split())
        name = name or combined_name(parts)
        named[name] = parts
        if place:
            places[name] = place.strip()
    made = combine(**named)
    made.places = places
    return made


def combined_name(group: Sequence[str]) -> str:
    """What the module that computes a group's linears is called where no family names it."""
    known = KNOWN_GROUPS.get(tuple(group))
    if known is not None:
        return next(iter(known.combined))
    if all(name.endswith("_proj") for name in group):
        return "_".join(name.removesuffix("_proj") for name in group) + "_proj"
    return "_".join(group)
