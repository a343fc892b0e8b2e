"""All kinds of hooks, on linears, their parent modules, parameters and all modules."""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from edits.outcome import Outcome
from edits.table import Subject, add, edit, forward, gradients, step

PARTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def each_part(name: str):
    """Register an edit for each linear. `{}` in its name is replaced by the linear's name."""

    def enter(apply):
        for part in PARTS:
            add(name.format(part), lambda subject, part=part: apply(subject, subject.part(part)), kind="hooks")
        return apply

    return enter


# Forward hooks


@each_part("a forward hook scales the output of {}")
def scale_output(subject: Subject, part: nn.Linear) -> Outcome:
    part.register_forward_hook(lambda module, args, output: output * 2)
    return step(subject)


@each_part("a pre-hook gives {} another input")
def replace_input(subject: Subject, part: nn.Linear) -> Outcome:
    part.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return step(subject)


@each_part("a pre-hook edits the input of {} in place")
def edit_input(subject: Subject, part: nn.Linear) -> Outcome:
    def hook(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        args[0].mul_(2)

    part.register_forward_pre_hook(hook)
    return {"logits": forward(subject)}


@each_part("a forward hook of {} edits the input that its neighbors read, in place")
def edit_input_afterwards(subject: Subject, part: nn.Linear) -> Outcome:
    def hook(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        args[0].add_(1)

    part.register_forward_hook(hook)
    return {"logits": forward(subject)}


@each_part("a pre-hook scales the weight of {}")
def scale_weight(subject: Subject, part: nn.Linear) -> Outcome:
    def hook(module: nn.Linear, args: tuple[torch.Tensor]) -> None:
        with torch.no_grad():
            module.weight.mul_(1.5)

    part.register_forward_pre_hook(hook)
    return step(subject)


@each_part("a full backward hook scales the gradient of the input of {}")
def scale_gradient_of_input(subject: Subject, part: nn.Linear) -> Outcome:
    part.register_full_backward_hook(lambda module, of_input, of_output: (of_input[0] * 2,))
    return step(subject)


@each_part("a backward pre-hook scales the gradient of the output of {}")
def scale_gradient_of_output(subject: Subject, part: nn.Linear) -> Outcome:
    part.register_full_backward_pre_hook(lambda module, of_output: (of_output[0] * 2,))
    return step(subject)


@each_part("a tensor hook on the output of {}")
def hook_on_output(subject: Subject, part: nn.Linear) -> Outcome:
    def hook(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient * 3)

    part.register_forward_hook(hook)
    return step(subject)


@each_part("a tensor hook on the weight of {}")
def hook_on_weight(subject: Subject, part: nn.Linear) -> Outcome:
    part.weight.register_hook(lambda gradient: gradient * 3)
    return step(subject)


@each_part("a hook steps {} as soon as its gradient is there")
def optimizer_in_backward(subject: Subject, part: nn.Linear) -> Outcome:
    @part.weight.register_post_accumulate_grad_hook
    def hook(weight: torch.Tensor) -> None:
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.1)
        weight.grad = None

    before = part.weight.detach().clone()
    outcome = step(subject)
    return {**outcome, "stepped": part.weight.detach() - before}


@edit()
def forward_hook_scales_output_in_place(subject: Subject) -> Outcome:
    subject.q.register_forward_hook(lambda module, args, output: output.mul_(2))
    return step(subject)


@edit()
def pre_hook_with_keywords_replaces_input(subject: Subject) -> Outcome:
    subject.k.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] - 1,), kwargs), with_kwargs=True)
    return step(subject)


@edit()
def pre_hook_with_keywords_passes_input_by_name(subject: Subject) -> Outcome:
    subject.v.register_forward_pre_hook(lambda module, args, kwargs: ((), {"input": args[0] * 2}), with_kwargs=True)
    return step(subject)


@edit()
def forward_hook_with_keywords_on_attention(subject: Subject) -> Outcome:
    seen = []

    def hook(module, args, kwargs, output):
        seen.append(sorted(name for name, value in kwargs.items() if value is not None))
        return (output[0] * 2, *output[1:])

    subject.attention.register_forward_hook(hook, with_kwargs=True)
    return {**step(subject), "seen": seen}


@edit()
def hooks_run_in_requested_order(subject: Subject) -> Outcome:
    seen = []
    for name in ("first", "second"):
        subject.gate.register_forward_hook(lambda *args, name=name: seen.append(name))
    subject.gate.register_forward_hook(lambda *args: seen.append("before"), prepend=True)
    return {**step(subject), "seen": seen}


