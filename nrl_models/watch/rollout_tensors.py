"""Tensors and fingerprints that a watch reads from samples, models and tokenizers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from nrl_models.common.modules import innermost
from nrl_models.common.state_dict.merged import export_adapter
from nrl_models.common.state_dict.mtp import MTPNames
from nrl_models.common.value_checks import is_integer, is_number
from nrl_models.engines.base import Engine
from nrl_models.engines.engine_types import Sample
from nrl_models.errors import UnknownArgumentError, shown, shown_or_type
from nrl_models.logprobs import TokenLogprobs
from nrl_models.logprobs.sampling import Sampling
from nrl_models.watch.finding import Cause, Finding, Severity
from nrl_models.watch.step_metrics import Bars, StepMetrics

SAMPLES = 8
"""Maximum number of samples that are scored again."""


class RolloutStep(NamedTuple):
    """Rollouts of a step.

    Args:
        samples: the engine's samples; empty if unknown.
        trainer, engine: log-probabilities `(rows, length)`.
        mask: True for compared tokens, `(rows, length)`.
        attention_mask: True for tokens that are not padding.
    """

    samples: Sequence[Sample]
    trainer: torch.Tensor
    engine: torch.Tensor
    mask: torch.Tensor
    attention_mask: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample] | None,
        trainer: torch.Tensor | TokenLogprobs | None,
        engine: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> RolloutStep:
        """Check the arguments of `Watch.before_update`, and replace each one that is missing by its default.

        Raises:
            UnknownArgumentError: an argument is missing, or has a wrong type.
            ValueError: the shapes differ.
        """
        rows, scored = _sample_rows(samples), None
        if isinstance(trainer, TokenLogprobs):
            scored = trainer.mask
            trainer = trainer.logprobs
        if trainer is None or (samples is None and (engine is None or (mask is None and scored is None))):
            raise UnknownArgumentError("expected trainer=, and samples= or both engine= and mask=")
        named = {"trainer": trainer, "engine": engine, "mask": mask, "attention_mask": attention_mask}
        for name, value in named.items():
            if value is not None and not isinstance(value, torch.Tensor):
                raise UnknownArgumentError(f"{name}={shown(value)}: expected a tensor (rows, length)")
        for name, value in named.items():
            if value is not None and value.ndim != 2:
                raise ValueError(f"{name} has shape {tuple(value.shape)}: expected (rows, length)")
        if rows and len(rows) != len(trainer):
            raise ValueError(f"trainer has {len(trainer)} rows, and there are {len(rows)} samples")
        if samples is not None and (engine is None or mask is None):
            of_samples, replied = engine_logprobs(rows, trainer.shape[1])
            engine = of_samples if engine is None else engine
            mask = replied if mask is None else mask
        mask = scored if mask is None else mask
        assert engine is not None
        assert mask is not None
        if not trainer.shape == engine.shape == mask.shape:
            shapes = {"trainer": trainer, "engine": engine, "mask": mask}
            shown_shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in shapes.items())
            raise ValueError(f"expected three tensors of one shape (rows, length), got {shown_shapes}")
        mask = mask.detach().bool().cpu()
        if scored is not None:
            mask = mask & scored.detach().cpu()
        return cls(rows, trainer, engine, mask, attention_mask)

    def of_version(self, versions: Sequence[int], version: int) -> RolloutStep:
        """Leave out rows that other weights sampled.

        Args:
            versions: version of the weights that sampled each row.
            version: version of the trainer's weights.

        Raises:
            ValueError: the number of versions is not that of rows.
        """
        if len(versions) != len(self.mask):
            raise ValueError(f"there are {len(versions)} versions, and {len(self.mask)} rows")
        is_current = torch.tensor([number == version for number in versions], dtype=torch.bool)
        return self._replace(mask=self.mask & is_current[:, None])

    def worst(self) -> tuple[list[Sample], torch.Tensor | None, torch.Tensor | None]:
        """Return the samples with the largest differences, and both log-probabilities of their completions.

        Samples with masked tokens are left out, because their log-probabilities are not aligned.
        """
        counts = self.mask.sum(1).tolist()
        rows = [row for row, sample in enumerate(self.samples) if len(sample.tokens) == counts[row]]
        if not rows:
            return [], None, None
        trainer, engine, mask = self.trainer[rows], self.engine[rows], self.mask[rows]
        trainer, engine = completions(trainer, mask, engine), completions(engine, mask, trainer)
        order = _worst_rows(trainer, engine)
        return [self.samples[rows[index]] for index in order], trainer[order], engine[order]

    def other_tokens(self, tokens: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], int, int]:
        """Return the rows with different token IDs, the number of rows of the trainer, and that of the engine."""
        pairs = zip(tokens, self.samples, strict=False)
        wrong = tuple(row for row, (token_ids, sample) in enumerate(pairs) if tuple(token_ids) != sample.sequence)
        return wrong, len(tokens), len(self.samples)


def _sample_rows(samples: Any) -> list[Sample]:
    """Return the samples of a step as a list.

    Raises:
        UnknownArgumentError: `samples` has something else, such as the trainer's result.
    """
    rows = list(samples) if isinstance(samples, Iterable) and not isinstance(samples, TokenLogprobs) else [samples]
    if samples is None:
        return []
    if wrong := [row for row in rows if not (hasattr(row, "sequence") and hasattr(row, "logprobs"))]:
        kind = f"a {type(wrong[0]).__name__}"
        raise UnknownArgumentError(
            f"samples has {kind}, expected samples of an engine: call before_update(samples, trainer)"
        )
    return rows


def token_rows(probes: Any) -> list[list[int]]:
    """Return probes as lists of token IDs; an empty list for None.

    Args:
        probes: rows of token IDs, or a tensor of whole numbers `(rows, length)`.

    Raises:
        UnknownArgumentError: `probes` is something else, or a token ID is negative or not a whole number.
    """
    rows = probes.tolist() if hasattr(probes, "tolist") else () if probes is None else probes
    expected = "expected rows of token IDs, such as [[11, 12, 13]]"
    if not isinstance(rows, Iterable) or isinstance(rows, (str, bytes)):
        raise UnknownArgumentError(f"probes={shown(probes)}: {expected}")
    token_lists: list[list[int]] = []
    for row in rows:
        tokens = row.tolist() if hasattr(row, "tolist") else row
        if not isinstance(tokens, Iterable) or isinstance(tokens, (str, bytes)):
            raise UnknownArgumentError(f"probes have the row {shown(row)}: {expected}")
        tokens = [token.item() if isinstance(token, torch.Tensor) else token for token in tokens]
        if wrong := [token for token in tokens if not is_integer(token)]:
            raise UnknownArgumentError(f"probes have the token {shown(wrong[0])}: {expected}")
        token_lists.append([int(token) for token in tokens])
    return token_lists


def whole_numbers(versions: Iterable[int] | None) -> list[int] | None:
    """Return versions as a list; None without.

    Raises:
        UnknownArgumentError: one is not a whole number.
    """
    if versions is None:
        return None
    numbers = versions.tolist() if isinstance(versions, torch.Tensor) else versions
    if not isinstance(numbers, Iterable) or not all(map(is_integer, numbers := list(numbers))):
        raise UnknownArgumentError(f"versions={shown(versions)}: expected a whole number for each row")
    return [int(number) for number in numbers]


def uncompared(metrics: StepMetrics) -> Iterable[Finding]:
    """Yield a finding for values that are not finite, and one for a step without a token to compare."""
    if metrics.not_finite:
        message = f"{metrics.not_finite} sampled tokens have a NaN or infinite log-probability"
        yield Finding(cause=Cause.NOT_FINITE, message=message)
    if not metrics.tokens:
        message = "no sampled token has a log-probability of both trainer and engine"
        yield Finding(cause=Cause.NOTHING_COMPARED, level=Severity.WARNING, message=message)


def engine_logprobs(samples: Sequence[Sample], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the engine's log-probabilities and a mask of sampled tokens, `(rows, length)` each.

    Raises:
        ValueError: the trainer's log-probabilities have another length.
    """
    longest = max((len(sample.sequence) for sample in samples), default=0)
    if length != longest:
        raise ValueError(
            f"trainer has {length} columns, and the longest sample has {longest} tokens with its prompt: expected "
            "log-probabilities of prompt and completion, padded on the right; or pass engine= and mask="
        )
    engine = torch.full((len(samples), longest), math.nan, dtype=torch.float64)
    mask = torch.zeros(engine.shape, dtype=torch.bool)
    for row, sample in enumerate(samples):
        completion = slice(len(sample.prompt), len(sample.sequence))
        mask[row, completion] = True
        engine[row, completion] = torch.tensor(sample.logprobs, dtype=torch.float64)
    return engine, mask


