"""Probes: fixed sequences that trainer and engine score after a sync, and other scores that the trainer could have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nrl_models.common.forward.evaluation import autocast, evaluating
from nrl_models.common.modules import device_of, innermost, input_embeddings, peft_modules
from nrl_models.engines.base import Engine
from nrl_models.engines.scores import final_scores
from nrl_models.errors import UnknownArgumentError
from nrl_models.inputs.model_inputs import text_ids
from nrl_models.logprobs import rollout_logprobs
from nrl_models.logprobs.metrics import token_mult_prob_error
from nrl_models.logprobs.sampling import Sampling
from nrl_models.parity.noise import rounded_otherwise
from nrl_models.watch.rollout_tensors import token_rows

ROWS, LENGTH = 4, 64
"""Default number of probe sequences, and their length in tokens."""

KEPT_VERSIONS = 8
"""Number of earlier versions of the weights whose log-probabilities are kept."""


class Probes:
    """Scores fixed sequences on both sides.

    Args:
        model: the trainer's model; it may be wrapped (PEFT, DDP, FSDP).
        engine: an engine that scores given tokens.
        sequences: token IDs, all of one length. Default: random text tokens.
        compute: dtype of the trainer's autocast; None for none.

    Raises:
        UnknownArgumentError: a token ID is not in the vocabulary, or see `token_rows`.

    Attributes:
        trainer: the trainer's log-probabilities `(rows, length - 1)`, fp64, by version of the weights.
        engine_scores: the engine's log-probabilities, by version.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        sequences: Sequence[Sequence[int]] | None = None,
        compute: torch.dtype | None = None,
    ) -> None:
        self.model, self.engine, self.compute = model, engine, compute
        rows = token_rows(sequences)
        self.tokens = torch.tensor(rows) if rows else self._random_tokens()
        weight = getattr(input_embeddings(innermost(model)), "weight", None)
        if rows and weight is not None and len(weight.shape) == 2 and (last := int(self.tokens.max())) >= len(weight):
            raise UnknownArgumentError(f"probes have the token {last}: the model has {len(weight)} tokens")
        self.trainer: dict[int, torch.Tensor] = {}
        self.engine_scores: dict[int, torch.Tensor] = {}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the trainer computes."""
        dtype: torch.dtype = self.compute or next(self.model.parameters()).dtype
        return dtype

    def _random_tokens(self) -> torch.Tensor:
        limit = self.engine.capabilities().max_length
        # vLLM generates one token to score a prompt.
        length = LENGTH if limit is None else min(LENGTH, limit - 1)
        config = innermost(self.model).config
        return text_ids(config, (ROWS, length), torch.Generator().manual_seed(0))

    def score(self, version: int) -> float:
        """Score the sequences on both sides and return `token_mult_prob_error`."""
        for scores, logprobs in ((self.trainer, self.of_trainer()), (self.engine_scores, self.of_engine())):
            scores.pop(version, None)  # keeps the order of calls: a restarted engine counts from 1 again
            scores[version] = logprobs
            for old in list(scores)[:-KEPT_VERSIONS]:
                del scores[old]
        return error(self.trainer[version], self.engine_scores[version])

    def of_trainer(self) -> torch.Tensor:
        """Compute the trainer's current log-probabilities."""
        return self._scores(self.compute)

    def of_engine(self) -> torch.Tensor:
        """Compute the engine's current log-probabilities with one prefill."""
        return final_scores(self.engine, self.tokens, self.tokens.shape[1] - 1, Sampling())

    def without_adapters(self) -> torch.Tensor | None:
        """Compute the trainer's log-probabilities with its adapters disabled. None without adapters."""
        layers = [module for _, module in peft_modules(self.model)]
        if not layers:
            return None
        with _adapters_disabled(self.model, layers):
            return self.of_trainer()

    def with_adapter_scale(self, factor: float | None) -> torch.Tensor | None:
        """Compute the trainer's log-probabilities with its adapters scaled. None without LoRA adapters.

        Args:
            factor: multiplies the scale `lora_alpha / r` of every adapter; None sets it to 1.
        """
        layers = [
            module for _, module in peft_modules(self.model) if isinstance(getattr(module, "scaling", None), dict)
        ]
        if not layers:
            return None
        scalings = [dict(layer.scaling) for layer in layers]
        try:
            for layer in layers:
                layer.scaling.update({name: scale * factor if factor else 1.0 for name, scale in layer.scaling.items()})
            return self.of_trainer()
        finally:
            for layer, scaling in zip(layers, scalings, strict=True):
                layer.scaling.update(scaling)

    def rounding(self, dtype: torch.dtype) -> float:
        """Return the noise floor: `token_mult_prob_error` of the trainer with itself under different rounding.

        Args:
            dtype: dtype of the engine. If it has a lower precision than the trainer's, rounding is that of autocast
                to it.
        """
        return error(*self.rounded(dtype))

    def rounded(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the trainer's log-probabilities, and those under different rounding, see `rounding`."""
        now = self.of_trainer()
        if torch.finfo(dtype).eps > torch.finfo(self.dtype).eps:
            return now, self._scores(dtype)
        with rounded_otherwise(self.model):
            return now, self.of_trainer()

    def _scores(self, dtype: torch.dtype | None) -> torch.Tensor:
        rows = self.tokens.tolist()
        device = device_of(self.model)
        with torch.no_grad(), evaluating(self.model), autocast(device, dtype):
            scores = rollout_logprobs(self.model, rows)
        return scores.logprobs[:, 1:].double().cpu()


@contextmanager
def _adapters_disabled(model: nn.Module, layers: Sequence[Any]) -> Iterator[None]:
    """Disable PEFT layers inside a `with` block, and restore `requires_grad` afterwards.

    PEFT changes `requires_grad` when it enables the layers again.
    """
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    enabled = [layer for layer in layers if not layer.disable_adapters]
    for layer in enabled:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in enabled:
            layer.enable_adapters(True)
        for parameter, requires_grad in trainable:
            parameter.requires_grad_(requires_grad)


def error(candidate: torch.Tensor, wanted: torch.Tensor, where: torch.Tensor | None = None) -> float:
    """Return `token_mult_prob_error`; infinite if a compared value is not finite, or nothing is compared.

    Args:
        candidate, wanted: log-probabilities of the same tokens.
        where: True for tokens to compare. Default: all.
    """
    candidate, wanted = candidate.double().cpu(), wanted.double().cpu()
    where = torch.ones_like(wanted, dtype=torch.bool) if where is None else where
    is_finite = candidate.isfinite() & wanted.isfinite()
    if not bool(where.any()) or bool((where & ~is_finite).any()):
        return math.inf
    return token_mult_prob_error(candidate, wanted, where)


def explains(candidate: torch.Tensor | None, wanted: torch.Tensor, present: float) -> bool:
    """Return True if other log-probabilities leave less than a tenth of the present excess error.

    Args:
        candidate: log-probabilities that the trainer could have; None if it cannot.
        wanted: log-probabilities to explain. NaN values are not compared.
        present: `token_mult_prob_error` of the trainer's present log-probabilities.
    """
    return candidate is not None and error(candidate, wanted, ~wanted.isnan()) - 1.0 < 0.1 * (present - 1.0)
