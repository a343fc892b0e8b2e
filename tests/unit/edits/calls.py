"""Calls of a group's linears in other ways than usual: alone, twice, never, in another order, with other inputs.

The parent module's forward is replaced on transformers' class, as kernels and patches do. Our class inherits it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers.models.llama import modeling_llama as hf

from edits.outcome import Outcome
from edits.table import Subject, add, edit, forward, gradients, step


@contextmanager
def mlp_forward(forward: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Replace the forward of every Llama MLP by `forward(mlp, x)`."""
    with mock.patch.object(hf.LlamaMLP, "forward", forward):
        yield


@contextmanager
def attention_parts(parts: Callable[[nn.Module, torch.Tensor], tuple[torch.Tensor, ...]]) -> Iterator[None]:
    """Compute queries, keys and values of every Llama attention by `parts(attention, hidden_states)`."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts(self, hidden_states))
        query, key = hf.apply_rotary_pos_emb(query, key, *position_embeddings)
        output, scores = hf.eager_attention_forward(self, query, key, value, attention_mask, self.scaling)
        return self.o_proj(output.flatten(2)), scores

    with mock.patch.object(hf.LlamaAttention, "forward", forward):
        yield


def replaced_mlp(replacement: Callable[[nn.Module, torch.Tensor], torch.Tensor], graph: bool = True) -> Callable:
    """Return an edit that replaces the MLPs' forward, and records a step, or only logits if there is no graph."""

    def apply(subject: Subject) -> Outcome:
        with mlp_forward(replacement):
            return step(subject) if graph else {"logits": forward(subject)}

    return apply


def replaced_parts(parts: Callable[[nn.Module, torch.Tensor], tuple[torch.Tensor, ...]]) -> Callable:
    """Return an edit that replaces how attention computes queries, keys and values."""

    def apply(subject: Subject) -> Outcome:
        with attention_parts(parts):
            return step(subject)

    return apply


add(
    "a part is called twice on one input",
    replaced_mlp(lambda mlp, x: mlp.down_proj(mlp.gate_proj(x) * mlp.up_proj(x) + mlp.gate_proj(x))),
)
add(
    "the second part is called twice, the first between",
    replaced_mlp(lambda mlp, x: mlp.down_proj(mlp.up_proj(x) * mlp.gate_proj(x) + mlp.up_proj(x))),
)
add("a part is never called", replaced_mlp(lambda mlp, x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)))))
add("the first part is never called", replaced_mlp(lambda mlp, x: mlp.down_proj(mlp.act_fn(mlp.up_proj(x)))))
add(
    "the second part runs first",
    replaced_mlp(lambda mlp, x: mlp.down_proj(mlp.up_proj(x) - 0.5 * mlp.act_fn(mlp.gate_proj(x)))),
)
add(
    "a part's output is computed and thrown away",
    replaced_mlp(lambda mlp, x: (mlp.gate_proj(x), mlp.down_proj(mlp.up_proj(x)))[1]),
)
add(
    "parts get different inputs",
    replaced_mlp(lambda mlp, x: mlp.down_proj(mlp.gate_proj(x) * mlp.up_proj(x + 1))),
)
add(
    "a part gets a slice of the other's input",
    replaced_mlp(lambda mlp, x: mlp.down_proj(mlp.gate_proj(x) * mlp.up_proj(x[:, -1:]))),
)
add(
    "a part gets the same memory through a view",
    replaced_mlp(lambda mlp, x: mlp.down_proj(mlp.gate_proj(x) * mlp.up_proj(x.view_as(x).flip(1).view_as(x)))),
)
add(
    "a part gets a detached input",
    replaced_mlp(lambda mlp, x: mlp.down_proj(mlp.gate_proj(x) * mlp.up_proj(x.detach()))),
)
add(
    "parts are called by keyword",
    replaced_mlp(lambda mlp, x: mlp.down_proj(mlp.gate_proj(input=x) * mlp.up_proj(input=x))),
)
add(
    "parts are called through forward",
    replaced_mlp(lambda mlp, x: mlp.down_proj(mlp.gate_proj.forward(x) * mlp.up_proj.forward(x))),
)
add(
    "weights are used without the modules",
    replaced_mlp(
        lambda mlp, x: mlp.down_proj(nn.functional.linear(x, mlp.gate_proj.weight) * (x @ mlp.up_proj.weight.T))
    ),
)
add(
    "one part by its module, the other by its weight",
    replaced_mlp(lambda mlp, x: mlp.down_proj(mlp.gate_proj(x) * (x @ mlp.up_proj.weight.T))),
)


