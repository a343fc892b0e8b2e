"""Change weights of a sharded model between calls of linears that share an input."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from jobs.setting import case_of, mesh_of
from nrl_models.distributed import parallelize


def scale_weight(linear: nn.Linear, factor: float, *_: Any) -> None:
    """A forward hook of another module that changes a linear's weight, without changing its version counter."""
    linear.weight.data.mul_(factor)


def hooks_edit_weights(factor: float, ranks: int, **sizes: int) -> list[float]:
    """Return differences of logits and of an input's gradient from one process.

    Args:
        factor: Factor of the weights at each forward.
        ranks: Number of ranks with hooks.
        sizes: The mesh.
    """
    case, mesh = case_of("Qwen3ForCausalLM"), mesh_of(**sizes)
    embeddings = case.model().get_input_embeddings()(torch.arange(10, 26)[None])
    outputs = []
    for model in (copy.deepcopy(case.model()), parallelize(copy.deepcopy(case.model()), mesh)):
        for layer in model.model.layers if mesh.get_local_rank() < ranks else ():
            layer.self_attn.q_norm.register_forward_hook(partial(scale_weight, layer.self_attn.v_proj, factor))
            layer.mlp.act_fn.register_forward_hook(partial(scale_weight, layer.mlp.up_proj, factor))
        inputs = embeddings.detach().requires_grad_()
        logits = model(inputs_embeds=inputs, use_cache=False).logits
        logits.square().mean().backward()
        outputs.append((logits.detach(), inputs.grad))
    return [float((first - second).abs().max()) for first, second in zip(*outputs, strict=True)]
