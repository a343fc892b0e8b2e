"""Finds which side of a failing cell is at fault, where, and why.

The same tokens are scored by every party: the engine as it decoded, the engine in one prefill, the trainer, and
transformers in fp32 and in fp64, which is the closest to the truth that can be computed. A party that is further from
fp64 than its precision explains is at fault. What it computes instead is found by trying `hypotheses`; the module where
it diverges is found by comparing modules, if its modules can be recorded. Another engine may be asked as a witness: it
has no say in who is at fault, but an engine and a witness that agree against transformers put its class in doubt. vLLM
with transformers' classes, as a witness of vLLM with its own, may be right where that is wrong: the verdict advises it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from nrl_models.common.dtypes import dtype_name
from nrl_models.common.trust.servers import TRANSFORMERS_BACKEND
from nrl_models.consistency.cells import Cell, Settings, largest_error
from nrl_models.consistency.divergence import Divergence, classify, first_divergence
from nrl_models.consistency.hypotheses import EXPLAINED, Hypotheses, distance
from nrl_models.consistency.measure import Comparison, Measurement, Meter, order_by_error
from nrl_models.consistency.references import References
from nrl_models.consistency.verdict import Advice, Cause, Deviation, Opinion, Party, Verdict, Vote
from nrl_models.engines.base import Engine, final_scores, padded
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import NRLModelsError, one_line
from nrl_models.logprobs.metrics import consistency_metrics
from nrl_models.logprobs.sampling import Sampling
from nrl_models.parity.localise import localise
from nrl_models.quirks import CATALOGUE, Subject, VerdictKind

FLOOR_FACTOR = 5.0
"""A party may be this many times further from fp64 than transformers in the same precision is."""

Reference = Callable[[torch.dtype], torch.Tensor]
"""Gives transformers' log-probabilities in a precision, `(sequences, generated)`."""

MODULE_TOKENS = 256
"""Tokens on which modules are compared first; if none diverges, the whole sequence is used."""


