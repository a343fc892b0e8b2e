"""transformers' Trainer: equal losses, and checkpoints from which either library resumes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import WEIGHTS, assert_same, hf_tensors, stored, weight_map
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from nrl_models import AutoModelForCausalLM
from nrl_models.common.projections import report

pytestmark = pytest.mark.long

Load = Callable[[Path], nn.Module]

STEPS, HALF = 6, 3


def theirs(folder: Path) -> PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def ours(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, combine=True)
    groups = report(model)
    assert groups
    assert all(group.joined for group in groups)
    return model


def uncombined(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, combine=False)


def with_lora(load: Load) -> Load:
    def load_with_lora(folder: Path) -> nn.Module:
        torch.manual_seed(0)
        return get_peft_model(load(folder), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))

    return load_with_lora


@dataclass
class Run:
    """A finished run: the trainer, its log of each step, and its folder with a checkpoint for each half."""

    trainer: Trainer
    out: Path

    @property
    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.trainer.state.log_history if "loss" in entry]

    @property
    def gradient_norms(self) -> list[float]:
        return [entry["grad_norm"] for entry in self.trainer.state.log_history if "loss" in entry]

    def checkpoint(self, step: int = HALF) -> Path:
        return self.out / f"checkpoint-{step}"

    def optimizer_state(self, step: int = STEPS) -> dict[str, Any]:
        return torch.load(self.checkpoint(step) / "optimizer.pt", weights_only=True)


def run(
    model: nn.Module,
    out: Path,
    resume: Path | None = None,
    *,
    evaluate: bool = False,
    **options: Any,
) -> Run:
    """Train for six steps on random tokens, or resume from a checkpoint."""
    settings = {
        "max_steps": STEPS,
        "save_steps": HALF,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    tokens = torch.randint(16, 480, (24, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(out), **settings | options),
        train_dataset=data[:16],
        eval_dataset=data[16:] if evaluate else None,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return Run(trainer, out)


def assert_same_run(actual: Run, expected: Run, tolerance: float = 1e-5) -> None:
    assert len(actual.losses) == STEPS
    assert actual.losses == pytest.approx(expected.losses, rel=tolerance)
    assert actual.gradient_norms == pytest.approx(expected.gradient_norms, rel=10 * tolerance)


def assert_near(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare on average: if a gradient is almost zero, Adam turns its rounding error into a full step."""
    assert list(actual) == list(expected)
    assert max((actual[name] - expected[name]).abs().mean().item() for name in expected) < 1e-6


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def their_run(llama_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(theirs(llama_checkpoint), tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="module")
def our_run(llama_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(ours(llama_checkpoint), tmp_path_factory.mktemp("ours"))


# Training


def test_losses_and_gradient_norms_match_transformers(our_run: Run, their_run: Run) -> None:
    assert_same_run(our_run, their_run)
    assert len(set(their_run.losses)) == STEPS


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"gradient_checkpointing": True}, 1e-5),
        ({"gradient_accumulation_steps": 2}, 1e-5),
        ({"bf16": True}, 1e-2),
    ],
    ids=["gradient checkpointing", "accumulation", "bf16"],
)
def test_training_options_match_transformers(
    options: dict[str, Any], tolerance: float, llama_checkpoint: Path, tmp_path: Path
) -> None:
    expected, actual = (
        run(load(llama_checkpoint), tmp_path / load.__name__, save_strategy="no", **options) for load in (theirs, ours)
    )
    assert_same_run(actual, expected, tolerance)


def test_lora_training_matches_transformers(llama_checkpoint: Path, tmp_path: Path) -> None:
    expected = run(with_lora(theirs)(llama_checkpoint), tmp_path / "theirs")
    actual = run(with_lora(ours)(llama_checkpoint), tmp_path / "ours")
    assert_same_run(actual, expected)
    assert set(stored(actual.checkpoint())) == set(stored(expected.checkpoint()))
    # The adapter's parameters have the Hugging Face model's names and order, so each resumes from the other's
    # checkpoint.
    for load, source in ((ours, expected), (theirs, actual)):
        resumed = run(with_lora(load)(llama_checkpoint), tmp_path / f"{load.__name__}-on", source.checkpoint())
        assert_same_run(resumed, expected)
        assert_close(resumed.optimizer_state()["state"], expected.optimizer_state()["state"])


# Checkpoints


