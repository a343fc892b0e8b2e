"""TRL: compare the log-probabilities of vLLM and trainer in every step.

    nrl_models.adapters.trl_watch.watch(trainer)
    trainer.train()

Call `watch` after creating the trainer and before training.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nrl_models.adapters.hub_stream import check_trainer
from nrl_models.adapters.trl import REQUIREMENT
from nrl_models.engines.digests import tensor_digest
from nrl_models.engines.engine_types import Sample
from nrl_models.errors import UnknownArgumentError
from nrl_models.logprobs.sampling import Sampling
from nrl_models.watch import Watch
from nrl_models.watch.record import PREFIX


def watch(trainer: Any, *, digests: bool = True, **options: Any) -> Watch:
    """Watch a trainer that samples with vLLM. Raises `DriftError` before an update if trainer and vLLM differ.

    The metrics appear in the trainer's log, as `watch/token_mult_prob_error` and others. TRL computes the
    log-probabilities of both sides for its correction anyway.

    Args:
        trainer: a `GRPOTrainer` with `use_vllm=True` and `vllm_importance_sampling_correction=True`, or another one
            with these attributes. Call it before training starts, after `send_hub_tensors`.
        digests: hash each tensor of a weight sync, to find tensors that are no longer sent.
        options: options of `Watch`, without model, engine and sampling.

    Raises:
        TrainerError: TRL is not installed, or has another version.
        UnknownArgumentError: the trainer does not compute the log-probabilities of both sides.
    """
    check_trainer(REQUIREMENT)
    generation = getattr(trainer, "vllm_generation", None)
    if generation is None or not getattr(trainer, "vllm_importance_sampling_correction", False):
        raise UnknownArgumentError(
            f"this {type(trainer).__name__} does not compare vLLM's log-probabilities with its own: expected "
            "use_vllm=True and vllm_importance_sampling_correction=True"
        )
    watcher = Watch(trainer.model, sampling=Sampling(temperature=trainer.temperature), **options)
    _watch_syncs(generation, watcher, digests)
    _watch_rollouts(trainer, watcher)
    return watcher


def _watch_syncs(generation: Any, watcher: Watch, digests: bool) -> None:
    gathered, sync_weights = generation._iter_named_params, generation.sync_weights
    sent: dict[str, str] = {}

    def iter_named_params() -> Iterator[tuple[str, torch.Tensor]]:
        sent.clear()
        for name, tensor in gathered():
            if digests:
                sent[name] = tensor_digest(tensor)
            yield name, tensor

    def synced() -> None:
        sync_weights()
        watcher.after_sync(dict(sent))

    generation._iter_named_params = iter_named_params
    generation.sync_weights = synced


def _watch_rollouts(trainer: Any, watcher: Watch) -> None:
    score = trainer._generate_and_score_completions

    def scored(inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = score(inputs)
        if trainer.model.training:
            mask = output["completion_mask"].bool()
            if "tool_mask" in output:
                mask = mask & output["tool_mask"].bool()
            report = watcher.before_update(
                _samples(output),
                output["old_per_token_logps"],
                engine=output["sampling_per_token_logps"],
                mask=mask,
                attention_mask=torch.cat([output["prompt_mask"], output["completion_mask"]], 1),
            )
            for name, value in report.metrics.values().items():
                trainer._metrics["train"][PREFIX + name].append(value)
        return output

    trainer._generate_and_score_completions = scored


def _samples(output: dict[str, Any]) -> list[Sample] | None:
    """Return prompts and completions as samples that the trainer can score again; None with images or tools."""
    if "tool_mask" in output or "pixel_values" in output:
        return None
    rows = zip(
        output["prompt_ids"],
        output["prompt_mask"].bool(),
        output["completion_ids"],
        output["completion_mask"].bool(),
        output["sampling_per_token_logps"],
        strict=True,
    )
    return [
        Sample(
            tuple(prompt[is_prompt].tolist()),
            tuple(completion[is_completion].tolist()),
            tuple(logprobs[is_completion].tolist()),
        )
        for prompt, is_prompt, completion, is_completion, logprobs in rows
    ]
