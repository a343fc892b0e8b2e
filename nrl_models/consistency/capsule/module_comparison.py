"""Modules of a wrong side and of the reference, compared on the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch

from nrl_models.common.checkpoint.json_reading import parsed
from nrl_models.common.dtypes import dtype_name
from nrl_models.consistency.divergence import Divergence, ModulePair, classify, first_of, match_names, module_pairs
from nrl_models.engines.engine_types import LOGITS, ModuleCall
from nrl_models.parity.localize import SearchRound, culprits_of, difference_of

Calls = Mapping[str, ModuleCall]


class ComparedSide(StrEnum):
    """Modules that are compared with the reference's."""

    TRAINER = "trainer"
    ENGINE = "engine"
    DECODE = "decode"
    """The engine's modules in a decoding step, compared with its own prefill."""


@dataclass(frozen=True, kw_only=True)
class ModuleComparison:
    """Numbers for every module, and the tensors that they were computed from.

    A capsule has the numbers of all modules, but the tensors of some.

    Args:
        side: The compared modules.
        dtype: Dtype of the side.
        pairs: Errors of modules of an engine.
        rounds: Differences of modules of the trainer.
        weights: Names of the trainer's weights that differ from the reference's.
        owner: The reference's tensor that the trainer has under the name of the first wrong weight.
        expected, actual: Calls of the reference's modules and of the side's, both by the reference's names.
    """

    side: ComparedSide
    dtype: torch.dtype
    pairs: tuple[ModulePair, ...] = ()
    rounds: tuple[SearchRound, ...] = ()
    weights: tuple[str, ...] = ()
    owner: str = ""
    expected: Calls = field(default_factory=dict, repr=False)
    actual: Calls = field(default_factory=dict, repr=False)

    @classmethod
    def of_engine(cls, side: ComparedSide, actual: Calls, expected: Calls, dtype: torch.dtype) -> ModuleComparison:
        """Compare modules of an engine, see `module_pairs`."""
        names = match_names(actual, expected)
        return cls(
            side=side,
            dtype=dtype,
            pairs=tuple(module_pairs(actual, expected, dtype)),
            expected={name: expected[name] for name in names},
            actual={name: actual[other] for name, other in names.items()},
        )

    def divergence(self) -> Divergence | None:
        """Return the first module that diverges, without a pattern; None if there is none."""
        if self.side is not ComparedSide.TRAINER:
            return first_of(self.pairs, self.dtype)
        culprits = culprits_of(self.rounds, self.weights)
        if not culprits:
            return None
        first = culprits[0]
        detail = first.cause
        if first.weights and self.owner:
            detail += f"; {first.weights[0]} holds what belongs in {self.owner}"
        if len(culprits) > 1:
            detail += f"; then {', '.join(culprit.module for culprit in culprits[1:])}"
        return Divergence(
            first.module, first.class_name, first.max_diff, relative=False, weights=first.weights, detail=detail
        )

    def classified(
        self, divergence: Divergence, output_before: Callable[[str, ModuleCall], torch.Tensor | None]
    ) -> Divergence | None:
        """Add the pattern to a divergence, see `classify`; None if the module's tensors are not recorded."""
        if divergence.module not in self.actual:
            return None
        return classify(divergence, self.actual, self.expected, output_before, self.dtype)

    def recomputed(self) -> ModuleComparison:
        """Return the comparison with the numbers of all recorded tensors computed again."""
        if self.side is ComparedSide.TRAINER:
            again = {
                name: difference_of(name, call.class_name, self.expected[name], call, self.dtype)
                for name, call in self.actual.items()
            }
            rounds = [
                replace(first, differences=tuple(again.get(each.module, each) for each in first.differences))
                for first in self.rounds[:1]
            ]
            return replace(self, rounds=(*rounds, *self.rounds[1:]))
        pairs = {pair.module: pair for pair in module_pairs(self.actual, self.expected, self.dtype)}
        return replace(self, pairs=tuple(pairs.get(pair.module, pair) for pair in self.pairs))

    def keeping(self, names: set[str]) -> ModuleComparison:
        """Return the comparison with the tensors of these modules only."""
        return replace(
            self,
            expected={name: call for name, call in self.expected.items() if name in names},
            actual={name: call for name, call in self.actual.items() if name in names},
        )

    def neighbors(self, module: str, block: str) -> list[set[str]]:
        """Return the modules whose tensors a replay of this divergence reads, the most important first.

        Args:
            module: The first module that diverges.
            block: The block that it is in.
        """
        divergence = self.divergence()
        essential = {module, *([divergence.after] if divergence is not None else [])}
        if module == LOGITS and module in self.expected:  # compared with modules that read the same hidden states
            hidden = self.expected[module].inputs[0]
            essential |= {name for name, call in self.expected.items() if call.inputs and call.inputs[0] is hidden}
        inside = {name for name in self.expected if name == block or name.startswith(f"{block}.")}
        return [essential & self.expected.keys(), inside]

    def to_json(self) -> dict[str, Any]:
        """Return everything but the tensors."""
        return {
            "side": self.side,
            "dtype": dtype_name(self.dtype),
            "pairs": [asdict(pair) for pair in self.pairs],
            "rounds": [asdict(search_round) for search_round in self.rounds],
            "weights": list(self.weights),
            "owner": self.owner,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], expected: Calls, actual: Calls) -> ModuleComparison:
        """Parse the output of `to_json`."""
        return cls(
            side=ComparedSide(content["side"]),
            dtype=getattr(torch, content["dtype"]),
            pairs=parsed(tuple[ModulePair, ...], content["pairs"]),
            rounds=parsed(tuple[SearchRound, ...], content["rounds"]),
            weights=tuple(content["weights"]),
            owner=content["owner"],
            expected=expected,
            actual=actual,
        )
