"""The losses and their gradients, compared with those of TRL's trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import new_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from nrl_models.losses import (
    Correction,
    Normalize,
    dpo_loss,
    group_advantages,
    importance_weights,
    misordered,
    overlong_penalty,
    policy_loss,
    ranking_loss,
    sequence_logprobs,
    token_weights,
)
from nrl_models.testing.tiny import tiny_config

pytestmark = pytest.mark.integrations
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

GROUP, LONGEST = 4, 6
QUIET_OPTIONS: dict[str, Any] = {
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "save_strategy": "no",
    "bf16": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one word per number."""
    words = {"<pad>": 0, "<end>": 1, "<unk>": 2} | {str(number): number for number in range(3, 100)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")


def llama(kind: str = "ForCausalLM", **values: Any) -> PreTrainedModel:
    return new_model(tiny_config(LlamaConfig, {"pad_token_id": 0, "eos_token_id": 1, **values}), kind)


def gradients(loss: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def assert_same_loss_and_gradients(ours: torch.Tensor, theirs: torch.Tensor, model: torch.nn.Module) -> None:
    """Compare two losses and their gradients, which must not be trivial."""
    first, second = gradients(theirs, model), gradients(ours, model)
    assert max(gradient.abs().max().item() for gradient in first.values()) > 1e-4
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(second, first, rtol=1e-4, atol=1e-6)


def rows_of_ids(lengths: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 100, (length,), generator=generator).tolist() for length in lengths]


METHODS = {
    "grpo": (Normalize.SEQUENCE, {"loss_type": "grpo", "scale_rewards": "group"}),
    "dr_grpo": (Normalize.LONGEST, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": (Normalize.TOKEN, {"loss_type": "dapo", "scale_rewards": "group", "epsilon_high": 0.28}),
}
CORRECTIONS = {
    "token_truncate": Correction("tis", cap=1.2),
    "token_mask": Correction("mis", cap=1.2, floor=0.8),
    "sequence_truncate": Correction("tis", cap=1.2, level="sequence"),
    "sequence_mask": Correction("mis", cap=1.2, floor=0.8, level="sequence"),
}


@pytest.mark.long
@pytest.mark.parametrize("mode", CORRECTIONS)
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("method", METHODS)
def test_policy_loss_matches_trl(
    method: str,
    beta: float,
    mode: str,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Advantages, importance weights, loss and gradients of a second update on fixed samples."""
    normalize, options = METHODS[method]
    correction = CORRECTIONS[mode]
    rewards = [1.0, 0.0, 0.25, 0.5, 1.0, 1.0, 0.0, -0.5]

    def reward(completions: list[str], **_: Any) -> list[float]:
        return rewards

    bounds = {"vllm_importance_sampling_clip_max": correction.cap}
    if correction.floor:
        bounds["vllm_importance_sampling_clip_min"] = correction.floor
    arguments = trl.GRPOConfig(
        str(tmp_path), per_device_train_batch_size=2 * GROUP, num_generations=GROUP, max_completion_length=LONGEST,
        beta=beta, use_bias_correction_kl=False, vllm_importance_sampling_mode=mode, gradient_checkpointing=False,
        **bounds, **options, **QUIET_OPTIONS,
    )  # fmt: skip
    policy = llama()
    policy.config._name_or_path = str(tmp_path / "reference")  # where the trainer loads the reference from
    llama(initializer_range=0.03).save_pretrained(tmp_path / "reference")
    prompts = [{"prompt": "5 6 7"}] * GROUP + [{"prompt": "8 9"}] * GROUP
    trainer = trl.GRPOTrainer(
        policy, reward_funcs=reward, args=arguments, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(prompts),
    )  # fmt: skip
    prompt_ids = [tokenizer(row["prompt"])["input_ids"] for row in prompts]
    answers = rows_of_ids([6, 2, 3, 6, 1, 4, 5, 6], seed=1)
    generator = torch.Generator().manual_seed(2)
    engine = [[0.0] * len(answer) for answer in answers]
    monkeypatch.setattr(trainer, "_generate", lambda _: (prompt_ids, answers, None, [""] * 8, engine, {}, None, None))
    trainer.use_vllm = True  # from here on, the fixed samples count as engine samples
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model
    for row, values in zip(
        engine, trainer._generate_and_score_completions(prompts)["old_per_token_logps"], strict=True
    ):
        row[:] = (values + 0.2 * torch.randn(len(values), generator=generator))[: len(row)].tolist()
    inputs = trainer._generate_and_score_completions(prompts)
    mask, old = inputs["completion_mask"].bool(), inputs["old_per_token_logps"]
    samples = inputs["sampling_per_token_logps"]

    advantages = group_advantages(torch.tensor(rewards).view(2, GROUP), scale=method != "dr_grpo").flatten()
    torch.testing.assert_close(advantages, inputs["advantages"])
    weights = importance_weights(old, samples, mask, correction)
    torch.testing.assert_close(weights, torch.where(mask, inputs["importance_sampling_ratio"].expand_as(old), 0.0))
    assert 0 < weights[mask].gt(0).sum() <= mask.sum()
    assert len(weights[mask].unique()) > 2

    with torch.no_grad():  # an update between sampling and training, so that some ratios are outside of the clip range
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    theirs = trainer.compute_loss(model, inputs)
    input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logprobs = trainer._get_per_token_logps_and_entropies(model, input_ids, attention_mask, mask.shape[1])[0]
    ours = policy_loss(
        logprobs, old, advantages, token_weights(mask, normalize, LONGEST if method == "dr_grpo" else None),
        eps_high=0.28 if method == "dapo" else 0.2, correction=weights,
        reference=inputs.get("ref_per_token_logps"), kl=beta,
    )  # fmt: skip
    ratios = (logprobs - old).exp()[mask]
    assert ratios.min() < 0.8 < 1.28 < ratios.max()
    assert_same_loss_and_gradients(ours, theirs, model)


def test_overlong_penalty_matches_trl() -> None:
    from trl.rewards import get_soft_overlong_punishment

    lengths = list(range(1, 131))
    theirs = get_soft_overlong_punishment(100, 20)(completion_ids=[[0] * length for length in lengths])
    torch.testing.assert_close(overlong_penalty(torch.tensor(lengths), 100, 20), torch.tensor(theirs))


def pairs(trainer: Any) -> dict[str, torch.Tensor]:
    return next(iter(trainer.get_train_dataloader()))


def texts(lengths: list[int], seed: int) -> list[str]:
    return [" ".join(map(str, row)) for row in rows_of_ids(lengths, seed)]


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_dpo_loss_matches_trl(beta: float, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = {"prompt": texts([3, 2], 0), "chosen": texts([4, 6], 1), "rejected": texts([5, 2], 2)}
    arguments = trl.DPOConfig(
        str(tmp_path), beta=beta, per_device_train_batch_size=2, gradient_checkpointing=False, **QUIET_OPTIONS
    )
    model, reference = llama(), llama(initializer_range=0.03)
    trainer = trl.DPOTrainer(
        model, ref_model=reference, args=arguments, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_dict(rows),
    )  # fmt: skip
    inputs = pairs(trainer)
    theirs = trainer.compute_loss(trainer.model, dict(inputs))

    def scores(scored: PreTrainedModel) -> tuple[torch.Tensor, ...]:
        logits = scored(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
        chosen = logits.log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
        return sequence_logprobs(chosen, inputs["completion_mask"][:, 1:]).chunk(2)

    with torch.no_grad():
        before = scores(trainer.ref_model)
    assert_same_loss_and_gradients(dpo_loss(*scores(trainer.model), *before, beta=beta), theirs, trainer.model)


def test_ranking_loss_matches_trl(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = {"chosen": texts([4, 6, 3], 1), "rejected": texts([5, 2, 7], 2)}
    arguments = trl.RewardConfig(
        str(tmp_path), per_device_train_batch_size=3, gradient_checkpointing=False, **QUIET_OPTIONS
    )
    trainer = trl.RewardTrainer(
        llama("ForSequenceClassification", num_labels=1), args=arguments, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_dict(rows),
    )  # fmt: skip
    inputs = pairs(trainer)
    theirs = trainer.compute_loss(trainer.model, dict(inputs))
    chosen, rejected = trainer.model(**inputs).logits[:, 0].chunk(2)
    (accuracy,) = trainer._metrics["train"]["accuracy"]
    assert len(misordered(chosen, rejected)) == round(3 * (1 - accuracy))
    assert_same_loss_and_gradients(ranking_loss(chosen, rejected), theirs, trainer.model)
