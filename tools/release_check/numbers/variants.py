"""Sections of `numbers` for inputs and configurations that the other sections do not cover.

Each section covers a kind of publicly reported regression: batches of one with padding, several tokens in a cached
step, small windows, bidirectional attention, assisted generation, layers that
share keys and values, and checkpoints of another class of the same model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers

from tools.release_check.cached_steps import NoCacheError, cache_argument, chunk_logits
from tools.release_check.numbers.cases import filled
from tools.release_check.numbers.facts import Facts, Kind, fingerprint
from tools.release_check.numbers.recorded import NotApplicableError, Recorded, forward, parameters_of

PADDING = 5
WINDOW = 4
"""Fewer tokens than an image in the fixtures."""

LOOKUP_TOKENS = 3
NEW_TOKENS = 12

WINDOW_KEY, BIDIRECTIONAL_KEY = "sliding_window", "use_bidirectional_attention"
SHARED_KEY = "num_kv_shared_layers"


def padded_alone(recorded: Recorded) -> Facts:
    """Run a batch of one with padding on the left."""
    inputs = recorded.inputs("text")
    if inputs.keys() != {"input_ids"}:
        raise NotApplicableError("takes more than tokens")
    ids = inputs["input_ids"][:1]
    mask = torch.ones_like(ids)
    mask[:, :PADDING] = 0
    return masked(recorded, {"input_ids": ids}, mask)


def masked(recorded: Recorded, inputs: Mapping[str, torch.Tensor], mask: torch.Tensor) -> Facts:
    """Return logits with a mask, without masked tokens if there are logits per token."""
    logits = forward(recorded.model(), {**inputs, "attention_mask": mask}).logits
    per_token = logits.shape[:2] == mask.shape and logits.ndim == 3 and "decoder_input_ids" not in inputs
    return {Kind.NUMBERS: {"logits": fingerprint(logits[mask.bool()] if per_token else logits)}}


def cached_chunk(recorded: Recorded) -> Facts:
    """Run one cached step of several tokens."""
    if not recorded.case.generates:
        raise NotApplicableError("does not generate")
    model = recorded.model()
    try:
        name = cache_argument(model, reference_class=recorded.model_class)
        return {Kind.NUMBERS: {"logits": fingerprint(chunk_logits(model, recorded.inputs("text"), name))}}
    except NoCacheError as error:
        raise NotApplicableError(str(error)) from error


def small_window(recorded: Recorded) -> Facts:
    """Use a sliding window of a few tokens, with every value of `use_bidirectional_attention`."""
    values = recorded.case.config_values()
    if not any(isinstance(value, int) and not isinstance(value, bool) for value in _found(values, WINDOW_KEY)):
        raise NotApplicableError("no window")
    windowed = _with(values, WINDOW_KEY, WINDOW)
    numbers = _logits(recorded, windowed, "window")
    for value, variant in _bidirectional(windowed):
        numbers |= _logits(recorded, variant, f"window, bidirectional {value}")
    return {Kind.NUMBERS: numbers}


def bidirectional(recorded: Recorded) -> Facts:
    """Use every other value of `use_bidirectional_attention`."""
    variants = list(_bidirectional(recorded.case.config_values()))
    if not variants:
        raise NotApplicableError("no such key")
    numbers: dict[str, Any] = {}
    for value, variant in variants:
        numbers |= _logits(recorded, variant, f"bidirectional {value}")
    return {Kind.NUMBERS: numbers}


def assisted(recorded: Recorded) -> Facts:
    """Generate greedily with prompt lookup, several tokens per step, on a repetitive prompt."""
    if not recorded.case.generates:
        raise NotApplicableError("does not generate")
    inputs = recorded.inputs("text")
    if inputs.keys() != {"input_ids"}:
        raise NotApplicableError("takes more than tokens")
    model: Any = recorded.model()
    facts: dict[str, Any] = {}
    for name, length in (("longer than a window", inputs["input_ids"].shape[1] // 2), ("shorter than a window", 3)):
        part = inputs["input_ids"][:1, :length]
        output = model.generate(
            torch.cat([part, part], dim=1),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            prompt_lookup_num_tokens=LOOKUP_TOKENS,
        )
        facts[f"tokens after a prompt {name}"] = output[:, -NEW_TOKENS:].tolist()
    return {Kind.TOKENS: facts}


def drafted(recorded: Recorded) -> Facts:
    """Generate greedily with a draft model of other weights, most of whose tokens are rejected."""
    if not recorded.case.generates:
        raise NotApplicableError("does not generate")
    inputs = recorded.inputs("text")
    if inputs.keys() != {"input_ids"}:
        raise NotApplicableError("takes more than tokens")
    model: Any = recorded.model()
    torch.manual_seed(1)
    draft = recorded.model_class._from_config(recorded.config(), dtype=torch.float32, attn_implementation="eager")
    output = model.generate(
        inputs["input_ids"][:1],
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        assistant_model=draft.eval(),
    )
    return {Kind.TOKENS: {"tokens": output[:, -NEW_TOKENS:].tolist()}}


def video(recorded: Recorded) -> Facts:
    """Use a video of two frames, the fixture's two images."""
    image, config = recorded.inputs("media"), recorded.case.config_values()
    image_token, video_token = config.get("image_token_id"), config.get("video_token_id")
    wanted = {"pixel_values_videos", "video_grid_thw"}
    takes = wanted <= parameters_of(recorded.model_class).keys() and "image_grid_thw" in image
    if image_token is None or video_token is None or not takes:
        raise NotApplicableError("takes no videos in this form")
    ids = image["input_ids"][0]
    places = torch.eq(ids, image_token).nonzero().flatten()
    count, start, end = len(places), int(places[0]), int(places[-1]) + 1
    kinds = torch.zeros(len(ids) + count, dtype=torch.long)
    kinds[start : end + count] = 2
    frames = image["image_grid_thw"][:1].clone()
    frames[:, 0] = 2
    inputs = {
        "input_ids": torch.cat([ids[:start], torch.full((2 * count,), video_token), ids[end:]])[None],
        "pixel_values_videos": image["pixel_values"],
        "video_grid_thw": frames,
    }
    if "mm_token_type_ids" in image:
        inputs["mm_token_type_ids"] = kinds[None]
    return {Kind.NUMBERS: {"logits": fingerprint(forward(recorded.model(), inputs).logits)}}


