"""Who is wrong, where, and why: the verdict on a cell that fails.

The same tokens are scored by everybody: the engine as it decoded, the engine in one prefill, the trainer, and
transformers in fp32 and in fp64, which is as near to the truth as one can compute. Whoever is further from fp64 than
the precision it computes in explains is the odd one out. What that party does instead is guessed (see `explanations`);
where in the model it diverges is looked up, if its modules can be seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from nrl_models.consistency.cells import Cell
from nrl_models.consistency.divergence import Divergence, Relation, first_divergence, relation
from nrl_models.consistency.explanations import Guesses, distance
from nrl_models.consistency.measure import Measurement, Meter, order_by_error
from nrl_models.consistency.references import References
from nrl_models.engines.base import final_scores
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import NRLModelsError
from nrl_models.logprobs.metrics import consistency_metrics, finite_or_none
from nrl_models.logprobs.sampling import Sampling
from nrl_models.parity.localise import localise
from nrl_models.quirks import CATALOGUE, Subject

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
        module: the first module where the odd one diverges, if that was found.
        detail: where it diverges and what is known about that, in words.
        load_format: how the engine was started: `auto` or `dummy`.
        quirks: for each known quirk that matches, its name and what to do.
        relation: of what the engine's module returns to what is right.
    """

    kind: str
    odd: tuple[str, ...]
    errors: Mapping[str, tuple[float, float]]
    cause: str = ""
    module: str = ""
    detail: str = ""
    load_format: str = "auto"
    quirks: tuple[str, ...] = ()
    relation: Relation = ""

    @property
    def summary(self) -> str:
        """All of it in a few sentences."""
        who = " and ".join(self.odd)
        if self.kind == "precision":
            sentences = [f"Nobody is wrong beyond the precision they compute in: {self.cause}"]
        elif self.kind == "unstable":
            sentences = ["The model itself is unstable: transformers in fp32 is as far from fp64 as this"]
        elif self.kind == "not finite":
            sentences = [f"Log-probabilities of {who} are not finite"]
        else:
            as_if = f": it computes as if {self.cause}" if self.cause else ""
            sentences = [f"The odd one out is {who}{as_if}", self.detail]
        sentences += [f"Known quirk: {quirk}" for quirk in self.quirks]
        return " ".join(f"{sentence.removesuffix('.')}." for sentence in sentences if sentence)

    def to_json(self) -> dict[str, Any]:
        """By name, with numbers that JSON lacks as None."""
        errors = {name: [finite_or_none(value) for value in pair] for name, pair in self.errors.items()}
        return asdict(self) | {"errors": errors, "summary": self.summary}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Verdict:
        """What `to_json` gave."""
        errors = {party: tuple(error) for party, error in content["errors"].items()}
        lists = {name: tuple(content[name]) for name in ("odd", "quirks")}
        return cls(**{name: value for name, value in content.items() if name != "summary"} | lists | {"errors": errors})


