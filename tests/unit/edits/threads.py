"""Several threads use one module. The outcome counts wrong results over many tries."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from torch import nn

from edits.outcome import Outcome
from edits.table import Subject, edit, forward, step

TRIES = 100


def at_once(*works: Callable[[], torch.Tensor], tries: int = TRIES) -> list[list[torch.Tensor]]:
    """Run each function in a separate thread, all starting together. Returns their results per try."""
    barrier = Barrier(len(works))

    def repeated(work: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        results = []
        for _ in range(tries):
            barrier.wait(60)
            results.append(work())
        return results

    with ThreadPoolExecutor(len(works)) as pool:
        return [found.result() for found in [pool.submit(repeated, work) for work in works]]


def wrong(results: list[torch.Tensor], expected: torch.Tensor) -> int:
    """Count the results that differ from the expected one."""
    return sum(not torch.allclose(result, expected, atol=1e-4, rtol=1e-4) for result in results)


def gradient_of(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return all weight gradients of one pass as one vector, without `.grad`, which threads would share."""
    found = torch.autograd.grad(mlp(x).square().sum(), list(mlp.parameters()), allow_unused=True)
    return torch.cat([torch.full((1,), torch.nan) if tensor is None else tensor.flatten() for tensor in found])


def without_graph(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return mlp(x)


def in_inference_mode(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return mlp(x)


def in_half_precision(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return mlp(x).float()


@edit()
def one_thread_trains_and_one_runs_without_graph(subject: Subject) -> Outcome:
    mlp, x = subject.mlp, subject.hidden_states()
    expected = gradient_of(mlp, x), without_graph(mlp, x)
    results = at_once(lambda: gradient_of(mlp, x), lambda: without_graph(mlp, x))
    return {"expected": expected, "wrong": [wrong(found, each) for found, each in zip(results, expected, strict=True)]}


@edit()
def threads_in_different_modes(subject: Subject) -> Outcome:
    mlp, x = subject.mlp, subject.hidden_states()
    works = [gradient_of, without_graph, in_inference_mode, in_half_precision]
    expected = [work(mlp, x) for work in works]
    results = at_once(*[lambda work=work: work(mlp, x) for work in works])
    return {
        "expected": expected[:3],
        "wrong": [wrong(found, each) for found, each in zip(results, expected, strict=True)],
    }


@edit()
def threads_with_separate_inputs(subject: Subject) -> Outcome:
    inputs = [subject.hidden_states(seed) for seed in range(3)]
    expected = [gradient_of(subject.mlp, x) for x in inputs]
    results = at_once(*[lambda x=x: gradient_of(subject.mlp, x) for x in inputs])
    return {"expected": expected, "wrong": [wrong(found, each) for found, each in zip(results, expected, strict=True)]}


@edit()
def threads_over_whole_model(subject: Subject) -> Outcome:
    def logits(seed: int) -> torch.Tensor:
        return forward(subject, subject.model) if seed else subject.model(subject.input_ids).logits.detach()

    results = at_once(lambda: logits(0), lambda: logits(1), tries=20)
    return {"wrong": [wrong(found, forward(subject)) for found in results], "step": step(subject)}


@edit()
def one_thread_calls_linear_while_another_runs_its_parent(subject: Subject) -> Outcome:
    mlp, x = subject.mlp, subject.hidden_states()
    expected = without_graph(mlp, x), without_graph(mlp.up_proj, x)
    results = at_once(lambda: without_graph(mlp, x), lambda: without_graph(mlp.up_proj, x))
    return {"expected": expected, "wrong": [wrong(found, each) for found, each in zip(results, expected, strict=True)]}


@edit()
def threads_that_accumulate_gradients(subject: Subject) -> Outcome:
    """Forward passes in threads, then one backward pass over all of them."""
    inputs = [subject.hidden_states(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(subject.mlp, inputs))
    sum(output.square().sum() for output in outputs).backward()
    return {"gradients": {name: parameter.grad for name, parameter in subject.mlp.named_parameters()}}


@edit()
def hook_is_put_on_by_another_thread(subject: Subject) -> Outcome:
    """The hook is added and removed while the parent module runs. Each result matches one of the two states."""
    mlp, x = subject.mlp, subject.hidden_states()
    plain = without_graph(mlp, x)

    def toggled() -> torch.Tensor:
        handle = mlp.up_proj.register_forward_hook(lambda module, args, output: output * 2)
        handle.remove()
        return plain

    with mlp.up_proj.register_forward_hook(lambda module, args, output: output * 2):
        hooked = without_graph(mlp, x)
    results, _ = at_once(lambda: without_graph(mlp, x), toggled)
    neither = sum(bool(wrong([result], plain) and wrong([result], hooked)) for result in results)
    return {"plain": plain, "hooked": hooked, "neither": neither}
