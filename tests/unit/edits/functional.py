"""torch.func on the model, a parent module and one linear."""

from __future__ import annotations

import torch
from torch import func, nn
from torch.nn.utils import stateless

from edits.outcome import Outcome
from edits.table import Subject, edit, forward, gradients, step

State = dict[str, torch.Tensor]


def parameters_of(module: nn.Module) -> State:
    """Return the module's detached parameters by name."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def logits_of(subject: Subject, state: State, input_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logits of the subject's model with other parameters."""
    tokens = subject.input_ids if input_ids is None else input_ids
    return func.functional_call(subject.model, state, (), {"input_ids": tokens, "use_cache": False}).logits


def loss_of(state: State, subject: Subject, tokens: torch.Tensor) -> torch.Tensor:
    """Return the negative mean log-probability of the next tokens of one sequence."""
    logits = logits_of(subject, state, tokens[None])[0]
    return nn.functional.cross_entropy(logits[:-1], tokens[1:])


@edit()
def functional_call_with_other_weights(subject: Subject) -> Outcome:
    state = {name: tensor * 1.5 for name, tensor in parameters_of(subject.model).items()}
    return {"with": logits_of(subject, state).detach(), "without": forward(subject), "step": step(subject)}


@edit()
def functional_call_with_one_other_weight(subject: Subject) -> Outcome:
    name = "model.layers.0.self_attn.k_proj.weight"
    weight = (subject.k.weight.detach() * 2).requires_grad_()
    logits = logits_of(subject, {name: weight})
    logits.square().mean().backward()
    return {"logits": logits.detach(), "weight": weight.grad, "gradients": gradients(subject.model)}


@edit()
def functional_call_of_old(subject: Subject) -> Outcome:
    state = {name: tensor * 1.5 for name, tensor in parameters_of(subject.mlp).items()}
    with stateless._reparametrize_module(subject.mlp, state):
        return {"logits": forward(subject)}


@edit()
def functional_call_of_one_linear(subject: Subject) -> Outcome:
    x = subject.hidden_states()
    return {"output": func.functional_call(subject.v, {"weight": torch.full((32, 64), 0.1)}, x), "then": subject.v(x)}


@edit()
def functional_call_with_weights_that_are_outputs(subject: Subject) -> Outcome:
    """A hypernetwork computes weights, and is trained through them."""
    scale = torch.ones((), requires_grad=True)
    state = {name: tensor * scale for name, tensor in parameters_of(subject.model).items()}
    logits = logits_of(subject, state)
    logits.square().mean().backward()
    return {"scale": scale.grad, "logits": logits.detach()}


@edit()
def grad_of_loss(subject: Subject) -> Outcome:
    return func.grad(loss_of)(parameters_of(subject.model), subject, subject.input_ids[0])


@edit()
def grad_with_value(subject: Subject) -> Outcome:
    state = parameters_of(subject.model)
    found, value = func.grad_and_value(loss_of)(state, subject, subject.input_ids[0])
    return {"gradients": found, "loss": value}


@edit()
def gradients_of_each_sample(subject: Subject) -> Outcome:
    def loss_of_mlp(state: State, x: torch.Tensor) -> torch.Tensor:
        return func.functional_call(subject.mlp, state, x).square().sum()

    return func.vmap(func.grad(loss_of_mlp), in_dims=(None, 0))(parameters_of(subject.mlp), subject.hidden_states())


@edit()
def parent_over_batch(subject: Subject) -> Outcome:
    """vmap over inputs: the linears run inside a batching transform."""
    x = subject.hidden_states()
    return {"output": func.vmap(subject.mlp)(x).detach(), "in another dimension": func.vmap(subject.mlp, 1)(x).detach()}


@edit()
def batch_that_trains(subject: Subject) -> Outcome:
    x = subject.hidden_states().requires_grad_()
    func.vmap(subject.mlp)(x).square().sum().backward()
    return {"x": x.grad, "gradients": gradients(subject.mlp)}


@edit()
def ensemble_of_parents(subject: Subject) -> Outcome:
    """Stack the parameters of several modules, and run all of them in one call."""
    modules = [subject.mlp, subject.model.model.layers[1].mlp, subject.new().model.layers[0].mlp]
    parameters, buffers = func.stack_module_state(modules)
    x = subject.hidden_states()

    def call(parameters: State, buffers: State) -> torch.Tensor:
        return func.functional_call(subject.mlp, (parameters, buffers), x)

    return {"outputs": func.vmap(call)(parameters, buffers).detach(), "stacked": dict(parameters)}


