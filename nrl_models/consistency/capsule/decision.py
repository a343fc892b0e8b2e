"""Derive a verdict from measurements. A live check and a replay both call `Decision.verdict`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import NamedTuple, Protocol

import torch

from nrl_models.common.dtypes import dtype_name
from nrl_models.consistency.capsule.module_comparison import ComparedSide, ModuleComparison
from nrl_models.consistency.capsule.observations import Observations
from nrl_models.consistency.divergence import Divergence
from nrl_models.consistency.hypotheses import EXPLAINED, Hypothesis, distance, find_cause
from nrl_models.consistency.verdict import Advice, CauseKind, Deviation, Opinion, Party, Verdict, VerdictCause, Vote
from nrl_models.engines.engine_types import ModuleCall
from nrl_models.errors import CapsuleError
from nrl_models.logprobs.metrics import consistency_metrics
from nrl_models.logprobs.sampling import Sampling
from nrl_models.quirks import CATALOG, Pattern, VerdictKind

FLOOR_FACTOR = 5.0
"""Maximum distance of a side from fp64, as a multiple of the distance of transformers in the same precision."""

ROUNDING_FACTOR = 2.0
"""Maximum distance of a side's `token_mult_prob_error` from 1, as a multiple of that of transformers in its dtype, to
call the difference rounding."""

NO_MODULE_DIVERGES = "None of its modules diverges"
"""Note of a verdict whose wrong side has no module that diverges."""

MODULE_TOKENS = (64, 256)
"""Numbers of tokens on which modules are first compared. If no module diverges, the complete sequence is used."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sequences to judge, and facts about the sides that scored them.

    Args:
        tokens: Prompt and continuation, `(batch, seq_len)`.
        generated: Number of generated tokens at the end of each sequence.
        sampling: Sampling parameters of the generated tokens.
        parties: Log-probabilities of each side, `(batch, generated)`, fp64.
        dtypes: Dtype that each side computes in; None if it does not report one.
        threshold: Largest `token_mult_prob_error` that passes.
        random_weights: Whether the engine was started on random weights.
        quirks: Names of the known quirks that apply to the model.
        witness: Name of the engine that also scores the sequences; empty for none.
        is_alternative: Whether the witness differs from the engine only in its model classes.
    """

    tokens: torch.Tensor
    generated: int
    sampling: Sampling
    parties: Mapping[Party, torch.Tensor]
    dtypes: Mapping[Party, torch.dtype | None]
    threshold: float
    random_weights: bool = False
    quirks: tuple[str, ...] = ()
    witness: str = ""
    is_alternative: bool = False


Testimony = tuple[dict[str, str], dict[str, torch.Tensor]]
"""Facts and log-probabilities of a witness, by name.

- `dtype`: Name of the precision that explains the witness's rounding.
- `error`: Reason why there are no log-probabilities; empty if there are.
- `scored`: Log-probabilities of the sequences.
- `decoded`: Log-probabilities while decoding other continuations, if that was necessary.
- `exact`, `rounded`: Log-probabilities of these continuations from transformers, in fp64 and in `dtype`.
"""


class Judged(NamedTuple):
    """A verdict with the measurements that it was derived from.

    Args:
        title: The cell.
        case: The judged sequences.
        observed: The measurements.
        verdict: The verdict.
    """

    title: str
    case: Case
    observed: Observations
    verdict: Verdict


class Measures(Protocol):
    """Measurements of running sides, see `nrl_models.consistency.judge`."""

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        """Return log-probabilities of the generated tokens from transformers, `(batch, generated)`."""

    def hypotheses(self) -> Iterator[Hypothesis]:
        """Yield the log-probabilities that possible bugs would produce, cheap ones first."""

    def compare_modules(self, side: ComparedSide, length: int) -> ModuleComparison:
        """Compare modules of a side with the reference's, on the first tokens of the first sequence."""

    def output_before(self, name: str, call: ModuleCall) -> torch.Tensor | None:
        """Return the output of a module with the weights from before the last refit; None if there are none."""

    def testimony(self, decodes: Callable[[torch.Tensor, torch.dtype], bool]) -> Testimony:
        """Start the witness and score the sequences. It also decodes if `decodes(scored, dtype)` returns True."""