def test_trainer_checkpoint_matches_transformers(our_run: Run, their_run: Run) -> None:
    for step in (HALF, STEPS):
        actual, expected = our_run.checkpoint(step), their_run.checkpoint(step)
        assert {path.name for path in actual.iterdir()} == {path.name for path in expected.iterdir()}
        assert_near(stored(actual), stored(expected))
        assert (actual / "config.json").read_text() == (expected / "config.json").read_text()


def test_trainer_checkpoint_loads_in_both_libraries(our_run: Run) -> None:
    folder = our_run.checkpoint(STEPS)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert_same(model.state_dict(), hf_tensors(our_run.trainer.model))
    assert_same(ours(folder).state_dict(), our_run.trainer.model.state_dict())


def test_resumed_run_matches_uninterrupted_run(our_run: Run, llama_checkpoint: Path, tmp_path: Path) -> None:
    resumed = run(ours(llama_checkpoint), tmp_path, our_run.checkpoint())
    assert_same_run(resumed, our_run)
    assert_close(resumed.optimizer_state(), our_run.optimizer_state())
    assert_near(stored(resumed.checkpoint(STEPS)), stored(our_run.checkpoint(STEPS)))


def test_resume_from_shards(our_run: Run, llama_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(our_run.checkpoint(), tmp_path / "shards")
    theirs(checkpoint).save_pretrained(checkpoint, max_shard_size="2MB")
    (checkpoint / WEIGHTS).unlink()
    shard = weight_map(checkpoint)
    mlps = [f"model.layers.{number}.mlp" for number in (0, 1)]
    assert all(shard[f"{mlp}.gate_proj.weight"] != shard[f"{mlp}.up_proj.weight"] for mlp in mlps)
    resumed = run(ours(llama_checkpoint), tmp_path / "out", checkpoint)
    assert_same_run(resumed, our_run)


def test_load_best_model_at_end(llama_checkpoint: Path, tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
    runs = [
        run(load(llama_checkpoint), tmp_path / load.__name__, evaluate=True, learning_rate=0.02, **options)
        for load in (theirs, ours)
    ]
    best = [Path(run.trainer.state.best_model_checkpoint).name for run in runs]
    assert best[0] == best[1] != f"checkpoint-{STEPS}"
    assert_same_run(runs[1], runs[0], 1e-3)  # rounding grows at this learning rate
    expected = stored(runs[1].out / best[1])
    assert_same(hf_tensors(runs[1].trainer.model), expected)
    assert not torch.equal(expected["lm_head.weight"], stored(runs[1].checkpoint(STEPS))["lm_head.weight"])


@pytest.mark.parametrize("max_shard_size", ["5GB", "2MB"])
def test_resume_mixture_from_saved_experts(max_shard_size: str, mixtral_checkpoint: Path, tmp_path: Path) -> None:
    """The files store one tensor per expert, as on the hub. In memory the experts are stacked."""
    base = transformers.AutoConfig.from_pretrained(mixtral_checkpoint)
    torch.manual_seed(1)  # the base model has other values
    AutoModelForCausalLM.from_config(base).save_pretrained(tmp_path / "checkpoint-0", max_shard_size=max_shard_size)
    transformers.TrainerState(max_steps=1, train_batch_size=2).save_to_json(
        tmp_path / "checkpoint-0" / "trainer_state.json"
    )
    resumed = run(
        ours(mixtral_checkpoint), tmp_path / "out", tmp_path / "checkpoint-0", max_steps=1, learning_rate=0.0,
        save_strategy="no",
    )  # fmt: skip
    assert_same(hf_tensors(resumed.trainer.model), hf_tensors(ours(tmp_path / "checkpoint-0")))


# Between the libraries


@pytest.mark.parametrize(("load", "source"), [(ours, "their_run"), (theirs, "our_run"), (uncombined, "our_run")])
def test_resume_from_checkpoint_of_other_library(
    load: Load, source: str, request: pytest.FixtureRequest, llama_checkpoint: Path, tmp_path: Path
) -> None:
    """Weights and optimizer state are in the same format for transformers' class and ours, with or without groups."""
    first: Run = request.getfixturevalue(source)
    resumed = run(load(llama_checkpoint), tmp_path, first.checkpoint())
    assert_same_run(resumed, first)
    assert_close(resumed.optimizer_state(), first.optimizer_state())
    assert_near(stored(resumed.checkpoint(STEPS)), stored(first.checkpoint(STEPS)))
