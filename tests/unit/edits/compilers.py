"""Compilers, exporters and tracers, on the model, a parent module and one linear."""

from __future__ import annotations

import io
from collections.abc import Callable

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from edits.outcome import Outcome
from edits.table import Subject, add, edit, forward, gradients, step


class Logits(nn.Module):
    """A model with one input tensor and one output tensor, as exporters require."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def compiled(module: Callable, backend: str = "eager", **options) -> Callable:
    """Compile the module as one graph."""
    torch.compiler.reset()
    return torch.compile(module, backend=backend, fullgraph=True, **options)


def trained(call: Callable, module: nn.Module, x: torch.Tensor) -> Outcome:
    """Return output and gradients of one pass."""
    output = call(x)
    output.square().sum().backward()
    return {"output": output.detach(), "gradients": gradients(module)}


# Compiling the complete model takes ten seconds, so one row does. The others compile a parent module.
@edit()
def model_is_compiled(subject: Subject) -> Outcome:
    model = Logits(subject.model)
    return {**trained(compiled(model), model, subject.input_ids), "not compiled": forward(subject)}


@edit()
def attention_is_compiled(subject: Subject) -> Outcome:
    subject.attention.compile(backend="eager", fullgraph=True)
    return {"compiled": step(subject)}


for backend in ("eager", "aot_eager"):

    def owner(subject: Subject, backend: str = backend) -> Outcome:
        subject.mlp.compile(backend=backend, fullgraph=True)
        return {"compiled": step(subject)}

    def part(subject: Subject, backend: str = backend) -> Outcome:
        subject.k.compile(backend=backend)
        return {"compiled": step(subject)}

    def edited(subject: Subject, backend: str = backend) -> Outcome:
        """Change weights and add a hook between calls of one compiled module."""
        model = compiled(subject.mlp, backend)
        x = subject.hidden_states()
        outputs = [model(x).detach()]
        with torch.no_grad():
            subject.up.weight.mul_(2)
        outputs.append(model(x).detach())
        subject.gate.weight.data = subject.gate.weight.data * 3
        outputs.append(model(x).detach())
        subject.gate.register_forward_hook(lambda module, args, output: output + 1)
        outputs.append(subject.mlp(x).detach())
        return {"outputs": outputs}

    def frozen(subject: Subject, backend: str = backend) -> Outcome:
        subject.up.requires_grad_(False)
        return trained(compiled(subject.mlp, backend), subject.mlp, subject.hidden_states())

    compilations = {"an owner": owner, "a part": part, "an edited owner": edited, "an owner with a frozen part": frozen}
    for name, apply in compilations.items():
        add(f"{name} is compiled with {backend}", apply)


@edit()
def function_around_linears_is_compiled(subject: Subject) -> Outcome:
    call = compiled(lambda x: subject.q(x).relu() + subject.k(x).sum())
    return trained(call, subject.attention, subject.hidden_states())


@edit()
def compiled_and_not_compiled_calls_take_turns(subject: Subject) -> Outcome:
    model = compiled(subject.mlp)
    x, other = subject.hidden_states(), subject.hidden_states(3)
    outputs = []
    for factor in (1.0, 2.0):
        with torch.no_grad():
            subject.up.weight.mul_(factor)
            outputs += [model(x), subject.mlp(x), model(other)]
    return {"outputs": outputs, "names": list(model.state_dict())}


@edit()
def compiled_with_hook_on_linear(subject: Subject) -> Outcome:
    subject.up.register_forward_hook(lambda module, args, output: output * 2)
    return trained(compiled(subject.mlp), subject.mlp, subject.hidden_states())


@edit()
def graph_break_in_activation(subject: Subject) -> Outcome:
    """The parent module is compiled in pieces. Code between them is not compiled."""
    activation = subject.mlp.act_fn
    seen = []

    class Breaking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            seen.append("ran")
            return activation(x)

    subject.mlp.act_fn = Breaking()
    torch.compiler.reset()
    model = torch.compile(subject.mlp, backend="eager")
    return {**trained(model, subject.mlp, subject.hidden_states()), "seen": bool(seen)}


@edit()
def exported(subject: Subject) -> Outcome:
    """Export the complete model."""
    program = torch.export.export(Logits(subject.model), (subject.input_ids,), strict=False)
    return {
        "logits": program.module()(subject.input_ids).detach(),
        "names": sorted(program.state_dict),
        "linears": sum(node.target is torch.ops.aten.linear.default for node in program.graph.nodes),
    }


@edit()
def exported_strictly(subject: Subject) -> Outcome:
    program = torch.export.export(subject.mlp, (subject.hidden_states(),), strict=True)
    return {"output": program.module()(subject.hidden_states()).detach(), "names": sorted(program.state_dict)}


@edit()
def exported_and_loaded(subject: Subject) -> Outcome:
    program = torch.export.export(subject.mlp, (subject.hidden_states(),))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    return {"output": loaded.module()(subject.hidden_states()).detach(), "state": dict(loaded.state_dict)}


@edit()
def jit_trace_of_model(subject: Subject) -> Outcome:
    traced = torch.jit.trace(Logits(subject.model), (subject.input_ids,))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    with torch.no_grad():
        logits = traced(subject.input_ids.flip(1)), loaded(subject.input_ids)
    return {"logits": logits, "names": [name for name, _ in loaded.named_parameters()], "step": step(subject)}


@edit()
def jit_trace_of_parent_trains(subject: Subject) -> Outcome:
    traced = torch.jit.trace(subject.mlp, (subject.hidden_states(),))
    traced(subject.hidden_states(3)).square().sum().backward()
    return {"gradients": gradients(subject.mlp)}


@edit()
def jit_trace_of_linear(subject: Subject) -> Outcome:
    traced = torch.jit.trace(subject.k, (subject.hidden_states(),))
    return {"output": traced(subject.hidden_states(3)).detach(), "names": list(traced.state_dict())}


@edit()
def make_fx_of_parent(subject: Subject) -> Outcome:
    x = subject.hidden_states()
    graph = make_fx(subject.mlp)(x)
    with torch.no_grad():
        subject.up.weight.mul_(2)
    return {"output": graph(x).detach(), "then": subject.mlp(x).detach()}


@edit()
def make_fx_of_gradient(subject: Subject) -> Outcome:
    """Trace as compilers do for activation checkpointing: parameters are inputs of the graph."""
    state = {name: parameter.detach() for name, parameter in subject.mlp.named_parameters()}

    def gradient(state: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
        return torch.func.grad(lambda s: torch.func.functional_call(subject.mlp, s, x).square().sum())(state)

    graph = make_fx(gradient)(state, subject.hidden_states())
    return graph(state, subject.hidden_states(3))


@edit()
def symbolically_traced_by_fx(subject: Subject) -> Outcome:
    graph = torch.fx.symbolic_trace(subject.mlp)
    return {
        "output": graph(subject.hidden_states()).detach(),
        "calls": [node.target for node in graph.graph.nodes if node.op == "call_module"],
    }


@edit()
def fake_tensors(subject: Subject) -> Outcome:
    """Run a model with real weights under `FakeTensorMode`, as memory estimation does."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        output = subject.mlp(mode.from_tensor(subject.hidden_states()))
    return {"shape": list(output.shape), "type": type(output).__name__, "step": step(subject)}


@edit(needs=("onnx", "onnxscript"))
def onnx(subject: Subject) -> Outcome:
    from onnx.reference import ReferenceEvaluator

    program = torch.onnx.export(subject.mlp, (subject.hidden_states(),), dynamo=True, verbose=False)
    model = program.model_proto
    (output,) = ReferenceEvaluator(model).run(None, {model.graph.input[0].name: subject.hidden_states().numpy()})
    return {"output": torch.tensor(output), "weights": sorted(each.name for each in model.graph.initializer)}
