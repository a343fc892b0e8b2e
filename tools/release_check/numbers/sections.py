"""The sections that `numbers` runs on each class. A section returns its facts, or raises `NotApplicableError`."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tools.release_check.cached_steps import NoCacheError, cache_argument, cached_logits
from tools.release_check.numbers.cases import stored_tensors
from tools.release_check.numbers.facts import Facts, Kind, Section, fingerprint, number
from tools.release_check.numbers.mixtures import expert_parallel, fp4_experts, int4_experts
from tools.release_check.numbers.recorded import (
    NotApplicableError,
    Recorded,
    forward,
    parameters_of,
    require_complete,
)
from tools.release_check.numbers.variants import (
    PADDING,
    assisted,
    bidirectional,
    cached_chunk,
    drafted,
    masked,
    other_class,
    padded_alone,
    shared_states,
    small_window,
    video,
)

NEW_TOKENS = 8


def _loading(recorded: Recorded) -> Facts:
    model = recorded.model(incomplete=True)
    state = model.state_dict(keep_vars=True)
    tensors = dict(state) | dict(model.named_buffers())
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(tensor.data_ptr(), []).append(name)
    info = recorded.loading_info
    return {
        Kind.NAMES: {name: _shape(tensor) for name, tensor in tensors.items()},
        Kind.DTYPES: _dtypes("fp32", tensors),
        Kind.TIES: {names[0]: names[1:] for names in groups.values() if len(names) > 1 and state[names[0]].numel()},
        Kind.LOADING: {key: sorted(map(str, names)) for key, names in info.items() if names and key != "error_msgs"},
    }


def _files(recorded: Recorded) -> Facts:
    path = recorded.folder / "saved"
    recorded.model(incomplete=True).save_pretrained(path)
    tensors = stored_tensors(path)
    # Weights missing in the checkpoint are random or uninitialized.
    is_complete = not recorded.loading_info["missing_keys"]
    return {
        Kind.FILES: {
            name: f"{_shape(tensor)} {_dtype(tensor)}" + (f" {_hash(tensor)}" if is_complete else "")
            for name, tensor in tensors.items()
        }
    }


def _new_files(recorded: Recorded) -> Facts:
    """Return names and shapes in the files of a model that was not loaded, so that no conversion is reversed."""
    path = recorded.folder / "new"
    recorded.model_class._from_config(recorded.config(), dtype=torch.float32).save_pretrained(path)
    return {Kind.FILES: {name: f"{_shape(tensor)} {_dtype(tensor)}" for name, tensor in stored_tensors(path).items()}}


def _dtypes_section(recorded: Recorded) -> Facts:
    facts: dict[str, str] = {}
    loads: tuple[tuple[str, torch.dtype | str, torch.dtype], ...]
    loads = ("auto", "auto", torch.bfloat16), ("fp16", torch.float16, torch.float32)
    for label, dtype, stored in loads:
        facts |= _dtypes(label, recorded.load(dtype, stored).state_dict())
    return {Kind.DTYPES: facts}


def _initialization(recorded: Recorded) -> Facts:
    torch.manual_seed(0)
    model = recorded.model_class._from_config(recorded.config(), dtype=torch.float32)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    return {
        Kind.INITIALIZATION: {name: _hash(tensor) for name, tensor in tensors.items()},
        Kind.INITIALIZATION_SCALE: {name: _scale(tensor) for name, tensor in tensors.items() if tensor.numel()},
    }


def _config(recorded: Recorded) -> Facts:
    facts: Facts = {Kind.CONFIG_KEYS: dict.fromkeys(_flat(json.loads(recorded.config().to_json_string())), True)}
    assert recorded.model_class.config_class is not None
    try:
        default = recorded.model_class.config_class()
    except Exception:  # some classes have no default
        return facts
    values = _flat(json.loads(default.to_json_string(use_diff=False)))
    facts[Kind.CONFIG_DEFAULTS] = {key: _short(value) for key, value in values.items()}
    return facts


def _eager(recorded: Recorded) -> Facts:
    inputs, model = recorded.any_inputs(), recorded.model()
    output = forward(model, inputs, use_cache=model.can_generate() or None)
    facts: Facts = {
        Kind.NUMBERS: {"logits": fingerprint(output.logits)},
        Kind.FIELDS: {"output": sorted(output), "logits": f"{_shape(output.logits)} {_dtype(output.logits)}"},
    }
    if "decoder_input_ids" not in inputs and "input_ids" in inputs:
        ones = {"attention_mask": torch.ones_like(inputs["input_ids"])}
        facts[Kind.NUMBERS]["logits with a mask of ones"] = fingerprint(forward(model, inputs | ones).logits)
    return facts


def _sdpa(recorded: Recorded) -> Facts:
    model = recorded.model()
    if not model._supports_sdpa:
        return {Kind.FIELDS: {"supports sdpa": False}}
    model.set_attn_implementation("sdpa")
    return {
        Kind.FIELDS: {"supports sdpa": True},
        Kind.NUMBERS: {"logits": fingerprint(forward(model, recorded.any_inputs()).logits)},
    }


def _bf16(recorded: Recorded) -> Facts:
    model, info = recorded.load(torch.bfloat16, torch.float32, output_loading_info=True)
    require_complete(info)
    inputs = {
        name: value.to(torch.bfloat16) if value.is_floating_point() else value
        for name, value in recorded.any_inputs().items()
    }
    logits = forward(model.eval(), inputs).logits
    return {Kind.LOW_PRECISION: {"logits": fingerprint(logits)}, Kind.FIELDS: {"logits": _dtype(logits)}}


def _media(recorded: Recorded) -> Facts:
    logits = forward(recorded.model(), recorded.inputs("media")).logits
    return {Kind.NUMBERS: {"logits": fingerprint(logits)}, Kind.FIELDS: {"logits": _shape(logits)}}


def _padding(recorded: Recorded) -> Facts:
    inputs = recorded.inputs("text")
    if "input_ids" not in inputs:
        raise NotApplicableError("takes no tokens")
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, :PADDING] = 0
    return masked(recorded, inputs, mask)


def _packed(recorded: Recorded) -> Facts:
    inputs = recorded.inputs("text")
    if "position_ids" not in parameters_of(recorded.model_class) or inputs.keys() != {"input_ids"}:
        raise NotApplicableError("takes no positions")
    length = inputs["input_ids"].shape[1]
    positions = torch.cat([torch.arange(length // 3), torch.arange(length - length // 3)])[None]
    packed = {"input_ids": inputs["input_ids"][:1], "position_ids": positions}
    return {Kind.NUMBERS: {"logits": fingerprint(forward(recorded.model(), packed).logits)}}


def _cached(recorded: Recorded, kind: str) -> Facts:
    if not recorded.case.generates:
        raise NotApplicableError("does not generate")
    model, inputs = recorded.model(), recorded.inputs(kind)
    try:
        name = cache_argument(model, reference_class=recorded.model_class)
    except NoCacheError as error:
        raise NotApplicableError(str(error)) from error
    return {Kind.NUMBERS: {"logits": fingerprint(cached_logits(model, inputs, name))}}


def _cached_steps(recorded: Recorded) -> Facts:
    return _cached(recorded, "text")


def _media_cached_steps(recorded: Recorded) -> Facts:
    return _cached(recorded, "media")


def _generation(recorded: Recorded, **options: Any) -> Facts:
    if not recorded.case.generates:
        raise NotApplicableError("does not generate")
    output: Any = recorded.model().generate(  # type: ignore[operator]
        **recorded.any_inputs(),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return {
        Kind.TOKENS: {"tokens": output.sequences[:, -NEW_TOKENS:].tolist()},
        Kind.NUMBERS: {"logits": fingerprint(torch.stack(output.logits, dim=1))},
    }


def _greedy(recorded: Recorded) -> Facts:
    return _generation(recorded)


def _static_cache(recorded: Recorded) -> Facts:
    return _generation(recorded, cache_implementation="static")


def _gradients(recorded: Recorded) -> Facts:
    return _backward(recorded, recorded.model())


def _checkpointing(recorded: Recorded) -> Facts:
    model = recorded.model()
    if not model.supports_gradient_checkpointing:
        raise NotApplicableError("does not support it")
    model.gradient_checkpointing_enable()
    for module in model.modules():  # not the complete model: some have dropout in training, or require more inputs
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
    return _backward(recorded, model)


def _backward(recorded: Recorded, model: PreTrainedModel) -> Facts:
    torch.manual_seed(0)  # some routers draw random numbers
    loss = model(**recorded.any_inputs(labels=True), use_cache=False).loss
    loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    norms = {name: [number(float(grad.norm())), *fingerprint(grad.flatten())] for name, grad in gradients.items()}
    return {Kind.NUMBERS: {"loss": [number(loss.item())]}, Kind.GRADIENTS: norms}


def _resize(recorded: Recorded) -> Facts:
    model: Any = recorded.model()
    inputs = recorded.any_inputs()
    size = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(size + 8, mean_resizing=False)
    head = model.get_output_embeddings()
    shapes = {"input embeddings": _shape(model.get_input_embeddings().weight)}
    if head is not None:
        shapes["output embeddings"] = _shape(head.weight)
    logits = forward(model, inputs).logits
    return {
        Kind.NAMES: shapes,
        Kind.FIELDS: {"logits": _shape(logits)},
        Kind.NUMBERS: {"logits of the old tokens": fingerprint(logits[..., :size])},
    }


SECTIONS: Mapping[Section, Callable[[Recorded], Facts]] = {
    Section.LOADING: _loading,
    Section.FILES: _files,
    Section.DTYPES: _dtypes_section,
    Section.INITIALIZATION: _initialization,
    Section.CONFIG: _config,
    Section.EAGER: _eager,
    Section.SDPA: _sdpa,
    Section.BF16: _bf16,
    Section.MEDIA: _media,
    Section.PADDING: _padding,
    Section.PACKED: _packed,
    Section.CACHED_STEPS: _cached_steps,
    Section.MEDIA_CACHED_STEPS: _media_cached_steps,
    Section.GREEDY: _greedy,
    Section.STATIC_CACHE: _static_cache,
    Section.GRADIENTS: _gradients,
    Section.CHECKPOINTING: _checkpointing,
    Section.RESIZE: _resize,
    Section.PADDED_ALONE: padded_alone,
    Section.CACHED_CHUNK: cached_chunk,
    Section.SMALL_WINDOW: small_window,
    Section.BIDIRECTIONAL: bidirectional,
    Section.ASSISTED: assisted,
    Section.VIDEO: video,
    Section.OTHER_CLASS: other_class,
    Section.NEW_FILES: _new_files,
    Section.DRAFTED: drafted,
    Section.SHARED_STATES: shared_states,
    Section.EXPERT_PARALLEL: expert_parallel,
    Section.INT4_EXPERTS: int4_experts,
    Section.FP4_EXPERTS: fp4_experts,
}


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dtypes(label: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the most frequent dtype of a model's tensors, and the names of tensors with another dtype."""
    dtypes = {name: _dtype(tensor) for name, tensor in tensors.items()}
    usual = Counter(dtypes.values()).most_common(1)[0][0]
    others = {f"{label}: {name}": dtype for name, dtype in dtypes.items() if dtype != usual}
    return {label: usual} | others


def _hash(tensor: torch.Tensor) -> str:
    content = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:8]


def _scale(tensor: torch.Tensor) -> list[float | None]:
    spread = float(tensor.double().std()) if tensor.numel() > 1 else 0.0
    mean = float(tensor.double().mean())
    # Both are relative to the larger one, because the mean of few random numbers is random.
    return [number(round(mean, 1)), number(float(f"{spread:.2g}"))]


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key == "transformers_version":
            continue
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 60 else f"{text[:40]}... {hashlib.sha256(text.encode()).hexdigest()[:8]}"
