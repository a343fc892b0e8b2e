"""Modules that are replaced, shared, moved, resized and inspected."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import nn
from torch.nn.utils import skip_init

from edits.outcome import Outcome
from edits.table import Subject, add, edit, forward, gradients, step, values

# Inspection


@edit()
def names_of_parameters(subject: Subject) -> Outcome:
    return {name: tuple(parameter.shape) for name, parameter in subject.model.named_parameters()}


@edit(which="mixtral")
def names_of_parameters_of_experts(subject: Subject) -> Outcome:
    return {name: tuple(parameter.shape) for name, parameter in subject.model.named_parameters()}


@edit()
def names_of_modules(subject: Subject) -> Outcome:
    return [name for name, _ in subject.model.named_modules()]


@edit()
def types_of_linears(subject: Subject) -> Outcome:
    return {name: type(module) for name, module in subject.model.named_modules() if isinstance(module, nn.Linear)}


@edit()
def children_of_parent(subject: Subject) -> Outcome:
    return {
        "attention": [name for name, _ in subject.attention.named_children()],
        "mlp": [name for name, _ in subject.mlp.named_children()],
        "modules": len(list(subject.model.modules())),
        "buffers": [name for name, _ in subject.model.named_buffers()],
    }


@edit()
def modules_and_parameters_by_name(subject: Subject) -> Outcome:
    name = "model.layers.1.self_attn.k_proj"
    return {
        "module": type(subject.model.get_submodule(name)),
        "parameter": subject.model.get_parameter(f"{name}.weight"),
        "is the same": subject.model.get_submodule(name).weight is subject.model.get_parameter(f"{name}.weight"),
    }


@edit()
def parents_are_of_transformers_classes(subject: Subject) -> Outcome:
    from transformers.models.llama import modeling_llama as hf

    classes = (hf.LlamaForCausalLM, hf.LlamaAttention, hf.LlamaMLP, hf.LlamaDecoderLayer)
    return [sum(isinstance(module, each) for module in subject.model.modules()) for each in classes]


@edit()
def signatures(subject: Subject) -> Outcome:
    """Forward arguments as trainers and tracers inspect them."""
    modules = (subject.model, subject.attention, subject.mlp, subject.q)
    return [list(inspect.signature(module.forward).parameters) for module in modules]


@edit()
def repr_of_linear(subject: Subject) -> Outcome:
    return [repr(subject.q), repr(subject.up)]


@edit()
def attributes_of_linear(subject: Subject) -> Outcome:
    part = subject.k
    return {
        "attributes": sorted(name for name in part.__dict__ if name != "forward"),
        "forward": "forward" in part.__dict__,
        "contiguous": part.weight.is_contiguous(),
        "leaf": part.weight.is_leaf,
        "view": part.weight._is_view(),
        "stride": part.weight.stride(),
        "offset": part.weight.storage_offset(),
        "bytes": part.weight.untyped_storage().nbytes(),
        "type": type(part.weight),
    }


@edit()
def storages_are_separate(subject: Subject) -> Outcome:
    """Detect tied weights as accelerate and safetensors do."""
    pointers = [parameter.untyped_storage().data_ptr() for parameter in subject.model.parameters()]
    sizes = [parameter.untyped_storage().nbytes() for parameter in subject.model.parameters()]
    return {"storages": len(set(pointers)), "sizes": sizes, "footprint": subject.model.get_memory_footprint()}


@edit(which="tied")
def tied_embeddings(subject: Subject) -> Outcome:
    model = subject.model
    return {
        **step(subject),
        "tied": model.lm_head.weight is model.get_input_embeddings().weight,
        "names": [name for name, _ in model.named_parameters()],
        "doubled": [name for name, _ in model.named_parameters(remove_duplicate=False)],
    }


# Replaced modules


class Scaled(nn.Linear):
    """A custom linear class."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def with_weight_of(new: nn.Linear, old: nn.Linear) -> nn.Linear:
    """Copy the old linear's weight into the new linear."""
    new.weight = old.weight
    return new


REPLACEMENTS = {
    "another linear": lambda old: nn.Linear(old.in_features, old.out_features, bias=False),
    "a linear with a bias": lambda old: nn.Linear(old.in_features, old.out_features),
    "a linear of the same weight": lambda old: with_weight_of(
        nn.Linear(old.in_features, old.out_features, bias=False), old
    ),
    "a subclass of the same weight": lambda old: with_weight_of(
        Scaled(old.in_features, old.out_features, bias=False), old
    ),
    "a sequence": lambda old: nn.Sequential(old, nn.Tanh()),
    "a low rank": lambda old: nn.Sequential(
        nn.Linear(old.in_features, 4, bias=False), nn.Linear(4, old.out_features, bias=False)
    ),
    "a linear that is not initialized": lambda old: with_weight_of(
        skip_init(nn.Linear, old.in_features, old.out_features, bias=False), old
    ),
}