class Judge:
    """Gives verdicts for one engine and one trainer.

    Args:
        meter: has measured the parties.
        references: transformers' models of the same weights.
        random_weights: whether the engine was started on random weights.
    """

    def __init__(self, meter: Meter, references: References, *, random_weights: bool = False) -> None:
        self.engine, self.trainer, self.settings = meter.engine, meter.trainer, meter.settings
        self.second = meter.second
        self.references, self.random_weights = references, random_weights

    def judge(self, cell: Cell, measurement: Measurement) -> Verdict:
        """The verdict on one measurement of a cell; of one that agrees, kind `precision`."""
        sampling = self.settings.sampling_of(cell)
        tokens, parties = _worst_sequences(measurement, self.settings, 1 if cell.length > 2_000 else 2)
        generated = measurement.decode.shape[1]
        reference = cache(partial(self._reference, tokens, generated, sampling))
        exact, single = reference(torch.float64), reference(torch.float32)
        errors = {party: _deviation(values, exact) for party, values in (parties | {Party.REFERENCE: single}).items()}
        not_finite = tuple(
            party
            for party, values in parties.items()
            if values.isnan().any() or (party == Party.DECODE and values.isinf().any())  # what was sampled was possible
        )
        if not_finite:
            verdict = self._finish(VerdictKind.NOT_FINITE, not_finite, errors)
            return self._with_witness(verdict, parties[not_finite[0]], tokens, generated, sampling, reference)
        if errors[Party.REFERENCE].token_mult_prob_error > self.settings.threshold:
            return self._finish(VerdictKind.UNSTABLE, (), errors)
        at_fault: list[Party] = []
        looks_like, floor = "", 0.0
        for party, values in parties.items():
            for dtype in self._possible_dtypes(party):
                allowed = FLOOR_FACTOR * max(distance(reference(dtype), exact), 1e-6)
                if distance(values, exact) <= allowed:
                    looks_like = looks_like or (dtype_name(dtype) if self._dtype(party) is None else "")
                    break
            else:
                floor = floor if at_fault else allowed
                at_fault.append(party)
        if not at_fault:
            return self._finish(VerdictKind.PRECISION, (), errors, found=self._precisions(looks_like))
        hypotheses = Hypotheses(self.references, tokens, generated, sampling)
        cause = hypotheses.find_cause(parties[at_fault[0]], single, floor)
        sides = [party for party in at_fault if party != Party.SECOND_TRAINER] or at_fault
        if len(sides) == 1:
            kind = VerdictKind(sides[0])
        else:
            kind = VerdictKind.BOTH if Party.TRAINER in sides else VerdictKind.ENGINE
        verdict = self._finish(kind, tuple(at_fault), errors, cause, self._locate(at_fault, tokens))
        return self._with_witness(verdict, parties[at_fault[0]], tokens, generated, sampling, reference)

    def _reference(self, tokens: torch.Tensor, generated: int, sampling: Sampling, dtype: torch.dtype) -> torch.Tensor:
        """Log-probabilities that transformers gives the generated tokens."""
        engine = HFEngine(self.references.model(dtype), "reference", max_length=tokens.shape[1])
        return final_scores(engine, tokens, generated, sampling)

    def _with_witness(
        self,
        verdict: Verdict,
        wrong: torch.Tensor,
        tokens: torch.Tensor,
        generated: int,
        sampling: Sampling,
        reference: Reference,
    ) -> Verdict:
        """The verdict, with what the witness says, if there is one, and what follows from it.

        Args:
            verdict: without.
            wrong: log-probabilities of the party at fault.
            tokens: the sequences, of which the last `generated` were sampled by `sampling`.
            reference: transformers' log-probabilities of these.
        """
        if not (name := self.references.witness):
            return verdict
        decodes = None
        try:
            with self.references.asked_witness() as witness:
                said, exact = final_scores(witness, tokens, generated, sampling), reference(torch.float64)
                vote = _vote(said, exact, wrong, _explained(witness, reference))
                if vote is Vote.REFERENCE and self._in_its_place(verdict):
                    decodes = self._decodes_right(witness, tokens[:, :-generated], generated, sampling)
        except NRLModelsError as error:
            return replace(verdict, witness=Opinion(name, None, one_line(error)))
        advice = Advice.TRANSFORMERS_BACKEND if decodes else None
        return replace(verdict, witness=Opinion(name, vote, decodes=decodes), advice=advice)

    def _in_its_place(self, verdict: Verdict) -> bool:
        """Whether the witness is the engine at fault but for its classes, with the weights from the same files."""
        at_fault = {Party.DECODE, Party.PREFILL} & set(verdict.at_fault)
        own_classes = self.engine.capabilities().transformers_classes
        same = self.references.witness == TRANSFORMERS_BACKEND and own_classes and not self.random_weights
        return same and bool(at_fault)

    def _decodes_right(self, witness: Engine, prompts: torch.Tensor, generated: int, sampling: Sampling) -> bool:
        """Whether transformers in fp64 gives what a witness samples the log-probabilities that it sampled with."""
        everything = replace(sampling, top_k=0, top_p=1.0)  # at the edge of what is left out, roundings decide
        samples = witness.generate(prompts.tolist(), everything, max_new_tokens=generated, seed=self.settings.seed)
        decoded = padded([sample.logprobs for sample in samples])
        sampled = torch.tensor([sample.sequence for sample in samples])
        reference = cache(partial(self._reference, sampled, generated, everything))
        near = distance(decoded, reference(torch.float64)) <= _explained(witness, reference)
        return near and bool(decoded.isfinite().all())

    def _possible_dtypes(self, party: Party) -> tuple[torch.dtype, ...]:
        """The dtypes a party may compute in, most precise first: the one it reports, or any if it reports none."""
        dtype = self._dtype(party)
        if dtype is None:
            return torch.float32, torch.float16, torch.bfloat16
        return (_precision(dtype),)

    def _dtype(self, party: Party) -> torch.dtype | None:
        engines = {Party.TRAINER: self.trainer, Party.SECOND_TRAINER: self.second or self.engine}
        return engines.get(party, self.engine).capabilities().dtype

    def _precisions(self, looks_like: str) -> str:
        engine, trainer = self._dtype(Party.DECODE), self._dtype(Party.TRAINER)
        shown = f"not reported (its error is that of {looks_like})" if engine is None else dtype_name(engine)
        return f"Engine: {shown}; trainer: {'not reported' if trainer is None else dtype_name(trainer)}"

    def _locate(self, at_fault: Sequence[Party], tokens: torch.Tensor) -> Divergence | str:
        """The first module where the party at fault diverges, or why none is known."""
        if at_fault == [Party.SECOND_TRAINER]:
            return "Its modules cannot be recorded"
        if Party.TRAINER in at_fault:
            compare = self._in_trainer
        else:
            compare = self._in_decode if at_fault == [Party.DECODE] else self._in_engine
        for length in dict.fromkeys((min(MODULE_TOKENS, tokens.shape[1]), tokens.shape[1])):
            try:
                found = compare(tokens[:1, :length])
            except NRLModelsError as error:
                return f"Its modules cannot be compared: {error}"
            if found is not None:
                return found
        return "None of its modules diverges"

    def _in_trainer(self, tokens: torch.Tensor) -> Divergence | None:
        model, reference = self.trainer.model, self.references.model(self.trainer.model.dtype)
        culprits = localise(model, reference, {"input_ids": tokens.to(model.device)}, max_culprits=3)
        if not culprits:
            return None
        first = culprits[0]
        detail = first.cause
        if first.weights and (owner := _owner_of(model, reference, first.weights[0])):
            detail += f"; {first.weights[0]} holds what belongs in {owner}"
        if len(culprits) > 1:
            detail += f"; then {', '.join(culprit.module for culprit in culprits[1:])}"
        return Divergence(
            first.module, first.class_name, first.max_diff, relative=False, weights=first.weights, detail=detail
        )

    def _in_engine(self, tokens: torch.Tensor) -> Divergence | None:
        ids = tokens[0].tolist()
        dtype = self.engine.capabilities().dtype or torch.float32
        actual = self.engine.module_calls(ids)
        expected = HFEngine(self.references.model(torch.float32, combined=True)).module_calls(ids)
        divergence = first_divergence(actual, expected, dtype)
        if divergence is None:
            return None
        previous = self.references.with_previous_weights(torch.float32, combined=True)
        return classify(divergence, actual, expected, previous, dtype)

    def _in_decode(self, tokens: torch.Tensor) -> Divergence | None:
        """Decoding compared with prefill, within the engine."""
        prompt = tokens[0].tolist()
        sample = self.engine.generate([prompt[:-1]], Sampling(0.0), max_new_tokens=1)[0]
        decoded = self.engine.module_calls(sample.sequence, decode_last=True)
        prefilled = self.engine.module_calls(sample.sequence)
        dtype = self.engine.capabilities().dtype or torch.float32
        found = first_divergence(decoded, prefilled, dtype)
        return found and replace(found, detail="decoding one token after a cached prompt, compared with one prefill")

    def _finish(
        self,
        kind: VerdictKind,
        at_fault: tuple[Party, ...],
        errors: Mapping[Party, Deviation],
        cause: Cause | None = None,
        found: Divergence | str = "",
    ) -> Verdict:
        verdict = Verdict(kind, at_fault, errors, cause, random_weights=self.random_weights)
        located = {"note": found} if isinstance(found, str) else {"divergence": found}
        verdict = replace(verdict, **located)
        subject = Subject(self.trainer.model)
        matching = (quirk for quirk in CATALOGUE if quirk.explains(verdict.evidence) and quirk.applies(subject))
        return replace(verdict, quirks=tuple(quirk.name for quirk in matching))


