"""Run a forward and a backward on meta, and count stored activations and communication."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils

from nrl_models.common.config.at_fault import blaming
from nrl_models.common.config.positions import model_limit
from nrl_models.common.forward.token_types import PER_TOKEN
from nrl_models.common.modules import class_name, is_base_model
from nrl_models.common.process_state import replaced_here
from nrl_models.common.upstream_torch import ConvNd, TorchDispatchMode
from nrl_models.distributed import tensor as divided
from nrl_models.distributed.mesh import has_stages
from nrl_models.distributed.sharding import sharding_of
from nrl_models.distributed.shards import local_of
from nrl_models.distributed.tensor.styles import ExpertsOfThisRank, entering, leaving
from nrl_models.errors import ConfigurationError, NRLModelsError, Problem, ProblemKind
from nrl_models.inputs.audio import AUDIO
from nrl_models.inputs.images import PIXELS
from nrl_models.onboarding.estimate_stage import OneStage
from nrl_models.onboarding.inspect import expert_counts

SEQ_LEN = 4096
"""Default sequence length in tokens."""


def default_seq_len(config: PreTrainedConfig) -> int:
    """Return `SEQ_LEN`, or the model's limit if that is less."""
    return min(SEQ_LEN, model_limit(config) or SEQ_LEN)


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of a training run.

    Args:
        mesh: Size of each dimension, e.g. `{"fsdp": 16, "tp": 8}`.
        seq_len: Sequence length in tokens.
        micro_batch: Number of sequences in one forward on a rank.
        dtype: Dtype of parameters, gradients and optimizer states.
        compute: Dtype in which `fsdp` gathers parameters and the model computes.
        checkpointing: Whether activations of layers are recomputed in the backward.
    """

    mesh: Mapping[str, int]
    seq_len: int = SEQ_LEN
    micro_batch: int = 1
    dtype: torch.dtype = torch.float32
    compute: torch.dtype = torch.bfloat16
    checkpointing: bool = True


def units_of_model(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that `fsdp` gathers as one unit."""
    return [module for module in model.modules() if type(module).__name__ in (sharding_of(model).plan.units or ())]


class _Exchanges(TorchDispatchMode):
    """Counts the bytes that collectives send, by dimension of the mesh.

    Some rotary embeddings adapt to the sequence length, and read it from a tensor. A tensor on meta has no value. Here,
    reading it returns the sequence length, and comparisons return False.
    """

    def __init__(self, mesh: DeviceMesh, seq_len: int) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.sent: Counter[str] = Counter()
        names = enumerate(mesh.mesh_dim_names or ())
        self.groups = {str(mesh.get_group(dim).group_name): (name, mesh.size(dim)) for dim, name in names}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            return False if args[0].dtype == torch.bool else self.seq_len
        result = func(*args, **(kwargs or {}))
        if name in _TIMES_SENT:
            group = next(argument for argument in args if isinstance(argument, str) and argument in self.groups)
            dimension, ranks = self.groups[group]
            self.sent[dimension] += _TIMES_SENT[name] * max(args[0].nbytes, result.nbytes) * (ranks - 1) // ranks
        return result


_TIMES_SENT = {
    "_c10d_functional::all_reduce": 2,
    "_c10d_functional::all_gather_into_tensor": 1,
    "_c10d_functional::reduce_scatter_tensor": 1,
    "_c10d_functional::all_to_all_single": 1,
}
"""How often a rank sends each byte of the other ranks' shares in a ring."""


def run_step(model: PreTrainedModel, setting: Setting, mesh: DeviceMesh) -> tuple[int, dict[str, int]]:
    """Return the peak bytes of activations of one micro-batch, and the bytes it sends by dimension of the mesh.

    Raises:
        ConfigurationError: If the forward raises an error, reads values of tensors, or requires images or audio.
    """
    tokens = torch.zeros(setting.micro_batch, setting.seq_len, dtype=torch.long, device="meta")
    stage = OneStage(model, tokens) if has_stages(mesh) else None
    units = set(units_of_model(model))
    references: list[ref[_Kept]] = []  # until their graph is dropped
    inputs: dict[nn.Module, int] = {}
    running: list[nn.Module | None] = [None]

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if module in units:
            running.append(module)
            hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            inputs[module] = 0 if stage is not None and hidden is stage.received else hidden.nbytes

    def leave(module: nn.Module, *_: Any) -> None:
        if module in units:
            running.pop()

    def pack(tensor: torch.Tensor) -> _Kept:
        packed = _Kept(tensor, running[-1])
        references.append(ref(packed))
        return packed

    with ExitStack() as stack:
        experts = _stub_experts(model, setting, stack)
        for module in units:
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        # The function reads values, which tensors on meta do not have.
        stack.enter_context(replaced_here(masking_utils, "find_packed_sequence_indices", lambda position_ids: None))
        # On meta, torch would use the math implementation, which stores all scores. The kernels of devices do not.
        stack.enter_context(replaced_here(nn.functional, "scaled_dot_product_attention", _fused_attention))
        stack.enter_context(_obstacles(class_name(model)))
        exchanges = stack.enter_context(_Exchanges(mesh, setting.seq_len))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
            if stage is None or stage.is_last:
                logits = _outputs(model, tokens) if stage is None else stage.run()
                # Trainers compute log-probabilities in fp32.
                scores = logits.float().flatten(0, -2)
                loss = nn.functional.cross_entropy(scores, tokens.flatten()) if logits.ndim == 3 else scores.sum()
            else:
                loss = stage.run().sum()
        forward = exchanges.sent.copy()
        held = [*model.parameters(), *(() if stage is None else (stage.received,))]
        sizes = _sizes(held, [packed for reference in references if (packed := reference()) is not None])
        loss.backward()
        if setting.checkpointing:  # the recomputed forward communicates again
            exchanges.sent.update(forward)
    for stack_of_experts, nbytes in experts.items():
        unit = next((module for module in units if stack_of_experts in set(module.modules())), None)
        sizes[unit] = sizes.get(unit, 0) + nbytes
    outside = sizes.pop(None, 0)
    layers, recomputed = sum(sizes.values()), 0
    if setting.checkpointing and sizes:
        layers = sum(nbytes for module, nbytes in inputs.items() if module in sizes)
        recomputed = max(sizes.values())
    if stage is not None:
        return stage.kept(outside + layers) + recomputed, {"pp": stage.sent, **exchanges.sent}
    return outside + layers + recomputed, dict(exchanges.sent)