for name, replacement in REPLACEMENTS.items():
    for part in ("q_proj", "v_proj", "gate_proj"):

        def apply(subject: Subject, replacement=replacement, part=part) -> Outcome:
            old = subject.part(part)
            owner = subject.attention if hasattr(subject.attention, part) else subject.mlp
            torch.manual_seed(3)
            setattr(owner, part, replacement(old))
            return {**step(subject), "state dict": values(subject.model)}

        add(f"{part} is replaced by {name}", apply)


@edit()
def class_of_linear_is_exchanged(subject: Subject) -> Outcome:
    subject.k.__class__ = Scaled
    return step(subject)


@edit()
def linear_is_replaced_and_put_back(subject: Subject) -> Outcome:
    old = subject.q
    subject.attention.q_proj = nn.Linear(64, 64, bias=False)
    replaced = forward(subject).shape
    subject.attention.q_proj = old
    return {**step(subject), "seen": list(replaced)}


@edit()
def linears_are_swapped(subject: Subject) -> Outcome:
    subject.mlp.gate_proj, subject.mlp.up_proj = subject.up, subject.gate
    return step(subject)


@edit()
def linear_is_exchanged_among_modules(subject: Subject) -> Outcome:
    new = nn.Linear(64, 96, bias=False)
    nn.init.constant_(new.weight, 0.01)
    subject.mlp._modules["up_proj"] = new
    return step(subject)


@edit()
def parent_is_replaced(subject: Subject) -> Outcome:
    subject.model.model.layers[0].mlp = nn.Identity()
    return step(subject)


@edit()
def class_of_parent_is_reset_to_transformers(subject: Subject) -> Outcome:
    """Patches replace the class of a module in this way."""
    from transformers.models.llama import modeling_llama as hf

    class Patched(hf.LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.gate_proj(x) * self.up_proj(x))

    subject.mlp.__class__ = Patched
    return step(subject)


@edit()
def forward_of_parent_is_replaced_on_instance(subject: Subject) -> Outcome:
    mlp = subject.mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.gate_proj(x) * mlp.up_proj(x))
    return step(subject)


@edit()
def forward_of_parent_is_wrapped(subject: Subject) -> Outcome:
    original = subject.attention.forward

    def wrapped(*args, **kwargs):
        output, scores = original(*args, **kwargs)
        return output * 2, scores

    subject.attention.forward = wrapped
    return step(subject)


@edit()
def bias_is_added_and_state_dict_with_it_is_loaded(subject: Subject) -> Outcome:
    subject.v.bias = nn.Parameter(torch.ones(32))
    subject.model.load_state_dict(
        {**subject.new().state_dict(), "model.layers.0.self_attn.v_proj.bias": torch.zeros(32)}
    )
    return step(subject)


@edit(raises=AttributeError)
def linear_is_deleted(subject: Subject) -> Outcome:
    del subject.attention.k_proj
    return step(subject)


# Shared modules


@edit()
def layers_share_their_mlp(subject: Subject) -> Outcome:
    layers = subject.model.model.layers
    layers[1].mlp = layers[0].mlp
    return {**step(subject), "names": list(subject.model.state_dict())}


@edit()
def layers_share_one_linear(subject: Subject) -> Outcome:
    layers = subject.model.model.layers
    layers[1].self_attn.k_proj = layers[0].self_attn.k_proj
    return {**step(subject), "names": [name for name, _ in subject.model.named_parameters()]}


@edit()
def layer_runs_twice(subject: Subject) -> Outcome:
    layers = subject.model.model.layers
    layers[1] = layers[0]
    return {**step(subject), "names": [name for name, _ in subject.model.named_parameters()]}


@edit()
def layer_is_removed(subject: Subject) -> Outcome:
    del subject.model.model.layers[1]
    subject.model.config.num_hidden_layers = 1
    return step(subject)


@edit()
def layers_change_places(subject: Subject) -> Outcome:
    layers = subject.model.model.layers
    subject.model.model.layers = nn.ModuleList([layers[1], layers[0]])
    for index, layer in enumerate(subject.model.model.layers):
        layer.self_attn.layer_idx = index
    return step(subject)


