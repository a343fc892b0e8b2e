"""State dicts and files of the model, a layer or one linear, strict or not, also loaded by the other library."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch
import transformers
from safetensors import safe_open
from torch import nn

import nrl_models
from edits.outcome import Outcome
from edits.table import Subject, edit, forward, gradients, step, values


def stored(folder: Path) -> dict[str, Outcome]:
    """Read the tensors in all files of a folder, by name."""
    found: dict[str, Outcome] = {}
    for file in sorted(folder.rglob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found[str(file.relative_to(folder))] = {name: opened.get_tensor(name) for name in sorted(opened.keys())}
    for file in sorted(folder.rglob("*.index.json")):
        found[str(file.relative_to(folder))] = json.loads(file.read_text())["weight_map"]
    return found


def saved_by_the_other(subject: Subject, scale: float = 1.5) -> dict[str, torch.Tensor]:
    """Return the state dict of the other library's model with other weights."""
    return {name: tensor * scale for name, tensor in subject.other().state_dict().items()}


@edit()
def complete_state_dict(subject: Subject) -> Outcome:
    return subject.model.state_dict()


@edit()
def state_dict_of_layer(subject: Subject) -> Outcome:
    return subject.model.model.layers[1].state_dict(prefix="mine.", keep_vars=True)


@edit()
def state_dict_shares_memory(subject: Subject) -> Outcome:
    """Editing a tensor of the state dict edits the model."""
    subject.model.state_dict()["model.layers.0.self_attn.k_proj.weight"].mul_(2)
    return step(subject)


@edit()
def state_dict_of_another_model_is_loaded(subject: Subject) -> Outcome:
    subject.model.load_state_dict(saved_by_the_other(subject))
    return step(subject)


@edit()
def state_dict_of_another_model_is_assigned(subject: Subject) -> Outcome:
    state_dict = saved_by_the_other(subject)
    subject.model.load_state_dict(state_dict, assign=True)
    outcome = step(subject)
    with torch.no_grad():
        state_dict["model.layers.0.mlp.up_proj.weight"].mul_(2)
    return {**outcome, "afterwards": forward(subject)}


@edit()
def partial_state_dict_is_loaded(subject: Subject) -> Outcome:
    state_dict = {name: tensor for name, tensor in saved_by_the_other(subject).items() if "q_proj" in name}
    result = subject.model.load_state_dict({**state_dict, "unknown": torch.zeros(1)}, strict=False)
    return {**step(subject), "missing": result.missing_keys, "unexpected": result.unexpected_keys}


@edit()
def state_dict_of_inner_model_is_loaded(subject: Subject) -> Outcome:
    inner = {
        name.removeprefix("model."): tensor
        for name, tensor in saved_by_the_other(subject).items()
        if name.startswith("model.")
    }
    result = subject.model.model.load_state_dict(inner, strict=False)
    return {**step(subject), "missing": result.missing_keys, "unexpected": result.unexpected_keys}


@edit()
def state_dict_of_layer_is_loaded(subject: Subject) -> Outcome:
    layers = subject.model.model.layers
    layers[0].load_state_dict(subject.other().model.layers[1].state_dict())
    return step(subject)


@edit()
def state_dict_of_linear_is_loaded(subject: Subject) -> Outcome:
    subject.k.load_state_dict(subject.other().model.layers[1].self_attn.k_proj.state_dict())
    return step(subject)


@edit()
def state_dict_of_linear_is_assigned(subject: Subject) -> Outcome:
    subject.up.load_state_dict({"weight": torch.full((96, 64), 0.01)}, assign=True)
    return step(subject)


@edit(raises=RuntimeError)
def state_dict_that_lacks_linear(subject: Subject) -> Outcome:
    state_dict = subject.model.state_dict()
    del state_dict["model.layers.0.self_attn.k_proj.weight"]
    subject.model.load_state_dict(state_dict)


