"""Tables of a model's layouts: for each Hugging Face tensor, the parameter that holds it and the view of it."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Literal, Protocol, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.dtypes import unreadable
from nrl_models.common.modules import is_flattened, without_wrappers
from nrl_models.common.process_state import no_collections
from nrl_models.common.state_dict import layouts
from nrl_models.common.state_dict.layouts import TensorSpec
from nrl_models.common.state_dict.own_tensors import own_state_dict
from nrl_models.common.state_dict.ties import tied_names
from nrl_models.common.upstream_conversions import Renaming
from nrl_models.common.value_checks import require_names
from nrl_models.common.views.view import HFTensor, Piece
from nrl_models.deprecation import OldAttribute
from nrl_models.errors import Problem, ProblemKind, StateDictError


class OtherLayout(Hashable, Protocol):
    """Another library's names and shapes: `nrl_models.megatron.layout.MegatronRank`."""

    def table(self, adapter: LayoutTables) -> dict[str, HFTensor]:
        """Return the layout's tensors by name, as views of `adapter.transformers`.

        Raises:
            StateDictError: If the layout has no equivalent of some tensors.
        """


Layout = Literal["hub", "transformers"] | OtherLayout
"""`hub`: names and shapes of published checkpoints (separate experts), which engines read and `save_pretrained` writes;
for a loaded model, those of its checkpoint. `transformers`: names and shapes of transformers' modules in memory
(stacked experts). They only differ if transformers converts on loading. Or the layout of another library."""