def _precision(dtype: torch.dtype | None) -> torch.dtype:
    """The precision that explains how an engine which computes in `dtype` rounds."""
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32


def _explained(party: Engine, reference: Reference) -> float:
    """How far from the reference in fp64 a party may be by its precision, in nats."""
    same = reference(_precision(party.capabilities().dtype))
    return FLOOR_FACTOR * max(distance(same, reference(torch.float64)), 1e-6)


def _vote(said: torch.Tensor, exact: torch.Tensor, at_fault: torch.Tensor, rounding: float) -> Vote:
    """Whose log-probabilities a witness gives, up to `rounding`."""
    if not said.isnan().any() and distance(said, exact) <= rounding:
        return Vote.REFERENCE
    explained = max(rounding, EXPLAINED * distance(at_fault, exact))
    return Vote.AT_FAULT if distance(said, at_fault) <= explained else Vote.NEITHER


def _worst_sequences(
    measurement: Measurement, settings: Settings, count: int
) -> tuple[torch.Tensor, dict[Party, torch.Tensor]]:
    """The sequences with the largest errors, and every party's log-probabilities of them."""
    metrics = measurement.metrics
    of_sampled = (Comparison.DECODE, Comparison.PREFILL, Comparison.SECOND)
    sampled = [metrics[name] for name in of_sampled if name in metrics]
    noise = metrics[Comparison.NOISE].token_mult_prob_error
    bound = largest_error(settings.threshold, settings.noise_factor, noise)
    if Comparison.STRICT in metrics and all(found.token_mult_prob_error <= bound for found in sampled):
        tokens = measurement.strict_tokens
        parties = {Party.TRAINER: measurement.strict_trainer, Party.PREFILL: measurement.strict_engine}
    else:
        tokens = measurement.tokens
        parties = {
            Party.TRAINER: measurement.trainer,
            Party.DECODE: measurement.decode,
            Party.PREFILL: measurement.prefill,
            Party.SECOND_TRAINER: measurement.second,
        }
    assert tokens is not None
    present = {party: values for party, values in parties.items() if values is not None}
    rows = order_by_error(*present.values())[:count]
    return tokens[rows], {party: values[rows] for party, values in present.items()}


def _deviation(values: torch.Tensor, exact: torch.Tensor) -> Deviation:
    found = consistency_metrics(values, exact)
    return Deviation(found.token_mult_prob_error, found.max)


def _owner_of(model: Any, reference: Any, name: str) -> str:
    """The name of the reference's tensor that `model` has under the wrong `name`; empty if it is none of them."""
    wrong = model.state_dict_adapter.to_hf(model.state_dict(), layout="transformers")[name]
    for other, tensor in reference.state_dict().items():
        if other != name and tensor.shape == wrong.shape and torch.equal(tensor.to(wrong.device), wrong):
            return other
    return ""