class Decision:
    """The verdict on a case.

    Args:
        case: The case.
        observed: Measurements. `measures` takes missing ones.
        measures: The running sides; None in a replay.
    """

    def __init__(self, case: Case, observed: Observations, measures: Measures | None = None) -> None:
        self.case, self.observed, self._measures = case, observed, measures

    @property
    def measures(self) -> Measures:
        """The running sides.

        Raises:
            CapsuleError: In a replay, which has no running sides.
        """
        if self._measures is None:
            raise CapsuleError(
                "the capsule lacks a measurement that its verdict needs: write it again with the nrl_models that reads "
                "it, or replay it with the nrl_models that wrote it"
            )
        return self._measures

    def verdict(self) -> Verdict:
        """Return the verdict. Its kind is `precision` or `rounding` if the sides agree."""
        case, reference = self.case, self._reference
        exact, single = reference(torch.float64), reference(torch.float32)
        errors = {
            party: _deviation(values, exact) for party, values in ({**case.parties, Party.REFERENCE: single}).items()
        }
        not_finite = tuple(
            party
            for party, values in case.parties.items()
            if values.isnan().any() or (party == Party.DECODE and values.isinf().any())  # sampled tokens are possible
        )
        if not_finite:
            verdict = self._finish(VerdictKind.NOT_FINITE, not_finite, errors)
            return self._with_witness(verdict, case.parties[not_finite[0]])
        largest = max(errors[party].token_mult_prob_error for party in case.parties)
        reference_error = errors[Party.REFERENCE].token_mult_prob_error
        if reference_error > case.threshold and largest - 1.0 <= FLOOR_FACTOR * (reference_error - 1.0):
            return self._finish(VerdictKind.UNSTABLE, (), errors)
        at_fault: list[Party] = []
        looks_like, floor = "", 0.0
        for party, values in case.parties.items():
            for dtype in self._possible_dtypes(party):
                allowed = FLOOR_FACTOR * max(distance(reference(dtype), exact), 1e-6)
                if distance(values, exact) <= allowed:
                    looks_like = looks_like or (dtype_name(dtype) if case.dtypes[party] is None else "")
                    break
            else:
                floor = floor if at_fault else allowed
                at_fault.append(party)
        if not at_fault:
            kind = VerdictKind.ROUNDING if self._is_rounding(errors, exact) else VerdictKind.PRECISION
            return self._finish(kind, (), errors, divergence_or_note=self._precisions(looks_like))
        wrong = case.parties[at_fault[0]]
        cause = find_cause(self._hypotheses(), wrong, single, floor)
        sides = [party for party in at_fault if party != Party.SECOND_TRAINER] or at_fault
        if len(sides) == 1:
            kind = VerdictKind(sides[0])
        else:
            kind = VerdictKind.BOTH if Party.TRAINER in sides else VerdictKind.ENGINE
        return self._with_witness(self._finish(kind, tuple(at_fault), errors, cause, self._locate(at_fault)), wrong)

    # Measurements

    def _reference(self, dtype: torch.dtype) -> torch.Tensor:
        return self.observed.tensor(f"reference.{dtype_name(dtype)}", lambda: self.measures.reference(dtype))

    def _hypotheses(self) -> Iterator[Hypothesis]:
        """Yield hypotheses in order. In a replay, the last one in the record was the cause."""
        values, tensors = self.observed.values, self.observed.tensors
        live: Iterator[Hypothesis] | None = None
        for index in count():
            name = f"hypothesis.{index}"
            if name not in values:
                if self._measures is None:
                    return
                live = live or self._measures.hypotheses()
                if (hypothesis := next(live, None)) is None:
                    return
                values[name], tensors[name] = asdict(hypothesis.cause), hypothesis.logprobs
            cause = values[name]
            yield Hypothesis(VerdictCause(CauseKind(cause["kind"]), cause["message"], cause["key"]), tensors[name])

    def _testimony(self) -> Testimony:
        values, tensors = self.observed.values, self.observed.tensors
        if "witness" not in values:
            values["witness"], scores = self.measures.testimony(self._is_right_alternative)
            tensors |= {f"witness.{name}": logprobs for name, logprobs in scores.items()}
        names = [name for name in tensors if name.startswith("witness.")]
        return values["witness"], {name.removeprefix("witness."): tensors[name] for name in names}

    # Rules

    def _possible_dtypes(self, party: Party) -> tuple[torch.dtype, ...]:
        """Return the dtypes that a side may compute in, most precise first. Without a reported dtype: any."""
        dtype = self.case.dtypes[party]
        if dtype is None:
            return torch.float32, torch.float16, torch.bfloat16
        return (precision(dtype),)

    def _is_rounding(self, errors: Mapping[Party, Deviation], exact: torch.Tensor) -> bool:
        """Return True if all sides compute in one dtype below fp32, and no token's error exceeds what it explains.

        `FLOOR_FACTOR` is for naming a wrong side. Here, the mean error may be at most twice that of transformers.
        """
        dtypes = {self.case.dtypes[party] for party in self.case.parties}
        if len(dtypes) != 1 or (dtype := precision(dtypes.pop())) == torch.float32:
            return False
        usual = _deviation(self._reference(dtype), exact)
        return all(
            errors[party].token_mult_prob_error - 1.0 <= ROUNDING_FACTOR * (usual.token_mult_prob_error - 1.0)
            and errors[party].max <= FLOOR_FACTOR * usual.max
            for party in self.case.parties
        )

    def _precisions(self, looks_like: str) -> str:
        engine, trainer = self.case.dtypes.get(Party.DECODE), self.case.dtypes[Party.TRAINER]
        if Party.DECODE not in self.case.dtypes:
            engine = self.case.dtypes[Party.PREFILL]
        shown = f"not reported (its error is that of {looks_like})" if engine is None else dtype_name(engine)
        return f"Engine: {shown}; trainer: {'not reported' if trainer is None else dtype_name(trainer)}"

    def _locate(self, at_fault: Sequence[Party]) -> Divergence | str:
        """Return the first module where the wrong side diverges, or why none is known."""
        if at_fault == [Party.SECOND_TRAINER]:
            return "Its modules cannot be recorded"
        side = ComparedSide.DECODE if at_fault == [Party.DECODE] else ComparedSide.ENGINE
        side = ComparedSide.TRAINER if Party.TRAINER in at_fault else side
        seq_len = self.case.tokens.shape[1]
        for length in dict.fromkeys((*(min(tokens, seq_len) for tokens in MODULE_TOKENS), seq_len)):
            comparison = self.observed.comparison(
                f"modules.{side}.{length}",
                lambda length=length: self.measures.compare_modules(side, length),  # type: ignore[misc]
            )
            if isinstance(comparison, str):
                return f"Its modules cannot be compared, because {comparison}"
            if (divergence := comparison.divergence()) is not None:
                return self._described(comparison, divergence)
        return NO_MODULE_DIVERGES

    def _described(self, comparison: ModuleComparison, divergence: Divergence) -> Divergence:
        """Add the pattern of a divergence, or the comparison that found it."""
        if comparison.side is ComparedSide.DECODE:
            return replace(divergence, detail="decoding one token after a cached prompt, compared with one prefill")
        if comparison.side is ComparedSide.TRAINER:
            return divergence
        values = self.observed.values
        if (classified := comparison.classified(divergence, self._output_before)) is not None:
            values["pattern"] = {"pattern": classified.pattern, "detail": classified.detail}
            return classified
        recorded = values.get("pattern", {"pattern": Pattern.UNKNOWN, "detail": ""})
        return replace(divergence, pattern=Pattern(recorded["pattern"]), detail=recorded["detail"])

    def _output_before(self, name: str, call: ModuleCall) -> torch.Tensor | None:
        return self.observed.optional("output before", lambda: self.measures.output_before(name, call))

    def _finish(
        self,
        kind: VerdictKind,
        at_fault: tuple[Party, ...],
        errors: Mapping[Party, Deviation],
        cause: VerdictCause | None = None,
        divergence_or_note: Divergence | str = "",
    ) -> Verdict:
        verdict = Verdict(kind, at_fault, errors, cause, random_weights=self.case.random_weights)
        located = (
            {"note": divergence_or_note} if isinstance(divergence_or_note, str) else {"divergence": divergence_or_note}
        )
        verdict = replace(verdict, **located)
        names = (quirk.name for quirk in CATALOG if quirk.name in self.case.quirks and quirk.explains(verdict.evidence))
        return replace(verdict, quirks=tuple(names))

    def _with_witness(self, verdict: Verdict, wrong: torch.Tensor) -> Verdict:
        """Add the witness's result to a verdict, and the advice that follows from it."""
        if not (name := self.case.witness):
            return verdict
        self._at_fault, self._wrong = verdict.at_fault, wrong
        facts, scores = self._testimony()
        if "scored" not in scores:
            return replace(verdict, witness=Opinion(name, None, facts["error"]))
        vote = self._vote(scores["scored"], getattr(torch, facts["dtype"]))
        decodes = None
        if "decoded" in scores:
            decoded, exact = scores["decoded"], scores["exact"]
            allowed = FLOOR_FACTOR * max(distance(scores["rounded"], exact), 1e-6)
            decodes = distance(decoded, exact) <= allowed and bool(decoded.isfinite().all())
        advice = Advice.TRANSFORMERS_BACKEND if decodes else None
        return replace(verdict, witness=Opinion(name, vote, decodes=decodes), advice=advice)

    def _is_right_alternative(self, scored: torch.Tensor, dtype: torch.dtype) -> bool:
        """Return True if the witness could replace the wrong engine, and scores as transformers does."""
        is_engines = bool({Party.DECODE, Party.PREFILL} & set(self._at_fault))
        return is_engines and self.case.is_alternative and self._vote(scored, dtype) is Vote.REFERENCE

    def _vote(self, scored: torch.Tensor, dtype: torch.dtype) -> Vote:
        """Return the side whose log-probabilities equal a witness's up to rounding."""
        exact = self._reference(torch.float64)
        rounding = FLOOR_FACTOR * max(distance(self._reference(dtype), exact), 1e-6)
        if not scored.isnan().any() and distance(scored, exact) <= rounding:
            return Vote.REFERENCE
        explained = max(rounding, EXPLAINED * distance(self._wrong, exact))
        return Vote.AT_FAULT if distance(scored, self._wrong) <= explained else Vote.NEITHER


def precision(dtype: torch.dtype | None) -> torch.dtype:
    """Return the precision that explains how an engine which computes in `dtype` rounds."""
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32


def _deviation(values: torch.Tensor, exact: torch.Tensor) -> Deviation:
    metrics = consistency_metrics(values, exact)
    return Deviation(metrics.token_mult_prob_error, metrics.max)
