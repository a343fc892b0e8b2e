"""Code that changes around the output embedding after the first call, or runs in other threads or in the backward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models import registry, rollout_logprobs, token_logprobs
from nrl_models.errors import HeadError
from nrl_models.testing.case import FamilyCase

LLAMA = cast(Any, registry.model_class("LlamaForCausalLM"))

IDS = torch.arange(20, 44).view(2, 12)


@pytest.fixture
def model() -> PreTrainedModel:
    return FamilyCase(LLAMA).model()


def of_full_logits(model: PreTrainedModel) -> torch.Tensor:
    return token_logprobs(model, IDS, chunk_size=None).logprobs


def mask_logits(module: nn.Module, args: Any, output: Any) -> Any:
    output.logits = output.logits.clone()
    output.logits[..., 50:] = -1e4
    return output


def hook_model(model: PreTrainedModel) -> None:
    model.register_forward_hook(mask_logits)


def replace_model_forward(model: PreTrainedModel) -> None:
    before = model.forward
    model.forward = lambda *args, **kwargs: mask_logits(model, args, before(*args, **kwargs))


def replace_head_forward(model: PreTrainedModel) -> None:
    head = model.lm_head
    before = head.forward
    head.forward = lambda hidden: before(hidden) + torch.linspace(0, 3, head.out_features)


@pytest.mark.parametrize("change", [hook_model, replace_model_forward, replace_head_forward])
def test_changes_after_the_first_call_count_or_raise(
    change: Callable[[PreTrainedModel], None], model: PreTrainedModel
) -> None:
    with torch.no_grad():
        before = token_logprobs(model, IDS).logprobs
        change(model)
        expected = of_full_logits(model)
        assert (before - expected).abs().max() > 0.1
        try:
            after = token_logprobs(model, IDS).logprobs
        except HeadError:
            assert change is not replace_head_forward
        else:
            torch.testing.assert_close(after, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_head_run(kind: str, model: PreTrainedModel) -> None:
    def gradients(chunk_size: int | None) -> dict[str, torch.Tensor]:
        model.zero_grad()
        token_logprobs(model, IDS, chunk_size=chunk_size).logprobs.sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    unhooked = gradients(4)

    def tripled(module: nn.Module, *gradients: Any) -> Any:
        return tuple(3.0 * each for each in gradients[0])

    getattr(model.lm_head, kind)(tripled)
    expected, actual = gradients(None), gradients(4)
    assert (expected["model.norm.weight"] - unhooked["model.norm.weight"]).abs().max() > 0.1
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("loss", [None, lambda found: found.logprobs.square().sum()])
def test_second_derivatives_raise(loss: Callable[[Any], torch.Tensor] | None, model: PreTrainedModel) -> None:
    found = token_logprobs(model, IDS, loss=loss)
    total = found.logprobs.sum() if loss is None else found.loss
    with pytest.raises(HeadError, match=r"create_graph=True: .* no second derivatives.* Pass chunk_size=None"):
        torch.autograd.grad(total, [model.lm_head.weight], create_graph=True)


def test_threads_do_not_change_each_others_logprobs(model: PreTrainedModel) -> None:
    batches = [IDS, IDS + 7, IDS.flip(-1)]
    with torch.no_grad():
        expected = [token_logprobs(model, batch).logprobs for batch in batches]
        logits = model(IDS).logits
    failures: list[object] = []

    @torch.no_grad()
    def run(number: int) -> None:
        try:
            for _ in range(20):
                if number == len(batches):
                    same = torch.equal(model(IDS).logits, logits)
                elif number == 0:
                    rows = rollout_logprobs(model, batches[0].tolist()).logprobs
                    same = torch.allclose(rows, expected[0], atol=1e-5)
                else:
                    same = torch.allclose(token_logprobs(model, batches[number]).logprobs, expected[number], atol=1e-5)
                if not same:
                    failures.append(number)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(batches) + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
