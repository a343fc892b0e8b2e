"""Context parallelism: one sequence over several ranks, by torch's ring attention.

torch replaces causal `scaled_dot_product_attention` by ring attention, and nothing else. So it works for a model whose
layers all attend to all earlier tokens of a sequence, without a mask, a window, a sink or a soft cap. A model or a
batch that has any of these is refused before the first step, from its configuration and its family's limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.modules import class_name
from nrl_models.errors import Problem, ProblemKind, ShardingError

_OTHER_LAYERS = {
    "sliding_attention": "see a window of the sequence, and keep a mask for it, which torch's ring attention rejects",
    "chunked_attention": "see a chunk of the sequence, and keep a mask for it, which torch's ring attention rejects",
}


def context_parallel_problems(model: PreTrainedModel, batch: Mapping[str, Any] | None = None) -> list[Problem]:
    """Why a model, or a batch, cannot be run under context parallelism. Empty if it can.

    Args:
        model: real or on meta.
        batch: keywords of a forward, to be checked as well.
    """
    name, config = class_name(model), model.config.get_text_config()
    declared = getattr(model, "limits", {}).get("context parallelism")
    reasons = [declared] if declared else []
    if getattr(getattr(model, "sharding", None), "stages", None) is not None:
        reasons.append("is divided over pp, which does not go with it so far")
    for kind in dict.fromkeys(_layer_types(config)):
        if kind != "full_attention":
            reasons.append(f"has layers ({kind}) that {_OTHER_LAYERS.get(kind, 'carry a state along the sequence')}")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        reasons.append("caps its attention scores, which torch's ring attention does not")
    if any("sinks" in parameter for parameter, _ in model.named_parameters()):
        reasons.append("has attention sinks, which torch's ring attention lacks")
    if config is not model.config:
        reasons.append("lets the tokens of an image see each other, for which it keeps a mask")
    if config._attn_implementation != "sdpa":
        reasons.append(f"runs attention as {config._attn_implementation!r}; torch replaces 'sdpa' only")
    problems = [Problem(ProblemKind.CONTEXT, name, reason) for reason in reasons]
    return problems + (_batch_problems(batch) if batch is not None else [])


def _layer_types(config: PreTrainedConfig) -> list[str]:
    """The kinds of a configuration's layers; a window without kinds is that of every layer."""
    if kinds := getattr(config, "layer_types", None):
        return list(kinds)
    window = getattr(config, "sliding_window", None)
    return ["sliding_attention"] if window and getattr(config, "use_sliding_window", True) else []


def _batch_problems(batch: Mapping[str, Any]) -> list[Problem]:
    found = {}
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None and not bool(torch.as_tensor(mask).bool().all()):
        found["attention_mask"] = "has padding: ring attention takes no mask"
    if positions is not None and bool((positions.diff(dim=-1) <= 0).any()):
        found["position_ids"] = "start again: packed documents need a mask to be kept apart"
    if "labels" in batch:
        found["labels"] = "would be shifted within each rank's piece; give `shift_labels`, shifted beforehand"
    for name in ("pixel_values", "token_type_ids", "mm_token_type_ids"):
        if batch.get(name) is not None:
            found[name] = "is not divided along the sequence"
    return [Problem(ProblemKind.CONTEXT, name, detail) for name, detail in found.items()]


def check_context_parallel(
    model: PreTrainedModel, mesh: DeviceMesh | None = None, batch: Mapping[str, Any] | None = None
) -> None:
    """Refuse what cannot be run under context parallelism. Call it before the first step.

    Args:
        model, batch: see `context_parallel_problems`.
        mesh: the ranks that share a sequence, one dimension.

    Raises:
        ShardingError: all reasons why not.
    """
    problems = context_parallel_problems(model, batch)
    if mesh is not None:
        if mesh.ndim != 1:
            detail = "has several dimensions; give the one of the sequence"
            problems.append(Problem(ProblemKind.MESH, str(mesh.mesh_dim_names), detail))
        if mesh.device_type == "cpu":
            problems.append(Problem(ProblemKind.MESH, "cpu", "torch has ring attention on accelerators only"))
        length = batch["input_ids"].shape[1] if batch is not None else 0
        if length % (2 * mesh.size()):
            detail = f"has {length} tokens; expected a multiple of {2 * mesh.size()}, two pieces for each rank"
            problems.append(Problem(ProblemKind.CONTEXT, "input_ids", detail))
    if problems:
        advice = [
            "run it without context parallelism: divide the batch (fsdp), or the heads (tp), or shorten the sequence"
        ]
        raise ShardingError(f"{class_name(model)} cannot be run under context parallelism", problems, advice)


@contextmanager
def context_parallel(model: PreTrainedModel, mesh: DeviceMesh, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """While open, each rank of `mesh` runs its pieces of the batch's sequences.

    Args:
        model: see `check_context_parallel`.
        mesh: the ranks that share a sequence, one dimension.
        batch: `input_ids` `(batch, length)` and whatever else has that shape; `shift_labels` in place of labels. Its
            tensors are divided in place, and whole again afterwards.

    Yields:
        The batch to call the model with.

    Raises:
        ShardingError: the model or the batch cannot be run under context parallelism.
    """
    check_context_parallel(model, mesh, batch)
    from torch.distributed.tensor.experimental import context_parallel as ring_attention

    batch = {key: value for key, value in batch.items() if key != "attention_mask"}
    tokens = batch["input_ids"]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    batch.setdefault("position_ids", positions.contiguous())
    divided = [value for value in batch.values() if isinstance(value, torch.Tensor) and value.shape == tokens.shape]
    with ExitStack() as stack:
        for module in model.modules():
            if "Attention" in type(module).__name__:
                stack.callback(module.register_forward_pre_hook(_without_mask, with_kwargs=True).remove)
        stack.enter_context(ring_attention(mesh, buffers=divided, buffer_seq_dims=[1] * len(divided)))
        yield {**batch, "use_cache": False}


def _without_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Positions that jump from one piece to the next look like packed documents to transformers, which then masks."""
    if "attention_mask" in kwargs:
        kwargs["attention_mask"] = None
    return args, kwargs
