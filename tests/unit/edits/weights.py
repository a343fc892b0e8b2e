"""Weights and biases that are cast, replaced, edited, tied, pruned and parametrized."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from edits.outcome import Outcome
from edits.table import Subject, add, edit, forward, gradients, step, values

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def scaled(weight: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    """Return a scaled, detached copy."""
    return weight.detach().clone() * by


def set_in_place(part: nn.Linear) -> None:
    with torch.no_grad():
        part.weight.set_(scaled(part.weight))


def scale_by_operator(part: nn.Linear) -> None:
    with torch.no_grad():
        part.weight *= 2


def swap(part: nn.Linear) -> None:
    torch.utils.swap_tensors(part.weight, nn.Parameter(scaled(part.weight)))


def delete_and_set_a_tensor(part: nn.Linear) -> None:
    weight = part.weight
    del part.weight
    part.weight = weight * 2


# Ways to replace a linear's weight. Each is tried on the first, middle and last linear of a group.
CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "gets other data": lambda part: setattr(part.weight, "data", scaled(part.weight)),
    "is scaled through data": lambda part: part.weight.data.mul_(2),
    "is copied over": lambda part: part.weight.data.copy_(scaled(part.weight)),
    "is set to another tensor": set_in_place,
    "is scaled by an operator": scale_by_operator,
    "is swapped": swap,
    "is exchanged among _parameters": lambda part: part._parameters.update(weight=nn.Parameter(scaled(part.weight))),
    "is another Parameter": lambda part: setattr(part, "weight", nn.Parameter(scaled(part.weight))),
    "is registered anew": lambda part: part.register_parameter("weight", nn.Parameter(scaled(part.weight))),
    "is deleted and a plain tensor": delete_and_set_a_tensor,
    "is initialized again": lambda part: nn.init.constant_(part.weight, 0.01),
    "is not contiguous": lambda part: setattr(part, "weight", nn.Parameter(scaled(part.weight).T.contiguous().T)),
    "is a slice of a larger tensor": lambda part: setattr(
        part.weight, "data", torch.cat([scaled(part.weight), scaled(part.weight)])[: part.out_features]
    ),
    "is frozen": lambda part: part.weight.requires_grad_(False),
}

for name, change in CHANGES.items():
    for part in ("q_proj", "k_proj", "up_proj"):

        def apply(subject: Subject, change=change, part=part) -> Outcome:
            change(subject.part(part))
            return {**step(subject), "names": [name for name, _ in subject.model.named_parameters()]}

        add(f"the weight of {part} {name}", apply)


@edit(raises=RuntimeError)
def weight_is_scaled_by_operator_within_graph(subject: Subject) -> Outcome:
    subject.q.weight *= 2


@edit()
def weight_is_unchanged_after_failed_operator(subject: Subject) -> Outcome:
    try:
        subject.q.weight *= 2
    except RuntimeError as error:
        return {**step(subject), "seen": type(error).__name__}


@edit(raises=TypeError)
def weight_is_assigned_a_tensor(subject: Subject) -> Outcome:
    subject.q.weight = torch.zeros(64, 64)


@edit(raises=RuntimeError)
def weight_that_optimizer_changed_before_backward_pass(subject: Subject) -> Outcome:
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=0.1)
    output = subject.model(input_ids=subject.input_ids, labels=subject.input_ids, use_cache=False)
    subject.q.weight.grad = torch.ones_like(subject.q.weight)
    optimizer.step()
    output.loss.backward()


@edit()
def weights_change_in_place_again_and_again(subject: Subject) -> Outcome:
    logits = []
    for part in ("q_proj", "v_proj", "gate_proj", "k_proj", "up_proj"):
        with torch.no_grad():
            subject.part(part).weight.mul_(1.5)
        logits.append(forward(subject))
        subject.part(part).weight.data = scaled(subject.part(part).weight, 0.9)
        logits.append(forward(subject))
    return {"logits": logits, "step": step(subject)}


@edit()
def weight_of_another_type(subject: Subject) -> Outcome:
    """A Tensor subclass that intercepts operations, as quantized weights do."""
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", ""))
            return super().__torch_function__(function, types, args, kwargs)

    subject.k.weight = nn.Parameter(scaled(subject.k.weight).as_subclass(Watched))
    logits = forward(subject).as_subclass(torch.Tensor)
    return {"logits": logits, "seen": "linear" in seen}


# Casts


def cast(*names: str, to: torch.dtype) -> Callable[[Subject], Outcome]:
    """Return an edit that casts linears, and their inputs with a hook."""

    def apply(subject: Subject) -> Outcome:
        for name in names:
            part = subject.part(name).to(to)
            part.register_forward_pre_hook(lambda module, args: (args[0].to(to),))
            part.register_forward_hook(lambda module, args, output: output.float())
        return {**step(subject), "dtypes": {name: str(value.dtype) for name, value in values(subject.model).items()}}

    return apply


for dtype in (torch.float16, torch.bfloat16, torch.float64):
    add(f"q_proj is cast to {dtype}, its input, too", cast("q_proj", to=dtype))
    add(f"all parts of the MLP are cast to {dtype}", cast("gate_proj", "up_proj", to=dtype), half=dtype.itemsize < 4)
    add(
        f"a cast of k_proj to {dtype} alone fails",
        lambda s, to=dtype: step(s, s.k.to(to) and s.model),
        raises=RuntimeError,
    )


@edit()
def linear_is_rounded_to_half_precision_and_back(subject: Subject) -> Outcome:
    subject.v.half().float()
    return step(subject)


@edit()
def model_is_rounded_to_half_precision_and_back(subject: Subject) -> Outcome:
    subject.model.half().float()
    return step(subject)


@edit()
def model_is_cast_to_double_and_back(subject: Subject) -> Outcome:
    parameters = list(subject.model.parameters())
    doubled = step(subject, subject.model.double())["logits"]
    subject.model.zero_grad()
    subject.model.float()
    same = all(now is before for now, before in zip(subject.model.parameters(), parameters, strict=True))
    return {"double": doubled, "single": step(subject), "same objects": same}


@edit(half=True)
def model_in_bfloat16(subject: Subject) -> Outcome:
    subject.model.to(torch.bfloat16)
    return step(subject)


@edit()
def one_layer_is_cast(subject: Subject) -> Outcome:
    layer = subject.model.model.layers[1].double()
    layer.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    layer.register_forward_hook(lambda module, args, output: output.float())
    with torch.no_grad():
        subject.model.model.rotary_emb.register_forward_hook(
            lambda module, args, output: tuple(value.double() for value in output)
        )
        for module in subject.model.model.layers[:1]:
            module.double()
            module.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    return step(subject)


# Biases


@edit(which="qwen2")
def bias_gets_other_data(subject: Subject) -> Outcome:
    subject.k.bias.data = scaled(subject.k.bias)
    return step(subject)


@edit(which="qwen2")
def bias_is_removed(subject: Subject) -> Outcome:
    subject.q.bias = None
    return step(subject)


@edit(which="qwen2")
def all_biases_of_group_are_removed(subject: Subject) -> Outcome:
    for part in (subject.q, subject.k, subject.v):
        part.register_parameter("bias", None)
    return {**step(subject), "names": list(subject.model.state_dict())}


@edit()
def bias_is_added(subject: Subject) -> Outcome:
    subject.v.bias = nn.Parameter(torch.linspace(-1, 1, 32))
    return {**step(subject), "names": list(subject.model.state_dict())}


@edit()
def biases_are_added_to_whole_group(subject: Subject) -> Outcome:
    for part in (subject.gate, subject.up):
        part.bias = nn.Parameter(torch.linspace(-1, 1, 96))
    return step(subject)


@edit(which="qwen2")
def only_biases_train(subject: Subject) -> Outcome:
    for name, parameter in subject.model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return step(subject)


@edit(which="qwen2")
def one_bias_is_frozen(subject: Subject) -> Outcome:
    subject.v.bias.requires_grad_(False)
    return step(subject)


@edit(which="qwen2")
def bias_is_scaled_between_two_steps(subject: Subject) -> Outcome:
    first = step(subject)["logits"]
    with torch.no_grad():
        subject.v.bias.mul_(-1)
    return {"first": first, "second": step(subject)}


# Ties


@edit(which="square")
def linears_share_one_weight(subject: Subject) -> Outcome:
    subject.k.weight = subject.q.weight
    return {**step(subject), "names": [name for name, _ in subject.model.named_parameters()]}


@edit()
def k_and_v_share_data(subject: Subject) -> Outcome:
    subject.v.weight.data = subject.k.weight.data
    return step(subject)


@edit()
def weight_is_tied_across_layers(subject: Subject) -> Outcome:
    subject.model.model.layers[1].mlp.up_proj.weight = subject.up.weight
    return {**step(subject), "names": [name for name, _ in subject.model.named_parameters()]}


# Other sizes


@edit()
def neurons_are_cut_off(subject: Subject) -> Outcome:
    """Structured pruning: remove a third of the MLP's neurons."""
    for part in (subject.gate, subject.up):
        part.weight = nn.Parameter(part.weight.detach()[:64].clone())
        part.out_features = 64
    down = subject.mlp.down_proj
    down.weight = nn.Parameter(down.weight.detach()[:, :64].clone())
    down.in_features = 64
    return step(subject)


