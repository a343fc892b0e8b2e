"""Find out which side of a failing cell is wrong, in which module, and why.

Every side scores the same tokens: the engine while decoding, the engine in one prefill, the trainer, and transformers
in fp32 and fp64. fp64 is the closest available approximation of the true values. A side is wrong if its distance from
fp64 exceeds what its precision explains. Then:

- `hypotheses` are tried to find the cause.
- Modules are compared to find the first that diverges, if the side's modules can be recorded.
- Another engine can be a witness. It does not affect which side is wrong. But if an engine and a witness agree and
  differ from transformers, the verdict notes that transformers' class may be wrong.
- vLLM with transformers' classes can be the witness of vLLM with its own classes. If it is right, the verdict
  recommends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from nrl_models.common.dtypes import dtype_name
from nrl_models.common.trust.servers import TRANSFORMERS_BACKEND
from nrl_models.consistency.capsule.decision import Case, Decision, Judged, Testimony, precision
from nrl_models.consistency.capsule.module_comparison import ComparedSide, ModuleComparison
from nrl_models.consistency.capsule.observations import Observations
from nrl_models.consistency.cells import Cell, Settings, largest_error
from nrl_models.consistency.divergence import module_output
from nrl_models.consistency.hypotheses import Hypotheses, Hypothesis
from nrl_models.consistency.measure import Comparison, Measurement, Meter, order_by_error
from nrl_models.consistency.references import References
from nrl_models.consistency.verdict import Party, Verdict
from nrl_models.engines.base import Engine
from nrl_models.engines.engine_types import ModuleCall
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.scores import final_scores, padded
from nrl_models.errors import NRLModelsError, one_line
from nrl_models.logprobs.sampling import Sampling
from nrl_models.parity.localize import differing_weights, search_rounds
from nrl_models.quirks import CATALOG, Subject


class Judge:
    """Gives verdicts for one engine and one trainer.

    Args:
        meter: Meter that has measured the sides.
        references: transformers' models with the same weights.
        random_weights: Whether the engine was started on random weights.
    """

    def __init__(self, meter: Meter, references: References, *, random_weights: bool = False) -> None:
        self.meter, self.references, self.random_weights = meter, references, random_weights

    def judge(self, cell: Cell, measurement: Measurement) -> Verdict:
        """Return the verdict on one measurement of a cell.

        Its kind is `precision` or `rounding` if the sides agree.
        """
        return self.judged(cell, measurement).verdict

    def judged(self, cell: Cell, measurement: Measurement, *, with_tensors: bool = False) -> Judged:
        """Return the verdict with the measurements that it was derived from.

        Args:
            cell: The cell.
            measurement: A measurement of the cell.
            with_tensors: Whether comparisons of modules have the tensors of both sides, for a capsule.
        """
        case, observed = self.case(cell, measurement), Observations()
        measures = RunningSides(self.meter, self.references, case, with_tensors)
        return Judged(str(cell), case, observed, Decision(case, observed, measures).verdict())

    def case(self, cell: Cell, measurement: Measurement) -> Case:
        """Select the sequences with the largest errors."""
        meter, settings = self.meter, self.meter.settings
        tokens, parties = _worst_sequences(measurement, settings, 1 if cell.length > 2_000 else 2)
        engines = {Party.TRAINER: meter.trainer, Party.SECOND_TRAINER: meter.second}
        known = meter.engine.capabilities()
        subject = Subject(meter.trainer.model)
        is_backend = self.references.witness == TRANSFORMERS_BACKEND
        return Case(
            tokens=tokens,
            generated=measurement.decode.shape[1],
            sampling=settings.sampling_of(cell),
            parties=parties,
            dtypes={party: (engines.get(party) or meter.engine).capabilities().dtype for party in parties},
            threshold=settings.threshold,
            random_weights=self.random_weights,
            quirks=tuple(quirk.name for quirk in CATALOG if quirk.applies(subject)),
            witness=self.references.witness,
            is_alternative=is_backend and known.transformers_classes and not self.random_weights,
        )


class RunningSides:
    """Measures a case with the running engine and trainer.

    Args:
        meter: Engine, trainer and settings.
        references: transformers' models.
        case: The sequences.
        with_tensors: Whether comparisons of the trainer's modules have the tensors of both sides.
    """

    def __init__(self, meter: Meter, references: References, case: Case, with_tensors: bool) -> None:
        self.engine, self.trainer, self.settings = meter.engine, meter.trainer, meter.settings
        self.references, self.case, self.with_tensors = references, case, with_tensors

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        """Return log-probabilities of the generated tokens from transformers."""
        return self._reference(self.case.tokens, self.case.sampling, dtype)

    def hypotheses(self) -> Iterator[Hypothesis]:
        """Yield hypotheses about the sequences."""
        case = self.case
        yield from Hypotheses(self.references, case.tokens, case.generated, case.sampling)

    def compare_modules(self, side: ComparedSide, length: int) -> ModuleComparison:
        """Compare modules of a side with the reference's, on the first tokens of the first sequence."""
        tokens = self.case.tokens[:1, :length]
        compare = {
            ComparedSide.TRAINER: self._in_trainer,
            ComparedSide.ENGINE: self._in_engine,
            ComparedSide.DECODE: self._in_decode,
        }
        return compare[side](tokens)

    def output_before(self, name: str, call: ModuleCall) -> torch.Tensor | None:
        """Return the output of a module with the weights from before the last refit; None if there are none."""
        before = self.references.with_previous_weights(torch.float32, combined=True)
        return None if before is None else module_output(before, name, call)

    def testimony(self, decodes: Callable[[torch.Tensor, torch.dtype], bool]) -> Testimony:
        """Start the witness and score the sequences. It also decodes if `decodes(scored, dtype)` returns True."""
        case = self.case
        try:
            with self.references.asked_witness() as witness:
                scored = final_scores(witness, case.tokens, case.generated, case.sampling)
                dtype = precision(witness.capabilities().dtype)
                decoded = self._decoded(witness, dtype) if decodes(scored, dtype) else {}
                return {"dtype": dtype_name(dtype), "error": ""}, {"scored": scored, **decoded}
        except NRLModelsError as error:
            return {"dtype": "float32", "error": one_line(error)}, {}

    def _decoded(self, witness: Engine, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the witness's log-probabilities while decoding, and those of transformers, as in a `Testimony`."""
        case = self.case
        prompts = case.tokens[:, : -case.generated].tolist()
        # Rounding decides which tokens at the limits are excluded.
        everything = replace(case.sampling, top_k=0, top_p=1.0)
        samples = witness.generate(prompts, everything, max_new_tokens=case.generated, seed=self.settings.seed)
        sampled = torch.tensor([sample.sequence for sample in samples])
        return {
            "decoded": padded([sample.logprobs for sample in samples]),
            "exact": self._reference(sampled, everything, torch.float64),
            "rounded": self._reference(sampled, everything, dtype),
        }

    def _reference(self, tokens: torch.Tensor, sampling: Sampling, dtype: torch.dtype) -> torch.Tensor:
        engine = HFEngine(self.references.model(dtype), "reference", max_length=tokens.shape[1])
        return final_scores(engine, tokens, self.case.generated, sampling)

    def _in_trainer(self, tokens: torch.Tensor) -> ModuleComparison:
        model, reference = self.trainer.model, self.references.model(self.trainer.model.dtype)
        rounds = search_rounds(model, reference, {"input_ids": tokens.to(model.device)}, max_culprits=3)
        weights = differing_weights(model, reference) if rounds else []
        comparison = ModuleComparison(
            side=ComparedSide.TRAINER, dtype=model.dtype, rounds=tuple(rounds), weights=tuple(weights)
        )
        divergence = comparison.divergence()
        if divergence is None:
            return comparison
        if divergence.weights:
            comparison = replace(comparison, owner=_owner_of(model, reference, divergence.weights[0]))
        if self.with_tensors:
            ids = tokens[0].tolist()
            calls = HFEngine(reference, "reference").module_calls(ids), self.trainer.module_calls(ids)
            names = [each.module for each in rounds[0].differences]
            expected, actual = ({name: of_side[name] for name in names if name in of_side} for of_side in calls)
            comparison = replace(comparison, expected=expected, actual=actual)
        return comparison

    def _in_engine(self, tokens: torch.Tensor) -> ModuleComparison:
        ids = tokens[0].tolist()
        actual = self.engine.module_calls(ids)
        expected = HFEngine(self.references.model(torch.float32, combined=True)).module_calls(ids)
        return ModuleComparison.of_engine(ComparedSide.ENGINE, actual, expected, self._engine_dtype)

    def _in_decode(self, tokens: torch.Tensor) -> ModuleComparison:
        """Compare modules while decoding the last token with modules in a prefill, within the engine."""
        prompt = tokens[0].tolist()
        sample = self.engine.generate([prompt[:-1]], Sampling(0.0), max_new_tokens=1)[0]
        decoded = self.engine.module_calls(sample.sequence, decode_last=True)
        prefilled = self.engine.module_calls(sample.sequence)
        return ModuleComparison.of_engine(ComparedSide.DECODE, decoded, prefilled, self._engine_dtype)

    @property
    def _engine_dtype(self) -> torch.dtype:
        return self.engine.capabilities().dtype or torch.float32


def _worst_sequences(
    measurement: Measurement, settings: Settings, count: int
) -> tuple[torch.Tensor, dict[Party, torch.Tensor]]:
    """Return the sequences with the largest errors, and every side's log-probabilities for them."""
    metrics = measurement.metrics
    of_sampled = (Comparison.DECODE, Comparison.PREFILL, Comparison.SECOND)
    sampled = [metrics[name] for name in of_sampled if name in metrics]
    noise = metrics[Comparison.NOISE].token_mult_prob_error
    bound = largest_error(settings.threshold, settings.noise_factor, noise)
    if Comparison.STRICT in metrics and all(
        sample_metrics.token_mult_prob_error <= bound for sample_metrics in sampled
    ):
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


def _owner_of(model: Any, reference: Any, name: str) -> str:
    """Return the name of the reference's tensor that has the values of `model` under `name`; empty without one."""
    wrong = model.state_dict_adapter.to_hf(model.state_dict(), layout="transformers")[name]
    for other, tensor in reference.state_dict().items():
        if other != name and tensor.shape == wrong.shape and torch.equal(tensor.to(wrong.device), wrong):
            return other
    return ""
