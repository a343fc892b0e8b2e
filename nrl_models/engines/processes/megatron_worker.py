"""Run a GPT model of Megatron-Core for `megatron_core.py`."""

from __future__ import annotations

import logging
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from nrl_models.auto import auto_class_for
from nrl_models.common.dtypes import dtype_name
from nrl_models.engines.processes.environment_worker import serve
from nrl_models.engines.processes.worker_loop import DecodingStep, WorkerModel
from nrl_models.engines.refit_targets import RefitTargets
from nrl_models.loading.read_config import read_config
from nrl_models.megatron.gpt_model import device, load, logits, megatron_of, start_megatron


class MegatronModel(WorkerModel):
    """Megatron's model of a checkpoint, and this library's model with the same weights, which maps new weights.

    Args:
        path: Directory of the checkpoint.
        dtype: Dtype of the parameters; None uses the checkpoint's.
        weights: Whether to load the weights. Otherwise they are random.
        seed: Random seed of random weights.
    """

    def __init__(self, path: str, dtype: str | None, weights: bool, seed: int) -> None:
        start_megatron()
        torch.manual_seed(seed)
        auto_class, wanted = auto_class_for(path), getattr(torch, dtype) if dtype is not None else "auto"
        if weights:
            self.source = auto_class.from_pretrained(path, dtype=wanted)
        else:
            self.source = auto_class.from_config(read_config(Path(path)), dtype=wanted)
        self.device = device()
        self.model = megatron_of(self.source.eval())

    def describe(self) -> dict[str, Any]:
        """Return versions and settings, see `WorkerModel.describe`."""
        return {
            "megatron-core": version("megatron-core"),
            "class": f"{type(self.model).__module__}:{type(self.model).__name__}",
            "dtype": dtype_name(self.source.dtype),
            "device": str(self.device),
            "vocabulary": self.source.config.vocab_size,
        }

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return logits, see `WorkerModel.logits`."""
        return logits(self.model, torch.tensor([tokens], device=self.device))[0].float().cpu()

    def decoding(self) -> DecodingStep:
        """Return a step that recomputes the complete sequence."""
        sequences: list[list[int]] = []

        @torch.no_grad()
        def step(new: list[list[int]]) -> torch.Tensor:
            sequences[:] = [[*row, *tokens] for row, tokens in zip(sequences or [[]] * len(new), new, strict=True)]
            return logits(self.model, torch.tensor(sequences, device=self.device))[:, -1].float().cpu()

        return step

    def apply(self) -> dict[str, Any]:
        """Load the received weights, see `WorkerModel.apply`."""
        arrived, self.arrived = self.arrived, {}
        adapter, targets = self.source.state_dict_adapter, RefitTargets(self.source, "megatron")
        matches = [targets.find(name, tensor) for name, tensor in arrived.items()]
        state_dict = adapter.from_hf(arrived, strict=False)
        targets.require_tied({**targets.held, **state_dict})
        self.source.load_state_dict(state_dict, strict=False)
        load(self.model, adapter, self.source.state_dict())
        return {"unwritten": sorted(targets.missing({target.name for target in matches if target is not None}))}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)  # Megatron logs all missing optional packages
    serve(MegatronModel)