class LayoutTables:
    """Tables of a model's tensors in Hugging Face's layouts and those of other libraries.

    Args:
        model: The model, with values or on meta. Only names, shapes, dtypes and the conversions of its checkpoint are
            read, and no reference is kept.

    Attributes:
        config: The model's configuration.
        specs: Shape and dtype of each of the model's own tensors, by name.
        hub: The hub's tensors by name, in the order in which transformers saves them.
        transformers: transformers' tensors in memory by name, in the order of its `state_dict()`.
        tied: For each own tensor that was tied when the tables were created, the name of the one that is saved. Use
            `retied` to update it.
    """

    own = OldAttribute("specs")

    @no_collections()
    def __init__(self, model: PreTrainedModel) -> None:
        model = without_wrappers(model)
        self.specs: dict[str, TensorSpec] = layouts.own_tensors(model)
        self.tied: dict[str, str] = tied_names(model)
        self.transformers: dict[str, HFTensor] = {
            name: HFTensor(name, view.region_in(self.specs[view.parameter].shape).shape, (Piece(view),))
            for name, view in layouts.transformers_views(model)
        }
        conversions = layouts.hub_conversions(model)
        saved = layouts.convert_layout(model, self.transformers, self.specs, conversions)
        self.hub: dict[str, HFTensor] = layouts.loaded_names(model).exported(saved)
        self._conversions, self._prefix = conversions or (), layouts.base_prefix(model)
        self.config = model.config
        self._others: dict[OtherLayout, dict[str, HFTensor]] = {}
        self._in_hub = _by_parameter(self.hub)
        self._in_transformers = _by_parameter(self.transformers)

    def retied(self, model: nn.Module) -> Self:
        """Return the same tables with the current ties of `model`.

        If names of the model are missing, all ties are kept. Names are missing in pipeline stages (which keep shared
        parameters equal) and in models flattened by FSDP1.
        """
        lacks_names = getattr(model, "stages", None) is not None or is_flattened(model)
        return self if lacks_names else self._with_ties(tied_names(model))

    def _with_ties(self, tied: dict[str, str]) -> Self:
        if tied == self.tied:
            return self
        changed = copy.copy(self)
        changed.tied, changed._others = tied, {}  # another library's layout may depend on ties
        return changed

    def with_dtypes(self, dtypes: Mapping[str, torch.dtype]) -> Self:
        """Return the same tables with other dtypes of own tensors, all or some."""
        specs = {name: TensorSpec(spec.shape, dtypes.get(name, spec.dtype)) for name, spec in self.specs.items()}
        if specs == self.specs:
            return self
        changed = copy.copy(self)
        changed.specs = specs
        return changed

    def tensors_in(self, name: str, layout: Layout) -> list[HFTensor]:
        """Return the Hugging Face tensors that hold parts of own tensor `name` in a layout.

        Raises:
            KeyError: If `name` is not a tensor of the model.
        """
        if name not in self.specs:
            raise KeyError(f"{name} is not a tensor of this model")
        table = self.layout(layout)
        if not isinstance(layout, str):
            return [tensor for tensor in table.values() if name in tensor.parameters]
        return (self._in_hub if table is self.hub else self._in_transformers)[name]

    def layout(self, layout: Layout) -> dict[str, HFTensor]:
        """Return the table of a layout.

        Raises:
            StateDictError: If another library's layout has no equivalent of some tensors.
        """
        if layout == "hub":
            return self.hub
        if layout == "transformers":
            return self.transformers
        if not hasattr(layout, "table"):
            raise ValueError(
                f"unknown layout {layout!r}: expected 'hub' or 'transformers', or an object with a `table`"
            )
        if layout not in self._others:
            self._others[layout] = layout.table(self)
        return self._others[layout]

    def table_for(self, keys: Collection[str]) -> Mapping[str, HFTensor]:
        """Return the table of the layout with names `keys`. If they are mixed, both tables, and results of `find`."""
        for table in (self.transformers, self.hub):
            if all(key in table for key in keys):
                return table
        both = self.hub | self.transformers
        return both | {key: tensor for key in keys if key not in both and (tensor := self.find(key)) is not None}

    def find(self, name: str) -> HFTensor | None:
        """Return the hub's tensor for a name, including older names that transformers reads; None if there is none."""
        if name in self.hub:
            return self.hub[name]
        renamed = layouts.renamed_keys([name], self._conversions, Renaming())[name]
        return self._by_renamed.get(renamed.removeprefix(self._prefix))

    @cached_property
    def _by_renamed(self) -> dict[str, HFTensor]:
        """The hub's tensors by the names that transformers gives them on loading, without the base model's prefix.

        Leaves out tensors that are merged into one.
        """
        renamed = layouts.renamed_keys(self.hub, self._conversions, Renaming())
        names = {name: new.removeprefix(self._prefix) for name, new in renamed.items()}
        count = Counter(names.values())
        return {new: self.hub[name] for name, new in names.items() if count[new] == 1}

    def absent(self, name: str, tensors: Collection[HFTensor]) -> list[str]:
        """Return names of missing parts of own tensor `name` if only `tensors` exist, in the layout of `tensors`."""
        layout: Layout = "transformers" if all(tensor.name in self.transformers for tensor in tensors) else "hub"
        there = {tensor.pieces for tensor in tensors}  # names of one region differ between layouts
        return [tensor.name for tensor in self.tensors_in(name, layout) if tensor.pieces not in there]

    def own_tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the model's own tensors, detached.

        Raises:
            StateDictError: If the model does not match this adapter.
        """
        tensors = own_state_dict(model)
        gone = [name for name in self.specs if name not in tensors]
        problems = [Problem(ProblemKind.MISSING, name, "is no longer in the model") for name in gone]
        if problems := problems + self.other_shapes(tensors):
            advice = ["use model.state_dict_adapter again: it is remade when the structure has changed"]
            if is_flattened(model):
                advice = ["FSDP1 flattened these parameters: pass the FullyShardedDataParallel module that has them"]
            raise StateDictError("the model is not the one this adapter was made for", problems, advice)
        return tensors

    def check_own(self, state_dict: Mapping[str, torch.Tensor], advice: Sequence[str] = ()) -> None:
        """Check that tensors are the model's own, all or some.

        Args:
            state_dict: Tensors by name.
            advice: Advice in the error message.

        Raises:
            StateDictError: If names are not the model's, values are not tensors, or shapes are not the parameters'.
        """
        require_tensors(state_dict)
        unknown = [name for name in state_dict if name not in self.specs]
        problems = [Problem(ProblemKind.UNEXPECTED, name, "is not a tensor of this model") for name in unknown]
        if unknown and all(name in self.hub for name in unknown):
            advice = ('these are names of the Hub checkpoint: use iter_export(model, layout="transformers")', *advice)
        if problems := problems + self.other_shapes(state_dict):
            raise StateDictError("state dict is not this model's", problems, advice)

    def exported(self, layout: Layout) -> dict[str, HFTensor]:
        """Return a layout's table without tied duplicates."""
        return {name: tensor for name, tensor in self.layout(layout).items() if tensor.parameters[0] not in self.tied}

    def is_zero_copy(self, tensor: HFTensor) -> bool:
        """Return True if a tensor is a view of a single parameter."""
        view = tensor.view
        return view is not None and view.region_in(self.specs[view.parameter].shape).strides is not None

    def other_shapes(self, tensors: Mapping[str, torch.Tensor | TensorSpec]) -> list[Problem]:
        """Return a problem for each of the model's own tensors with a wrong shape."""
        return [
            Problem(ProblemKind.SHAPE, name, f"has shape {tuple(tensor.shape)}, expected {self.specs[name].shape}")
            for name, tensor in tensors.items()
            if name in self.specs and tensor.shape != self.specs[name].shape
        ]


def require_tensors(state_dict: Mapping[str, object]) -> None:
    """Check that all values are dense tensors. They may be on meta.

    Raises:
        StateDictError: If some are not.
        UnknownArgumentError: If `state_dict` is not a mapping with strings as keys.
    """
    require_names(state_dict)
    problems = [
        Problem(ProblemKind.DTYPE, str(name), f"is a {type(value).__name__}, expected a torch.Tensor")
        for name, value in state_dict.items()
        if not isinstance(value, torch.Tensor)
    ]
    problems += [
        Problem(ProblemKind.DTYPE, name, unreadable(value))
        for name, value in state_dict.items()
        if isinstance(value, torch.Tensor) and (value.is_nested or value.layout is not torch.strided)
    ]
    if problems:
        raise StateDictError("state dict has other values than dense tensors", problems)


def _by_parameter(table: Mapping[str, HFTensor]) -> dict[str, list[HFTensor]]:
    """Return the tensors of a table by the own tensors that hold them."""
    result: dict[str, list[HFTensor]] = defaultdict(list)
    for tensor in table.values():
        for parameter in tensor.parameters:
            result[parameter].append(tensor)
    return dict(result)
