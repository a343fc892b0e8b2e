"""Megatron-Core's GPT model with a model's weights, in a subprocess, because Megatron keeps its groups in globals.

Without a GPU, Megatron-Core still requests device and random states from CUDA. Only `without_gpu` replaces these
functions.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from nrl_models.common.forward.random_states import random_states_kept
from nrl_models.common.process_state import BUILDING
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.errors import Problem, ProblemKind, StateDictError
from nrl_models.family import FamilyModel
from nrl_models.megatron.gpt_settings import GPTSettings, gpt_settings, readings
from nrl_models.megatron.layer_rules import STATES
from nrl_models.megatron.layout import MegatronRank
from nrl_models.testing.case import randomize
from nrl_models.testing.tiny import tiny_config

LOCAL = MegatronRank(transformer_engine=False, grouped_experts=False)
"""A complete model with layers of `get_gpt_layer_local_spec`, which need neither Transformer Engine nor Apex."""

TOLERANCE = 1e-4
"""Largest difference of the small model's logits in fp32, relative to the largest logit."""

LENGTH = 40
"""Sequence length for the small model. It exceeds the small model's windows and trained positions."""


def start_megatron(tp: int = 1, pp: int = 1) -> None:
    """Make this process a rank of Megatron; the only one if it is not in a process group.

    Args:
        tp: Number of ranks of tensor parallelism.
        pp: Number of ranks of pipeline parallelism.

    Raises:
        ImportError: If megatron-core is not installed.
    """
    from megatron.core import parallel_state

    if not torch.cuda.is_available():
        without_gpu()
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tp, pp)
    if torch.cuda.is_available():
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(0)


def device() -> torch.device:
    """Return the device of Megatron's model."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def without_gpu() -> None:
    """Make Megatron-Core run on a CPU.

    Device and masks are on the CPU, dropout uses no separate random states (there is no dropout), and routers use
    torch's matmul.
    """
    from megatron.core.fusions import fused_softmax
    from megatron.core.tensor_parallel import random as random_states
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    random_states.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False  # otherwise it uses Transformer Engine's layers, which are None
    fused_softmax.get_default_causal_mask = lambda length: _hidden(length, length, None)
    fused_softmax.get_sliding_window_causal_mask = lambda queries, keys, window: _hidden(queries, keys, window[0])


def _hidden(queries: int, keys: int, before: int | None) -> torch.Tensor:
    """Return a mask of hidden keys, `(queries, keys)` bool: later keys, and keys more than `before` earlier."""
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return (distance < 0) if before is None else (distance < 0) | (distance > before)


def build(settings: GPTSettings) -> Any:
    """Build this rank's part of Megatron's model for these settings, in evaluation mode. Weights are not set."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    sizes = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
    }
    made = (MLATransformerConfig if settings.latent else TransformerConfig)(**sizes, **settings.transformer)
    if settings.experts:
        spec = get_gpt_decoder_block_spec(made, use_transformer_engine=False, normalization=made.normalization)
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=made.qk_layernorm,
            multi_latent_attention=settings.latent,
            normalization=made.normalization,
        )
    if settings.latent:
        from nrl_models.megatron.latent_attention import LatentDotProductAttention

        for layer in getattr(spec, "layer_specs", [spec]):
            layer.submodules.self_attention.submodules.core_attention = LatentDotProductAttention
    stages = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    return GPTModel(made, spec, **stages, **settings.model).eval().to(device())


def load(
    megatron: Any, adapter: StateDictAdapter, state_dict: Mapping[str, torch.Tensor], rank: MegatronRank = LOCAL
) -> list[Problem]:
    """Load a state dict of the adapter's model into a rank's part of Megatron's model.

    Returns:
        The mismatches. If there are any, nothing is written.
    """
    table = adapter.layout(rank)
    theirs = {name: value for name, value in megatron.state_dict().items() if isinstance(value, torch.Tensor)}
    missing = [name for name in theirs if name not in table and STATES not in name]
    problems = [Problem(ProblemKind.MISSING, name, "is only in Megatron's model") for name in missing]
    for name, tensor in table.items():
        if name not in theirs:
            problems.append(Problem(ProblemKind.UNEXPECTED, name, "is not in Megatron's model"))
        elif tuple(theirs[name].shape) != tensor.shape:
            shape = tuple(theirs[name].shape)
            problems.append(Problem(ProblemKind.SHAPE, name, f"has shape {tensor.shape}, in Megatron's model {shape}"))
    if not problems:
        with torch.no_grad():
            for name, tensor in table.items():
                theirs[name].copy_(tensor.read(state_dict))
    return problems


def logits(megatron: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Compute the logits of sequences with equal length, `(sequences, length, vocab_size)`."""
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    result: torch.Tensor = megatron(input_ids, positions, None)
    return result


def megatron_of(model: FamilyModel) -> Any:
    """Return Megatron's model with the weights of `model`, on this process's device.

    Raises:
        StateDictError: If Megatron's GPT model does not compute the same, or has no parameters for some weights. Lists
            all known reasons.
    """
    megatron = build(proven_settings(model))
    _require(load(megatron, model.state_dict_adapter, model.state_dict()), model)
    return megatron


def proven_settings(model: FamilyModel) -> GPTSettings:
    """Return Megatron's settings for a model, verified on a small model with the same configuration.

    Raises:
        StateDictError: If a value or tensor has no equivalent, or no reading of the configuration gives the same
            logits.
    """
    model_class, config = type(model), model.config
    settings, problems = gpt_settings(config, model.state_dict_adapter.layout(LOCAL), model.dtype)
    _require(problems, model)
    # Sequences of small models are short, so scaling parameters of rotary positions are not scaled down.
    rope = {"rope_parameters": config.rope_parameters}
    with random_states_kept():
        tiny = tiny_config(copy.deepcopy(config), {**model_class.tiny, **rope}, model_class)
        torch.manual_seed(0)
        with BUILDING:
            small = model_class._from_config(tiny, dtype=torch.float32).eval()
        randomize(small)
        choices, difference = _best_reading(small)
    if difference > TOLERANCE:
        detail = f"has other logits: those of a small model differ by {difference:.1e} of the largest"
        _require([Problem(ProblemKind.UNSUPPORTED, "its forward", detail)], model)
    return settings.reading(choices)


def _best_reading(small: FamilyModel) -> tuple[dict[str, Any], float]:
    """Return the reading of a small model's configuration with the smallest error of the logits, and that error."""
    settings, problems = gpt_settings(small.config, small.state_dict_adapter.layout(LOCAL), torch.float32)
    _require(problems, small)
    input_ids = torch.randint(16, small.config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    best: tuple[dict[str, Any], float] = {}, float("inf")
    with torch.no_grad():
        expected = small(input_ids=input_ids, use_cache=False).logits
        for choices in readings(settings):
            megatron = build(settings.reading(choices))
            _require(load(megatron, small.state_dict_adapter, small.state_dict()), small)
            actual = logits(megatron, input_ids.to(device())).to(expected.device)
            difference = float((actual - expected).abs().max() / expected.abs().max())
            if difference < best[1]:
                best = choices, difference
            if difference <= TOLERANCE:
                break
    return best


def _require(problems: list[Problem], model: FamilyModel) -> None:
    """Raise if there are settings without an equivalent in Megatron."""
    if problems:
        raise StateDictError(f"Megatron-Core's GPT model is not {type(model).__name__}", problems)
