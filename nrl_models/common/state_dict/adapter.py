"""Translate between a model's own tensors and Hugging Face tensors.

An adapter has a table: for each Hugging Face tensor, the parameter that holds it and the view of the parameter. All
methods read this table. An adapter holds no tensors, has no mutable state, and never communicates with other ranks. So
the same adapter converts weights, gradients and optimizer states.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nrl_models.common.modules import is_flattened, own_name, peft_modules
from nrl_models.common.state_dict import layouts, own_tensors
from nrl_models.common.state_dict.blocks import check_reads
from nrl_models.common.state_dict.buckets import exported_values
from nrl_models.common.state_dict.kept_tensors import kept_as, kept_specs
from nrl_models.common.state_dict.layouts import TensorSpec
from nrl_models.common.state_dict.matching import match
from nrl_models.common.state_dict.tables import Layout, LayoutTables, require_tensors
from nrl_models.common.state_dict.ties import tied_names
from nrl_models.common.upstream_conversions import loaded_conversions
from nrl_models.common.views.trainer_options import check_options, excluded_keys, named_tensors, require_whole_experts
from nrl_models.deprecation import OldAttribute
from nrl_models.errors import Problem, ProblemKind, StateDictError, UnknownArgumentError


class StateDictAdapter(LayoutTables):
    """Translates between a model's own tensors and Hugging Face's names and shapes.

    `to_hf`, `from_hf` and `convert_single_tensor_to_hf` accept the arguments of NeMo AutoModel and NeMo RL
    (`nrl_models.common.views.trainer_options`).

    Args:
        model: See `LayoutTables`.

    Attributes:
        mtp: MTP weights that the model keeps but does not compute with, by engines' names.
        computed: Weights that torch computes from other tensors (pruning, parametrizations).
        quantized: Weights that are stored quantized, with their format.
        extra_modules: Modules that the model's class does not have, such as value heads. Not exported.
    """

    kept = OldAttribute("mtp")

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.mtp: dict[str, TensorSpec] = kept_specs(model)
        self._has_peft = any(peft_modules(model))
        self.computed = own_tensors.computed_weights(model)
        self.extra_modules = own_tensors.extra_modules(model)
        self._stored = own_tensors.stored_formats(model)
        self.quantized = own_tensors.quantized_weights(model, self._stored)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.specs)} parameters, {len(self.hub)} checkpoint tensors)"

    def __deepcopy__(self, memo: dict[int, object]) -> StateDictAdapter:
        return self  # immutable

    def keeping(self, model: nn.Module) -> StateDictAdapter:
        """Return a copy of the adapter with the tensors that `model` currently keeps."""
        adapter = copy.copy(self)
        adapter.mtp = kept_specs(model)
        return adapter

    # Complete state dicts

    def from_hf(
        self,
        state_dict: Mapping[str, torch.Tensor],
        device_mesh: DeviceMesh | None = None,
        *,
        strict: bool = True,
    ) -> dict[str, torch.Tensor]:
        """Convert Hugging Face tensors in either layout to the model's own.

        A tensor that is a complete parameter is returned without a copy.

        Args:
            state_dict: Tensors by Hugging Face name: weights, or other tensors of the same shapes.
            device_mesh: Mesh that shards experts. Its dimension `ep` (or all of it, if there is no such dimension) must
                have a single rank, because the tensors are not sharded.
            strict: Whether all tensors of the model must be present. Otherwise, parameters without any source are left
                out. A parameter that is only partly present always raises.

        Raises:
            StateDictError: If keys are missing, unexpected, incomplete, or present in two layouts, shapes or dtypes do
                not match, or values are not tensors. Lists all problems.
            ShardingError: If `device_mesh` shards experts, or sharded tensors would have to be concatenated.
            UnknownArgumentError: If `state_dict` is not a mapping.
        """
        require_whole_experts(device_mesh)
        require_tensors(state_dict)
        matched = match(
            {key: TensorSpec(tuple(tensor.shape), tensor.dtype) for key, tensor in state_dict.items()},
            self.table_for(state_dict).get,
            self.specs,
            self.absent,
            self.tied,
            may_miss=lambda name: not strict,
            why_unexpected=lambda key: "the model has no such tensor",
        )
        if matched.problems:
            raise StateDictError("state dict does not fit the model", matched.problems)
        result = {
            name: own_tensors.assemble(name, spec.shape, matched.sources[name], state_dict)
            for name, spec in self.specs.items()
            if name in matched.sources
        }
        return result | {name: result[tied_name] for name, tied_name in matched.copies.items()}

    def to_hf(
        self,
        state_dict: Mapping[str, torch.Tensor],
        exclude_key_regex: str | None = None,
        quantization: bool = False,
        *,
        layout: Layout = "hub",
        **options: Any,
    ) -> dict[str, torch.Tensor]:
        """Convert the model's own tensors to Hugging Face tensors. Returns views if the layout allows it.

        A tied tensor that is passed under both names is returned under both.

        Args:
            state_dict: The model's own tensors by name, all or some.
            exclude_key_regex: Pattern of names to leave out, matched from their beginning (`re.match`). Applies to the
                Hugging Face names, and to names in `state_dict` that are not the model's.
            quantization: Must be False. True requests tensors of a quantized checkpoint, which is not supported.
            layout: Names and shapes to return.
            options: Keywords of trainers that have no effect here, see `trainer_options`.

        Raises:
            StateDictError: If names are not the model's, or shapes are not the parameters'.
            ShardingError: If this rank does not hold a complete Hugging Face tensor.
            UnknownArgumentError: If `quantization=True`, a keyword is unknown, or an argument is invalid.
        """
        check_options(quantization, options)
        require_tensors(state_dict)
        excluded = excluded_keys(exclude_key_regex)
        named = {own_name(name): tensor for name, tensor in state_dict.items()}
        model_tensors = {
            name: tensor for name, tensor in named.items() if name in self.specs or not excluded.match(name)
        }
        self.check_own(model_tensors)
        table = {name: tensor for name, tensor in self.layout(layout).items() if not excluded.match(name)}
        return own_tensors.read_all(table, model_tensors)

    def convert_single_tensor_to_hf(
        self,
        fqn: str,
        tensor: torch.Tensor,
        exclude_key_regex: str | None = None,
        quantization: bool = False,
        *,
        layout: Layout = "hub",
        **options: Any,
    ) -> list[tuple[str, torch.Tensor]]:
        """Return names and tensors of the Hugging Face tensors inside one own tensor, as views of `tensor`.

        Args:
            fqn: Name of the own tensor.
            tensor: A tensor of its shape.
            exclude_key_regex: See `to_hf`.
            quantization: See `to_hf`.
            layout: Names and shapes to return.
            options: See `to_hf`.

        Raises:
            StateDictError: If the name is unknown or the shape is wrong.
            ShardingError: See `to_hf`.
            UnknownArgumentError: See `to_hf`.
            ValueError: If the Hugging Face tensor also needs another parameter (a hub tensor that packs separate
                parameters of this model). Convert them together with `to_hf` or `iter_to_hf`.
        """
        check_options(quantization, options)
        excluded, fqn = excluded_keys(exclude_key_regex), own_name(fqn)
        if fqn not in self.specs and excluded.match(fqn):
            return []
        self.check_own({fqn: tensor})
        inside = [hf_tensor for hf_tensor in self.tensors_in(fqn, layout) if not excluded.match(hf_tensor.name)]
        for hf_tensor in inside:
            if len(hf_tensor.parameters) > 1:
                together = ", ".join(hf_tensor.parameters)
                raise ValueError(f"{hf_tensor.name} is made of {together}: convert them together with to_hf")
        check_reads(inside, {fqn: tensor})
        return [(hf_tensor.name, hf_tensor.read({fqn: tensor})) for hf_tensor in inside]

    def iter_to_hf(
        self, tensors: Iterable[tuple[str, torch.Tensor]], *, layout: Layout = "hub"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Convert a stream of the model's own tensors. Yields each Hugging Face tensor once all its parts have arrived.

        For trainers that gather one parameter after another. Only parts of incomplete Hugging Face tensors are kept.

        Args:
            tensors: Pairs of name and tensor of the model's own, in any order, each at most once.
            layout: Names and shapes to yield.

        Raises:
            StateDictError: If a name is unknown or repeated, or a shape is wrong, or, at the end, if parts are missing.
            UnknownArgumentError: If an item is not a pair.
        """
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        seen: set[str] = set()
        for wrapped_name, tensor in named_tensors(tensors):
            name = own_name(wrapped_name)
            self.check_own({name: tensor})
            if name in seen:
                raise StateDictError("a tensor came twice", [Problem(ProblemKind.DUPLICATED, name, "came before")])
            seen.add(name)
            for hf_tensor in self.tensors_in(name, layout):
                parts = waiting.setdefault(hf_tensor.name, {})
                parts[name] = tensor
                if len(parts) == len(hf_tensor.parameters):
                    check_reads([hf_tensor], parts)
                    yield hf_tensor.name, hf_tensor.read(waiting.pop(hf_tensor.name))
        problems = [
            Problem(
                ProblemKind.PARTIAL,
                name,
                f"is made of {', '.join(self.layout(layout)[name].parameters)}, of which only {', '.join(parts)} came",
            )
            for name, parts in waiting.items()
        ]
        if problems:
            raise StateDictError("a Hugging Face tensor lacks parts", problems)

    # A live model

    def hf_views(self, model: nn.Module, *, layout: Layout = "hub") -> dict[str, torch.Tensor]:
        """Return Hugging Face tensors that are views of `model`: writing to them changes the model.

        Tensors that are not a view of a single parameter (see `HFTensor`) are left out; use `to_hf` for them. For a
        sharded model, the tensors are DTensors over this rank's shards, without those that no placement can describe.
        Raises StateDictError if the model does not match the adapter, has PEFT adapters (`export_adapter` returns an
        adapter that leaves out merged weights), or has weights that are quantized or on meta.
        """
        own_tensors.require_no_peft(self._has_peft or any(peft_modules(model)))
        return self._views(model, layout)

    def export_plan(self, *, layout: Layout = "hub") -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Return name, shape and dtype of each tensor of `iter_export`, in order. Also for a model on meta."""
        own_tensors.require_no_peft(self._has_peft)
        own_tensors.require_stored(self.computed)
        own_tensors.require_unquantized(self.quantized)
        exported = own_tensors.for_engines(self.exported(layout), self.extra_modules)
        plan = [(name, tensor.shape, self.specs[tensor.parameters[0]].dtype) for name, tensor in exported.items()]
        return plan + [(name, spec.shape, spec.dtype) for name, spec in self._kept_in(layout).items()]

    def iter_export(
        self, model: nn.Module, max_bytes: int | None = None, *, layout: Layout = "hub"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every Hugging Face tensor of `model`, including persistent buffers, in the order of `export_plan`.

        Modules next to the decoder that the model's class does not have, such as a value head (`v_head`), are left out.
        Of tensors that are currently tied, only one is yielded. If weights were untied after this adapter was created,
        use `model.state_dict_adapter`, which returns an updated adapter.

        In the hub's layout, weights of multi-token prediction that the model keeps come last. Each is read from disk
        when it is yielded, and moved to the model's device. transformers' layout does not have them.

        Args:
            model: A model of this adapter's architecture and configuration. It may be wrapped (`torch.compile`, DDP,
                activation checkpointing).
            max_bytes: None yields views without copying. A number yields contiguous copies in buffers of at most that
                many bytes, for consumers that send buckets. A larger tensor gets a separate buffer. Sharded models
                always use buffers (default: 512 MiB), which are gathered one after another. Every rank receives every
                tensor and has to exhaust the iterator.

                A tensor that the consumer keeps is never overwritten. Its buffer stays in memory until the last tensor
                in it is freed, and a new buffer is allocated instead. Buffers whose tensors are all freed are reused.
                On a CPU, the model keeps the last two such buffers for its next export.
            layout: Names and shapes to yield.

        Raises:
            StateDictError: If the model does not match the adapter, has PEFT adapters, computes weights from other
                tensors (parametrizations, pruning), or has weights that are quantized or on meta (also offloaded ones).
        """
        own_tensors.require_no_peft(self._has_peft or any(peft_modules(model)))
        yield from self._export(model, max_bytes, layout)

    def _views(self, model: nn.Module, layout: Layout) -> dict[str, torch.Tensor]:
        """Implement `hf_views`."""
        inner = own_tensors.model_inside(model)
        exported = self.retied(inner).exported(layout)
        if (sharding := getattr(inner, "sharding", None)) is not None:
            return sharding.hf_views(inner, exported)
        model_tensors = self.own_tensors(model)
        own_tensors.require_values(inner, model_tensors)
        return {name: tensor.read(model_tensors) for name, tensor in exported.items() if self.is_zero_copy(tensor)}

    def _export(self, model: nn.Module, max_bytes: int | None, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
        """Implement `iter_export`."""
        own_tensors.require_stored(self.computed)
        if max_bytes is not None and type(max_bytes) is not int:
            raise UnknownArgumentError(f"max_bytes={max_bytes!r}: expected a whole number of bytes, or None")
        inner = own_tensors.model_inside(model)
        still_kept = kept_as(inner, self.mtp)
        kept_tensors = {name: still_kept[name] for name in self._kept_in(layout)}
        exported = own_tensors.for_engines(self.retied(inner).exported(layout), self.extra_modules)
        if (sharding := getattr(inner, "sharding", None)) is not None:
            yield from sharding.iter_export(inner, exported, max_bytes)
        else:
            model_tensors = self.own_tensors(model)
            own_tensors.require_values(inner, model_tensors)
            values = self._values(inner, model_tensors)
            is_sharded = any(isinstance(tensor, DTensor) for tensor in model_tensors.values())
            is_temporary = is_sharded or values is not model_tensors
            values = own_tensors.Gathered(values) if is_temporary else model_tensors
            yield from exported_values(inner, exported, model_tensors, values, max_bytes, one_at_a_time=is_temporary)
        device = next((parameter.device for parameter in model.parameters()), None)
        for name, tensor in kept_tensors.items():
            yield name, tensor.read().to(device, copy=max_bytes is not None)

    def _kept_in(self, layout: Layout) -> dict[str, TensorSpec]:
        return self.mtp if self.layout(layout) is self.hub else {}

    def _values(self, model: nn.Module, model_tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the tensors to export: the model's own."""
        return model_tensors


_adapters: WeakKeyDictionary[nn.Module, tuple[StateDictAdapter, Any]] = WeakKeyDictionary()


def adapter_of(model: PreTrainedModel) -> StateDictAdapter:
    """Return the adapter of an unsharded model. It is cached until the model's structure or its ties change."""
    if is_flattened(model):
        return StateDictAdapter(own_tensors.as_built(model))
    conversions = loaded_conversions(model)
    if model in _adapters:
        adapter, made_with = _adapters[model]
        is_same = layouts.has_own_tensors(model, adapter.specs) and adapter.tied == tied_names(model)
        is_same = is_same and adapter.mtp == kept_specs(model) and adapter._has_peft == any(peft_modules(model))
        is_same = is_same and adapter._stored == own_tensors.stored_formats(model)
        if is_same and made_with is conversions:
            return adapter
    _adapters[model] = StateDictAdapter(model), conversions
    return _adapters[model][0]