@edit(raises=RuntimeError)
def state_dict_of_wrong_shape(subject: Subject) -> Outcome:
    state_dict = subject.model.state_dict()
    state_dict["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(3, 64)
    subject.model.load_state_dict(state_dict)


@edit()
def state_dict_is_loaded_after_edits(subject: Subject) -> Outcome:
    """Load after replacing data, replacing a linear and casting a linear. The values arrive in the right parameters."""
    subject.q.weight.data = subject.q.weight.data.clone()
    subject.attention.v_proj = nn.Linear(64, 32, bias=False)
    subject.up.half().float()
    subject.model.load_state_dict(saved_by_the_other(subject))
    return {**step(subject), "values": values(subject.model)}


@edit()
def state_dict_of_half_precision_is_loaded(subject: Subject) -> Outcome:
    subject.model.load_state_dict({name: tensor.bfloat16() for name, tensor in saved_by_the_other(subject).items()})
    return step(subject)


@edit()
def state_dict_of_half_precision_is_assigned_to_one_linear(subject: Subject) -> Outcome:
    subject.k.load_state_dict({"weight": subject.k.weight.detach().bfloat16()}, assign=True)
    subject.k.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    subject.k.register_forward_hook(lambda module, args, output: output.float())
    return step(subject)


@edit()
def loading_swaps_tensors(subject: Subject) -> Outcome:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        subject.model.load_state_dict(saved_by_the_other(subject))
        subject.model.double().float()
        return step(subject)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@edit()
def conversions_overwrite_parameters(subject: Subject) -> Outcome:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        before = subject.q.weight
        subject.model.double()
        return {**step(subject), "same": subject.q.weight is before}
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


# Files


@edit()
def save_pretrained_and_other_library_loads(subject: Subject) -> Outcome:
    with torch.no_grad():
        subject.k.weight.mul_(2)
    subject.model.save_pretrained(subject.folder)
    loader = nrl_models if subject.library == "transformers" else transformers
    other = loader.AutoModelForCausalLM.from_pretrained(subject.folder, attn_implementation="eager")
    return {"files": stored(subject.folder), "step": step(subject, other), "values": values(other)}


@edit()
def save_pretrained_in_shards(subject: Subject) -> Outcome:
    subject.model.save_pretrained(subject.folder, max_shard_size="100KB")
    return stored(subject.folder)


@edit()
def save_pretrained_with_state_dict(subject: Subject) -> Outcome:
    subject.model.save_pretrained(subject.folder, state_dict=saved_by_the_other(subject))
    return stored(subject.folder)


@edit(which="tied")
def save_pretrained_with_tied_embeddings(subject: Subject) -> Outcome:
    subject.model.save_pretrained(subject.folder)
    return stored(subject.folder)


@edit(which="mixtral")
def save_pretrained_with_experts(subject: Subject) -> Outcome:
    subject.model.save_pretrained(subject.folder)
    return stored(subject.folder)


@edit(which="mixtral")
def save_pretrained_with_experts_as_in_memory(subject: Subject) -> Outcome:
    subject.model.save_pretrained(subject.folder, save_original_format=False)
    return stored(subject.folder)


@edit()
def safetensors_saves_model(subject: Subject) -> Outcome:
    """safetensors finds tensors that share memory, and drops all but one."""
    file = subject.folder / "model.safetensors"
    safetensors.torch.save_model(subject.model, file)
    with torch.no_grad():
        subject.q.weight.zero_()
    loaded = safetensors.torch.load_model(subject.model, file)
    return {"files": stored(subject.folder), "loaded": [sorted(each) for each in loaded], "step": step(subject)}


@edit()
def safetensors_saves_state_dict(subject: Subject) -> Outcome:
    safetensors.torch.save_file(subject.model.state_dict(), subject.folder / "model.safetensors")
    return stored(subject.folder)


@edit()
def safetensors_saves_gradients(subject: Subject) -> Outcome:
    step(subject)
    safetensors.torch.save_file(gradients(subject.model), subject.folder / "gradients.safetensors")
    return stored(subject.folder)


@edit()
def torch_saves_state_dict(subject: Subject) -> Outcome:
    file = subject.folder / "model.pt"
    torch.save(subject.model.state_dict(), file)
    loaded = torch.load(file, mmap=True)
    other = subject.other()
    other.load_state_dict(loaded, assign=True)
    return {"loaded": loaded, "bytes": file.stat().st_size, "step": step(subject, other)}


@edit()
def torch_saves_one_linear(subject: Subject) -> Outcome:
    """The file contains the linear's weight only, not the shared buffer."""
    file = subject.folder / "part.pt"
    torch.save(subject.k.state_dict(), file)
    return {"loaded": torch.load(file), "bytes": file.stat().st_size}


@edit()
def torch_saves_one_gradient(subject: Subject) -> Outcome:
    step(subject)
    file = subject.folder / "gradient.pt"
    torch.save(subject.k.weight.grad.clone(), file)
    return {"loaded": torch.load(file), "bytes": file.stat().st_size}


@edit()
def model_is_built_on_meta_and_assigned(subject: Subject) -> Outcome:
    state_dict = {name: tensor.clone() for name, tensor in saved_by_the_other(subject).items()}
    with torch.device("meta"):
        model = type(subject.model)(subject.model.config)
    model.load_state_dict(state_dict, assign=True)
    model.model.rotary_emb = subject.new().model.rotary_emb
    return step(subject, model.eval())


@edit()
def weights_are_copied_by_name_from_other_library(subject: Subject) -> Outcome:
    """Copy weights as trainers do: `named_parameters` of one model, `copy_` into the other."""
    other = dict(subject.other().named_parameters())
    with torch.no_grad():
        for name, parameter in subject.model.named_parameters():
            parameter.copy_(other[name] * 1.5)
    return {**step(subject), "names": list(other)}


@edit()
def weights_of_engine_are_exchanged_by_name(subject: Subject) -> Outcome:
    """Set weights as engines do: find the module by name and assign `data`."""
    for name, tensor in saved_by_the_other(subject).items():
        module_name, _, kind = name.rpartition(".")
        getattr(subject.model.get_submodule(module_name), kind).data = tensor
    return step(subject)
