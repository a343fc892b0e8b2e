"""Batches and random numbers of ranks that process the same batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from jobs.setting import batches, case_of, full, mesh_of
from nrl_models import token_logprobs
from nrl_models.distributed import Pipeline, batch_checks, parallelize
from nrl_models.errors import ShardingError

Outcome = tuple[str, ...]
"""Subjects and details of the problems in an error; empty without an error."""


def _outcome(error: ShardingError) -> Outcome:
    return tuple(f"{problem.subject} {problem.detail}" for problem in error.problems)


def batches_without_gradients(reads: str, **sizes: int) -> Outcome:
    """Run a forward without gradients on another batch on each rank."""
    case, mesh = case_of("MixtralForCausalLM"), mesh_of(**sizes)
    model = parallelize(copy.deepcopy(case.model()), mesh)
    tokens = batches(case, 2)[dist.get_rank()]["input_ids"]
    try:
        with torch.no_grad():
            token_logprobs(model, tokens) if reads == "token_logprobs" else model(input_ids=tokens)
    except ShardingError as error:
        return _outcome(error)
    return ()


CALLS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "model.model": lambda model: model.model,
    "model.model.forward": lambda model: model.model.forward,
    "base_model": lambda model: model.base_model,
    "decoder": lambda model: model.get_decoder(),
    "model": lambda model: model,
    "compiled model": lambda model: torch.compile(model, backend="eager"),
}
"""Ways to run a model, or a model inside it."""


def compares(architecture: str, call: str, differs: bool, **sizes: int) -> tuple[Outcome, int]:
    """Run a forward with gradients in one of `CALLS`. Returns the error and the number of comparisons between ranks.

    Args:
        architecture: The model's class.
        call: Key of `CALLS`.
        differs: Whether each rank has another batch. If not, the result must be that of one process.
        sizes: Size of each mesh dimension.
    """
    case = case_of(architecture)
    unsharded = case.model().train()
    model = parallelize(copy.deepcopy(unsharded), mesh_of(**sizes))
    tokens = batches(case, 2)[dist.get_rank() if differs else 0]["input_ids"]
    torch.compiler.reset()
    run = CALLS[call](model)
    original = batch_checks._states_differ_in
    with mock.patch.object(batch_checks, "_states_differ_in", side_effect=original) as compared:
        try:
            output = run(input_ids=tokens, use_cache=False)[0]
        except ShardingError as error:
            return _outcome(error), compared.call_count
    expected = CALLS[call.removeprefix("compiled ")](unsharded)(input_ids=tokens, use_cache=False)[0]
    torch.compiler.reset()
    if not differs:
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
        output.square().sum().backward()
    return (), compared.call_count


def generates(architecture: str, seeds: tuple[int, int], **options: Any) -> tuple[Outcome, int]:
    """Generate under `tp` with a seed per rank. Returns the error and the number of comparisons between ranks.

    Without an error, the tokens are those of one process with the same seed.
    """
    case = case_of(architecture)
    unsharded = case.model().eval()
    model = parallelize(copy.deepcopy(unsharded), mesh_of(tp=2))
    tokens = batches(case, 1)[0]["input_ids"]
    original = batch_checks._states_differ_in
    with mock.patch.object(batch_checks, "_states_differ_in", side_effect=original) as compared:
        torch.manual_seed(seeds[dist.get_rank()])
        try:
            generated = model.generate(tokens, max_new_tokens=8, min_new_tokens=8, **options)
        except ShardingError as error:
            return _outcome(error), compared.call_count
    torch.manual_seed(seeds[0])
    assert torch.equal(generated, unsharded.generate(tokens, max_new_tokens=8, min_new_tokens=8, **options))
    return (), compared.call_count


def trains(architecture: str, config: dict[str, Any], seeds: list[int], training: bool = True, **sizes: int) -> Outcome:
    """Take a step with a seed per rank. Without an error, replicated parameters stay equal on all ranks."""
    case, mesh = case_of(architecture, config), mesh_of(**sizes)
    model = parallelize(copy.deepcopy(case.model()).train(training), mesh)
    (batch,) = batches(case, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(seeds[dist.get_rank()])
    try:
        if "pp" in sizes:
            _pipeline_step(Pipeline(model, 2), batch)
        else:
            model(**batch, use_cache=False).loss.backward()
    except ShardingError as error:
        return _outcome(error)
    optimizer.step()
    replicated = {
        name: parameter.to_local()
        for name, parameter in model.named_parameters()
        if all(placement.is_replicate() for placement in parameter.placements)
    }
    assert replicated
    for name, parameter in replicated.items():
        mean = full(parameter.detach()).clone()
        dist.all_reduce(mean, group=mesh.get_group(mesh.mesh_dim_names[-1]))
        torch.testing.assert_close(mean / mesh.size(-1), parameter, rtol=0, atol=1e-6, msg=name)
    return ()


def _pipeline_step(pipeline: Pipeline, batch: dict[str, torch.Tensor]) -> None:
    def loss(logits: torch.Tensor, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets["labels"].flatten(), reduction="sum") / 20

    pipeline.step({"input_ids": batch["input_ids"]}, loss, {"labels": batch["labels"]})
