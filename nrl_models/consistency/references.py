"""Reference models: transformers' model in any precision, with the weights that engine and trainer should have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from nrl_models.auto import auto_class_for
from nrl_models.common.dtypes import support_float64
from nrl_models.common.modules import owner_of
from nrl_models.common.process_state import BUILDING
from nrl_models.engines.base import Engine
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.start import start_engine
from nrl_models.parity.check import reference_model

WeightStream = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Function that yields tensors by hub name. Each call starts again with the first tensor."""


class References:
    """Creates reference models of a checkpoint, and caches them.

    Args:
        path: Directory of the checkpoint.
        device: Device of the models.
        weights: Weights to use instead of the checkpoint's: the export of a trained model.
        previous: Weights from before the last refit, which an engine may still use.
        witness: Name of another engine to use if both sides differ; empty for none.
        witness_options: Options of the witness.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str | torch.device = "cpu",
        weights: WeightStream | None = None,
        previous: WeightStream | None = None,
        witness: str = "",
        witness_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.device, self.weights, self.previous = Path(path), device, weights, previous
        self.witness, self.witness_options = witness, witness_options or {}
        self._kept: dict[tuple[torch.dtype, bool], PreTrainedModel] = {}

    def model(self, dtype: torch.dtype, *, combined: bool = False) -> PreTrainedModel:
        """Return transformers' model in `dtype`, or ours with fused groups (named as in engines) if `combined`."""
        key = (dtype, combined)
        if key not in self._kept:
            if self._kept and next(iter(self._kept.values())).num_parameters() > 2e9:
                self._kept.clear()  # keep only one large model in memory
            self._kept[key] = self._load(dtype, combined, self.weights)
        return self._kept[key]

    def with_previous_weights(self, dtype: torch.dtype, *, combined: bool = False) -> PreTrainedModel | None:
        """Return the model with the previous weights; None if there are none."""
        return None if self.previous is None else self._load(dtype, combined, self.previous)

    @contextmanager
    def asked_witness(self) -> Iterator[Engine]:
        """Start the witness with the weights, in fp32 by default. It is closed at the end of the context.

        Raises:
            EngineError: If it does not start, or does not accept the weights.
        """
        options = {"dtype": torch.float32, **self.witness_options}
        with start_engine(self.witness, self.path, **options) as engine:
            if self.weights is not None:
                engine.refit(self.weights())
            yield engine

    def with_config(self, changes: Mapping[str, Any]) -> PreTrainedModel:
        """Return transformers' fp32 model of a changed configuration, with the same weights (not copied)."""
        original = self.model(torch.float32)
        config = copy.deepcopy(original.config)
        text = config.get_text_config()
        for key, value in changes.items():
            setattr(text, key, value)
        with BUILDING, torch.device("meta"):
            changed = type(original)._from_config(config, dtype=torch.float32)
        changed.load_state_dict(original.state_dict(), strict=False, assign=True)
        if next(changed.buffers(), None) is not None:
            # Buffers (RoPE tables, scales) depend on the changed configuration.
            with BUILDING:
                built = type(original)._from_config(config, dtype=torch.float32)
            for name, buffer in built.named_buffers():
                owner, attribute = owner_of(changed, name)
                owner._buffers[attribute] = buffer.to(self.device)
        changed.tie_weights()
        return changed.eval()

    def _load(self, dtype: torch.dtype, combined: bool, weights: WeightStream | None) -> PreTrainedModel:
        model: PreTrainedModel
        if combined:
            model = auto_class_for(self.path).from_pretrained(self.path, dtype=dtype, device=self.device)
        else:
            model = reference_model(self.path, dtype, self.device)
        support_float64(model)
        if weights is not None:
            HFEngine(model).refit(weights())
        return model.eval()
