"""A small RL loop under FSDP2 with a watch and a separate engine on every rank."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jobs.setting import case_of, mesh_of
from nrl_models.distributed import parallelize
from nrl_models.engines.engine_types import NamedTensor
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import DriftError
from nrl_models.logprobs import Sampling, rollout_logprobs
from nrl_models.watch import Watch

NOT_WRITTEN = "model.layers.0.mlp.down_proj.weight"
"""The tensor that a faulty engine does not write."""

NEW_TOKENS = 12


class FaultyEngine(HFEngine):
    """An engine that does not write `NOT_WRITTEN`. `admits`: whether its digests show that."""

    admits = False

    def _refit(self, sent: Iterator[list[NamedTensor]], digests: bool) -> dict[str, Any]:
        parameter = self.model.get_parameter(NOT_WRITTEN)
        before = parameter.detach().clone()
        report = super()._refit(sent, digests)
        with torch.no_grad():
            parameter.copy_(before)
        if self.admits:
            report["digests"][NOT_WRITTEN] = "0" * 64
        return report


def watched(steps: int, faulty_rank: int | None, admits: bool = False) -> dict[str, Any]:
    """Run steps. Returns this rank's findings, its error, and the number of optimizer steps.

    Args:
        steps: Number of steps.
        faulty_rank: Rank with the faulty engine; None for none.
        admits: Whether digests show the fault at the sync. Otherwise only log-probabilities of the next step do.
    """
    rank, case = dist.get_rank(), case_of("LlamaForCausalLM")
    kind = FaultyEngine if rank == faulty_rank else HFEngine
    engine = kind(copy.deepcopy(case.model()))
    if isinstance(engine, FaultyEngine):
        engine.admits = admits
    model = parallelize(copy.deepcopy(case.model()), mesh_of(fsdp=dist.get_world_size()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    watch = Watch(model, engine)
    prompts = [[20 + rank, 30, 40, 50], [60, 70 + rank, 80]]
    updates, error, names = 0, "", ()
    try:
        for step in range(steps):
            samples = engine.generate(prompts, Sampling(), max_new_tokens=NEW_TOKENS, seed=10 * step + rank)
            score = [[False] * len(sample.prompt) + [True] * len(sample.tokens) for sample in samples]
            optimizer.zero_grad()
            scores = rollout_logprobs(
                model,
                [sample.sequence for sample in samples],
                score=score,
                loss=lambda result: -(result.logprobs * result.mask).sum() / 50,
            )
            watch.before_update(samples, scores.logprobs)
            optimizer.step()
            updates += 1
            watch.refit()
    except DriftError as raised:
        error, names = str(raised), tuple(name for finding in watch.findings for name in finding.names)
    return {
        "error": error,
        "findings": [str(finding.cause) for finding in watch.findings],
        "names": names,
        "updates": updates,
        "errors": [metrics.token_mult_prob_error for metrics in watch.history],
    }


def failing_on_one_rank(capsule: Path, failing_rank: int) -> dict[str, Any]:
    """Compare log-probabilities that differ on one rank only. Returns this rank's error.

    Args:
        capsule: Directory for capsules.
        failing_rank: The rank.
    """
    model = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()), mesh_of(fsdp=dist.get_world_size()))
    watch = Watch(model, capsule=capsule)
    watch.after_sync()  # without digests
    trainer, error = -torch.ones(2, 8), ""
    engine = trainer - float(dist.get_rank() == failing_rank)
    try:
        watch.before_update(trainer=trainer, engine=engine, mask=torch.ones(2, 8, dtype=torch.bool))
    except DriftError as raised:
        error = str(raised)
    return {"error": error}
