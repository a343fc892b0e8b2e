"""The bugs themselves, as questions to a model: does it show? Asked of upstream's class and of ours.

Each is put so that the answer yes means trouble. Models are tiny and in evaluation mode; none is changed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from nrl_models.parity.inputs import Inputs

APART = 1e-3
"""Logits of tiny models with random weights differ by more than this, if they differ in more than rounding."""


@torch.no_grad()
def documents_meet(model: PreTrainedModel, inputs: Inputs, *, mask: bool) -> bool:
    """Whether a document's logits depend on one packed before it, with positions that start again.

    Args:
        model: a decoder.
        inputs: of which `input_ids` `(2, length)` are the two documents.
        mask: whether to give a mask of ones and leave the cache at its default; else there is neither.
    """
    first, second = inputs["input_ids"][0, :-5], inputs["input_ids"][1]
    positions = [torch.arange(len(one), device=second.device) for one in (first, second)]
    packed: dict[str, Any] = {
        "input_ids": torch.cat([first, second])[None],
        "position_ids": torch.cat(positions)[None],
    }
    packed |= {"attention_mask": torch.ones_like(packed["input_ids"])} if mask else {"use_cache": False}
    together = model(**packed).logits[0, -len(second) :]
    alone = model(input_ids=second[None], use_cache=False).logits[0]
    return _differ(together, alone)


@torch.no_grad()
def offsets_stay(model: PreTrainedModel, with_images: Inputs, text: torch.Tensor) -> bool:
    """Whether decoding `text` `(batch, length)` from a cache depends on a sequence with images seen before."""
    model = copy.deepcopy(model)
    expected = _decoded(model, text)
    model(**with_images, use_cache=True)
    return _differ(_decoded(model, text), expected)


@torch.no_grad()
def images_are_causal(model: PreTrainedModel, inputs: Inputs) -> bool:
    """Whether a batch with images but without token types is computed otherwise than with them, or refused."""
    kinds = [name for name in ("token_type_ids", "mm_token_type_ids") if name in inputs]
    without = {name: value for name, value in inputs.items() if name not in kinds}
    text = model.config.get_text_config()
    is_unset = getattr(text, "use_bidirectional_attention", False) is None
    if is_unset:
        text.use_bidirectional_attention = "vision"  # as published; the class's default has none
    try:
        return _differ(model(**without).logits, model(**inputs).logits)
    except ValueError:
        return True
    finally:
        if is_unset:
            text.use_bidirectional_attention = None


def reentrant_checkpointing_loses_gradients(model: PreTrainedModel, inputs: Inputs) -> bool:
    """Whether reentrant checkpointing gives other gradients than none does.

    Args:
        model: some of whose layers share keys and values.
        inputs: with labels.
    """
    gradients = []
    for reentrant in (False, True):
        one = copy.deepcopy(model).train()
        if reentrant:
            one.gradient_checkpointing_enable({"use_reentrant": True})
            one.enable_input_require_grads()
        one(**inputs, use_cache=False).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in one.named_parameters()})
    expected, actual = gradients
    return any(
        gradient is not None and (actual[name] is None or _differ(actual[name], gradient, 1e-4))
        for name, gradient in expected.items()
    )


def unused_weights_are_dropped(load: Callable[[Path], PreTrainedModel], reference: PreTrainedModel, at: Path) -> bool:
    """Whether loading and saving drops keys and values that a checkpoint holds for layers that share.

    Args:
        load: loads a checkpoint.
        reference: writes it.
        at: an empty folder to work in.
    """
    reference.save_pretrained(at / "published")
    file = at / "published" / "model.safetensors"
    tensors = load_file(file)
    queries = {name for name in tensors if name.endswith("self_attn.q_proj.weight") and "tower" not in name}
    unused = {name.replace("q_proj", "k_proj") for name in queries} - tensors.keys()
    save_file(tensors | {name: torch.randn(4, 4) for name in unused}, file, metadata={"format": "pt"})
    load(at / "published").save_pretrained(at / "again")
    return bool(unused) and not unused <= load_file(at / "again" / "model.safetensors").keys()


def a_new_row_explodes(model: PreTrainedModel, inputs: Inputs) -> bool:
    """Whether an embedding row of zeros gets a gradient ten times as large as any other row."""
    model = copy.deepcopy(model)
    tokens = inputs["input_ids"]
    weight = model.get_input_embeddings().weight
    row = int(tokens[0, 3])
    with torch.no_grad():
        weight[row] = 0
    weight.requires_grad_(True)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    (gradient,) = torch.autograd.grad(loss, weight)
    sizes = gradient.norm(dim=1)
    return bool(sizes[row] > 10 * torch.cat([sizes[:row], sizes[row + 1 :]]).max())


def whole_logits_are_made(model: PreTrainedModel, inputs: Inputs) -> bool:
    """Whether log-probabilities from the model's own forward take a tensor of tokens times vocabulary."""
    tokens = inputs["input_ids"]
    vocabulary = model.config.get_text_config().vocab_size
    with new_tensors(vocabulary) as sizes, torch.no_grad():
        model(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)
    return max(sizes) >= tokens.numel() * vocabulary


