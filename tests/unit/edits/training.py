"""Freezing; reading, setting, clipping and accumulating gradients; higher-order derivatives."""

from __future__ import annotations

from fnmatch import fnmatch

import torch
from torch import nn

from edits.outcome import Outcome
from edits.table import Subject, add, edit, forward, gradients, step, values


def loss_of(subject: Subject, model: nn.Module | None = None) -> torch.Tensor:
    """Return the loss of the subject's tokens."""
    model = subject.model if model is None else model
    return model(input_ids=subject.input_ids, labels=subject.input_ids, use_cache=False).loss


def sgd(model: nn.Module, lr: float = 0.5) -> None:
    """Take one step of SGD."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=lr)


def trained(subject: Subject, steps: int = 2) -> Outcome:
    """Return weights and `requires_grad` flags after some steps."""
    for _ in range(steps):
        subject.model.zero_grad()
        loss_of(subject).backward()
        sgd(subject.model)
    return {
        "values": values(subject.model),
        "trains": [name for name, parameter in subject.model.named_parameters() if parameter.requires_grad],
        "gradients": gradients(subject.model),
    }


# Trainable parameters by name

TRAINABLE = {
    "only q_proj": "*q_proj.weight",
    "only k_proj": "*k_proj.weight",
    "only v_proj": "*v_proj.weight",
    "only up_proj": "*up_proj.weight",
    "only q_proj and v_proj": "*.[qv]_proj.weight",
    "only attention": "*self_attn*",
    "only the last layer": "model.layers.1.*",
    "only norms": "*norm*",
    "all but k_proj": "!*k_proj.weight",
    "all but gate_proj": "!*gate_proj.weight",
    "only the head": "lm_head.weight",
}

for name, pattern in TRAINABLE.items():

    def apply(subject: Subject, pattern: str = pattern) -> Outcome:
        for parameter_name, parameter in subject.model.named_parameters():
            parameter.requires_grad_(fnmatch(parameter_name, pattern.lstrip("!")) != pattern.startswith("!"))
        return trained(subject)

    add(f"{name} trains", apply)


@edit()
def linear_is_frozen_by_its_module(subject: Subject) -> Outcome:
    for parameter in subject.q.parameters():
        parameter.requires_grad = False
    return trained(subject)


@edit()
def linears_are_frozen_by_name_of_module(subject: Subject) -> Outcome:
    for name, module in subject.model.named_modules():
        if name.endswith(("k_proj", "gate_proj")):
            module.requires_grad_(False)
    return trained(subject)


@edit()
def linear_is_frozen_between_two_steps(subject: Subject) -> Outcome:
    first = trained(subject, 1)["values"]
    subject.v.requires_grad_(False)
    second = trained(subject, 1)
    subject.v.requires_grad_(True)
    return {"first": first, "second": second, "third": trained(subject, 1)}


@edit()
def model_is_frozen_and_its_input_trains(subject: Subject) -> Outcome:
    subject.model.requires_grad_(False)
    x = subject.hidden_states().requires_grad_()
    subject.model(inputs_embeds=x, use_cache=False).logits.square().mean().backward()
    return {"x": x.grad, "gradients": gradients(subject.model)}


@edit()
def new_linear_trains_next_to_frozen_linear(subject: Subject) -> Outcome:
    """A hand-written adapter."""
    subject.model.requires_grad_(False)
    down, up = nn.Linear(64, 4, bias=False), nn.Linear(4, 32, bias=False)

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.down, self.up = base, down, up

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    subject.attention.v_proj = Adapted(subject.v)
    return trained(subject)


# Access to gradients


@edit()
def gradient_is_set(subject: Subject) -> Outcome:
    loss_of(subject).backward()
    subject.q.weight.grad = torch.ones_like(subject.q.weight)
    sgd(subject.model)
    return values(subject.model)


@edit()
def one_gradient_is_scaled_in_place(subject: Subject) -> Outcome:
    loss_of(subject).backward()
    subject.k.weight.grad.mul_(3)
    subject.up.weight.grad.zero_()
    return gradients(subject.model)


@edit()
def gradients_are_removed_one_by_one(subject: Subject) -> Outcome:
    loss_of(subject).backward()
    subject.k.weight.grad = None
    loss_of(subject).backward()
    return gradients(subject.model)


for set_to_none in (True, False):

    def apply(subject: Subject, set_to_none: bool = set_to_none) -> Outcome:
        loss_of(subject).backward()
        subject.model.zero_grad(set_to_none=set_to_none)
        empty = {name: None if value is None else value.clone() for name, value in gradients(subject.model).items()}
        return {"empty": empty, **step(subject)}

    add(f"gradients are {'removed' if set_to_none else 'set to zero'} between two steps", apply)


@edit()
def gradients_accumulate(subject: Subject) -> Outcome:
    kept = None
    for tokens in (subject.input_ids[:1], subject.input_ids[1:], subject.input_ids.flip(1)):
        subject.model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        kept = kept or {name: gradient.clone() for name, gradient in gradients(subject.model).items()}
    return {"first": kept, "sum": gradients(subject.model)}


@edit()
def gradients_accumulate_in_separate_buffer(subject: Subject) -> Outcome:
    """Accumulate as Megatron and DeepSpeed do: parameters have views of one flat gradient buffer."""
    parameters = list(subject.model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, view in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = view.view_as(parameter)
    for _ in range(2):
        loss_of(subject).backward()
    return {
        "flat": flat,
        "is in place": all(p.grad.untyped_storage().data_ptr() == flat.data_ptr() for p in parameters),
    }


@edit()
def gradients_of_one_linear_are_clipped(subject: Subject) -> Outcome:
    loss_of(subject).backward()
    norm = nn.utils.clip_grad_norm_(subject.q.parameters(), 1e-3)
    return {"norm": norm, "gradients": gradients(subject.model)}


@edit()
def every_gradient_is_clipped_by_itself(subject: Subject) -> Outcome:
    loss_of(subject).backward()
    norms = [nn.utils.clip_grad_norm_([parameter], 1e-2) for parameter in subject.model.parameters()]
    return {"norms": norms, "gradients": gradients(subject.model)}


@edit()
def gradients_are_clipped_together(subject: Subject) -> Outcome:
    loss_of(subject).backward()
    norm = nn.utils.clip_grad_norm_(subject.model.parameters(), 0.1)
    return {"norm": norm, "gradients": gradients(subject.model)}


@edit()
def gradients_are_clipped_by_value(subject: Subject) -> Outcome:
    loss_of(subject).backward()
    nn.utils.clip_grad_value_(subject.k.parameters(), 1e-4)
    return gradients(subject.model)


@edit()
def gradients_get_noise_by_name(subject: Subject) -> Outcome:
    loss_of(subject).backward()
    generator = torch.Generator().manual_seed(4)
    for name, parameter in subject.model.named_parameters():
        if "_proj" in name:
            parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-2)
    return gradients(subject.model)


@edit()
def gradients_are_kept_from_step_to_step(subject: Subject) -> Outcome:
    """A stored gradient does not change in the next backward pass."""
    loss_of(subject).backward()
    kept = gradients(subject.model)
    subject.model.zero_grad(set_to_none=True)
    with torch.no_grad():
        subject.q.weight.mul_(2)
    loss_of(subject).backward()
    return {"kept": kept, "next": gradients(subject.model)}


# Derivatives without .grad


@edit()
def derivative_with_respect_to_one_weight(subject: Subject) -> Outcome:
    (gradient,) = torch.autograd.grad(loss_of(subject), subject.q.weight)
    return {"gradient": gradient, "others": gradients(subject.model)}


@edit()
def derivatives_with_respect_to_weights_and_activations(subject: Subject) -> Outcome:
    seen = []
    subject.mlp.down_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    loss = loss_of(subject)
    return {"gradients": torch.autograd.grad(loss, [subject.up.weight, seen[0], subject.v.weight])}


@edit()
def gradient_of_one_linear_by_weight_of_another(subject: Subject) -> Outcome:
    """The derivative does not exist, because one linear does not depend on the other."""
    outputs = {}
    for part in ("q_proj", "k_proj", "v_proj"):
        add_output = lambda module, args, output, part=part: outputs.update({part: output})  # noqa: E731
        subject.part(part).register_forward_hook(add_output)
    subject.attention.o_proj.register_forward_pre_hook(lambda *args: None)
    loss_of(subject)
    weights = {part: subject.part(part).weight for part in outputs}
    return {
        f"{output} by {weight}": torch.autograd.grad(
            outputs[output].sum(), weights[weight], retain_graph=True, allow_unused=True
        )
        for output in outputs
        for weight in weights
    }


@edit(raises=RuntimeError)
def gradient_of_one_linear_by_weight_of_another_without_allow_unused(subject: Subject) -> Outcome:
    x = subject.hidden_states()
    outputs = []
    original = type(subject.mlp).forward

    class Catch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs.append(x)
            return x

    subject.mlp.act_fn = Catch()
    original(subject.mlp, x)
    return torch.autograd.grad(outputs[0].sum(), subject.up.weight)


def gate_outputs(subject: Subject) -> list[torch.Tensor]:
    """Return a list to which the activation function of the MLP adds its inputs."""
    outputs: list[torch.Tensor] = []
    activation = subject.mlp.act_fn

    class Catch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs.append(x)
            return activation(x)

    subject.mlp.act_fn = Catch()
    return outputs


@edit()
def activation_of_one_linear_without_hooks(subject: Subject) -> Outcome:
    """Capture the gate's output where it is used. It depends only on the gate's weight and the input."""
    x = subject.hidden_states().requires_grad_()
    outputs = gate_outputs(subject)
    subject.mlp(x)
    wanted = [x, subject.gate.weight, subject.up.weight]
    return {"gradients": torch.autograd.grad(outputs[0].square().sum(), wanted, allow_unused=True)}


@edit()
def backward_from_one_linear_alone(subject: Subject) -> Outcome:
    """Parameters that do not affect the output have no gradient, rather than a zero gradient."""
    outputs = gate_outputs(subject)
    loss_of(subject)
    outputs[0].square().sum().backward()
    return gradients(subject.model)


@edit()
def graph_is_kept_for_second_backward_pass(subject: Subject) -> Outcome:
    loss = loss_of(subject)
    loss.backward(retain_graph=True)
    first = {name: gradient.clone() for name, gradient in gradients(subject.model).items()}
    loss.backward()
    return {"first": first, "twice": gradients(subject.model)}


@edit(raises=RuntimeError)
def second_backward_pass_over_freed_graph(subject: Subject) -> Outcome:
    loss = loss_of(subject)
    loss.backward()
    loss.backward()


@edit()
def penalty_on_gradients(subject: Subject) -> Outcome:
    """Double backward through all weights."""
    weights = list(subject.model.parameters())
    first = torch.autograd.grad(loss_of(subject), weights, create_graph=True)
    sum(gradient.square().sum() for gradient in first).backward()
    return {"first": [gradient.detach() for gradient in first], "second": gradients(subject.model)}


@edit(which="qwen2")
def penalty_on_gradients_with_biases(subject: Subject) -> Outcome:
    weights = [subject.q.weight, subject.k.bias, subject.v.weight, subject.up.weight]
    first = torch.autograd.grad(loss_of(subject), weights, create_graph=True)
    sum(gradient.square().sum() for gradient in first).backward()
    return gradients(subject.model)


@edit()
def penalty_on_gradient_of_input(subject: Subject) -> Outcome:
    x = subject.hidden_states().requires_grad_()
    logits = subject.model(inputs_embeds=x, use_cache=False).logits
    (gradient,) = torch.autograd.grad(logits.square().mean(), x, create_graph=True)
    gradient.square().sum().backward()
    return {"x": x.grad, "gradients": gradients(subject.model)}


@edit()
def hessian_times_vector(subject: Subject) -> Outcome:
    weights = [subject.q.weight, subject.up.weight]
    first = torch.autograd.grad(loss_of(subject), weights, create_graph=True)
    product = sum((gradient * torch.ones_like(gradient)).sum() for gradient in first)
    return {"product": torch.autograd.grad(product, weights)}


@edit()
def forward_mode_over_dual_input(subject: Subject) -> Outcome:
    x = subject.hidden_states()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        output = subject.mlp(dual)
        primal, tangent = torch.autograd.forward_ad.unpack_dual(output)
        return {"primal": primal.detach(), "tangent": tangent.detach()}


@edit()
def gradcheck_of_parent(subject: Subject) -> Outcome:
    mlp = subject.mlp.double()
    x = subject.hidden_states()[:1, :2].double().requires_grad_()
    return {"seen": torch.autograd.gradcheck(mlp, (x,), check_batched_grad=True)}


@edit()
def two_graphs_at_once(subject: Subject) -> Outcome:
    """Two forward passes, then their backward passes in reverse order."""
    first, second = loss_of(subject), subject.model(subject.input_ids.flip(0), labels=subject.input_ids).loss
    second.backward()
    kept = {name: gradient.clone() for name, gradient in gradients(subject.model).items()}
    first.backward()
    return {"second": kept, "both": gradients(subject.model)}


@edit()
def reward_from_same_model_without_its_gradient(subject: Subject) -> Outcome:
    """Policy and frozen reference are the same model. The reference runs between the policy's forward and backward."""
    policy = subject.model(subject.input_ids, use_cache=False).logits.log_softmax(-1)
    with torch.no_grad():
        reference = subject.model(subject.input_ids.flip(1), use_cache=False).logits.log_softmax(-1)
    (policy.exp() * (policy - reference)).sum().backward()
    return {"gradients": gradients(subject.model), "logits": forward(subject)}


@edit()
def sharpness_aware_steps(subject: Subject) -> Outcome:
    """SAM: move weights along the gradient, compute a second gradient, and restore the weights."""
    loss_of(subject).backward()
    moves = {parameter: parameter.grad * 0.1 for parameter in subject.model.parameters()}
    with torch.no_grad():
        for parameter, move in moves.items():
            parameter.add_(move)
    subject.model.zero_grad()
    loss_of(subject).backward()
    with torch.no_grad():
        for parameter, move in moves.items():
            parameter.sub_(move)
    return {"values": values(subject.model), "gradients": gradients(subject.model)}
