"""Sums and gradients of a tile of logits, each in one kernel.

On a GPU, separate operations read and write all logits several times, which takes longer than the matmul that computes
them. `torch.compile` makes one kernel of each function here. On a CPU, separate operations in one buffer are as fast
(`Logits.log_sum_exp`, `nrl_models.logprobs.tiles`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from nrl_models.common.logs import get_logger
from nrl_models.common.upstream_torch import count_dispatch_modes
from nrl_models.errors import one_line

logger = get_logger(__name__)


def log_sum_exp(logits: torch.Tensor, temperature: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the logarithm of the sum of exponentials of each row, `(tokens,)` in `dtype`."""
    return torch.logsumexp(logits.to(dtype) / temperature, 1)


def logprob_gradient_(
    logits: torch.Tensor,
    log_sum: torch.Tensor,
    by_logprobs: torch.Tensor,
    places: torch.Tensor,
    temperature: float,
    scale: float,
    cap: float | None,
) -> torch.Tensor:
    """Replace logits by the gradient of a loss by the output embedding's result.

    Args:
        logits: Logits before the temperature, `(tokens, vocabulary)` or some columns of these; overwritten.
        log_sum: Logarithm of the sum of exponentials over the vocabulary, `(tokens,)`.
        by_logprobs: Derivatives of the loss by the log-probabilities, `(tokens,)`.
        places: Column of each token; outside the columns if the token is in another tile.
        temperature: Divisor of the logits.
        scale, cap: Scale and soft cap of the head, see `OutputHead`.
    """
    wide = logits.to(log_sum.dtype)
    probabilities = (wide / temperature - log_sum[:, None]).exp()
    is_token = torch.arange(logits.shape[1], device=logits.device) == places[:, None]
    gradient = (is_token.to(wide.dtype) - probabilities) * by_logprobs[:, None]
    slope = scale / temperature if cap is None else (1.0 - (wide / cap) ** 2) * (scale / temperature)
    return logits.copy_(gradient * slope)


def fuses(device: torch.device) -> bool:
    """Return True if tiles on `device` are computed by compiled functions: on CUDA, where Triton is installed.

    Not under modes (operation counters, fake tensors), which have to see each operation.
    """
    return device.type == "cuda" and _has_triton() and not count_dispatch_modes()


def run_fused(function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """Call a function of this module compiled, or as it is if the compiler does not work here."""
    try:
        return _compiled(function)(*arguments)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # any of the compilers' errors, before the function has run
        _warn_once(one_line(error))
        return function(*arguments)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function, dynamic=True)


@cache
def _warn_once(problem: str) -> None:
    logger.warning("torch.compile failed, so log-probabilities take longer: %s", problem)