@contextmanager
def new_tensors(width: int) -> Iterator[list[int]]:
    """While open, note the numbers of elements of the tensors that are made whose last dimension is `width`."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes: list[int] = [0]

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
            for one in result if isinstance(result, (tuple, list)) else (result,):
                is_wide = isinstance(one, torch.Tensor) and one.ndim > 0 and one.shape[-1] == width
                if is_wide and one.untyped_storage().data_ptr() not in given:
                    sizes.append(one.numel())
            return result

    with Sizes():
        yield sizes


def small_updates_vanish(dtype: torch.dtype) -> bool:
    """Whether a step of AdamW at a learning rate of post-training leaves a weight of that dtype as it is."""
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return torch.equal(weight.detach(), torch.ones(4, dtype=dtype))


def an_integer_is_refused(read: Callable[[Path], Any], values: dict[str, Any], key: str, at: Path) -> bool:
    """Whether a `config.json` with `key: 0`, for a float of zero, is not read.

    Args:
        read: reads the configuration in a folder.
        values: the configuration's.
        key: one of them, a float.
        at: a folder to work in.
    """
    (at / "config.json").write_text(json.dumps(values | {key: 0}))
    try:
        return getattr(read(at), key) != 0
    except Exception:  # transformers' own, or what it is turned into
        return True


def _decoded(model: PreTrainedModel, text: torch.Tensor) -> torch.Tensor:
    """The logits of the last token, by way of a cache."""
    cache = model(input_ids=text[:, :-1], use_cache=True).past_key_values
    return model(input_ids=text[:, -1:], past_key_values=cache, use_cache=True).logits


def _differ(one: torch.Tensor, other: torch.Tensor, by: float = APART) -> bool:
    return bool((one - other).abs().max() > by)


def frozen_parts_train(
    from_pretrained: Callable[[Path], PreTrainedModel], model: PreTrainedModel, folder: Path
) -> bool:
    """Whether something that the class freezes when it is built trains when it is loaded.

    Args:
        from_pretrained: loads a checkpoint.
        model: one that was built, and has such parameters.
        folder: an empty one.
    """
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    model.save_pretrained(folder)
    loaded = dict(from_pretrained(folder).named_parameters())
    return any(loaded[name].requires_grad for name in frozen)


@torch.no_grad()
def soft_cap_is_dropped(model: PreTrainedModel, inputs: Inputs) -> bool:
    """Whether logits are the same without the soft cap of attention scores that the configuration asks for."""
    uncapped = copy.deepcopy(model)
    for module in uncapped.modules():
        if getattr(module, "attn_logit_softcapping", None) is not None:
            module.attn_logit_softcapping = None
    return not _differ(model(**inputs).logits, uncapped(**inputs).logits)
