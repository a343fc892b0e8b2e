"""torch modes around one linear and around the complete model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from edits.calls import mlp_forward
from edits.outcome import Outcome
from edits.table import Subject, add, edit, forward, step

Context = Callable[[], AbstractContextManager[Any]]


class Doubling(TorchFunctionMode):
    """Double the output of `linear`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        return output * 2 if function is nn.functional.linear else output


class DoublingMatmuls(TorchDispatchMode):
    """Double the output of matrix products, below autograd."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default)
        return output * 2 if function in products else output


CONTEXTS: dict[str, Context] = {
    "no_grad": torch.no_grad,
    "set_grad_enabled(False)": lambda: torch.set_grad_enabled(False),
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "hooks that double what is saved": lambda: saved_tensors_hooks(lambda saved: saved * 2, lambda saved: saved),
    "save_on_cpu": save_on_cpu,
    "a mode for torch functions": Doubling,
    "a mode for dispatch": DoublingMatmuls,
}


def around(part: str, context: Context) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """Return an MLP forward that calls one linear within the context, and the other outside of it."""

    def forward_with_context(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
        contexts = {name: context if name == part else nullcontext for name in ("gate_proj", "up_proj")}
        with contexts["gate_proj"]():
            gate = mlp.gate_proj(x)
        with contexts["up_proj"]():
            up = mlp.up_proj(x)
        return mlp.down_proj(gate.float() * up.float() + 0.5 * gate.float())

    return forward_with_context


def calling(part: str, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Callable:
    """Return an MLP forward that calls one linear through `call`."""

    def forward_with_call(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
        calls = {name: call if name == part else nn.Module.__call__ for name in ("gate_proj", "up_proj")}
        gate, up = (calls[name](getattr(mlp, name), x) for name in calls)
        return mlp.down_proj(gate * up + 0.5 * gate)

    return forward_with_call


def with_mlp(replacement: Callable[[nn.Module, torch.Tensor], torch.Tensor], subject: Subject) -> Outcome:
    """Run a step with the replaced MLP forward, and compute logits twice without a graph."""
    with mlp_forward(replacement):
        return {**step(subject), "without graph": forward(subject)}


for part in ("gate_proj", "up_proj"):
    for name, context in CONTEXTS.items():
        add(f"{name} around {part}", partial(with_mlp, around(part, context)))
    add(f"inference mode around {part}", partial(with_mlp, around(part, torch.inference_mode)), raises=RuntimeError)
    for reentrant in (True, False):
        add(
            f"checkpoint around {part}, {'re-entrant' if reentrant else 'not re-entrant'}",
            partial(with_mlp, calling(part, partial(checkpoint, use_reentrant=reentrant))),
        )


@edit()
def no_grad_on_both_linears(subject: Subject) -> Outcome:
    def replacement(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        return mlp.down_proj(gate * up)

    return with_mlp(replacement, subject)


@edit()
def grad_switched_off_by_activation(subject: Subject) -> Outcome:
    """The activation, which runs between the linears, disables gradients and does not enable them again."""
    activation = subject.mlp.act_fn

    class Switching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = activation(x)
            torch.set_grad_enabled(False)
            return output

    subject.mlp.act_fn = Switching()
    subject.up.register_forward_hook(lambda *args: torch._C._set_grad_enabled(True))
    try:
        return step(subject)
    finally:
        torch.set_grad_enabled(True)


@edit()
def enable_grad_on_one_linear_of_model_without_graph(subject: Subject) -> Outcome:
    seen = {}

    def replacement(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
        gate = mlp.gate_proj(x)
        with torch.enable_grad():
            up = mlp.up_proj(x)
        seen.setdefault("flags", []).extend([gate.requires_grad, up.requires_grad])
        return mlp.down_proj(gate * up)

    with mlp_forward(replacement):
        return {"logits": forward(subject), "seen": seen}


@edit()
def layer_is_checkpointed_re_entrant(subject: Subject) -> Outcome:
    return checkpointed(subject, use_reentrant=True)


@edit()
def layer_is_checkpointed(subject: Subject) -> Outcome:
    return checkpointed(subject, use_reentrant=False)


@edit()
def layer_is_checkpointed_selectively(subject: Subject) -> Outcome:
    """Save the outputs of matrix products, and recompute everything else."""

    def policy(context, function, *args, **kwargs) -> CheckpointPolicy:
        matmul = function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if matmul else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpointed(subject, use_reentrant=False, context_fn=contexts)


def checkpointed(subject: Subject, **options: Any) -> Outcome:
    """Run a step whose first layer is checkpointed. `seen` counts the calls of its norm."""
    seen = []
    layer = subject.model.model.layers[0]
    layer.input_layernorm.register_forward_hook(lambda *args: seen.append("ran"))
    original = layer.forward
    # Bind keyword arguments: a reentrant checkpoint accepts none.
    layer.forward = lambda x, **kwargs: checkpoint(partial(original, **kwargs), x, **options)
    return {**step(subject), "seen": seen}


@edit()
def gradient_checkpointing_of_transformers(subject: Subject) -> Outcome:
    seen = []
    subject.gate.register_forward_hook(lambda *args: seen.append("ran"))
    subject.model.gradient_checkpointing_enable({"use_reentrant": False})
    subject.model.train()
    return {**step(subject), "seen": seen}


@edit()
def gradient_checkpointing_re_entrant_of_frozen_embeddings(subject: Subject) -> Outcome:
    seen = []
    subject.model.model.layers[0].register_forward_hook(lambda *args: seen.append("ran"))
    subject.model.get_input_embeddings().requires_grad_(False)
    subject.model.gradient_checkpointing_enable({"use_reentrant": True})
    subject.model.enable_input_require_grads()
    subject.model.train()
    return {**step(subject), "seen": seen}


@edit()
def parent_is_checkpointed(subject: Subject) -> Outcome:
    seen = []
    original = subject.mlp.forward

    def forward_of_mlp(x: torch.Tensor) -> torch.Tensor:
        seen.append("ran")
        return original(x)

    subject.mlp.forward = lambda x: checkpoint(forward_of_mlp, x, use_reentrant=False)
    return {**step(subject), "seen": seen}


# Around the complete model


@edit(half=True)
def autocast_around_model(subject: Subject) -> Outcome:
    with torch.autocast("cpu", torch.bfloat16):
        return step(subject)


@edit(half=True)
def autocast_with_one_linear_outside(subject: Subject) -> Outcome:
    def replacement(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            up = mlp.up_proj(x.float())
        return mlp.down_proj(mlp.gate_proj(x) * up)

    with mlp_forward(replacement), torch.autocast("cpu", torch.bfloat16):
        return step(subject)


@edit()
def inference_mode_around_model(subject: Subject) -> Outcome:
    with torch.inference_mode():
        output = subject.model(input_ids=subject.input_ids, use_cache=False).logits
    return {"logits": output.clone(), "inference": output.is_inference(), "training": step(subject)}


@edit()
def weights_as_inference_tensors(subject: Subject) -> Outcome:
    with torch.inference_mode():
        model = subject.new()
        output = model(input_ids=subject.input_ids, use_cache=False).logits
        return {"logits": output.clone(), "weight": model.model.layers[0].self_attn.k_proj.weight.is_inference()}


@edit(raises=RuntimeError)
def training_of_inference_tensor_weights(subject: Subject) -> Outcome:
    with torch.inference_mode():
        model = subject.new()
    return step(subject, model)


@edit()
def saved_tensors_are_packed(subject: Subject) -> Outcome:
    seen = []

    def pack(saved: torch.Tensor) -> torch.Tensor:
        seen.append("packed")
        return saved.clone()

    with saved_tensors_hooks(pack, lambda saved: saved):
        return {**step(subject), "seen": bool(seen)}


@edit()
def saved_tensors_are_rounded(subject: Subject) -> Outcome:
    """Activations are saved in bfloat16. Weights, which are also saved, are not converted."""
    weights = {parameter.data_ptr() for parameter in subject.model.parameters()}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        rounds = saved.is_floating_point() and saved.shape == (2, 7, 96) and saved.data_ptr() not in weights
        return saved.to(torch.bfloat16) if rounds else saved

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        return saved.float() if saved.dtype == torch.bfloat16 else saved

    with saved_tensors_hooks(pack, unpack):
        return step(subject)


@edit()
def saved_tensors_on_cpu(subject: Subject) -> Outcome:
    with save_on_cpu():
        return {"step": step(subject)}


@edit()
def mutation_of_saved_tensors_is_allowed(subject: Subject) -> Outcome:
    """An optimizer step between forward and backward: the gradients are those of the old weights."""
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        loss = subject.model(input_ids=subject.input_ids, labels=subject.input_ids, use_cache=False).loss
        with torch.no_grad():
            for weight in (subject.q.weight, subject.k.weight, subject.up.weight):
                weight.mul_(2)
        loss.backward()
        return {"gradients": {name: weight.grad for name, weight in subject.model.named_parameters()}}


@edit()
def operations_are_counted(subject: Subject) -> Outcome:
    with FlopCounterMode(display=False) as counter:
        outcome = step(subject)
    return {**outcome, "seen": counter.get_total_flops()}


@edit()
def operations_are_counted_of_one_linear(subject: Subject) -> Outcome:
    with FlopCounterMode(display=False) as counter:
        subject.q(subject.hidden_states())
    return {"seen": counter.get_total_flops()}


@edit()
def model_is_profiled(subject: Subject) -> Outcome:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        outcome = step(subject)
    return {**outcome, "seen": any("linear" in event.key for event in profiled.key_averages())}


@edit()
def function_mode_around_model(subject: Subject) -> Outcome:
    with Doubling():
        return step(subject)


@edit()
def dispatch_mode_around_model(subject: Subject) -> Outcome:
    with DoublingMatmuls():
        return {"logits": forward(subject)}


@edit()
def anomaly_detection(subject: Subject) -> Outcome:
    subject.k.register_full_backward_hook(lambda module, of_input, of_output: (of_input[0] * torch.nan,))
    with torch.autograd.detect_anomaly(check_nan=True):
        try:
            step(subject)
        except RuntimeError as error:
            return {"seen": type(error).__name__}


@edit()
def default_dtype_is_double(subject: Subject) -> Outcome:
    torch.set_default_dtype(torch.float64)
    try:
        outcome = step(subject)
        fresh = type(subject.model)(subject.model.config)
        return {**outcome, "dtypes": sorted({str(parameter.dtype) for parameter in fresh.parameters()})}
    finally:
        torch.set_default_dtype(torch.float32)


@edit()
def deterministic_algorithms(subject: Subject) -> Outcome:
    torch.use_deterministic_algorithms(True)
    try:
        return {"step": step(subject), "logits": forward(subject)}
    finally:
        torch.use_deterministic_algorithms(False)


@edit()
def one_thread_for_backward_pass(subject: Subject) -> Outcome:
    with torch.autograd.set_multithreading_enabled(False):
        return {"step": step(subject)}


# Generation in each mode


def generated(subject: Subject) -> torch.Tensor:
    """Generate six tokens greedily."""
    return subject.model.generate(subject.input_ids, max_new_tokens=6, do_sample=False)


for name, context in {
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a function mode": Doubling,
    "a dispatch mode": DoublingMatmuls,
}.items():

    def apply(subject: Subject, context: Context = context) -> Outcome:
        with context():
            return {"tokens": generated(subject)}

    add(f"generation under {name}", apply)


@edit()
def generation_between_two_training_steps(subject: Subject) -> Outcome:
    first = step(subject)
    tokens = generated(subject)
    with torch.no_grad():
        for parameter in subject.model.parameters():
            parameter.sub_(parameter.grad, alpha=0.5)
    subject.model.zero_grad()
    return {"first": first["logits"], "tokens": tokens, "again": generated(subject), "second": step(subject)}
