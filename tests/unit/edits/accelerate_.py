"""accelerate: saving, loading, offloading, dispatching, and models on the meta device."""

from __future__ import annotations

import accelerate
import torch
from accelerate import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import compute_module_sizes, find_tied_parameters, set_module_tensor_to_device
from transformers import AutoModelForCausalLM

from edits.files import stored
from edits.outcome import Outcome
from edits.table import Subject, edit, forward, gradients, step, values
from nrl_models.common.upstream import CACHE_NAMES


def accelerator(**options) -> Accelerator:
    """Return a single-process accelerator on the CPU, after clearing the state of earlier ones."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state() if hasattr(state, "_reset_state") else state._shared_state.clear()
    return Accelerator(cpu=True, **options)


@edit()
def save_model_loads_in_transformers(subject: Subject) -> Outcome:
    with torch.no_grad():
        subject.k.weight.mul_(2)
    accelerator().save_model(subject.model, subject.folder)
    subject.model.config.save_pretrained(subject.folder)
    files = stored(subject.folder)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        subject.folder, attn_implementation="eager", output_loading_info=True
    )
    return {"files": files, "missing": sorted(info["missing_keys"]), "step": step(subject, loaded)}


@edit()
def save_model_in_shards(subject: Subject) -> Outcome:
    accelerator().save_model(subject.model, subject.folder, max_shard_size="100KB")
    return stored(subject.folder)


@edit(which="tied")
def save_model_with_tied_embeddings(subject: Subject) -> Outcome:
    accelerator().save_model(subject.model, subject.folder)
    return {"files": stored(subject.folder), "tied": find_tied_parameters(subject.model)}


@edit()
def save_model_without_safetensors(subject: Subject) -> Outcome:
    accelerator().save_model(subject.model, subject.folder, safe_serialization=False)
    return {"file": torch.load(subject.folder / "pytorch_model.bin")}


@edit()
def load_checkpoint_into_model(subject: Subject) -> Outcome:
    """Load a folder that the other library's model was saved to, with other weights."""
    other = subject.other()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    other.save_pretrained(subject.folder)
    load_checkpoint_in_model(subject.model, str(subject.folder))
    return step(subject)


@edit()
def load_checkpoint_into_model_without_memory(subject: Subject) -> Outcome:
    subject.other().save_pretrained(subject.folder)
    with init_empty_weights():
        model = type(subject.model)(subject.model.config)
    on_meta = all(parameter.is_meta for parameter in model.parameters())
    model = load_checkpoint_and_dispatch(model, str(subject.folder), device_map={"": "cpu"})
    return {**step(subject, model.eval()), "seen": on_meta}


@edit()
def training_state_is_saved_and_loaded(subject: Subject) -> Outcome:
    """`save_state` with one library's model, then `load_state` with the other's."""
    outcome = {}
    for number, model in enumerate((subject.model, subject.other())):
        made = accelerator()
        prepared, optimizer = made.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        if number:
            made.load_state(str(subject.folder))
        made.backward(prepared(subject.input_ids, labels=subject.input_ids).loss)
        optimizer.step()
        if not number:
            made.save_state(str(subject.folder))
        outcome[f"values {number}"] = values(model)
    return outcome


@edit()
def prepared_model_trains(subject: Subject) -> Outcome:
    made = accelerator(gradient_accumulation_steps=2)
    model, optimizer = made.prepare(subject.model, torch.optim.SGD(subject.model.parameters(), lr=0.1))
    for tokens in (subject.input_ids, subject.input_ids.flip(1)):
        with made.accumulate(model):
            made.backward(model(tokens, labels=tokens).loss)
            made.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return {"values": values(made.unwrap_model(model)), "state dict": made.get_state_dict(model)}


@edit(half=True)
def prepared_model_in_mixed_precision(subject: Subject) -> Outcome:
    made = accelerator(mixed_precision="bf16")
    model = made.prepare(subject.model)
    output = model(subject.input_ids, labels=subject.input_ids)
    made.backward(output.loss)
    unwrapped = made.unwrap_model(model, keep_fp32_wrapper=False)
    return {"logits": output.logits.detach(), "gradients": gradients(unwrapped), "again": forward(subject, unwrapped)}


# Offloading


