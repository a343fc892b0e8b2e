"""Megatron-Core's layout of a decoder: tensor names, interleaving, and the tensors of each rank.

The layout is a table of views of the tensors of transformers' modules:

- `linear_qkv` has the rows of a query group together (its queries, its key, its value).
- `linear_fc1` has the gate's rows before those of the other half.
- Ranks of tensor parallelism hold complete query groups, and a share of either half of `linear_fc1`.
- Pipeline stages number their layers from 0, and ranks of expert parallelism their experts.

Names and shapes are those of `GPTModel` in `megatron.core`; `tests/distributed/test_megatron.py` compares them. A
layout does not show whether Megatron computes the same as the model; `nrl_models.megatron.gpt_model` verifies that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from nrl_models.common.config.walk import values_of_layers
from nrl_models.common.process_state import no_collections
from nrl_models.common.state_dict.tables import LayoutTables
from nrl_models.common.views.traced_tensor import TracedTensor
from nrl_models.common.views.view import HFTensor, Piece
from nrl_models.errors import Problem, ProblemKind, StateDictError
from nrl_models.megatron.layer_rules import (
    ATTENTION,
    EXPERTS,
    FIRST_LINEARS,
    HEAD,
    LATENT_ATTENTION,
    MLP,
    OUTSIDE,
    ROUTER,
    Rule,
    Split,
)


@dataclass(frozen=True, slots=True)
class Share:
    """The `index`-th of `of` equal shares, counted from 0."""

    index: int = 0
    of: int = 1


WHOLE = Share()
"""Share of an unsplit dimension."""


@dataclass(frozen=True, slots=True)
class MegatronRank:
    """Shares and module names of a Megatron rank; default: the complete model.

    Args:
        tp: Share of each layer (tensor parallelism).
        pp: Share of the layers (pipeline parallelism), in stages of equal numbers of layers.
        ep: Share of the experts (expert parallelism).
        etp: Share of each expert (expert tensor parallelism); Megatron's default is `tp`.
        transformer_engine: Whether layers are those of Transformer Engine, which store a norm's weight in the following
            linear (`linear_qkv.layer_norm_weight`). Otherwise those of `get_gpt_layer_local_spec`.
        grouped_experts: Whether experts are those of `TEGroupedMLP` (`experts.linear_fc1.weight0`). Otherwise those of
            `SequentialMLP` (`experts.local_experts.0.linear_fc1.weight`).
        vocabulary: Padded vocabulary size of embeddings and head over all ranks (`padded_vocab_size`); None without
            padding. Padding is zero, and is ignored when converting back.

    Raises:
        ValueError: If a share is out of range.
    """

    tp: Share = WHOLE
    pp: Share = WHOLE
    ep: Share = WHOLE
    etp: Share | None = None
    transformer_engine: bool = True
    grouped_experts: bool = True
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "etp"):
            share = getattr(self, name)
            if share is not None and not 0 <= share.index < share.of:
                raise ValueError(f"{name}={share}: expected an index from 0 to {share.of - 1}")

    def table(self, adapter: LayoutTables) -> dict[str, HFTensor]:
        """Return the rank's tensors of a model by Megatron's names; see `OtherLayout.table`.

        Raises:
            StateDictError: If Megatron's GPT model has no equivalent of some tensors, or they cannot be divided. Lists
                all of them.
        """
        return _Table(adapter, self).build()

    @property
    def of_experts(self) -> Share:
        """Share of each expert."""
        return self.tp if self.etp is None else self.etp


_IN_LAYER = re.compile(r"(.*?)layers\.(\d+)\.(.*)")


@dataclass
class _Table:
    adapter: LayoutTables
    rank: MegatronRank
    problems: list[Problem] = field(default_factory=list)

    @no_collections()
    @torch.inference_mode(False)  # where operations on traced tensors do not decompose
    def build(self) -> dict[str, HFTensor]:
        layers, outside, base = self._sorted()
        share = self._part("layers", len(layers), self.rank.pp)
        tensors: dict[str, TracedTensor] = {}
        first, last = self.rank.pp.index == 0, self.rank.pp.index == self.rank.pp.of - 1
        inside = self._outside(outside, base)
        embeddings, head = inside.pop("embedding.word_embeddings.weight", None), inside.pop(HEAD, None)
        if embeddings is not None and first:
            tensors["embedding.word_embeddings.weight"] = embeddings
        for number, layer in layers.items():
            made = dict(_Layer(self, layer).build())
            if number in share:
                tensors |= {f"decoder.layers.{number - share.start}.{name}": tensor for name, tensor in made.items()}
        if last:
            tensors |= inside
            output = head if head is not None else embeddings if not first else None
            if output is not None:
                tensors["output_layer.weight"] = output
        if self.problems:
            raise StateDictError("the model does not fit Megatron's layout", self.problems)
        return {name: HFTensor(name, tuple(tensor.shape), tensor.pieces) for name, tensor in tensors.items()}

    def _sorted(self) -> tuple[dict[int, dict[str, TracedTensor]], dict[str, TracedTensor], str]:
        """Return each layer's tensors by the name after its number, tensors outside layers, and the base prefix."""
        layers: dict[int, dict[str, TracedTensor]] = {}
        outside: dict[str, TracedTensor] = {}
        base: str | None = None
        for name, tensor in self.adapter.transformers.items():
            dtype = self.adapter.specs[tensor.parameters[0]].dtype
            traced = TracedTensor.of_pieces(tensor.shape, dtype, tensor.pieces)
            match = _IN_LAYER.fullmatch(name)
            if match and match[1] == (base := match[1] if base is None else base):
                layers.setdefault(int(match[2]), {})[match[3]] = traced
            else:
                outside[name] = traced
        return layers, outside, base or ""

    def _outside(self, outside: dict[str, TracedTensor], base: str) -> dict[str, TracedTensor]:
        """Return tensors outside the layers, as this rank would hold them. The head's name is `HEAD`."""
        tensors = {}
        for theirs, names in OUTSIDE.items():
            name = next((base + name for name in names if base + name in outside), None)
            if name is not None:
                tensor = outside.pop(name)
                tensors[theirs] = self.words(name, tensor) if theirs.startswith("embedding") else tensor
        head = outside.pop(HEAD, None)
        if head is not None and HEAD not in self.adapter.tied:
            tensors[HEAD] = self.words(HEAD, head)
        for name in outside:
            self.no_place(name)
        return tensors

    def no_place(self, name: str) -> None:
        """Record a tensor without an equivalent in Megatron."""
        detail = "has no place in Megatron-Core's GPT model"
        if not any(problem.subject == name for problem in self.problems):
            self.problems.append(Problem(ProblemKind.UNSUPPORTED, name, detail))

    def _part(self, subject: str, size: int, share: Share, things: str = "") -> range:
        """Return the indices of a share of `size` parts. Record a problem with `subject` if they do not divide."""
        if size % share.of:
            is_many = f"has {size} {things}" if things else f"are {size}"
            detail = f"{is_many}, which do not divide over {share.of} ranks"
            problem = Problem(
                ProblemKind.INDIVISIBLE, subject, detail, None, f"choose a number of ranks that divides {size}"
            )
            if problem not in self.problems:
                self.problems.append(problem)
            return range(size)
        part = size // share.of
        return range(share.index * part, (share.index + 1) * part)

    def rows(self, name: str, tensor: torch.Tensor, share: Share, dim: int = 0) -> Any:
        """Return a share of a tensor along a dimension."""
        part = self._part(name, tensor.shape[dim], share, ("rows", "columns")[dim])
        return tensor.narrow(dim, part.start, len(part))

    def words(self, name: str, tensor: TracedTensor) -> Any:
        """Return this rank's rows of embeddings or head, padded if it has fewer tokens than its share."""
        size, padded = tensor.shape[0], self.rank.vocabulary
        if padded is None or padded == size:
            return self.rows(name, tensor, self.rank.tp)
        if padded < size:
            detail = f"has {size} rows, and a padded vocabulary of {padded} has no room for them"
            advice = f"choose a vocabulary of {size} or more"
            self.problems.append(Problem(ProblemKind.SHAPE, name, detail, None, advice))
            return tensor
        share = self._part("padded vocabulary", padded, self.rank.tp, "rows")
        start, stop = min(share.start, size), min(share.stop, size)
        held: Any = tensor.narrow(0, start, stop - start)
        if stop - start == len(share):
            return held
        region = ("narrow", (0, 0, stop - start))
        pieces = tuple(Piece(piece.view, (region, *piece.region)) for piece in held.pieces)
        return TracedTensor.of_pieces((len(share), *tensor.shape[1:]), tensor.dtype, pieces)

    def groups(self, count: int) -> range:
        """Return the indices of this rank's query groups."""
        return self._part("query groups", count, self.rank.tp)

    def experts(self, count: int) -> range:
        """Return the indices of this rank's experts."""
        return self._part("experts", count, self.rank.ep)


