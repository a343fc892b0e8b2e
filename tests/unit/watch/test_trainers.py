"""Trainer hooks: TRL's GRPOTrainer with an engine instead of vLLM, transformers' Trainer, and verl's metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import new_model
from recipe_inputs import byte_tokenizer
from training_loop import FaultyEngine
from transformers import LlamaConfig, Trainer, TrainingArguments

from nrl_models import AutoModelForCausalLM, Sampling
from nrl_models.adapters import hf_trainer, verl_trainer
from nrl_models.errors import DriftError, TrainerError, UnknownArgumentError
from nrl_models.testing.tiny import tiny_config
from nrl_models.watch import Cause, Watch

pytestmark = pytest.mark.integrations

STEPS = 3


class Generation:
    """`VLLMGeneration` with an engine instead of vLLM."""

    def __init__(self, model: Any, engine: FaultyEngine, drop: str = "") -> None:
        self.model, self.engine, self.drop = model, engine, drop

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, tensor) for name, tensor in self.model.named_parameters() if name != self.drop)

    def sync_weights(self) -> None:
        self.engine.refit(((name, tensor.detach()) for name, tensor in self._iter_named_params()), partial=True)

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any) -> tuple[Any, ...]:
        samples = self.engine.generate(prompts, Sampling(), max_new_tokens=8)
        logprobs = [[[value] for value in sample.logprobs] for sample in samples]
        return prompts, [list(sample.tokens) for sample in samples], logprobs, None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = new_model(tiny_config(LlamaConfig))
    model.save_pretrained(tmp_path / "tiny")
    byte_tokenizer(model.config).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def grpo(folder: Path, out: Path) -> tuple[Any, FaultyEngine]:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = trl.GRPOTrainer(
        model=model,
        args=trl.GRPOConfig(
            output_dir=str(out),
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=8,
            max_steps=STEPS,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            save_strategy="no",
        ),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        train_dataset=datasets.Dataset.from_list([{"prompt": text} for text in ("one", "two plus", "a", "bcd") * 4]),
        processing_class=byte_tokenizer(model.config),
    )
    engine = FaultyEngine(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    trainer.vllm_importance_sampling_mode = "token_truncate"
    trainer.vllm_importance_sampling_clip_max = 3.0
    trainer.vllm_importance_sampling_clip_min = None
    trainer._last_loaded_step = -1
    trainer.vllm_generation = Generation(trainer.model, engine)
    return trainer, engine


def test_trl_logs_metrics_without_findings(folder: Path, tmp_path: Path) -> None:
    from nrl_models.adapters import trl_watch

    trainer, _ = grpo(folder, tmp_path)
    watch = trl_watch.watch(trainer, log=tmp_path / "watch.jsonl")
    trainer.train()
    assert not watch.findings
    errors = [entry["watch/token_mult_prob_error"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(errors) == STEPS
    assert max(errors) < 1.0001
    events = [json.loads(line) for line in (tmp_path / "watch.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["sync", "step"] * STEPS


FAULTS = {
    "not sent": Cause.MISSING_WEIGHTS,
    "not written": Cause.MISSING_WEIGHTS,
    "temperature": Cause.SAMPLING,
}


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_trl_stops_before_update(fault: str, folder: Path, tmp_path: Path) -> None:
    from nrl_models.adapters import trl_watch

    trainer, engine = grpo(folder, tmp_path)
    watch = trl_watch.watch(trainer)
    sync = trainer.vllm_generation.sync_weights

    def later() -> None:
        if trainer.state.global_step == 2:
            if fault == "not sent":
                trainer.vllm_generation.drop = "model.layers.0.mlp.up_proj.weight"
            elif fault == "not written":
                engine.keeps = lambda name: "layers.0" in name
            else:
                engine.sampling = Sampling(temperature=0.5)
        sync()

    trainer.vllm_generation.sync_weights = later
    before: dict[str, torch.Tensor] = {}

    def remember(*_: Any, **__: Any) -> None:
        before.update({name: tensor.clone() for name, tensor in trainer.model.state_dict().items()})

    trainer.create_optimizer()
    trainer.optimizer.register_step_post_hook(remember)
    with pytest.raises(DriftError) as caught:
        trainer.train()
    assert watch.version == 3
    assert trainer.state.global_step == 2
    assert caught.value.findings[0].cause is FAULTS[fault]
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())


def test_trl_without_vllm_raises() -> None:
    pytest.importorskip("trl")
    from nrl_models.adapters import trl_watch

    with pytest.raises(UnknownArgumentError, match="use_vllm=True"):
        trl_watch.watch(SimpleNamespace(vllm_generation=None))


@pytest.mark.long
def test_transformers_trainer_refits_engine(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = FaultyEngine(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    rows = [{"input_ids": list(range(20, 30)), "labels": list(range(20, 30))}] * 16
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        learning_rate=1e-2, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    watch = hf_trainer.watch(trainer, engine, every=2)
    trainer.train()
    assert (watch.version, watch.findings) == (2, [])
    logged = [entry["watch/probe_error"] for entry in trainer.state.log_history if "watch/probe_error" in entry]
    assert len(logged) == 2
    assert torch.equal(engine.model.lm_head.weight, model.lm_head.weight)
    engine.keeps = lambda name: "lm_head" in name
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    hf_trainer.watch(trainer, engine)
    with pytest.raises(DriftError):
        trainer.train()


def test_transformers_trainer_weights_changed_at_learning_rate_0(folder: Path, tmp_path: Path) -> None:
    class Decaying(Trainer):
        def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
            loss = super().training_step(*args, **options)
            with torch.no_grad():
                self.model.lm_head.weight.mul_(0.999)
            return loss

    model, served = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    rows = [{"input_ids": list(range(20, 30)), "labels": list(range(20, 30))}] * 8
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        learning_rate=0.0, save_strategy="no",
    )  # fmt: skip
    trainer = Decaying(model=model, args=arguments, train_dataset=rows)
    hf_trainer.watch(trainer, FaultyEngine(served))
    with pytest.raises(DriftError, match="unexpected update") as caught:
        trainer.train()
    assert caught.value.findings[0].names == ("lm_head.weight",)


def test_refit_callback_every_below_1_raises() -> None:
    with pytest.raises(UnknownArgumentError, match="every=0"):
        hf_trainer.RefitCallback(Watch(), 0)


def verl_batch(shift: float) -> Any:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(4, 6, generator=generator)
    batch = {
        "responses": torch.ones(4, 6, dtype=torch.long),
        "response_mask": torch.ones(4, 6),
        "attention_mask": torch.ones(4, 9),
        "old_log_probs": old,
        "rollout_log_probs": old + shift,
    }
    return SimpleNamespace(batch=batch)


def test_verl_reports_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("verl.utils.debug.metrics")
    module.calculate_debug_metrics = lambda data: {"training/rollout_probs_diff_valid": 1}
    for name in ("verl", "verl.utils", "verl.utils.debug"):
        monkeypatch.setitem(__import__("sys").modules, name, ModuleType(name))
    monkeypatch.setitem(__import__("sys").modules, "verl.utils.debug.metrics", module)
    monkeypatch.setattr(verl_trainer, "check_trainer", lambda requirement: None)
    watch = verl_trainer.watch()
    metrics = module.calculate_debug_metrics(verl_batch(0.0))
    assert metrics["training/rollout_probs_diff_valid"] == 1
    assert metrics["watch/token_mult_prob_error"] == pytest.approx(1.0)
    with pytest.raises(DriftError):
        module.calculate_debug_metrics(verl_batch(0.3))
    assert watch.version == 2


def test_verl_not_installed_raises() -> None:
    with pytest.raises(TrainerError, match="verl"):
        verl_trainer.watch()
