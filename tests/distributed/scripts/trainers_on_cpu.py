"""Run accelerate, `Trainer` and TRL's trainers under `accelerate launch` on CPUs, with the functions of the examples.

    accelerate launch ... trainers_on_cpu.py RUNS.json

RUNS lists runs, each a `Run`. Every rank writes the logs of its runs to `RUNS.json.<rank>`. A single launch runs all of
them, because starting processes takes seconds.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate_fsdp2
import fsdp_on_cpu  # noqa: F401  FSDP on CPUs
import grpo_trl
import sft
import torch
import torch.distributed as dist
import trainer
import transformers
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, TrainerCallback

import nrl_models


@dataclass(frozen=True)
class Run:
    """One training run, sharded over all ranks.

    Args:
        kind: `loop`, `trainer`, `sft` or `grpo`. `loop` is the training loop of `accelerate_fsdp2.py`.
        checkpoint: The initial checkpoint.
        out: The output folder.
        sharded_by: `transformers` for its own model, sharded by accelerate; `accelerate` or `us` for our model.
        forget: A checkpoint to remove first. The run then resumes from the last remaining one.
    """

    kind: str
    checkpoint: str
    out: str
    sharded_by: str
    forget: str | None = None

    def __call__(self) -> list[dict[str, float]]:
        """Train. Returns the log of each step; for `loop` the losses of rank 0, then those of rank 1."""
        if self.forget and dist.get_rank() == 0:
            shutil.rmtree(Path(self.out) / self.forget)
        dist.barrier()
        os.environ["FSDP_AUTO_WRAP_POLICY"] = "NO_WRAP" if self.sharded_by == "us" else "TRANSFORMER_BASED_WRAP"
        if self.kind == "loop":
            return self._loop()
        options = {}
        if self.sharded_by == "us":
            options["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        auto = (
            transformers.AutoModelForCausalLM if self.sharded_by == "transformers" else nrl_models.AutoModelForCausalLM
        )
        trainer_with_model = self._trainer(auto.from_pretrained(self.checkpoint, dtype=torch.float32, **options))
        trainer_with_model.add_callback(CheckParametersAreSharded())
        trainer_with_model.train(resume_from_checkpoint=self.forget is not None)
        trainer_with_model.save_model(self.out)
        return [
            {key: entry[key] for key in ("loss", "reward") if key in entry}
            for entry in trainer_with_model.state.log_history
            if "loss" in entry
        ]

    def _loop(self) -> list[dict[str, float]]:
        AcceleratorState._reset_state(reset_partial_state=True)  # reads the environment again
        assert Accelerator().is_fsdp2
        losses = accelerate_fsdp2.main([self.checkpoint, self.out, *(["--beforehand"] * (self.sharded_by == "us"))])
        of_ranks: list[list[float]] = [[]] * dist.get_world_size()
        dist.all_gather_object(of_ranks, losses)
        return [{"loss": loss} for of_rank in of_ranks for loss in of_rank]

    def _trainer(self, model: Any) -> Any:
        options: dict[str, Any] = {"use_cpu": True, "bf16": False, "seed": 0, "max_steps": 4, "learning_rate": 1e-3}
        options |= {"save_strategy": "steps", "save_steps": 2}
        if self.kind == "trainer":
            return trainer.trainer_for(model, self.out, **options)
        tokenizer = AutoTokenizer.from_pretrained(self.checkpoint)
        texts = [" ".join(str(20 + (7 * row + 3 * column) % 400) for column in range(8)) for row in range(16)]
        if self.kind == "sft":
            return sft.trainer_for(model, tokenizer, texts, self.out, **options)
        return grpo_trl.trainer_for(
            model, tokenizer, {"prompt": texts}, reward, self.out, max_completion_length=6, **options
        )


class CheckParametersAreSharded(TrainerCallback):
    """Check that every parameter is sharded. Otherwise the run would test nothing."""

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        """Check the model during training."""
        assert isinstance(model, FSDPModule)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor), name
            assert parameter.to_local().numel() == parameter.numel() // dist.get_world_size(), name


def reward(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between completions."""
    return [sum(int(word) % 7 for word in completion.split() if word.isdigit()) / 10 for completion in completions]


if __name__ == "__main__":
    PartialState(cpu=True)  # initializes the process group
    gc.freeze()  # accelerate and transformers collect garbage often, which visits all objects of torch
    runs_file = Path(sys.argv[1])
    logged = [Run(**run)() for run in json.loads(runs_file.read_text())]
    runs_file.with_suffix(f".json.{dist.get_rank()}").write_text(json.dumps(logged))
    dist.barrier()
    dist.destroy_process_group()