def other_class(recorded: Recorded) -> Facts:
    """Load the base model from a head's checkpoint, and the head from the base model's."""
    base_class: Any = transformers.MODEL_MAPPING.get(type(recorded.config()), None)
    if base_class is None or isinstance(base_class, tuple) or base_class is recorded.model_class:
        raise NotApplicableError("no base model")
    path = recorded.write_checkpoint("float32", torch.float32)
    base, of_base = base_class.from_pretrained(path, output_loading_info=True)
    base.save_pretrained(recorded.folder / "base")
    head: Any = recorded.model_class.from_pretrained(recorded.folder / "base", output_loading_info=True)
    of_head: dict[str, Any] = head[1]
    return {
        Kind.LOADING: {
            f"{name}: {key}": sorted(map(str, names))
            for name, info in (("base model", of_base), ("head", of_head))
            for key, names in info.items()
            if names and key != "error_msgs"
        }
    }


def shared_states(recorded: Recorded) -> Facts:
    """Add a layer that uses the keys and values of an earlier one, and run without a cache."""
    values = recorded.case.config_values()
    if SHARED_KEY not in values or not values.get("layer_types"):
        raise NotApplicableError("no such key")
    types = [*values["layer_types"], values["layer_types"][-1]]
    values |= {"num_hidden_layers": len(types), "layer_types": types, SHARED_KEY: 1}
    assert recorded.model_class.config_class is not None
    config = recorded.model_class.config_class.from_dict(values)
    model = recorded.model_class._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():  # the fixture has no such layer
        for name, weight in model.named_parameters():
            mean, std = (1.0, 0.1) if weight.ndim == 1 else (0.0, 0.05)
            weight.copy_(filled(name, {"shape": list(weight.shape), "mean": mean, "std": std}))
    return {Kind.NUMBERS: {"logits": fingerprint(forward(model, recorded.inputs("text")).logits)}}


def _logits(recorded: Recorded, values: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return logits of text and media with other configuration values."""
    assert recorded.model_class.config_class is not None
    config = recorded.model_class.config_class.from_dict(dict(values))
    options = {"config": config, "attn_implementation": "eager"}
    model = recorded.load(torch.float32, torch.float32, **options).eval()
    return {
        f"logits of {kind}, {label}": fingerprint(forward(model, recorded.inputs(kind)).logits)
        for kind in recorded.case.inputs
    }


def _bidirectional(values: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Return other values of the key, each with a configuration that has it."""
    present = list(_found(values, BIDIRECTIONAL_KEY))
    if present:
        for value in (True,) if isinstance(present[0], bool) else ("all", "vision"):
            if value not in present:
                yield value, _with(values, BIDIRECTIONAL_KEY, value)


def _found(values: Mapping[str, Any], name: str) -> Iterator[Any]:
    """Return the values of a key in a configuration and its nested configurations."""
    for key, value in values.items():
        if key == name:
            yield value
        elif isinstance(value, dict):
            yield from _found(value, name)


def _with(values: Mapping[str, Any], name: str, new: Any) -> dict[str, Any]:
    """Return the configuration with another value of a key, in every part that has the key."""
    return {
        key: new if key == name else _with(value, name, new) if isinstance(value, dict) else value
        for key, value in values.items()
    }