@edit()
def layer_is_copied_on_top(subject: Subject) -> Outcome:
    """Double the depth by copying layers, as model growing does."""
    layers = subject.model.model.layers
    new = copy.deepcopy(layers[0])
    new.self_attn.layer_idx = 2
    layers.append(new)
    subject.model.config.num_hidden_layers = 3
    return step(subject)


@edit(which="square")
def one_module_serves_as_two_linears(subject: Subject) -> Outcome:
    subject.attention.v_proj = subject.k
    return {**step(subject), "names": list(subject.model.state_dict())}


@edit()
def linears_in_separate_module(subject: Subject) -> Outcome:
    """The linears are also in a separate list. Names and gradients exist at both places."""
    subject.model.probes = nn.ModuleList([subject.q, subject.v])
    return {**step(subject), "names": list(subject.model.state_dict())}


# Sizes and places


@edit()
def embeddings_are_resized(subject: Subject) -> Outcome:
    torch.manual_seed(3)
    subject.model.resize_token_embeddings(140)
    return {**step(subject), "state dict": values(subject.model)}


@edit()
def heads_are_given_other_weights(subject: Subject) -> Outcome:
    subject.model.set_output_embeddings(nn.Linear(64, 128))
    nn.init.constant_(subject.model.lm_head.weight, 0.1)
    nn.init.constant_(subject.model.lm_head.bias, 0.2)
    return step(subject)


@edit()
def model_goes_to_meta(subject: Subject) -> Outcome:
    subject.model.to("meta")
    return subject.model.state_dict()


@edit()
def model_goes_to_meta_and_is_filled_again(subject: Subject) -> Outcome:
    state_dict = values(subject.model)
    subject.model.to("meta")
    subject.model.to_empty(device="cpu")
    with torch.no_grad():
        subject.model.model.rotary_emb.inv_freq.copy_(subject.new().model.rotary_emb.inv_freq)
        subject.model.model.rotary_emb.original_inv_freq.copy_(subject.new().model.rotary_emb.inv_freq)
    subject.model.load_state_dict({name: tensor * 1.1 for name, tensor in state_dict.items()})
    return step(subject)


@edit()
def one_linear_goes_to_meta(subject: Subject) -> Outcome:
    weight = subject.k.weight.detach().clone()
    subject.k.to("meta")
    names = [name for name, parameter in subject.model.named_parameters() if parameter.is_meta]
    subject.k.to_empty(device="cpu")
    with torch.no_grad():
        subject.k.weight.copy_(weight * 2)
    return {**step(subject), "seen": names}


@edit()
def parent_runs_on_meta(subject: Subject) -> Outcome:
    output = subject.mlp.to("meta")(subject.hidden_states().to("meta"))
    return {"shape": list(output.shape), "device": str(output.device), "requires_grad": output.requires_grad}


@edit()
def model_made_on_meta(subject: Subject) -> Outcome:
    with torch.device("meta"):
        model = type(subject.model)(subject.model.config)
    return model.state_dict()


@edit()
def memory_is_shared_with_other_processes(subject: Subject) -> Outcome:
    subject.model.share_memory()
    return {**step(subject), "seen": all(parameter.is_shared() for parameter in subject.model.parameters())}


@edit()
def custom_function_is_applied_to_every_tensor(subject: Subject) -> Outcome:
    subject.model._apply(lambda tensor: tensor * 1.1 if tensor.is_floating_point() else tensor)
    return step(subject)


@edit()
def train_and_eval(subject: Subject) -> Outcome:
    subject.model.train()
    training = [module.training for module in subject.model.modules()]
    subject.attention.eval()
    return {"step": step(subject), "before": training, "after": [module.training for module in subject.model.modules()]}


@edit()
def dropout_in_attention(subject: Subject) -> Outcome:
    for layer in subject.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    subject.model.train()
    torch.manual_seed(3)
    return step(subject)


@edit()
def model_is_made_and_initialized(subject: Subject) -> Outcome:
    """A new model with the same seed has the same random weights."""
    torch.manual_seed(3)
    return values(type(subject.model)(subject.model.config))


@edit()
def linear_is_used_after_model_is_gone(subject: Subject) -> Outcome:
    part, x = subject.v, subject.hidden_states()
    weights = [subject.q.weight, part.weight]
    del subject.model
    part(x).sum().backward()
    return {"output": part(x).detach(), "gradients": [weight.grad for weight in weights]}


@edit()
def parent_in_another_model(subject: Subject) -> Outcome:
    """Extract attention and MLP, and train them in a custom model."""

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = subject.mlp, subject.model.model.layers[1].mlp

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x) + x)

    mine = Mine()
    output = mine(subject.hidden_states())
    output.square().sum().backward()
    return {"output": output.detach(), "gradients": gradients(mine)}