@edit()
def offloaded_to_cpu(subject: Subject) -> Outcome:
    cpu_offload(subject.model, torch.device("cpu"))
    return {"logits": forward(subject), "again": forward(subject), "meta": on_meta(subject)}


@edit()
def offloaded_to_disk(subject: Subject) -> Outcome:
    disk_offload(subject.model, str(subject.folder), torch.device("cpu"))
    files = sorted(file.name for file in subject.folder.iterdir())
    return {"logits": forward(subject), "again": forward(subject), "files": files, "meta": on_meta(subject)}


@edit()
def offloading_is_undone(subject: Subject) -> Outcome:
    cpu_offload(subject.model, torch.device("cpu"))
    offloaded = forward(subject)
    remove_hook_from_module(subject.model, recurse=True)
    return {"offloaded": offloaded, "meta": on_meta(subject)}


def on_meta(subject: Subject) -> list[str]:
    """Return the parameters on the meta device."""
    return [name for name, parameter in subject.model.named_parameters() if parameter.is_meta]


@edit()
def dispatched_with_layer_on_disk(subject: Subject) -> Outcome:
    device_map = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    skip = subject.model._skip_keys_device_placement
    dispatch_model(subject.model, device_map, "cpu", offload_dir=str(subject.folder), skip_keys=skip)
    tokens = subject.model.generate(subject.input_ids, max_new_tokens=4, do_sample=False)
    files = sorted(file.name for file in subject.folder.iterdir())
    return {"logits": forward(subject), "tokens": tokens, "files": files, "meta": on_meta(subject)}


@edit()
def one_linear_is_dispatched_to_disk(subject: Subject) -> Outcome:
    """q and k are in memory, v is not."""
    device_map = {name: "cpu" for name, module in subject.model.named_modules() if not list(module.children()) and name}
    device_map["model.layers.0.self_attn.v_proj"] = "disk"
    dispatch_model(
        subject.model, device_map, "cpu", offload_dir=str(subject.folder), skip_keys=list(CACHE_NAMES), force_hooks=True
    )
    return {"logits": forward(subject), "meta": on_meta(subject), "again": forward(subject)}


@edit()
def hook_of_accelerate_on_linear(subject: Subject) -> Outcome:
    class Doubling(ModelHook):
        def post_forward(self, module, output):
            return output * 2

    add_hook_to_module(subject.up, Doubling())
    hooked = step(subject)
    remove_hook_from_module(subject.up)
    return {**hooked, "removed": forward(subject)}


@edit()
def device_map_is_inferred(subject: Subject) -> Outcome:
    sizes = compute_module_sizes(subject.model)
    no_split = ["LlamaDecoderLayer"]
    limits = {0: sizes["model.layers.0"] + sizes["model.embed_tokens"] + 1000, "cpu": "1GB"}
    inferred = infer_auto_device_map(subject.model, limits, no_split)
    split = infer_auto_device_map(subject.model, {0: "60KB", "cpu": "1GB"}, [])
    return {"sizes": dict(sizes), "inferred": dict(inferred), "split": dict(split)}


@edit()
def tensors_are_placed_by_name(subject: Subject) -> Outcome:
    for name in ("self_attn.k_proj.weight", "mlp.up_proj.weight"):
        value = subject.model.get_parameter(f"model.layers.0.{name}").detach() * 2
        set_module_tensor_to_device(subject.model, f"model.layers.0.{name}", "cpu", value=value)
    return step(subject)


@edit()
def empty_weights_are_filled_by_name(subject: Subject) -> Outcome:
    with init_empty_weights():
        model = type(subject.model)(subject.model.config)
    for name, value in subject.other().state_dict().items():
        set_module_tensor_to_device(model, name, "cpu", value=value * 1.5)
    return step(subject, model.eval())


@edit()
def from_pretrained_with_device_map(subject: Subject) -> Outcome:
    subject.model.save_pretrained(subject.folder)
    loaded = type(subject.model).from_pretrained(subject.folder, device_map={"": "cpu"}, attn_implementation="eager")
    return {"step": step(subject, loaded), "version": accelerate.__version__, "values": values(loaded)}


@edit()
def memory_is_released(subject: Subject) -> Outcome:
    made = accelerator()
    model = made.prepare(subject.model)
    outcome = step(subject, model)
    (released,) = made.free_memory(model)
    return {**outcome, "released": released, "prepared": len(made._models)}
