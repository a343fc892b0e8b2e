"""Optimizers of torch, transformers and others: parameter groups by name, steps, states, weight averages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from transformers import Adafactor

from edits.outcome import Outcome
from edits.table import Subject, add, edit, forward, gradients, values
from edits.training import loss_of

Parameters = Iterable[nn.Parameter]


def matrices_of_layers(model: nn.Module) -> list[nn.Parameter]:
    """Return every matrix except embeddings and the head."""
    return [weight for name, weight in model.named_parameters() if weight.dim() == 2 and ".layers." in name]


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Outcome]:
    """Return the optimizer's state by parameter name."""
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def run(subject: Subject, optimizer: torch.optim.Optimizer, steps: int = 3, model: nn.Module | None = None) -> Outcome:
    """Return weights and states after some steps."""
    model = subject.model if model is None else model
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(subject, model).backward()
        optimizer.step()
    return {"values": values(model), "states": states(model, optimizer)}


# fp64, because most of these divide by the root of a squared gradient, which amplifies rounding.
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "AdamW, all at once": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "Adam with AMSGrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),
    "RAdam": partial(torch.optim.RAdam, lr=1e-2),
    "Adamax": partial(torch.optim.Adamax, lr=1e-2),
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "ASGD": torch.optim.ASGD,
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3),
    "Rprop": partial(torch.optim.Rprop, lr=1e-3),
    "torch's Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "transformers' Adafactor": partial(Adafactor, lr=1e-2, relative_step=False, scale_parameter=True),
}

for name, make in OPTIMIZERS.items():
    add(f"{name} trains", lambda s, make=make: run(s, make(s.model.parameters())), dtype=torch.float64)


# Muon computes in bfloat16, where gradients that agree up to rounding may round differently.
@edit(dtype=torch.float64)
def muon_trains_every_matrix(subject: Subject) -> Outcome:
    return run(subject, torch.optim.Muon(matrices_of_layers(subject.model), lr=1e-2))


