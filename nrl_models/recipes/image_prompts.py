"""Convert prompts with images to token ids and tensors, with the checkpoint's processor.

Images appear in messages as parts, `{"type": "image"}`, or as `<image>` in the text, as in data sets such as
Geometry3K. They are matched with the row's images in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from nrl_models.errors import Problem, ProblemKind, RecipeError
from nrl_models.recipes.rows import appended_ids, with_template

MARK = "<image>"
"""Placeholder of an image in a text."""

_READ_ELSEWHERE = ("input_ids", "attention_mask")


def image_prompt(processor: Any, prompt: Any, images: Sequence[Any]) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Return token ids of a prompt up to the start of the completion, and further inputs of the model's forward.

    Args:
        processor: The checkpoint's processor, see `nrl_models.inputs.processors`.
        prompt: Messages.
        images: PIL images, one per image in the messages.

    Raises:
        RecipeError: If the prompt is not a list of messages or has another number of images, or the processor does not
            support images.
    """
    if not isinstance(prompt, list):
        raise _refused("prompt", "has to be a list of messages if it has images")
    if getattr(processor, "image_processor", None) is None:
        raise _refused("processor", f"supports no images: the checkpoint only has a {type(processor).__name__}")
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
        with_template(
            processor, messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
    )
    ids = cast(torch.Tensor, made["input_ids"])[0].tolist()
    inputs = {name: value for name, value in made.items() if name not in _READ_ELSEWHERE}
    if (end := appended_ids(processor.tokenizer)) and ids[-len(end) :] == end:
        text = with_template(processor, messages, add_generation_prompt=True, tokenize=False)
        if not text.endswith(processor.tokenizer.decode(end)):  # remove it: the completion follows
            of_tokens = {name for name, value in inputs.items() if tuple(value.shape[:2]) == (1, len(ids))}
            inputs |= {name: inputs[name][:, : -len(end)] for name in of_tokens}
            ids = ids[: -len(end)]
    return ids, inputs


def _parts(content: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a message's content. Text is split at `<image>` into text parts and image parts."""
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


def _refused(subject: str, detail: str) -> RecipeError:
    return RecipeError("cannot use the data", [Problem(ProblemKind.CONFIG, subject, detail)])
