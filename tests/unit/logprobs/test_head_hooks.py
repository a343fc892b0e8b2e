"""Hooks of the output embedding: each counts as in the model's own logits, or raises an error that names it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from nrl_models import registry, token_logprobs
from nrl_models.errors import HeadError
from nrl_models.testing.case import FamilyCase

LLAMA = cast(Any, registry.model_class("LlamaForCausalLM"))

IDS = torch.arange(20, 44).view(2, 12)


def scaled_input(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (2.0 * args[0],)


def scaled_input_with_keywords(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return (2.0 * args[0],), kwargs


def capped_input(module: nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return args[0].clamp(-0.5, 0.5)


def last_tokens_masked(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return torch.cat([output[..., :-3], torch.full_like(output[..., -3:], -1e4)], -1)


def many_tokens_masked(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output[..., 50:] = -torch.inf


def masked_in_training(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.index_fill(-1, torch.tensor([40]), -1e4) if module.training and output.shape[-1] > 40 else output


def biased(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + torch.linspace(0.0, 1.0, module.out_features)


def slightly_biased(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 0.05 * (torch.arange(output.shape[-1]) > 40).to(output.dtype)


def doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.mul_(2.0)


def capped(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 0.5 * torch.tanh(output / 0.5)


def unchanged(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.double().float()


def observed(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.sum()


def hooked_model(hook: Any, *, lora: bool = False) -> Any:
    model: Any = copy.deepcopy(FamilyCase(LLAMA).model())
    if lora:
        options = LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
        model = get_peft_model(model, options).eval()
    head = model.get_output_embeddings()
    keywords = "kwargs" in hook.__code__.co_varnames
    if "input" in hook.__name__:
        head.register_forward_pre_hook(hook, with_kwargs=keywords)
    else:
        head.register_forward_hook(hook, with_kwargs=keywords)
    return model


@pytest.mark.parametrize(
    ("hook", "lora"),
    [
        (last_tokens_masked, False),
        (many_tokens_masked, False),
        (biased, False),
        (scaled_input, True),
        (scaled_input_with_keywords, True),
        (doubled, True),
        (last_tokens_masked, True),
    ],
)
@torch.no_grad()
def test_hooks_that_no_chunk_can_reproduce_are_named(hook: Any, lora: bool) -> None:
    model = hooked_model(hook, lora=lora)
    kind = "pre-hook" if "input" in hook.__name__ else "hook"
    for _ in range(2):  # only the result of a successful check is kept
        with pytest.raises(HeadError, match=rf"lm_head: forward {kind} {hook.__name__} changes .*chunk_size=None"):
            token_logprobs(model, IDS)
    found = token_logprobs(model, IDS, chunk_size=None).logprobs[:, 1:]
    torch.testing.assert_close(found, own_logprobs(model), rtol=0, atol=1e-5)
    head = model.get_output_embeddings()
    assert [*head._forward_pre_hooks.values(), *head._forward_hooks.values()] == [hook]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_hooks_that_change_less_than_the_rounding_of_a_matmul(dtype: torch.dtype) -> None:
    model = hooked_model(slightly_biased).to(dtype)
    with pytest.raises(HeadError, match="lm_head: forward hook slightly_biased changes"):
        token_logprobs(model, IDS)


@pytest.mark.parametrize(
    ("hook", "lora"),
    [
        (scaled_input, False),
        (scaled_input_with_keywords, False),
        (capped_input, False),
        (doubled, False),
        (capped, False),
        (unchanged, False),
        (observed, False),
        (capped_input, True),
        (many_tokens_masked, True),
        (unchanged, True),
        (observed, True),
    ],
)
@torch.no_grad()
def test_other_hooks_count(hook: Any, lora: bool) -> None:
    model = hooked_model(hook, lora=lora)
    for _ in range(2):
        found = token_logprobs(model, IDS, chunk_size=5).logprobs[:, 1:]
        torch.testing.assert_close(found, own_logprobs(model), rtol=0, atol=1e-5)


@torch.no_grad()
def test_hook_that_is_added_after_the_first_call() -> None:
    model = hooked_model(unchanged)
    token_logprobs(model, IDS)
    handle = model.lm_head.register_forward_hook(many_tokens_masked)
    with pytest.raises(HeadError, match="lm_head: forward hook many_tokens_masked changes"):
        token_logprobs(model, IDS)
    handle.remove()
    token_logprobs(model, IDS)


@torch.no_grad()
def test_hook_that_changes_the_output_in_training_only() -> None:
    model = hooked_model(masked_in_training)
    token_logprobs(model, IDS)
    with pytest.raises(HeadError, match="lm_head: forward hook masked_in_training changes"):
        token_logprobs(model.train(), IDS)


def masking(columns: Callable[[nn.Module], int], module: nn.Module, args: Any, output: Any) -> Any:
    """Mask logits of the model itself from a column on."""
    output.logits = output.logits.clone()
    output.logits[..., columns(module) :] = -1e4
    return output


@torch.no_grad()
def test_model_hook_that_acts_in_training_only() -> None:
    model = copy.deepcopy(FamilyCase(LLAMA).model()).eval()
    model.register_forward_hook(partial(masking, lambda module: 40 if module.training else 10_000))
    torch.testing.assert_close(token_logprobs(model, IDS).logprobs[:, 1:], own_logprobs(model), rtol=0, atol=1e-5)
    with pytest.raises(HeadError, match="are not those of its output embedding"):
        token_logprobs(model.train(), IDS)
    token_logprobs(model.eval(), IDS)


@torch.no_grad()
def test_model_class_that_masks_in_training_only() -> None:
    class Padded(LLAMA):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return masking(
                lambda module: 40 if module.training else 10_000, self, args, super().forward(*args, **kwargs)
            )

    model = Padded(FamilyCase(LLAMA).config)
    token_logprobs(model.eval(), IDS)
    with pytest.raises(HeadError, match="are not those of its output embedding"):
        token_logprobs(model.train(), IDS)


@torch.no_grad()
@pytest.mark.parametrize("part", ["", "lm_head"])
def test_hook_that_acts_later(part: str) -> None:
    model, first = copy.deepcopy(FamilyCase(LLAMA).model()).eval(), [10_000]

    def mask(module: nn.Module, args: Any, output: Any) -> Any:
        if not part:
            return masking(lambda _: first[0], module, args, output)
        output = output.clone()
        output[..., first[0] :] = -1e4
        return output

    model.get_submodule(part).register_forward_hook(mask)
    token_logprobs(model, IDS)
    first[0] = 40
    with pytest.raises(HeadError):
        token_logprobs(model, IDS)


def own_logprobs(model: nn.Module) -> torch.Tensor:
    logprobs = model(input_ids=IDS, use_cache=False).logits.log_softmax(-1)
    return cast(torch.Tensor, logprobs[:, :-1].gather(2, IDS[:, 1:, None])[..., 0])
