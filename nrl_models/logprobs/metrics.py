"""Metrics that compare the trainer's log-probabilities with those of the engine's sampling.

`trainer` and `engine` are log-probabilities of the same tokens: tensors of any shape, or lists of numbers. `mask`
selects the tokens to compare. With `r = trainer - engine`:

| metric | definition | if equal |
|---|---|---|
| `token_mult_prob_error` | mean exp(abs(r)), the larger over the smaller probability; the guide's bound is 1.05 | 1 |
| `sampling_importance_ratio` | mean exp(r): signed, so it shows bias rather than spread | 1 |
| `kl_k1`, `kl_k2`, `kl_k3` | mean -r, r^2 / 2, exp(r) - 1 - r: estimators of KL(engine, trainer) | 0 |
| `js_divergence_error` | mean k3 of trainer and engine against their even mixture: bounded growth, unlike k3 | 0 |

k1 to k3 are defined in http://joschu.net/blog/kl-approx.html. The names are NeMo RL's. All sums are in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nrl_models.common.dtypes import unreadable
from nrl_models.common.value_checks import finite_or_none, not_zero_or_one
from nrl_models.errors import UnknownArgumentError, one_line
from nrl_models.logprobs.sampling import Sampling

Values = torch.Tensor | Sequence[Any]
"""A tensor, or lists of numbers, as `Engine.score` returns them."""


def _tensors(trainer: Values, engine: Values, mask: Values | None) -> tuple[torch.Tensor, ...]:
    """Return log-probabilities on one device, and the mask if there is one. Lists become fp64."""
    arguments = {"trainer": trainer, "engine": engine} | ({} if mask is None else {"mask": mask})
    tensors = {}
    for name, value in arguments.items():
        try:
            dtype = None if isinstance(value, torch.Tensor) else torch.float64
            tensors[name] = torch.as_tensor(value, dtype=dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnknownArgumentError(
                f"{name} is a {type(value).__name__} that is not a tensor ({one_line(error)}): expected a tensor or "
                "lists of numbers. Pad sequences of different lengths, and leave the padding out with mask"
            ) from error
        if problem := unreadable(tensors[name]) or ("" if name == "mask" else _not_logprobs(tensors[name])):
            raise UnknownArgumentError(f"{name} {problem}")
    shapes = [tuple(tensor.shape) for tensor in tensors.values()]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"log-probabilities and mask must have one shape, got {shapes}")
    if mask is not None and (other := not_zero_or_one(tensors["mask"])) is not None:
        raise ValueError(f"mask has the value {other:g}: expected 1 or True for compared tokens, 0 or False for others")
    return tuple(tensor.to(tensors["trainer"].device) for tensor in tensors.values())


def _not_logprobs(tensor: torch.Tensor) -> str:
    if tensor.is_complex() or tensor.dtype == torch.bool:
        return f"is of {tensor.dtype}: expected log-probabilities, which are real numbers"
    return ""


def _chosen(trainer: Values, engine: Values, mask: Values | None) -> tuple[torch.Tensor, ...]:
    values = _tensors(trainer, engine, mask)
    first, second = (value.detach().double() for value in values[:2])
    chosen = values[2].bool() if mask is not None else ...
    return first[chosen].flatten(), second[chosen].flatten()


def _difference(trainer: Values, engine: Values, mask: Values | None) -> torch.Tensor:
    trainer, engine = _chosen(trainer, engine, mask)
    return trainer - engine


def _mean(values: torch.Tensor) -> float:
    return values.mean().item() if values.numel() else math.nan


def token_mult_prob_error(trainer: Values, engine: Values, mask: Values | None = None) -> float:
    """Return the mean factor by which the probability of a token is off: `mean exp(abs(trainer - engine))`."""
    return _mean(_difference(trainer, engine, mask).abs().exp())


def shown_error(value: float, *, aligned: bool = False) -> str:
    """Return a `token_mult_prob_error`, or its bound, with enough digits to distinguish values near 1.

    Args:
        value: The error.
        aligned: Whether to keep zeros at the end, so that the values of a column have the same decimals.
    """
    if aligned and value < 100.0:
        return f"{value:.7f}"
    return f"{value:.8g}" if value < 2.0 else f"{value:.6g}"


def sampling_importance_ratio(trainer: Values, engine: Values, mask: Values | None = None) -> float:
    """Return the mean importance ratio: `mean exp(trainer - engine)`."""
    return _mean(_difference(trainer, engine, mask).exp())


def kl_k1(trainer: Values, engine: Values, mask: Values | None = None) -> float:
    """Estimate KL(engine, trainer) without bias but with high variance: `mean engine - trainer`."""
    return _mean(-_difference(trainer, engine, mask))


def kl_k2(trainer: Values, engine: Values, mask: Values | None = None) -> float:
    """Estimate KL(engine, trainer) with bias but low variance: `mean (trainer - engine)^2 / 2`."""
    return _mean(_difference(trainer, engine, mask).square() / 2)


def kl_k3(trainer: Values, engine: Values, mask: Values | None = None) -> float:
    """Estimate KL(engine, trainer) without bias, at least 0: `mean exp(r) - 1 - r` (NeMo RL's `gen_kl_error`)."""
    return _mean(_k3(_difference(trainer, engine, mask)))


def js_divergence_error(trainer: Values, engine: Values, mask: Values | None = None) -> float:
    """Return the mean k3 of trainer and engine against the mixture `log(exp(trainer) / 2 + exp(engine) / 2)`.

    Each of them is at most twice as likely as the mixture, so no term grows exponentially.
    """
    trainer, engine = _chosen(trainer, engine, mask)
    mixture = torch.logaddexp(trainer, engine) - math.log(2.0)
    return _mean((_k3(trainer - mixture) + _k3(engine - mixture)) / 2)


METRICS = (token_mult_prob_error, sampling_importance_ratio, kl_k1, kl_k2, kl_k3, js_divergence_error)


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.expm1(log_ratio) - log_ratio


@dataclass(frozen=True, slots=True)
class ConsistencyMetrics:
    """All metrics for a set of sequences.

    Attributes:
        tokens: Number of compared tokens, which have two finite log-probabilities.
        token_mult_prob_error, sampling_importance_ratio, kl_k1, kl_k2, kl_k3, js_divergence_error: See the module.
        worst_sequence: Largest `token_mult_prob_error` of a single sequence.
        worst_sequence_index: Index of that sequence; -1 if there is none.
        p99: 99th percentile of `abs(r)`, in nats.
        max: Maximum of `abs(r)`, in nats.
        nan: Number of tokens for which either side is NaN.
        engine_infinite: Number of tokens with an infinite log-probability in the engine, although it sampled them.
        trainer_infinite: Number of tokens with probability 0 in the trainer, for example excluded by `top_k`.
    """

    tokens: int
    token_mult_prob_error: float
    sampling_importance_ratio: float
    kl_k1: float
    kl_k2: float
    kl_k3: float
    js_divergence_error: float
    worst_sequence: float
    worst_sequence_index: int
    p99: float
    max: float
    nan: int
    engine_infinite: int
    trainer_infinite: int

    def impossible(self, sampling: Sampling) -> int:
        """Number of tokens that are not finite on a side, although `sampling` cannot exclude them on that side.

        At the limit of `top_k` and `top_p`, rounding decides whether the trainer excludes a token that was sampled.
        """
        return self.nan + self.engine_infinite + (0 if sampling.truncates else self.trainer_infinite)

    def to_json(self) -> dict[str, Any]:
        """Return the metrics by name. NaN and infinity become None, because JSON does not have them."""
        values: dict[str, Any] = finite_or_none(asdict(self))
        return values


def consistency_metrics(trainer: Values, engine: Values, mask: Values | None = None) -> ConsistencyMetrics:
    """Compare two sets of log-probabilities of the same tokens.

    Args:
        trainer, engine: `(batch, seq_len)`, or lists of lists. NaN and infinite values are counted, and excluded from
            the means.
        mask: Sampled tokens; default: all.

    Raises:
        UnknownArgumentError: If an argument is neither a dense tensor nor lists of equal length, or log-probabilities
            are complex or booleans.
        ValueError: If shapes differ or are not `(batch, seq_len)`, or `mask` has values other than 0 and 1.

    Examples:
        >>> import torch
        >>> from nrl_models import consistency_metrics
        >>> trainer = torch.tensor([[-1.0, -2.0]])
        >>> metrics = consistency_metrics(trainer, engine=torch.tensor([[-1.1, -2.0]]))
        >>> round(metrics.token_mult_prob_error, 4)  # the mean of exp(0.1) and exp(0)
        1.0526
    """
    trainer, engine, *masks = _tensors(trainer, engine, mask)
    trainer, engine = (each.float() if each.itemsize == 1 else each for each in (trainer, engine))  # float8
    if trainer.ndim != 2:
        raise ValueError(f"expected (sequences, length), got {tuple(trainer.shape)}")
    mask = masks[0].bool() if masks else torch.ones_like(trainer, dtype=torch.bool)
    nan = mask & (trainer.isnan() | engine.isnan())
    engine_infinite, trainer_infinite = mask & engine.isinf(), mask & trainer.isinf()
    compared = mask & ~(nan | engine_infinite | trainer_infinite)
    first, second = _chosen(trainer, engine, compared)
    difference = (first - second).abs()
    rows = compared.any(1).nonzero()[:, 0].tolist()
    by_row = {row: token_mult_prob_error(trainer[row], engine[row], compared[row]) for row in rows}
    index = max(by_row, key=by_row.__getitem__, default=-1)
    return ConsistencyMetrics(
        tokens=difference.numel(),
        **{metric.__name__: metric(first, second) for metric in METRICS},
        worst_sequence=by_row.get(index, math.nan),
        worst_sequence_index=index,
        p99=quantile(difference, 0.99),
        max=difference.max().item() if difference.numel() else math.nan,
        nan=int(nan.sum()),
        engine_infinite=int(engine_infinite.sum()),
        trainer_infinite=int(trainer_infinite.sum()),
    )


def quantile(values: torch.Tensor, share: float) -> float:
    """Return the smallest value such that at least `share` of `values` are at or below it; NaN if there are none.

    `torch.quantile` is limited to 16 million values.
    """
    if not values.numel():
        return math.nan
    rank = max(1, math.ceil(share * values.numel()))
    return values.flatten().kthvalue(rank).values.item()