def _worst_rows(trainer: torch.Tensor, engine: torch.Tensor) -> list[int]:
    """Return the rows with the largest mean differences, at most `SAMPLES`.

    Args:
        trainer, engine: results of `completions`.
    """
    difference = (trainer - engine).abs()
    mean = difference.nan_to_num(nan=0.0, posinf=0.0).sum(1) / difference.isfinite().sum(1).clamp(min=1)
    order: list[int] = mean.argsort(descending=True)[:SAMPLES].tolist()
    return order


def completions(values: torch.Tensor, mask: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the values of sampled tokens, left-aligned, `(rows, longest completion)`. NaN if a side is not finite."""
    values, other, mask = values.detach().double().cpu(), other.detach().double().cpu(), mask.detach().bool().cpu()
    values = values.masked_fill(~(values.isfinite() & other.isfinite()), math.nan)
    rows = [row[chosen] for row, chosen in zip(values, mask, strict=True)]
    return pad_sequence(rows, batch_first=True, padding_value=math.nan)


def draft_names(model: nn.Module) -> list[str]:
    """Return the Hub names of the model's draft (MTP) tensors."""
    inner: Any = innermost(model)
    names = MTPNames(inner)
    return [name for name, _, _ in export_adapter(model).export_plan() if names.may_be(name)]


def fingerprint(tokenizer: Any) -> dict[str, Any]:
    """Return the parts of a tokenizer that decide token IDs."""
    if tokenizer is None:
        return {}
    return {
        "vocabulary": hash(frozenset(tokenizer.get_vocab().items())),
        "chat_template": getattr(tokenizer, "chat_template", None),
        "special tokens": str(sorted(getattr(tokenizer, "special_tokens_map", {}).items())),
    }


def require_sides(model: Any, engine: Any, sampling: Any, bars: Any) -> None:
    """Check the model, the engine and the settings of `Watch`; None is an argument that was not passed.

    Raises:
        UnknownArgumentError: One has another type, for example if model and engine are swapped.
    """
    expected = {
        "model": (model, nn.Module, "the trainer's model"),
        "engine": (engine, Engine, 'an engine: call start_engine("vllm", path) or another name'),
        "sampling": (sampling, Sampling, "a Sampling: call Sampling(temperature=...)"),
        "bars": (bars, Bars, "Bars: call Bars(name=value)"),
    }
    for name, (value, kind, description) in expected.items():
        if value is not None and not isinstance(value, kind):
            raise UnknownArgumentError(f"{name} is {shown_or_type(value)}, expected {description}")


def require_options(
    fail: Any, max_staleness: Any, probe_every: Any, probes: Sequence[Sequence[int]] | None, compute: Any
) -> None:
    """Check options of `Watch`.

    Raises:
        UnknownArgumentError: An option has a wrong type or value.
    """
    if not isinstance(fail, bool):
        raise UnknownArgumentError(f"fail={shown(fail)}: expected True or False")
    if not is_number(max_staleness, 0, math.inf) or not (math.isinf(max_staleness) or max_staleness % 1 == 0):
        raise UnknownArgumentError(f"max_staleness={shown(max_staleness)}: expected a number of syncs: 0, 1 or more")
    if not is_integer(probe_every):
        raise UnknownArgumentError(f"probe_every={shown(probe_every)}: expected a whole number, at least 0")
    if compute is not None and not (isinstance(compute, torch.dtype) and compute.is_floating_point):
        raise UnknownArgumentError(f"compute={shown(compute)}: expected a floating-point torch.dtype, or None")
    rows = token_rows(probes)
    if (lengths := {len(row) for row in rows}) and (len(lengths) > 1 or min(lengths) < 2):
        raise UnknownArgumentError(f"probes have {sorted(lengths)} tokens: expected one length of at least 2")