def scaled_between(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Scale the input in place between the calls."""
    gate = mlp.gate_proj(x)
    return mlp.down_proj(gate * mlp.up_proj(x.mul_(2)))


def replaced_data_between(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Replace the input's data between the calls. autograd does not record it."""
    gate = mlp.gate_proj(x)
    x.data = x.detach() * 2
    return mlp.down_proj(gate * mlp.up_proj(x))


def replaced_weight_between(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Replace the data of the second linear's weight between the calls."""
    gate = mlp.gate_proj(x)
    mlp.up_proj.weight.data = mlp.up_proj.weight.detach() * 2
    return mlp.down_proj(gate * mlp.up_proj(x))


def edited_weight_between(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Scale the second linear's weight in place between the calls."""
    gate = mlp.gate_proj(x)
    with torch.no_grad():
        mlp.up_proj.weight.mul_(2)
    return mlp.down_proj(gate * mlp.up_proj(x))


def frozen_between(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Freeze the second linear between the calls."""
    gate = mlp.gate_proj(x)
    mlp.up_proj.weight.requires_grad_(False)
    return mlp.down_proj(gate * mlp.up_proj(x))


class Doubled(nn.Module):
    """A parametrization that doubles the weight."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def parametrized_between(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Parametrize the second linear between the calls, for this call only."""
    gate = mlp.gate_proj(x)
    parametrize.register_parametrization(mlp.up_proj, "weight", Doubled())
    up = mlp.up_proj(x)
    parametrize.remove_parametrizations(mlp.up_proj, "weight", leave_parametrized=False)
    return mlp.down_proj(gate * up)


def replaced_between(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Replace the second linear between the calls, for this call only."""
    gate, old = mlp.gate_proj(x), mlp.up_proj
    mlp.up_proj = nn.Sequential(old, nn.Tanh())
    up, mlp.up_proj = mlp.up_proj(x), old
    return mlp.down_proj(gate * up)


def hooked_between(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Add a hook to the second linear between the calls, for this call only."""
    gate = mlp.gate_proj(x)
    with mlp.up_proj.register_forward_hook(lambda module, args, output: output * 2):
        return mlp.down_proj(gate * mlp.up_proj(x))


def hooked_backward_between(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Add a backward hook to the second linear between the calls."""
    gate = mlp.gate_proj(x)
    mlp.up_proj.register_full_backward_hook(lambda module, of_input, of_output: (of_input[0] * 2,))
    return mlp.down_proj(gate * mlp.up_proj(x))


def swapped_between(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Replace the second linear's Parameter between the calls."""
    gate = mlp.gate_proj(x)
    mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight.detach() * 2)
    return mlp.down_proj(gate * mlp.up_proj(x))


def in_place_output(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Edit the first linear's output in place before calling the second linear."""
    gate = mlp.gate_proj(x)
    gate.mul_(2)
    return mlp.down_proj(mlp.up_proj(x).add_(gate))


add("the input is scaled in place between parts", replaced_mlp(scaled_between, graph=False))
add("the input is scaled in place between parts of a graph", replaced_mlp(scaled_between), raises=RuntimeError)
add("the input gets other data between parts", replaced_mlp(replaced_data_between, graph=False))
add("the input gets other data between parts of a graph", replaced_mlp(replaced_data_between))
add("a weight gets other data between parts", replaced_mlp(replaced_weight_between))
add("a weight is scaled in place between parts", replaced_mlp(edited_weight_between))
add("a weight is frozen between parts", replaced_mlp(frozen_between))
add("a part is parametrized between parts", replaced_mlp(parametrized_between))
add("a part is replaced between parts", replaced_mlp(replaced_between))
add("a part gets a hook between parts", replaced_mlp(hooked_between))
add("a part gets a backward hook between parts", replaced_mlp(hooked_backward_between))
add("a part gets another weight between parts", replaced_mlp(swapped_between))
add("outputs are edited in place", replaced_mlp(in_place_output))
add(
    "outputs are edited in place without a graph",
    replaced_mlp(in_place_output, graph=False),
)
add(
    "attention in the order v, k, q",
    replaced_parts(lambda attention, x: reversed_parts(attention, x)),
)
add(
    "q twice and k never",
    replaced_parts(lambda attention, x: (attention.q_proj(x), attention.q_proj(x), attention.v_proj(x))),
    which="square",
)
add(
    "v of the keys",
    replaced_parts(lambda attention, x: (attention.q_proj(x), (key := attention.k_proj(x)), attention.v_proj(key))),
    which="square",
)


def reversed_parts(attention: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute queries, keys and values in reverse order. Doubled values show that the replacement ran."""
    value = attention.v_proj(x)
    key = attention.k_proj(x)
    return attention.q_proj(x), key, value * 2


# Outside of the parent module's forward


@edit()
def linear_is_called_alone(subject: Subject) -> Outcome:
    output = subject.k(subject.hidden_states())
    output.square().sum().backward()
    return {"output": output.detach(), "gradients": gradients(subject.model)}


@edit()
def all_linears_are_called_alone_on_one_input(subject: Subject) -> Outcome:
    x = subject.hidden_states().requires_grad_()
    outputs = [part(x) for part in (subject.q, subject.k, subject.v)]
    sum(output.square().sum() for output in outputs).backward()
    return {"outputs": [output.detach() for output in outputs], "x": x.grad, "gradients": gradients(subject.model)}


@edit()
def parent_is_called_alone(subject: Subject) -> Outcome:
    x = subject.hidden_states().requires_grad_()
    output = subject.mlp(x)
    output.square().sum().backward()
    return {"output": output.detach(), "x": x.grad, "gradients": gradients(subject.model)}


@edit()
def parent_is_called_twice_on_one_input(subject: Subject) -> Outcome:
    x = subject.hidden_states().requires_grad_()
    (subject.mlp(x) * subject.mlp(x)).sum().backward()
    return {"x": x.grad, "gradients": gradients(subject.model)}


@edit()
def weights_change_between_two_calls_on_one_input(subject: Subject) -> Outcome:
    x = subject.hidden_states()
    outcome = {}
    with torch.no_grad():
        outcome["before"] = subject.mlp(x)
        subject.up.weight.mul_(2)
        outcome["scaled"] = subject.mlp(x)
        subject.up.weight.data = subject.up.weight.data * 2
        outcome["other data"] = subject.mlp(x)
        subject.up.weight.data.mul_(2)
        outcome["data scaled"] = subject.mlp(x)
        x.mul_(2)
        outcome["input"] = subject.mlp(x)
    return outcome


@edit()
def linear_is_called_after_parent_on_its_input(subject: Subject) -> Outcome:
    x = subject.hidden_states()
    with torch.no_grad():
        first = subject.mlp(x)
        subject.up.weight.mul_(3)
        return {"owner": first, "part": subject.up(x), "first": subject.gate(x)}


@edit()
def linear_is_used_by_another_parent(subject: Subject) -> Outcome:
    """The second layer's MLP calls the first layer's `up_proj`."""
    subject.model.model.layers[1].mlp.up_proj = subject.up
    return step(subject)


@edit()
def parent_calls_its_neighbor_within_its_forward(subject: Subject) -> Outcome:
    """The activation of the first MLP calls the second MLP's linears on another input."""
    layers = subject.model.model.layers
    activation = subject.mlp.act_fn

    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return activation(x) + layers[1].mlp.up_proj(x[..., :64]) + layers[0].mlp.up_proj(x[..., :64])

    layers[0].mlp.act_fn = Nested()
    return step(subject)


@edit()
def recursive_forward_of_parent(subject: Subject) -> Outcome:
    mlp, activation, depth = subject.mlp, subject.mlp.act_fn, []

    class Recursive(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if depth:
                return activation(x)
            depth.append(1)
            inner = mlp(x[..., :64])
            depth.pop()
            return activation(x) + inner.sum(-1, keepdim=True)

    mlp.act_fn = Recursive()
    return step(subject)


@edit()
def inputs_of_other_shapes(subject: Subject) -> Outcome:
    """Inputs without a batch, without tokens, as one vector, with many dimensions, noncontiguous or expanded."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"vector": (64,), "tokens": (5, 64), "none": (0, 64), "many": (2, 1, 3, 64)}
    inputs = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    inputs["strided"] = torch.randn(64, 5, generator=generator).T
    inputs["expanded"] = torch.randn(1, 1, 64, generator=generator).expand(2, 3, 64)
    outcome = {}
    for name, x in inputs.items():
        x = x.detach().requires_grad_()
        output = subject.mlp(x)
        output.sum().backward()
        outcome[name] = {"output": output.detach(), "x": x.grad, "gradients": gradients(subject.mlp)}
    return outcome


@edit(raises=RuntimeError)
def input_of_wrong_size(subject: Subject) -> Outcome:
    return subject.mlp(torch.zeros(2, 63))


@edit(raises=RuntimeError)
def input_of_wrong_dtype(subject: Subject) -> Outcome:
    return subject.mlp(torch.zeros(2, 64, dtype=torch.float64))


@edit()
def model_runs_after_error_in_parent(subject: Subject) -> Outcome:
    seen = []
    try:
        subject.mlp(torch.zeros(2, 63))
    except RuntimeError as error:
        seen.append(type(error).__name__)
    return {**step(subject), "seen": seen}


@edit()
def embeddings_in_place_of_tokens(subject: Subject) -> Outcome:
    x = subject.hidden_states().requires_grad_()
    logits = subject.model(inputs_embeds=x, use_cache=False).logits
    logits.square().mean().backward()
    return {"logits": logits.detach(), "x": x.grad, "gradients": gradients(subject.model)}


@edit()
def parent_runs_over_chunks(subject: Subject) -> Outcome:
    """Run three tokens per call, as for long sequences."""
    seen = []

    def chunked(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
        outputs = [mlp.down_proj(mlp.gate_proj(tokens) * mlp.up_proj(tokens)) for tokens in x.split(3, dim=1)]
        seen.append([output.shape[1] for output in outputs])
        return torch.cat(outputs, dim=1)

    with mlp_forward(chunked):
        return {**step(subject), "seen": seen}


@edit()
def forward_of_linear_is_replaced_while_parent_runs(subject: Subject) -> Outcome:
    """The activation, which runs between the calls, replaces the forward. It stays replaced."""
    activation = subject.mlp.act_fn

    class Replacing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            subject.up.forward = lambda x: nn.functional.linear(x, subject.up.weight) * 2
            return activation(x)

    subject.mlp.act_fn = Replacing()
    return {"first": forward(subject), "alone": subject.up(subject.hidden_states()).detach(), "step": step(subject)}


@edit()
def greedy_generation(subject: Subject) -> Outcome:
    kept = subject.model.generate(subject.input_ids, max_new_tokens=6, do_sample=False)
    again = subject.model.generate(subject.input_ids, max_new_tokens=6, do_sample=False, use_cache=False)
    return {"kept": kept, "again": again, "logits": forward(subject)}