@edit()
def stacked_weights(subject: Subject) -> Outcome:
    weights = torch.stack([subject.up.weight.detach() * scale for scale in (1.0, 2.0, 3.0)])
    x = subject.hidden_states()
    call = func.vmap(lambda weight: func.functional_call(subject.mlp, {"up_proj.weight": weight}, x))
    return {"outputs": call(weights).detach()}


@edit()
def jvp_of_model_by_its_weights(subject: Subject) -> Outcome:
    state = parameters_of(subject.model)
    tangents = {name: torch.ones_like(tensor) * 0.01 for name, tensor in state.items()}
    output, tangent = func.jvp(lambda state: logits_of(subject, state), (state,), (tangents,))
    return {"output": output, "tangent": tangent}


@edit()
def jvp_of_parent_by_its_input(subject: Subject) -> Outcome:
    x = subject.hidden_states()
    output, tangent = func.jvp(subject.mlp, (x,), (torch.ones_like(x),))
    return {"output": output.detach(), "tangent": tangent.detach()}


@edit()
def linearize_parent(subject: Subject) -> Outcome:
    x = subject.hidden_states()
    output, by_tangent = func.linearize(subject.mlp, x)
    return {"output": output.detach(), "tangent": by_tangent(torch.ones_like(x)).detach()}


@edit()
def vjp_of_model_by_its_weights(subject: Subject) -> Outcome:
    output, back = func.vjp(lambda state: logits_of(subject, state), parameters_of(subject.model))
    return {"output": output, "gradients": back(torch.ones_like(output))[0]}


@edit()
def vjp_of_parent_by_its_input(subject: Subject) -> Outcome:
    output, back = func.vjp(subject.mlp, subject.hidden_states())
    return {"output": output.detach(), "gradient": back(torch.ones_like(output))[0].detach()}


@edit()
def jacobian_by_rows(subject: Subject) -> Outcome:
    return {"jacobian": func.jacrev(subject.mlp)(subject.hidden_states()[0, :2]).detach()}


@edit()
def jacobian_by_columns(subject: Subject) -> Outcome:
    return {"jacobian": func.jacfwd(subject.mlp)(subject.hidden_states()[0, :2]).detach()}


@edit()
def hessian_by_input(subject: Subject) -> Outcome:
    x = subject.hidden_states()[0, 0]
    return {"hessian": func.hessian(lambda x: subject.mlp(x).square().sum())(x).detach()}


@edit()
def jacobian_by_autograd(subject: Subject) -> Outcome:
    """Vectorized: a backward pass under vmap through a graph built without vmap."""
    x = subject.hidden_states()[0, :1]
    jacobian = torch.autograd.functional.jacobian
    return {"one by one": jacobian(subject.mlp, x), "at once": jacobian(subject.mlp, x, vectorize=True)}


@edit()
def backward_pass_of_many_gradients_at_once(subject: Subject) -> Outcome:
    x = subject.hidden_states().requires_grad_()
    output = subject.mlp(x)
    directions = torch.randn(3, *output.shape, generator=torch.Generator().manual_seed(4))
    wanted = [x, subject.gate.weight, subject.up.weight]
    return {"gradients": torch.autograd.grad(output, wanted, directions, is_grads_batched=True)}


@edit()
def attention_linears_under_vmap(subject: Subject) -> Outcome:
    """Run the complete attention on stacked inputs."""
    x = torch.stack([subject.hidden_states(2), subject.hidden_states(3)])
    positions = torch.arange(7)[None].expand(2, 7)
    position_embeddings = subject.model.model.rotary_emb(x[0], positions)
    attend = func.vmap(lambda x: subject.attention(x, position_embeddings, None)[0])
    return {"outputs": attend(x).detach()}


@edit()
def fisher_information_of_one_linear(subject: Subject) -> Outcome:
    """Square the per-sample gradients of `k_proj` only."""
    name = "model.layers.0.self_attn.k_proj.weight"

    def loss(weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return loss_of({name: weight}, subject, tokens)

    of_each = [func.grad(loss)(subject.k.weight.detach(), tokens) for tokens in subject.input_ids]
    return {"fisher": sum(gradient.square() for gradient in of_each)}


@edit()
def steps_that_gradients_pass_through(subject: Subject) -> Outcome:
    """Meta-learning: differentiate the loss after a step with respect to the weights before it."""
    parameters = parameters_of(subject.model)
    tokens = subject.input_ids[0]

    def after_a_step(state: State) -> torch.Tensor:
        found = func.grad(loss_of)(state, subject, tokens)
        return loss_of({name: state[name] - 0.1 * found[name] for name in state}, subject, tokens)

    return func.grad(after_a_step)(parameters)