@edit()
def pre_hook_of_v_scales_weight_of_k(subject: Subject) -> Outcome:
    def hook(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        subject.k.weight.data.mul_(1.5)

    subject.v.register_forward_pre_hook(hook)
    return {"first": forward(subject), "second": forward(subject)}


@edit(raises=RuntimeError)
def pre_hook_of_v_edits_weight_that_k_has_saved(subject: Subject) -> Outcome:
    def hook(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        with torch.no_grad():
            subject.k.weight.mul_(1.5)

    subject.v.register_forward_pre_hook(hook)
    return step(subject)


@edit()
def hook_that_removes_itself(subject: Subject) -> Outcome:
    seen = []

    def hook(module, args, output):
        seen.append("ran")
        handle.remove()
        return output * 2

    handle = subject.q.register_forward_hook(hook)
    return {"first": forward(subject), "second": forward(subject), "seen": seen}


@edit()
def hook_that_is_removed_between_forward_and_backward(subject: Subject) -> Outcome:
    seen = []
    handle = subject.k.register_full_backward_hook(lambda module, of_input, of_output: seen.append(of_output[0]))
    loss = subject.model(input_ids=subject.input_ids, labels=subject.input_ids, use_cache=False).loss
    handle.remove()
    loss.backward()
    return {"gradients": gradients(subject.model), "seen": len(seen) + 1}


@edit()
def hook_added_while_parent_runs(subject: Subject) -> Outcome:
    """The MLP's activation runs between its linears: it adds a hook to `up_proj` before that runs."""
    activation = subject.mlp.act_fn

    class Hooking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not subject.up._forward_hooks:
                subject.up.register_forward_hook(lambda module, args, output: output * 2)
            return activation(x)

    subject.mlp.act_fn = Hooking()
    return step(subject)


@edit()
def hook_on_parent_replaces_its_input(subject: Subject) -> Outcome:
    subject.mlp.register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))
    return step(subject)


@edit()
def hook_on_parent_replaces_its_output(subject: Subject) -> Outcome:
    subject.mlp.register_forward_hook(lambda module, args, output: output * 0.5)
    return step(subject)


@edit()
def backward_hook_on_parent(subject: Subject) -> Outcome:
    subject.mlp.register_full_backward_hook(lambda module, of_input, of_output: (of_input[0] * 2,))
    return step(subject)


@edit()
def hook_that_raises(subject: Subject) -> Outcome:
    def hook(module, args, output):
        raise ValueError("stop")

    handle = subject.k.register_forward_hook(hook)
    try:
        forward(subject)
    except ValueError as error:
        raised = str(error)
    handle.remove()
    return {**step(subject), "seen": raised}


@edit()
def hook_that_always_runs(subject: Subject) -> Outcome:
    seen = []
    subject.v.register_forward_hook(lambda *args: seen.append("ran"), always_call=True)
    subject.v.register_forward_pre_hook(lambda module, args: (args[0][..., :3],))
    try:
        forward(subject)
    except RuntimeError as error:
        seen.append(type(error).__name__)
    return {"seen": seen}


@edit()
def pre_hook_calls_another_linear_on_same_input(subject: Subject) -> Outcome:
    seen = []
    subject.k.register_forward_pre_hook(lambda module, args: seen.append(subject.q(args[0]).detach()))
    return {**step(subject), "seen": seen}


@edit()
def outputs_of_all_linears_are_collected(subject: Subject) -> Outcome:
    seen = {}
    for name, module in subject.model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda module, args, output, name=name: seen.update({name: (args[0].detach(), output.detach())})
            )
    return {**step(subject), "seen": seen}


@edit()
def gradients_of_all_linears_are_collected(subject: Subject) -> Outcome:
    seen = {}
    for name, module in subject.model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_full_backward_hook(
                lambda module, of_input, of_output, name=name: seen.update({name: (of_input[0], of_output[0])})
            )
    return {**step(subject), "seen": dict(sorted(seen.items()))}


# Hooks on tensors and on the graph


@edit()
def gradients_are_averaged_in_accumulate_grad_hooks(subject: Subject) -> Outcome:
    """Register a hook on each parameter's AccumulateGrad node, as DDP and Apex do."""
    seen = []
    nodes = []
    for name, parameter in subject.model.named_parameters():
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *args, name=name: seen.append(name))
        nodes.append(node)
    return {**step(subject), "seen": sorted(seen)}


@edit()
def hook_after_all_gradients_of_group(subject: Subject) -> Outcome:
    seen = []
    weights = [subject.q.weight, subject.k.weight, subject.v.weight]
    torch.autograd.graph.register_multi_grad_hook(weights, lambda of_weights: seen.extend(of_weights))
    return {**step(subject), "seen": seen}