@edit()
def neurons_are_cut_off_through_data(subject: Subject) -> Outcome:
    """The linears' `in_features` and `out_features` do not change."""
    for part in (subject.gate, subject.up):
        part.weight.data = part.weight.data[::2]
    subject.mlp.down_proj.weight.data = subject.mlp.down_proj.weight.data[:, ::2]
    return step(subject)


@edit()
def neurons_are_added(subject: Subject) -> Outcome:
    for part in (subject.gate, subject.up):
        part.weight = nn.Parameter(torch.cat([part.weight.detach(), part.weight.detach()[:8] * 0.5]))
    down = subject.mlp.down_proj
    down.weight = nn.Parameter(torch.cat([down.weight.detach(), down.weight.detach()[:, :8]], dim=1))
    return step(subject)


# Parametrizations


class Doubled(nn.Module):
    """A parametrization that doubles the weight, with its inverse."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


@edit()
def weight_is_parametrized(subject: Subject) -> Outcome:
    parametrize.register_parametrization(subject.k, "weight", Doubled())
    return {**step(subject), "state dict": subject.model.state_dict()}


@edit()
def parametrization_is_removed_and_its_weight_kept(subject: Subject) -> Outcome:
    parametrize.register_parametrization(subject.k, "weight", Doubled())
    parametrize.remove_parametrizations(subject.k, "weight", leave_parametrized=True)
    return {**step(subject), "type": type(subject.k), "state dict": subject.model.state_dict()}


@edit()
def parametrization_is_removed(subject: Subject) -> Outcome:
    parametrize.register_parametrization(subject.gate, "weight", Doubled())
    subject.gate.weight = torch.ones(96, 64) * 0.1
    parametrize.remove_parametrizations(subject.gate, "weight", leave_parametrized=False)
    return {**step(subject), "type": type(subject.gate)}


@edit()
def all_linears_are_parametrized_with_cache(subject: Subject) -> Outcome:
    for part in (subject.q, subject.k, subject.v):
        parametrize.register_parametrization(part, "weight", Doubled())
    with parametrize.cached():
        return step(subject)


@edit()
def weight_norm(subject: Subject) -> Outcome:
    parametrizations.weight_norm(subject.q)
    with torch.no_grad():
        subject.q.parametrizations.weight.original0.mul_(2)
    return step(subject)


@edit()
def weight_norm_of_old(subject: Subject) -> Outcome:
    nn.utils.weight_norm(subject.up)
    with torch.no_grad():
        subject.up.weight_g.mul_(2)
    outcome = step(subject)
    nn.utils.remove_weight_norm(subject.up)
    return {**outcome, "removed": forward(subject), "names": list(subject.model.state_dict())}


@edit()
def spectral_norm(subject: Subject) -> Outcome:
    torch.manual_seed(3)
    parametrizations.spectral_norm(subject.v)
    subject.model.train()
    return step(subject)


@edit()
def spectral_norm_of_old(subject: Subject) -> Outcome:
    torch.manual_seed(3)
    nn.utils.spectral_norm(subject.gate)
    return step(subject)


@edit()
def orthogonal(subject: Subject) -> Outcome:
    torch.manual_seed(3)
    parametrizations.orthogonal(subject.k)
    return step(subject)


# Pruning


@edit()
def pruned_by_magnitude(subject: Subject) -> Outcome:
    prune.l1_unstructured(subject.k, "weight", amount=0.5)
    return {**step(subject), "state dict": subject.model.state_dict()}


@edit()
def pruned_by_chance(subject: Subject) -> Outcome:
    torch.manual_seed(3)
    prune.random_unstructured(subject.up, "weight", amount=0.5)
    return step(subject)


@edit()
def pruned_by_rows(subject: Subject) -> Outcome:
    prune.ln_structured(subject.gate, "weight", amount=0.5, n=2, dim=0)
    return step(subject)


@edit()
def pruned_across_modules(subject: Subject) -> Outcome:
    linears = [(module, "weight") for module in subject.model.modules() if isinstance(module, nn.Linear)]
    prune.global_unstructured(linears, prune.L1Unstructured, amount=0.5)
    return {**step(subject), "linears": len(linears)}


@edit()
def pruning_is_made_permanent(subject: Subject) -> Outcome:
    prune.l1_unstructured(subject.q, "weight", amount=0.5)
    prune.remove(subject.q, "weight")
    return {**step(subject), "state dict": subject.model.state_dict()}


@edit()
def pruned_by_activations(subject: Subject) -> Outcome:
    """Wanda: prune by the norms of each linear's inputs."""
    norms = {}
    handles = [
        module.register_forward_pre_hook(
            lambda module, args, name=name: norms.update({name: args[0].flatten(0, -2).norm(dim=0)})
        )
        for name, module in subject.model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    forward(subject)
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        for name, norm in norms.items():
            weight = subject.model.get_submodule(name).weight
            score = weight.abs() * norm
            weight[score < score.median(dim=1, keepdim=True).values] = 0
    return {**step(subject), "seen": sorted(norms)}


# Several at once


@edit()
def parameters_as_one_vector(subject: Subject) -> Outcome:
    vector = nn.utils.parameters_to_vector(subject.model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 1.1, subject.model.parameters())
    return {**step(subject), "vector": vector.detach()}


@edit()
def all_parameters_become_slices_of_one_tensor(subject: Subject) -> Outcome:
    """DeepSpeed and Megatron store parameters in this way."""
    parameters = list(subject.model.parameters())
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = piece.view_as(parameter)
    flat.mul_(1.1)
    return {**step(subject), "again": (flat.mul_(0.9), forward(subject))[1]}


@edit()
def custom_initialization(subject: Subject) -> Outcome:
    """It checks for the exact type, as many initializers do."""
    seen = []

    def initialize(module: nn.Module) -> None:
        if type(module) is nn.Linear:
            seen.append(tuple(module.weight.shape))
            nn.init.xavier_uniform_(module.weight)

    torch.manual_seed(3)
    subject.model.apply(initialize)
    return {**step(subject), "seen": seen}


@edit()
def transformers_own_initialization(subject: Subject) -> Outcome:
    torch.manual_seed(3)
    subject.model.apply(subject.model._init_weights)
    return step(subject)


@edit()
def every_linear_resets_itself(subject: Subject) -> Outcome:
    torch.manual_seed(3)
    for module in subject.model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return step(subject)


@edit()
def low_rank_weights(subject: Subject) -> Outcome:
    """Replace each weight, found by name, by its best approximation of rank 8."""
    for name, parameter in subject.model.named_parameters():
        if name.endswith(("k_proj.weight", "up_proj.weight")):
            u, s, v = torch.linalg.svd(parameter.detach(), full_matrices=False)
            parameter.data = (u[:, :8] * s[:8]) @ v[:8]
    return step(subject)


@edit()
def weight_receives_merged_update(subject: Subject) -> Outcome:
    """Merge LoRA manually into `data`, and subtract it again."""
    update = torch.randn(32, 4, generator=torch.Generator().manual_seed(5)) @ torch.ones(4, 64) * 0.01
    subject.v.weight.data += update
    merged = forward(subject)
    subject.v.weight.data -= update
    return {"merged": merged, "unmerged": forward(subject), "gradients": gradients(subject.model)}