@edit(dtype=torch.float64, tolerance=1e-4)
def lbfgs_trains(subject: Subject) -> Outcome:
    optimizer = torch.optim.LBFGS(subject.model.parameters(), lr=0.1, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(subject)
        loss.backward()
        return loss

    return {"loss": optimizer.step(closure).detach(), "values": values(subject.model)}


# Groups


def grouped(model: nn.Module, key: Callable[[str, nn.Parameter], Any]) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Group parameters by the value of `key`."""
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(str(key(name, parameter)), []).append((name, parameter))
    return groups


GROUPINGS: dict[str, Callable[[str, nn.Parameter], Any]] = {
    "by part": lambda name, parameter: next((part for part in ("q_proj", "v_proj", "up_proj") if part in name), "rest"),
    "by layer, deeper ones slower": lambda name, parameter: name.split(".")[2] if ".layers." in name else "rest",
    "by shape": lambda name, parameter: tuple(parameter.shape),
    "by what decays": lambda name, parameter: parameter.dim() > 1,
}

for name, key in GROUPINGS.items():

    def apply(subject: Subject, key: Callable[[str, nn.Parameter], Any] = key) -> Outcome:
        groups = grouped(subject.model, key)
        rates = [
            {"params": members, "lr": 1e-2 / (number + 1), "weight_decay": 0.1 * number}
            for number, members in enumerate(groups.values())
        ]
        outcome = run(subject, torch.optim.AdamW(rates))
        return {**outcome, "groups": {name: [member for member, _ in group] for name, group in groups.items()}}

    add(f"groups {name}", apply, dtype=torch.float64)


@edit()
def groups_by_module(subject: Subject) -> Outcome:
    attention = [layer.self_attn.parameters() for layer in subject.model.model.layers]
    groups = [{"params": list(parameters), "lr": 0.1 * (n + 1)} for n, parameters in enumerate(attention)]
    return run(subject, torch.optim.SGD(groups, lr=0.1))


@edit()
def parameter_groups_of_trainer(subject: Subject) -> Outcome:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(str(subject.folder), weight_decay=0.1, use_cpu=True, report_to=[])
    optimizer = Trainer(subject.model, arguments).create_optimizer()
    names = {parameter: name for name, parameter in subject.model.named_parameters()}
    return {"groups": [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]}


@edit()
def linear_joins_optimizer_later(subject: Subject) -> Outcome:
    optimizer = torch.optim.SGD(subject.model.model.layers[1].parameters(), lr=0.1, momentum=0.9)
    first = run(subject, optimizer, 1)["values"]
    optimizer.add_param_group({"params": subject.k.parameters(), "lr": 1.0})
    return {"first": first, "then": run(subject, optimizer, 2)}


# States


@edit(dtype=torch.float64)
def steps_differ_from_parameter_to_parameter(subject: Subject) -> Outcome:
    """q has made one step when k has made three."""
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=1e-2)
    subject.q.weight.requires_grad_(False)
    run(subject, optimizer, 2)
    subject.q.weight.requires_grad_(True)
    return run(subject, optimizer, 1)


@edit(dtype=torch.float64)
def optimizer_resumes_over_other_library(subject: Subject) -> Outcome:
    """Save weights and state after two steps. A model of the other library makes the third step."""
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=1e-2)
    run(subject, optimizer, 2)
    file = subject.folder / "state.pt"
    torch.save({"model": subject.model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    saved = torch.load(file)
    other = subject.other()
    other.load_state_dict(saved["model"])
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
    resumed.load_state_dict(saved["optimizer"])
    return run(subject, resumed, 1, other)


@edit(dtype=torch.float64)
def state_dict_of_optimizer(subject: Subject) -> Outcome:
    optimizer = torch.optim.AdamW(subject.model.named_parameters(), lr=1e-2)
    run(subject, optimizer, 1)
    return optimizer.state_dict()


@edit(dtype=torch.float64)
def state_of_one_parameter_is_reset(subject: Subject) -> Outcome:
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=1e-2)
    run(subject, optimizer, 2)
    del optimizer.state[subject.k.weight]
    return run(subject, optimizer, 1)


@edit(dtype=torch.float64)
def training_continues_after_move(subject: Subject) -> Outcome:
    """The optimizer keeps its parameters when the model is cast."""
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=1e-2)
    run(subject, optimizer, 1)
    subject.model.to(torch.float32).to(torch.float64)
    return run(subject, optimizer, 1)


@edit()
def gradients_are_scaled_for_half_precision(subject: Subject) -> Outcome:
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(subject)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return {"values": values(subject.model), "gradients": gradients(subject.model)}


@edit()
def one_optimizer_per_parameter_in_backward_pass(subject: Subject) -> Outcome:
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in subject.model.parameters()}

    def hook(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        loss_of(subject).backward()
    return {"values": values(subject.model), "gradients": gradients(subject.model)}


@edit()
def all_parameters_are_updated_at_once(subject: Subject) -> Outcome:
    loss_of(subject).backward()
    parameters = list(subject.model.parameters())
    with torch.no_grad():
        torch._foreach_mul_(parameters, 0.9)
        torch._foreach_add_(parameters, [parameter.grad for parameter in parameters], alpha=-0.1)
    return {"values": values(subject.model), "logits": forward(subject)}


class Projected(torch.optim.SGD):
    """GaLore: step matrices, found by name, in the first singular vectors of their gradients."""

    def __init__(self, model: nn.Module, rank: int = 4) -> None:
        targets = ("self_attn", "mlp")
        self.rank, self.projected = rank, []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and any(target in name for target in targets):
                self.projected.append((name, module.weight))
        super().__init__(model.parameters(), lr=0.5)

    def step(self) -> None:  # type: ignore[override]
        with torch.no_grad():
            for _, weight in self.projected:
                basis = torch.linalg.svd(weight.grad, full_matrices=False).U[:, : self.rank]
                weight.grad = basis @ (basis.T @ weight.grad)
        super().step()


@edit(dtype=torch.float64)
def gradients_are_projected_by_name(subject: Subject) -> Outcome:
    optimizer = Projected(subject.model)
    return {**run(subject, optimizer), "projected": [name for name, _ in optimizer.projected]}


@edit(dtype=torch.float64, needs=("galore_torch",))
def galore(subject: Subject) -> Outcome:
    from galore_torch import GaLoreAdamW

    targets = [
        module.weight
        for name, module in subject.model.named_modules()
        if isinstance(module, nn.Linear) and ("self_attn" in name or "mlp" in name)
    ]
    rest = [parameter for parameter in subject.model.parameters() if all(parameter is not each for each in targets)]
    galore = {"rank": 4, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
    optimizer = GaLoreAdamW([{"params": rest}, {"params": targets, **galore}], lr=1e-2, no_deprecation_warning=True)
    optimizer_outcome = run(subject, optimizer)
    return {"values": optimizer_outcome["values"], "projected": len(targets)}


# Averages


def averaged(subject: Subject, **options: Any) -> Outcome:
    """Return weights, names and logits of the averaged model after three steps."""
    average = AveragedModel(subject.model, **options)
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=0.5)
    schedule = SWALR(optimizer, swa_lr=0.2)
    for _ in range(3):
        run(subject, optimizer, 1)
        average.update_parameters(subject.model)
        schedule.step()
    update_bn([], average)
    return {"state dict": average.state_dict(), "logits": forward(subject, average), "values": values(subject.model)}


add("weights are averaged", averaged)
add("weights are averaged exponentially", lambda s: averaged(s, multi_avg_fn=get_ema_multi_avg_fn(0.5)))
add("weights are averaged with buffers", lambda s: averaged(s, use_buffers=True))


@edit()
def weights_are_averaged_by_hand_and_exchanged(subject: Subject) -> Outcome:
    """Swap an EMA, stored as a dict of clones, into the model for evaluation and out again."""
    average = {name: parameter.detach().clone() for name, parameter in subject.model.named_parameters()}
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=0.5)
    for _ in range(2):
        run(subject, optimizer, 1)
        for name, parameter in subject.model.named_parameters():
            average[name].lerp_(parameter.detach(), 0.5)
    kept = {name: parameter.data for name, parameter in subject.model.named_parameters()}
    for name, parameter in subject.model.named_parameters():
        parameter.data = average[name]
    evaluated = forward(subject)
    for name, parameter in subject.model.named_parameters():
        parameter.data = kept[name]
    return {"average": average, "evaluated": evaluated, "then": run(subject, optimizer, 1)["values"]}


def distances(model: nn.Module, other: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the distance between two models' parameters, by name."""
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        yield name, (mine - theirs).norm()


@edit()
def penalty_on_distance_to_start(subject: Subject) -> Outcome:
    start = subject.new().requires_grad_(False)
    with torch.no_grad():
        subject.k.weight.mul_(1.1)
    loss = loss_of(subject) + sum(distance for name, distance in distances(subject.model, start) if "k_proj" in name)
    loss.backward()
    return gradients(subject.model)


@edit()
def weights_of_another_library_are_mixed_in(subject: Subject) -> Outcome:
    """Model soups: average the parameters of two models, one of each library."""
    other = subject.other()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
        for mine, theirs in zip(subject.model.parameters(), other.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)
    return {"values": values(subject.model), "logits": forward(subject)}
