"""Prompts about images: the token ids and tensors that a checkpoint's processor makes of messages and pictures.

Images stand in messages as parts, `{"type": "image"}`, or as `<image>` in their text, as data sets write it
(Geometry3K, say): the first of either is the row's first image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from nrl_models.errors import Problem, ProblemKind, RecipeError
from nrl_models.recipes.rows import appended_ids

MARK = "<image>"
"""What stands for an image in a text."""

_READ_ELSEWHERE = ("input_ids", "attention_mask")


def image_prompt(processor: Any, prompt: Any, images: Sequence[Any]) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Token ids of a prompt, up to where the answer begins, and what else the model's forward is given.

    Args:
        processor: the checkpoint's, `AutoProcessor.from_pretrained`.
        prompt: messages.
        images: PIL's, as many as the messages name.

    Raises:
        RecipeError: a prompt that is no messages or names another number of images, or a processor that takes none.
    """
    if not isinstance(prompt, list):
        raise _refused("prompt", "with images it has to be messages, in which they have their places")
    if getattr(processor, "image_processor", None) is None:
        raise _refused("processor", f"the checkpoint has none that takes images, only a {type(processor).__name__}")
    named = sum(part["type"] == "image" for message in prompt for part in _parts(message["content"]))
    if named != len(images):
        raise _refused(
            "prompt", f"names {named} images ({MARK!r}, or parts of type image), and the row has {len(images)}"
        )
    left = iter(images)
    messages = [
        {**message, "content": [_with_image(part, left) for part in _parts(message["content"])]} for message in prompt
    ]
    made = dict(
        processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
    )
    ids = cast(torch.Tensor, made["input_ids"])[0].tolist()
    inputs = {name: value for name, value in made.items() if name not in _READ_ELSEWHERE}
    if (end := appended_ids(processor.tokenizer)) and ids[-len(end) :] == end:
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        if not text.endswith(processor.tokenizer.decode(end)):  # the answer follows
            of_tokens = {name for name, value in inputs.items() if tuple(value.shape[:2]) == (1, len(ids))}
            inputs |= {name: inputs[name][:, : -len(end)] for name in of_tokens}
            ids = ids[: -len(end)]
    return ids, inputs


def _parts(content: Any) -> Iterator[Mapping[str, Any]]:
    """A message's content as parts, texts and images."""
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        if part["type"] != "text":
            yield part
            continue
        first, *others = part["text"].split(MARK)
        if first:
            yield {"type": "text", "text": first}
        for text in others:
            yield {"type": "image"}
            if text:
                yield {"type": "text", "text": text}


def _with_image(part: Mapping[str, Any], images: Iterator[Any]) -> Mapping[str, Any]:
    return {"type": "image", "image": next(images)} if part["type"] == "image" else part


def _refused(what: str, detail: str) -> RecipeError:
    return RecipeError("cannot use the data", [Problem(ProblemKind.CONFIG, what, detail)])