@edit()
def post_accumulate_hooks_run_once_per_parameter(subject: Subject) -> Outcome:
    seen = []
    for name, parameter in subject.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda weight, name=name: seen.append((name, weight.grad.clone())))
    return {**step(subject), "seen": dict(sorted(seen)), "calls": len(seen)}


@edit()
def hook_on_node_of_output(subject: Subject) -> Outcome:
    def hook(module, args, output):
        output.grad_fn.register_prehook(lambda of_output: tuple(gradient * 2 for gradient in of_output))

    subject.v.register_forward_hook(hook)
    return step(subject)


@edit()
def outputs_retain_their_gradients(subject: Subject) -> Outcome:
    outputs = {}
    for part in PARTS:

        def hook(module, args, output, part=part):
            output.retain_grad()
            outputs[part] = output

        subject.part(part).register_forward_hook(hook)
    return {**step(subject), "seen": {part: output.grad for part, output in outputs.items()}}


# Hooks on all modules


@edit()
def global_forward_hook_scales_outputs_of_linears(subject: Subject) -> Outcome:
    handle = global_hooks.register_module_forward_hook(
        lambda module, args, output: output * 1.1 if isinstance(module, nn.Linear) else None
    )
    with handle:
        return step(subject)


@edit()
def global_pre_hook_counts_calls_of_each_module(subject: Subject) -> Outcome:
    names = {module: name for name, module in subject.model.named_modules()}
    seen = []
    with global_hooks.register_module_forward_pre_hook(lambda module, args: seen.append(names[module])):
        return {**step(subject), "seen": seen}


@edit()
def global_pre_hook_scales_inputs_of_linears(subject: Subject) -> Outcome:
    handle = global_hooks.register_module_forward_pre_hook(
        lambda module, args: (args[0] * 1.1,) if isinstance(module, nn.Linear) else None
    )
    with handle:
        return step(subject)


@edit()
def global_backward_hook(subject: Subject) -> Outcome:
    handle = global_hooks.register_module_full_backward_hook(
        lambda module, of_input, of_output: (of_input[0] * 1.5,) if isinstance(module, nn.Linear) else None
    )
    with handle:
        return step(subject)


@edit()
def global_hook_on_registration_of_parameters(subject: Subject) -> Outcome:
    seen = []

    def hook(module, name, parameter):
        seen.append((type(module).__name__, name))

    with global_hooks.register_module_parameter_registration_hook(hook):
        subject.q.weight = nn.Parameter(subject.q.weight.detach() * 2)
    return {**step(subject), "seen": seen}


# Hooks on state dicts


@edit()
def hook_on_state_dict_of_linear(subject: Subject) -> Outcome:
    def hook(module, state_dict, prefix, metadata):
        state_dict[f"{prefix}doubled"] = state_dict[f"{prefix}weight"] * 2

    subject.q.register_state_dict_post_hook(hook)
    return subject.model.state_dict()


@edit()
def hook_before_linear_is_loaded(subject: Subject) -> Outcome:
    def hook(module, state_dict, prefix, *args):
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2

    subject.v.register_load_state_dict_pre_hook(hook)
    subject.model.load_state_dict(subject.model.state_dict())
    return step(subject)


@edit()
def hook_after_linear_is_loaded(subject: Subject) -> Outcome:
    seen = []
    subject.v.register_load_state_dict_post_hook(lambda module, keys: seen.append(list(keys.missing_keys)))
    state_dict = subject.model.state_dict()
    del state_dict["model.layers.0.self_attn.v_proj.weight"]
    subject.model.load_state_dict(state_dict, strict=False)
    return {**step(subject), "seen": seen}


# Hooks without a hook API


@each_part("{}.forward is replaced on the instance")
def replaced_forward(subject: Subject, part: nn.Linear) -> Outcome:
    original, owner = part.forward, weakref.ref(part)
    part.forward = lambda x: original(x) + owner().weight.sum()
    return step(subject)


@edit()
def nn_linear_is_patched_globally(subject: Subject) -> Outcome:
    original = nn.Linear.forward
    nn.Linear.forward = lambda self, x: original(self, x) * 1.1
    try:
        return step(subject)
    finally:
        nn.Linear.forward = original


@edit()
def functional_linear_is_patched_globally(subject: Subject) -> Outcome:
    original = nn.functional.linear
    nn.functional.linear = lambda *args, **kwargs: original(*args, **kwargs) * 1.1
    try:
        return step(subject)
    finally:
        nn.functional.linear = original


@edit(raises=RuntimeError)
def pre_hook_of_k_edits_input_that_q_has_saved(subject: Subject) -> Outcome:
    subject.k.register_forward_pre_hook(lambda module, args: (args[0].mul_(2),))
    return step(subject)