class Judge:
    """Gives verdicts for one engine and one trainer.

    Args:
        meter: measured the parties.
        references: transformers' models of the same weights.
        load_format: how the engine was started.
    """

    def __init__(self, meter: Meter, references: References, load_format: str = "auto") -> None:
        self.engine, self.trainer, self.settings = meter.engine, meter.trainer, meter.settings
        self.references, self.load_format = references, load_format

    def judge(self, cell: Cell, found: Measurement) -> Verdict:
        """The verdict on one measurement of a cell; of one that agrees, kind `precision`."""
        sampling = self.settings.sampling_of(cell)
        tokens, parties = _case(found, self.settings.threshold, 1 if cell.length > 2_000 else 2)
        generated = found.decode.shape[1]
        exact = self._reference(torch.float64, tokens, generated, sampling)
        single = self._reference(torch.float32, tokens, generated, sampling)
        errors = {name: _error(values, exact) for name, values in parties.items()}
        errors["transformers fp32"] = _error(single, exact)
        broken = tuple(
            name
            for name, values in parties.items()
            if values.isnan().any() or (name == DECODE and values.isinf().any())  # what was sampled was possible
        )
        if broken:
            return self._finish("not finite", broken, errors)
        if errors["transformers fp32"][0] > self.settings.threshold:
            return self._finish("unstable", (), errors)
        odd, floors, looks_like = [], {}, ""
        for name, values in parties.items():
            off = distance(values, exact)
            for dtype in self._dtypes(name):
                reference = single if dtype == torch.float32 else self._reference(dtype, tokens, generated, sampling)
                floors[name] = FLOOR_FACTOR * max(distance(reference, exact), 1e-6)
                if off <= floors[name]:
                    looks_like = looks_like or (_name(dtype) if self._dtype(name) is None else "")
                    break
            else:
                odd.append(name)
        if not odd:
            return self._finish("precision", (), errors, self._about_precision(looks_like))
        guesses = Guesses(self.references, tokens, generated, sampling)
        cause = guesses.explain(parties[odd[0]], single, floors[odd[0]])
        kind = odd[0] if len(odd) == 1 else "engine" if TRAINER not in odd else "everybody"
        return self._finish(kind, tuple(odd), errors, cause, self._where(odd, tokens))

    def _reference(self, dtype: torch.dtype, tokens: torch.Tensor, generated: int, sampling: Sampling) -> torch.Tensor:
        engine = HFEngine(self.references.model(dtype), "reference", max_length=tokens.shape[1])
        return final_scores(engine, tokens, generated, sampling)

    def _dtypes(self, party: str) -> tuple[torch.dtype, ...]:
        """What a party may compute in, most precise first: what it says, or any if it does not say."""
        dtype = self._dtype(party)
        if dtype is None:
            return torch.float32, torch.float16, torch.bfloat16
        return (dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32,)

    def _dtype(self, party: str) -> torch.dtype | None:
        return (self.trainer if party == TRAINER else self.engine).capabilities().dtype

    def _about_precision(self, looks_like: str) -> str:
        engine, trainer = self._dtype(DECODE), self._dtype(TRAINER)
        if engine == trainer:
            return f"both compute in {_name(trainer)}"
        says = f"in what looks like {looks_like}" if engine is None else f"in {_name(engine)}"
        return f"the engine computes {says} and the trainer in {_name(trainer)}"

    def _where(self, odd: Sequence[str], tokens: torch.Tensor) -> Divergence | str:
        """The first module where the odd one diverges, or why none is known."""
        only_decoding = tuple(odd) == (DECODE,)
        look = self._in_trainer if TRAINER in odd else self._in_decode if only_decoding else self._in_engine
        for length in dict.fromkeys((min(MODULE_TOKENS, tokens.shape[1]), tokens.shape[1])):
            try:
                found = look(tokens[:1, :length])
            except NRLModelsError as error:
                return f"Where it diverges cannot be seen: {error}"
            if found is not None:
                return found
        return "None of its modules diverges"

    def _in_trainer(self, tokens: torch.Tensor) -> Divergence | None:
        dtype = self.trainer.model.dtype
        model, reference = self.trainer.model, self.references.model(dtype)
        culprits = localise(model, reference, {"input_ids": tokens.to(model.device)}, max_culprits=3)
        if not culprits:
            return None
        first = culprits[0]
        detail = first.cause
        if first.weights and (held := _holds(model, reference, first.weights[0])):
            detail += f"; {first.weights[0]} holds {held}"
        if len(culprits) > 1:
            detail += f"; then {', '.join(culprit.module for culprit in culprits[1:])}"
        return Divergence(first.module, first.class_name, first.max_diff, after="", relative=False, detail=detail)

    def _in_engine(self, tokens: torch.Tensor) -> Divergence | None:
        ids = tokens[0].tolist()
        dtype = self.engine.capabilities().dtype or torch.float32
        calls = self.engine.module_calls(ids)
        expected = HFEngine(self.references.model(torch.float32, combined=True)).module_calls(ids)
        divergence = first_divergence(calls, expected, dtype)
        if divergence is None:
            return None
        before = self.references.with_previous_weights(torch.float32, combined=True)
        known, words = relation(divergence, calls, expected, before, dtype)
        return replace(divergence, relation=known, detail=words)

    def _in_decode(self, tokens: torch.Tensor) -> Divergence | None:
        """Decoding against prefill, within the engine."""
        prompt = tokens[0].tolist()
        step = self.engine.generate([prompt[:-1]], Sampling(0.0), max_new_tokens=1)[0]
        stepwise = self.engine.module_calls(step.sequence, decode_last=True)
        at_once = self.engine.module_calls(step.sequence)
        dtype = self.engine.capabilities().dtype or torch.float32
        found = first_divergence(stepwise, at_once, dtype)
        return found and replace(found, detail="decoding one token after a cached prompt, against one prefill")

    def _finish(
        self,
        kind: str,
        odd: tuple[str, ...],
        errors: Mapping[str, tuple[float, float]],
        cause: str = "",
        where: Divergence | str = "",
    ) -> Verdict:
        verdict = Verdict(kind, odd, errors, cause, detail=str(where), load_format=self.load_format)
        if isinstance(where, Divergence):
            verdict = replace(verdict, module=where.module, relation=where.relation, detail=f"It diverges {where}")
        subject = Subject(self.trainer.model)
        quirks = tuple(
            f"{quirk.name}: {quirk.symptom} {quirk.handling}"
            for quirk in CATALOGUE
            if quirk.explains is not None and quirk.explains(verdict) and quirk.applies(subject)
        )
        return replace(verdict, quirks=quirks)


def _case(found: Measurement, threshold: float, count: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The sequences to look at, with every party's log-probabilities: the worst of what fails."""
    others = [metrics for name, metrics in found.metrics.items() if name in ("decode", "prefill")]
    if "strict" in found.metrics and all(metrics.token_mult_prob_error <= threshold for metrics in others):
        tokens = found.strict_tokens
        parties = {TRAINER: found.strict_trainer, PREFILL: found.strict_engine}
    else:
        tokens = found.tokens
        parties = {TRAINER: found.trainer, DECODE: found.decode, PREFILL: found.prefill}
    assert tokens is not None
    there = {name: values for name, values in parties.items() if values is not None}
    rows = order_by_error(*there.values())[:count]
    return tokens[rows], {name: values[rows] for name, values in there.items()}


def _error(party: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    found = consistency_metrics(party, exact)
    return found.token_mult_prob_error, found.max


def _holds(model: Any, reference: Any, name: str) -> str:
    """Which of the reference's tensors a wrong tensor of the model is, if it is one."""
    tensors = model.state_dict_adapter.to_hf(model.state_dict(), layout="transformers")
    wrong = tensors[name]
    for other, tensor in reference.state_dict().items():
        if other != name and tensor.shape == wrong.shape and torch.equal(tensor.to(wrong.device), wrong):
            return f"what belongs in {other}"
    return ""


def _name(dtype: torch.dtype | None) -> str:
    return "an unknown precision" if dtype is None else str(dtype).removeprefix("torch.")
