"""Who is wrong, where, and why: the verdict on a cell that fails.

The same tokens are scored by everybody: the engine as it decoded, the engine in one prefill, the trainer, and transformers
in fp32 and in fp64, which is as near to the truth as one can compute. Whoever is further from fp64 than the precision he
computes in explains is the odd one out. What he does instead is guessed (see `explanations`); where in the model he parts
is looked up, if his modules can be seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nrl_models.consistency.cells import Cell, Settings
from nrl_models.consistency.explanations import Guesses, distance, explain
from nrl_models.consistency.measure import Measurement
from nrl_models.consistency.parting import Parting, first_parting
from nrl_models.consistency.quirks import Observation, QuirkFinder, no_quirks
from nrl_models.consistency.references import References
from nrl_models.consistency.relations import relation
from nrl_models.engines.base import Engine
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import NRLModelsError
from nrl_models.logprobs.metrics import consistency_metrics
from nrl_models.logprobs.sampling import Sampling
from nrl_models.parity.localise import localise

TRAINER, DECODE, PREFILL = "trainer", "engine decode", "engine prefill"

FLOOR_FACTOR = 5.0
"""A party may be this many times further from fp64 than transformers in the same precision is."""

MODULE_TOKENS = 256
"""Tokens for which modules are looked at; if they show nothing, the whole sequence is."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a disagreement comes from.

    Args:
        kind: `trainer`, `engine`, `engine decode`, `engine prefill` or `everybody` (who is wrong), `precision` (nobody
            is: the parties compute in different or too low a precision), `unstable` (transformers itself is far from
            fp64), `not finite` (NaN or infinite log-probabilities).
        odd: who is wrong.
        errors: for each party its `token_mult_prob_error` and largest difference against transformers in fp64.
        cause: what the odd one does instead, if that was found.
        module: the first module where the odd one parts, if that was found.
        detail: what is known about that module.
        quirks: known quirks that match.
        summary: all of it in a sentence.
    """

    kind: str
    odd: tuple[str, ...]
    errors: Mapping[str, tuple[float, float]]
    cause: str = ""
    module: str = ""
    detail: str = ""
    quirks: tuple[str, ...] = ()
    summary: str = ""

    def to_json(self) -> dict[str, Any]:
        """By name."""
        return asdict(self)


class Judge:
    """Gives verdicts for one engine and one trainer.

    Args:
        engine, trainer: the parties.
        references: transformers' models of the same weights.
        settings: how was sampled.
        quirks: finds known quirks.
        load_format: how the engine was started.
    """

    def __init__(
        self,
        engine: Engine,
        trainer: HFEngine,
        references: References,
        settings: Settings,
        *,
        quirks: QuirkFinder = no_quirks,
        load_format: str = "auto",
    ) -> None:
        self.engine, self.trainer, self.references, self.settings = engine, trainer, references, settings
        self.quirks, self.load_format = quirks, load_format

    def judge(self, cell: Cell, found: Measurement) -> Verdict:
        """The verdict on one measurement of a cell; of one that agrees, kind `precision`."""
        sampling = self.settings.sampling_of(cell)
        rows = _worst_rows(found, 1 if cell.length > 2_000 else 2)
        tokens, generated = found.tokens[rows], found.decode.shape[1]
        parties = {TRAINER: found.trainer[rows], DECODE: found.decode[rows]}
        if found.prefill is not None:
            parties[PREFILL] = found.prefill[rows]
        exact = self._reference(torch.float64, tokens, generated, sampling)
        single = self._reference(torch.float32, tokens, generated, sampling)
        errors = {name: _error(values, exact) for name, values in parties.items()}
        errors["transformers fp32"] = _error(single, exact)
        broken = tuple(name for name, values in parties.items() if _is_broken(values))
        if broken:
            return self._finish("not finite", broken, errors, "", None, "")
        if errors["transformers fp32"][0] > self.settings.threshold:
            return self._finish("unstable", (), errors, "", None, "")
        floors = {name: self._floor(name, tokens, generated, sampling, exact, single) for name in parties}
        odd = tuple(name for name, values in parties.items() if distance(values, exact) > floors[name])
        if not odd:
            return self._finish("precision", (), errors, self._about_precision(), None, "")
        guesses = Guesses(self.references, tokens, generated, sampling)
        guess = explain(parties[odd[0]], single, guesses(), floors[odd[0]])
        cause = guess.text if guess else ""
        parting, detail = self._where(odd, tokens)
        kind = odd[0] if len(odd) == 1 else "engine" if TRAINER not in odd else "everybody"
        return self._finish(kind, odd, errors, cause, parting, detail)

    def _reference(self, dtype: torch.dtype, tokens: torch.Tensor, generated: int, sampling: Sampling) -> torch.Tensor:
        engine = HFEngine(self.references.model(dtype), "reference", max_length=tokens.shape[1])
        scores = engine.score(tokens.tolist(), sampling, last=generated)
        return torch.tensor([row[-generated:] for row in scores], dtype=torch.float64)

    def _floor(
        self,
        party: str,
        tokens: torch.Tensor,
        generated: int,
        sampling: Sampling,
        exact: torch.Tensor,
        single: torch.Tensor,
    ) -> float:
        """How far from fp64, in nats a token, a party may be in the precision it computes in."""
        dtype = self._dtype(party)
        if dtype in (None, torch.float32, torch.float64):
            same_precision = single
        else:
            same_precision = self._reference(dtype, tokens, generated, sampling)
        return FLOOR_FACTOR * max(distance(same_precision, exact), 1e-6)

    def _dtype(self, party: str) -> torch.dtype | None:
        return (self.trainer if party == TRAINER else self.engine).capabilities().dtype

    def _about_precision(self) -> str:
        engine, trainer = self._dtype(DECODE), self._dtype(TRAINER)
        if engine is not None and engine != trainer:
            return f"the engine computes in {_name(engine)} and the trainer in {_name(trainer)}"
        return f"both compute in {_name(trainer)}"

    def _where(self, odd: Sequence[str], tokens: torch.Tensor) -> tuple[Parting | None, str]:
        """The first module where the odd one parts, and what can be said about it."""
        for length in dict.fromkeys((min(MODULE_TOKENS, tokens.shape[1]), tokens.shape[1])):
            some = tokens[:1, :length]
            try:
                if TRAINER in odd:
                    found, detail = self._in_trainer(some)
                elif odd == (DECODE,):
                    found, detail = self._in_decode(some)
                else:
                    found, detail = self._in_engine(some)
            except NRLModelsError as error:
                return None, f"where it parts is not known: {error}"
            if found is not None:
                return found, detail
        return None, "its modules show no difference in one prefill"

    def _in_trainer(self, tokens: torch.Tensor) -> tuple[Parting | None, str]:
        dtype = self.trainer.model.dtype
        model, reference = self.trainer.model, self.references.model(dtype)
        culprits = localise(model, reference, {"input_ids": tokens.to(model.device)}, max_culprits=3)
        if not culprits:
            return None, ""
        first = culprits[0]
        parting = Parting(first.module, first.class_name, first.max_diff, after="")
        detail = str(first)
        if first.weights and (held := _holds(model, reference, first.weights[0])):
            detail += f"; {first.weights[0]} holds {held}"
        return parting, detail

    def _in_engine(self, tokens: torch.Tensor) -> tuple[Parting | None, str]:
        ids = tokens[0].tolist()
        dtype = self.engine.capabilities().dtype or torch.float32
        calls = self.engine.module_calls(ids)
        expected = HFEngine(self.references.model(torch.float32, combined=True)).module_calls(ids)
        parting = first_parting(calls, expected, dtype)
        if parting is None:
            return None, ""
        before = self.references.with_previous_weights(torch.float32, combined=True)
        return parting, relation(parting, calls, expected, before, dtype)

    def _in_decode(self, tokens: torch.Tensor) -> tuple[Parting | None, str]:
        """Decoding against prefill, within the engine."""
        prompt = tokens[0].tolist()
        step = self.engine.generate([prompt[:-1]], Sampling(0.0), max_new_tokens=1)[0]
        stepwise = self.engine.module_calls(step.sequence, decode_last=True)
        at_once = self.engine.module_calls(step.sequence)
        dtype = self.engine.capabilities().dtype or torch.float32
        return first_parting(stepwise, at_once, dtype), "decoding one token after a cached prompt, against one prefill"

    def _finish(
        self,
        kind: str,
        odd: tuple[str, ...],
        errors: Mapping[str, tuple[float, float]],
        cause: str,
        parting: Parting | None,
        detail: str,
    ) -> Verdict:
        module = parting.module if parting else ""
        where = str(parting) if parting else ""
        detail = "; ".join(one for one in (where, detail) if one)
        seen = Observation(
            self.trainer.model.config, odd, kind, module, cause, self.engine.describe(), self.load_format
        )
        quirks = tuple(self.quirks(seen))
        return Verdict(kind, odd, errors, cause, module, detail, quirks, _sentence(kind, odd, cause, detail, quirks))


def _worst_rows(found: Measurement, count: int) -> list[int]:
    """The sequences with the largest disagreements, worst first."""
    difference = (found.trainer - found.decode).abs()
    if found.prefill is not None:
        difference = torch.maximum(difference, (found.trainer - found.prefill).abs())
    score = difference.nan_to_num(nan=math.inf).mean(1)
    return score.argsort(descending=True)[:count].tolist()


def _error(party: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    found = consistency_metrics(party, exact)
    return found.token_mult_prob_error, found.max


def _is_broken(values: torch.Tensor) -> bool:
    return bool(values.isnan().any())


def _holds(model: Any, reference: Any, name: str) -> str:
    """Which of the reference's tensors a wrong tensor of the model is, if it is one."""
    tensors = model.state_dict_adapter.to_hf(model.state_dict(), layout="transformers")
    wrong = tensors[name]
    for other, tensor in reference.state_dict().items():
        if other != name and tensor.shape == wrong.shape and torch.equal(tensor.to(wrong.device), wrong):
            return f"what belongs in {other}"
    return ""


def _sentence(kind: str, odd: Sequence[str], cause: str, detail: str, quirks: Sequence[str]) -> str:
    who = " and ".join(odd)
    if kind == "precision":
        text = f"Nobody is wrong beyond the precision he computes in: {cause}"
    elif kind == "unstable":
        text = "The model itself is unstable: transformers in fp32 is as far from fp64 as this"
    elif kind == "not finite":
        text = f"Log-probabilities of {who} are not finite"
    else:
        text = f"The odd one out is {who}"
        text += f": it computes as if {cause}" if cause else ""
    text += f". It parts {detail}" if detail and kind not in ("precision", "unstable", "not finite") else ""
    return text + ("" if text.endswith(".") else ".") + "".join(f" Known quirk: {one}" for one in quirks)


def _name(dtype: torch.dtype | None) -> str:
    return "an unknown precision" if dtype is None else str(dtype).removeprefix("torch.")