def _outputs(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the model's logits, or the last hidden states of a base model."""
    accepted = inspect.signature(model.forward).parameters
    inputs = {name: tokens for name in ("input_ids", "decoder_input_ids") if name in accepted}
    with blaming(model.config, f"run {class_name(model)}"), _obstacles(class_name(model)):
        output: Any = model(**inputs, use_cache=False)
    result: torch.Tensor = output[0] if is_base_model(model) else output.logits
    return result


@contextmanager
def _obstacles(name: str) -> Iterator[None]:
    """Report missing inputs, and operations that torch does not run without values, as problems of a model's class."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, NRLModelsError):
            raise
        needed = next((argument for argument in (*PIXELS, *AUDIO, *PER_TOKEN) if argument in str(error)), None)
        if needed is None and not (isinstance(error, RuntimeError) and "meta" in str(error)):
            raise
        detail = "reads values of tensors, which a model without weights does not have; torch raised "
        detail = f"needs {needed}, and estimates pass only text" if needed else f"{detail}{type(error).__name__}"
        problem = Problem(ProblemKind.UNSUPPORTED, name, detail)
        advice = f"measure one training step of {name} on a device instead"
        raise ConfigurationError(
            f"cannot estimate activations and communication of {name}", [problem], [advice]
        ) from error


@dataclass(eq=False)
class _Kept:
    """A tensor that autograd keeps for the backward, and the unit that was running when it was saved."""

    tensor: torch.Tensor
    unit: nn.Module | None


def _sizes(held: list[torch.Tensor], saved_tensors: list[_Kept]) -> dict[nn.Module | None, int]:
    """Return the bytes that autograd keeps for each unit, without the storages of `held`.

    A storage that several units keep counts for the first.
    """
    counted = set(map(_storage, held))  # all are alive, so addresses are unique
    sizes: dict[nn.Module | None, int] = {}
    for packed in sorted(saved_tensors, key=lambda packed: packed.unit is not None):
        if _storage(packed.tensor) not in counted:
            counted.add(_storage(packed.tensor))
            sizes[packed.unit] = sizes.get(packed.unit, 0) + local_of(packed.tensor).untyped_storage().nbytes()
    return sizes


class _FusedAttention(torch.autograd.Function):
    """The shapes of attention in a fused kernel, which stores only one sum of the scores per query."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums, *(() if mask is None else (mask,)))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors[:3]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    return _FusedAttention.apply(query, key, value, attn_mask)


def _storage(tensor: torch.Tensor) -> int:
    return local_of(tensor).untyped_storage()._cdata


def _stub_experts(model: PreTrainedModel, setting: Setting, stack: ExitStack) -> dict[nn.Module, int]:
    """Replace stacks of experts by the identity. Return the bytes that each would keep, if tokens are routed evenly.

    Each chosen expert of a token keeps input, output, the outputs of gate and up, the activation and their product.
    """
    config = model.config.get_text_config()
    keys = ("num_experts_per_tok", "top_k_experts", "moe_topk", "top_k")
    top_k = next((value for key in keys if (value := getattr(config, key, None))), 1)
    counts = set(expert_counts(model.config))
    saved_bytes: dict[nn.Module, int] = {}
    for module in model.modules():
        parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
        stacked = [parameter for parameter in parameters if parameter.ndim == 3 and parameter.shape[0] in counts]
        if not stacked or isinstance(module, ConvNd):
            continue
        locals_ = [local_of(parameter).shape for parameter in stacked]
        share = module.num_experts / stacked[0].shape[0] if isinstance(module, ExpertsOfThisRank) else 1.0
        hidden = config.hidden_size
        features = min(math.prod(shape[1:]) // hidden for shape in locals_)
        choices = setting.seq_len * setting.micro_batch * top_k * share
        saved_bytes[module] = int(choices * (2 * hidden + 4 * features) * setting.compute.itemsize)
        computes = next(
            cls
            for cls in type(module).__mro__
            if "forward" in vars(cls)
            and not cls.__module__.startswith(divided.__name__)
            and "mixed_into" not in vars(cls)
        )
        stack.enter_context(replaced_here(computes, "forward", lambda self, hidden, *_, **__: hidden * 1))
    stack.enter_context(replaced_here(ExpertsOfThisRank, "forward", _exchanged))
    return saved_bytes


def _exchanged(
    module: ExpertsOfThisRank, hidden: torch.Tensor, *args: torch.Tensor, **kwargs: torch.Tensor
) -> torch.Tensor:
    """Run the collectives of a divided stack of experts, without routing."""
    weights = next(value for value in (*args, *kwargs.values()) if value.is_floating_point())
    scale = entering(weights, module.ep_mesh).sum(-1, keepdim=True)
    tokens = entering(hidden, module.ep_mesh).reshape(-1, hidden.shape[-1])
    return leaving(tokens * scale.reshape(-1, 1), module.ep_mesh).reshape(hidden.shape)
