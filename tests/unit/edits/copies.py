"""Copies of the model, a layer, one linear or two linears, also through pickle, torch.save and other processes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import torch
from torch import nn

from edits.outcome import Outcome
from edits.table import Subject, add, edit, forward, gradients, step, values


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def through_torch_save(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_shared_memory(value):
    return pickle.loads(bytes(ForkingPickler.dumps(value)))


COPIES: dict[str, Callable] = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save": through_torch_save,
    "pickle for another process": through_shared_memory,
}

for name, made_by in COPIES.items():

    def whole(subject: Subject, made_by: Callable = made_by) -> Outcome:
        """Edit and train both the copy and the original. Neither affects the other."""
        copied = made_by(subject.model)
        shared = made_by is through_shared_memory
        with torch.no_grad():
            copied.model.layers[0].self_attn.k_proj.weight.mul_(2)
            if not shared:
                subject.up.weight.mul_(3)
        return {"copy": step(subject, copied), "original": step(subject), "values": values(copied)}

    def layer(subject: Subject, made_by: Callable = made_by) -> Outcome:
        copied = made_by(subject.model.model.layers[0])
        with torch.no_grad():
            copied.mlp.up_proj.weight.mul_(2)
        x = subject.hidden_states()
        copied.mlp(x).sum().backward()
        return {"values": values(copied), "gradients": gradients(copied), "mlp": copied.mlp(x).detach()}

    def part(subject: Subject, made_by: Callable = made_by) -> Outcome:
        copied = made_by(subject.k)
        x = subject.hidden_states()
        with torch.no_grad():
            copied.weight.mul_(2)
        if made_by is not through_shared_memory:
            subject.attention.k_proj = copied
        return {**step(subject), "alone": copied(x).detach(), "type": type(copied), "values": values(copied)}

    def pair(subject: Subject, made_by: Callable = made_by) -> Outcome:
        """The copied linear belongs to the copied parent module."""
        copied, owner = made_by([subject.q, subject.attention])
        subject.model.model.layers[0].self_attn = owner
        copied.register_forward_hook(lambda module, args, output: output * 2)
        return {**step(subject), "is the same": owner.q_proj is copied}

    def weight(subject: Subject, made_by: Callable = made_by) -> Outcome:
        copied = made_by(subject.v.weight)
        return {
            "weight": copied,
            "type": type(copied),
            "bytes": copied.untyped_storage().nbytes(),
            "stride": copied.stride(),
        }

    for what, apply in {"model": whole, "layer": layer, "part": part, "pair": pair, "weight": weight}.items():
        add(f"a {what} is copied by {name}", apply)


@edit()
def copy_of_copy(subject: Subject) -> Outcome:
    copied = copy.deepcopy(through_pickle(copy.deepcopy(subject.model)))
    with torch.no_grad():
        copied.model.layers[1].mlp.gate_proj.weight.mul_(2)
    return step(subject, copied)


@edit()
def shallow_copy(subject: Subject) -> Outcome:
    """A shallow copy shares its modules with the original, so the edit applies to both."""
    copied = copy.copy(subject.mlp)
    copied.up_proj.register_forward_hook(lambda module, args, output: output * 2)
    return {**step(subject), "copy": copied(subject.hidden_states()).detach()}


@edit()
def shallow_copy_with_separate_linear(subject: Subject) -> Outcome:
    copied = copy.copy(subject.mlp)
    copied._modules = dict(copied._modules)
    copied.up_proj = nn.Linear(64, 96, bias=False)
    nn.init.constant_(copied.up_proj.weight, 0.01)
    x = subject.hidden_states()
    return {"copy": copied(x).detach(), "original": subject.mlp(x).detach(), **step(subject)}


@edit()
def copy_after_backward_pass(subject: Subject) -> Outcome:
    """Gradients are also copied."""
    step(subject)
    copied = copy.deepcopy(subject.model)
    return {"before": gradients(copied), "after": step(subject, copied)}


@edit()
def copy_with_hooks(subject: Subject) -> Outcome:
    subject.k.register_forward_hook(doubled)
    return step(subject, copy.deepcopy(subject.model))


def doubled(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    return output * 2


@edit()
def pickle_with_hooks(subject: Subject) -> Outcome:
    subject.up.register_forward_hook(doubled)
    return step(subject, through_pickle(subject.model))


@edit()
def copy_with_replaced_linear(subject: Subject) -> Outcome:
    subject.attention.q_proj = nn.Sequential(subject.q, nn.Tanh())
    return step(subject, copy.deepcopy(subject.model))


@edit()
def copy_with_frozen_and_cast_linears(subject: Subject) -> Outcome:
    subject.q.requires_grad_(False)
    subject.model.model.layers[1].mlp.double()
    copied = copy.deepcopy(subject.model)
    return dict(copied.named_parameters())


@edit()
def copy_that_shares_memory(subject: Subject) -> Outcome:
    """A deepcopy memo that contains the weights keeps them: the copy uses the original's weights."""
    memo = {id(parameter): parameter for parameter in subject.model.parameters()}
    copied = copy.deepcopy(subject.model, memo)
    with torch.no_grad():
        subject.q.weight.mul_(2)
    same = [mine is theirs for mine, theirs in zip(copied.parameters(), subject.model.parameters(), strict=True)]
    return {**step(subject, copied), "same": same}


@edit()
def copy_is_made_within_hook(subject: Subject) -> Outcome:
    """Copy while the parent module runs."""
    copies = []
    activation = subject.mlp.act_fn

    class Copying(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not copies:
                copies.append(None)
                copies.append(copy.deepcopy(subject.up))
            return activation(x)

    subject.mlp.act_fn = Copying()
    outcome = step(subject)
    with torch.no_grad():
        copies[1].weight.mul_(2)
    return {**outcome, "copy": copies[1](subject.hidden_states()).detach(), "logits": forward(subject)}


@edit()
def model_is_saved_while_it_runs(subject: Subject) -> Outcome:
    """An activation saves the complete model, as monitoring code may do."""
    saved = []

    class Saving(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not saved:
                saved.append(pickle.dumps(subject.mlp.up_proj))
            return x

    subject.mlp.act_fn = Saving()
    outcome = step(subject)
    return {**outcome, "copy": pickle.loads(saved[0])(subject.hidden_states()).detach()}