class _Layer:
    """A layer's tensors. Building a module removes its tensors. Tensors that remain have no equivalent."""

    def __init__(self, table: _Table, tensors: dict[str, TracedTensor]) -> None:
        self.table, self.rank, self.tensors = table, table.rank, tensors

    def build(self) -> Iterator[tuple[str, Any]]:
        latent = any(name.startswith("self_attn.kv_a_proj") for name in self.tensors)
        mixture = "mlp.experts.down_proj" in self.tensors
        if not latent:
            yield from self._qkv()
        for rules in (LATENT_ATTENTION if latent else ATTENTION, EXPERTS if mixture else MLP):
            for name, rule in rules.items():
                yield from self._module(name, rule)
        if mixture:
            yield from self._experts()
            for shared in ("mlp.shared_experts.", "mlp.shared_expert."):
                yield from self._first_linear("mlp.shared_experts.linear_fc1", shared, self.rank.tp)
        else:
            yield from self._first_linear("mlp.linear_fc1", "mlp.", self.rank.tp)
        for name in self.tensors:
            self.table.no_place(f"layers.*.{name}")

    def _module(self, name: str, rule: Rule) -> Iterator[tuple[str, Any]]:
        """Yield weight and bias of a module with an equivalent in transformers."""
        for kind in ("weight", "bias"):
            theirs = next((f"{prefix}.{kind}" for prefix in rule.names if f"{prefix}.{kind}" in self.tensors), None)
            if theirs is None:
                continue
            tensor: Any = self.tensors.pop(theirs)
            if rule.split is Split.ROWS:
                tensor = self.table.rows(theirs, tensor, self.rank.tp)
            elif rule.split is Split.COLUMNS and kind == "weight":
                tensor = self.table.rows(theirs, tensor, self.rank.tp, 1)
            fused = rule.fused if self.rank.transformer_engine else ""
            yield f"{fused or name + '.'}{kind}", tensor

    def _qkv(self) -> Iterator[tuple[str, Any]]:
        """Yield the packed projection: for each query group the rows of its queries, its key and its value."""
        config: Any = self.table.adapter.config.get_text_config(decoder=True)
        (heads, *more), (count, *more_groups) = (
            values_of_layers(config, key) or (None,) for key in ("num_attention_heads", "num_key_value_heads")
        )
        count = count or heads
        if more or more_groups or not (isinstance(heads, int) and isinstance(count, int)):
            return  # without query groups, or if layers have different ones, there is no equivalent
        for kind in ("weight", "bias"):
            parts = self._taken([f"self_attn.{name}_proj.{kind}" for name in "qkv"])
            if not parts and (packed := self.tensors.pop(f"self_attn.qkv_proj.{kind}", None)) is not None:
                size = packed.shape[0] // (heads + 2 * count)
                parts = [*packed.split([size * heads, size * count, size * count])]
            if parts:
                shares = [(part, part.shape[0] // count) for part in parts]
                rows = [
                    part.narrow(0, group * size, size) for group in self.table.groups(count) for part, size in shares
                ]
                yield f"self_attention.linear_qkv.{kind}", torch.cat(rows)

    def _first_linear(self, theirs: str, prefix: str, share: Share) -> Iterator[tuple[str, Any]]:
        """Yield the first linear of an MLP. If it is gated: a share of the gate, then a share of the other half."""
        for kind in ("weight", "bias"):
            for names in FIRST_LINEARS:
                if parts := self._taken([f"{prefix}{name}.{kind}" for name in names]):
                    if names == ("gate_up_proj",):
                        parts = list(parts[0].chunk(2))
                    name = f"{prefix}{names[0]}.{kind}"
                    yield f"{theirs}.{kind}", torch.cat([self.table.rows(name, part, share) for part in parts])
                    break

    def _experts(self) -> Iterator[tuple[str, Any]]:
        """Yield the router and each expert of this rank. In transformers, the experts of a layer are stacked."""
        for name, names in ROUTER.items():
            if (key := next((key for key in names if key in self.tensors), None)) is not None:
                yield name, self.tensors.pop(key)
        down = self.tensors.pop("mlp.experts.down_proj")
        first = self.tensors.pop("mlp.experts.gate_up_proj", None)
        gated = first is not None
        if first is None:
            first = self.tensors.pop("mlp.experts.up_proj")
        for local_index, expert in enumerate(self.table.experts(down.shape[0])):
            halves = first[expert].chunk(2) if gated else (first[expert],)
            share = self.rank.of_experts
            rows = [self.table.rows("mlp.experts.gate_up_proj", half, share) for half in halves]
            yield self._expert(local_index, "linear_fc1"), torch.cat(rows)
            yield (
                self._expert(local_index, "linear_fc2"),
                self.table.rows("mlp.experts.down_proj", down[expert], share, 1),
            )

    def _expert(self, local_index: int, linear: str) -> str:
        if self.rank.grouped_experts:
            return f"mlp.experts.{linear}.weight{local_index}"
        return f"mlp.experts.local_experts.{local_index}.{linear}.weight"

    def _taken(self, names: list[str]) -> list[torch.Tensor]:
        """Return the tensors of these names if all exist."""
        if not all(name in self.tensors for name in names):
            return []
        return [self.tensors.pop(name) for name in names]
