"""Rows of data sets, and conversion of their text to token ids.

| loss | columns of a row |
|---|---|
| `sft` | `messages`, the last of which is the answer; or `prompt` and `completion`; or `text` |
| `dpo`, `reward` | `chosen` and `rejected`; also `prompt`, unless they are complete chats |
| `grpo`, `dr_grpo`, `dapo` | `prompt`, and the columns that the reward reads; optionally `images` (see `image_prompts`)
|

Prompts and answers are text, or messages (`{"role": ..., "content": ...}`) for the tokenizer's chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import torch
from jinja2 import TemplateError
from torch.nn.utils.rnn import pad_sequence

from nrl_models.errors import NRLModelsError, one_line, shown
from nrl_models.recipes.data_sets.sources import data_set, lines_of, local_path, refused

Row = Mapping[str, Any]


def rows(
    path: str,
    *,
    name: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    columns: Mapping[str, Any] | None = None,
    images: str | None = None,
) -> Sequence[Row]:
    """Load rows of a file or of a hub data set.

    Args:
        path: A `.jsonl` file with a JSON object per line, or the name of a data set, which needs the package datasets.
        name, split, revision: Configuration, split and revision of a hub data set.
        columns: Additional columns by name: text in which `$column` is replaced by that column's value, or messages
            with such texts. If the text is only `$column`, the value itself is used, for example a list of messages.
            Values that are not text stay as they are.
        images: Column with a row's images: file names relative to the `.jsonl` file's directory, or images of a hub
            data set; one or a list. The opened images are in `images` of a row.

    Raises:
        RecipeError: If the file does not exist, is not valid JSON, has no rows, or lacks a column.
    """
    file = local_path(path)
    if path.endswith(".jsonl"):
        if hub_keys := [key for key, value in (("name", name), ("split", split), ("revision", revision)) if value]:
            advice = f"remove {', '.join(hub_keys)}: {' '.join(f'data.{key}=null' for key in hub_keys)}"
            raise refused(path, f"is a file, which has no {', '.join(hub_keys)}", advice)
        source_rows: Any = list(lines_of(file))
    elif file.is_file():
        advice = "write one JSON object per line into a file with the suffix .jsonl"
        raise refused(path, "is a file without the suffix .jsonl", advice)
    else:
        source_rows = data_set(str(file) if file.is_dir() else path, name, split or "train", revision)
    if not len(source_rows):
        raise refused(path, "has no rows")
    if columns:
        source_rows = _Made(source_rows, partial(_with_columns, path, columns))
    return _Made(source_rows, partial(_with_images, path, images)) if images else source_rows


class _Made(Sequence[Row]):
    """Rows computed from other rows on access. The first is computed immediately, to detect missing columns early."""

    def __init__(self, source_rows: Sequence[Row], make: Callable[[Row], Row]) -> None:
        self.source_rows, self.make = source_rows, make
        self[0]

    def __len__(self) -> int:
        return len(self.source_rows)

    def __getitem__(self, index: Any) -> Any:
        return self.make(self.source_rows[index])


def _with_columns(path: str, columns: Mapping[str, Any], row: Row) -> Row:
    try:
        return dict(row) | {name: _filled(text, row) for name, text in columns.items()}
    except KeyError as error:
        raise refused(path, f"columns: {error} is not a column; it has {', '.join(row)}") from error
    except ValueError as error:
        raise refused(path, f"columns: {error}", "write $$ for a dollar sign") from error


def _with_images(path: str, column: str, row: Row) -> Row:
    if column not in row:
        raise refused(path, f"images: {column!r} is not a column; it has {', '.join(row)}")
    images = row[column]
    return dict(row) | {
        "images": [_opened(path, column, each) for each in (images if isinstance(images, list) else [images])]
    }


def _opened(path: str, column: str, image_or_name: Any) -> Any:
    from PIL import Image  # not at the top: other recipes read no images

    if isinstance(image_or_name, Image.Image):
        return image_or_name.convert("RGB")
    if not isinstance(image_or_name, str):
        raise refused(path, f"{column} has {type(image_or_name).__name__}: expected an image, or a file's name")
    file = Path(path).expanduser().parent / image_or_name
    try:
        with Image.open(file) as image:
            return image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise refused(str(file), f"cannot be read as an image: {error}") from error


def _filled(template: Any, row: Row) -> Any:
    if isinstance(template, Mapping):
        return {name: _filled(value, row) for name, value in template.items()}
    if isinstance(template, list):
        return [_filled(value, row) for value in template]
    if not isinstance(template, str):
        return template
    alone = template.removeprefix("$")
    return row[alone] if template != alone and alone.isidentifier() else Template(template).substitute(row)


# Token ids


def prompt_ids(tokenizer: Any, prompt: Any) -> list[int]:
    """Return token ids of a prompt up to the start of the answer.

    Args:
        tokenizer: The checkpoint's tokenizer.
        prompt: Text, which is used unchanged, or messages. Special tokens that the tokenizer appends to text (EOS, a
            separator) are removed, because the answer follows.
    """
    if isinstance(prompt, str):
        start, rest, _ = _text_parts(tokenizer, prompt)
        return start + rest
    _require_messages("the prompt", prompt)
    return list(with_template(tokenizer, prompt, add_generation_prompt=True, return_dict=False))


def with_template(renderer: Any, messages: Sequence[Any], **options: Any) -> Any:
    """Apply the chat template of a tokenizer or processor to messages.

    Raises:
        RecipeError: If there is no chat template, or it does not accept the messages.
    """
    try:
        return renderer.apply_chat_template(messages, **options)
    except (TemplateError, TypeError, ValueError) as error:
        folder = getattr(renderer, "tokenizer", renderer).name_or_path
        if getattr(renderer, "chat_template", None):
            raise refused(
                folder, f"the chat template cannot be applied to {shown(messages)}: {one_line(error)}"
            ) from error
        advice = (
            "add chat_template.jinja to the checkpoint, or use rows with a `prompt` and a `completion` of plain text"
        )
        raise refused(folder, "has no chat template, which rows with messages need", advice) from error


def _text_parts(tokenizer: Any, text: str) -> tuple[list[int], list[int], list[int]]:
    """Return token ids of a text in three parts: prepended special tokens, the text, and appended special tokens."""
    every = list(tokenizer(text)["input_ids"])
    text_ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    end = tokenizer.eos_token_id
    if text_ids and text_ids[-1] == end and not text.endswith(tokenizer.eos_token):
        text_ids.pop()  # some tokenizers always append it
    if text_ids and every[:2] == [tokenizer.bos_token_id, text_ids[0]] and text_ids[0] == tokenizer.bos_token_id:
        every.pop(0)  # the text begins with BOS, as rendered chats do
    if not text_ids and every and text != _SOME_TEXT:
        before, *_ = _text_parts(tokenizer, _SOME_TEXT)
        return before, text_ids, every[len(before) :]
    for start in range(len(every) - len(text_ids) + 1):
        if every[start : start + len(text_ids)] == text_ids:
            return every[:start], text_ids, every[start + len(text_ids) :]
    return [], every, []


_SOME_TEXT = "a"


def appended_ids(tokenizer: Any) -> list[int]:
    """Return the special tokens that a tokenizer appends to every text: none, EOS or a separator."""
    return _text_parts(tokenizer, _SOME_TEXT)[2]


def answered_ids(tokenizer: Any, prompt: Any, answer: Any) -> tuple[list[int], list[bool]]:
    """Return token ids of a prompt and its answer, and a mask of the answer's tokens, including its end token.

    In messages, the answer consists of the assistant's messages, each from its first token to its end-of-turn token.
    Text that the template adds around them and messages of other roles are not part of the answer.

    Args:
        tokenizer: The checkpoint's tokenizer.
        prompt: Text or messages; None if `answer` is a complete chat or text.
        answer: Text, or messages: either the messages after the prompt or a complete chat, which begins with a message
            of the system, developer or user and includes the prompt. In a complete chat, the last message is the
            answer.

    Raises:
        NRLModelsError: If there is no answer, or it is not from the assistant. Also if the chat template renders a
            prompt differently once an answer follows, or writes no end-of-turn token.
    """
    if prompt is not None and not isinstance(prompt, str):
        _require_messages("the prompt", prompt)
    if not isinstance(answer, str):
        _require_messages("the answer", answer)
    if isinstance(answer, str) and not isinstance(prompt, list):
        return _answered_text(tokenizer, prompt, answer)
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    begins_chat = bool(answer) and answer[0]["role"] in _BEFORE_ANSWERS
    if isinstance(prompt, str):
        prompt = None if begins_chat else [{"role": "user", "content": prompt}]
    elif not prompt or (begins_chat and _contains(answer, prompt)):
        prompt = None
    chat = [*(prompt or []), *answer]
    if len(chat) < 2 or not answer:
        raise NRLModelsError("a chat has to have a question and an answer")
    first = len(chat) - 1 if prompt is None else len(prompt)
    answers = [number for number in range(first, len(chat)) if chat[number]["role"] == "assistant"]
    if not answers or (prompt is None and len(chat) - 1 not in answers):
        raise NRLModelsError(
            f"the answer has messages of the role {', '.join(message['role'] for message in chat[first:])}: expected "
            "one of the assistant, whose messages the model is trained on"
        )
    return _answered_chat(tokenizer, chat, answers)


def _require_messages(name: str, value: Any) -> None:
    """Check that a value is a list of messages.

    Raises:
        NRLModelsError: If it is not.
    """
    messages = value if isinstance(value, (list, tuple)) else [None]
    wrong = [each for each in messages if not isinstance(each, Mapping) or not {"role", "content"} <= each.keys()]
    if wrong:
        raise NRLModelsError(
            f"{name} is {shown(value)}: expected text, or a list of messages with the keys `role` and `content`"
        )


def _contains(chat: Sequence[Any], prompt: Sequence[Any]) -> bool:
    """Return True if a chat contains the messages of a prompt consecutively."""
    return any(list(chat[start : start + len(prompt)]) == list(prompt) for start in range(len(chat)))


_BEFORE_ANSWERS = ("system", "developer", "user")
"""Roles of the first message in a complete chat."""


def _answered_text(tokenizer: Any, prompt: str | None, answer: str) -> tuple[list[int], list[bool]]:
    start = [] if prompt is None else prompt_ids(tokenizer, prompt)
    before, rest, after = _text_parts(tokenizer, answer)
    end = after if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if not end:
        raise NRLModelsError(
            "the tokenizer has no `eos_token`, so the model would not learn to stop: set it in tokenizer_config.json"
        )
    rest = (before if prompt is None else []) + rest + (end if rest[-len(end) :] != end else [])
    return start + rest, [False] * len(start) + [True] * len(rest)


def _answered_chat(tokenizer: Any, chat: list[Any], answers: Sequence[int]) -> tuple[list[int], list[bool]]:
    """Return token ids of a chat, and a mask of the tokens of the messages with indices `answers`."""
    chat_ids = list(with_template(tokenizer, chat, return_dict=False))
    chosen = [False] * len(chat_ids)
    for number in answers:
        start = prompt_ids(tokenizer, chat[:number])
        until = list(with_template(tokenizer, chat[: number + 1], return_dict=False))
        if until[: len(start)] == start:
            until = until[: _end_of_turn(tokenizer, until, len(start)) + 1]
        if until[: len(start)] != start or chat_ids[: len(until)] != until:
            raise NRLModelsError(
                "the chat template renders a question differently once an answer follows, so training and sampling "
                "prompts would differ: use rows with a `prompt` and a `completion` of plain text"
            )
        chosen[len(start) : len(until)] = [True] * (len(until) - len(start))
    return chat_ids, chosen


def _end_of_turn(tokenizer: Any, ids: Sequence[int], start: int) -> int:
    """Find the token that ends an answer: the last token, except for whitespace that the template writes after it.

    Raises:
        NRLModelsError: If it is not a special token, because the model would not be trained to stop.
    """
    added_tokens = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token for token, added in added_tokens.items() if added.special}
    special |= {*tokenizer.all_special_ids}
    special = special - {tokenizer.unk_token_id} | {tokenizer.eos_token_id}
    for position in range(len(ids) - 1, start - 1, -1):
        if ids[position] in special:
            return position
        if tokenizer.decode([ids[position]]).strip():
            break
    raise NRLModelsError(
        "the chat template writes no end-of-turn token after an answer, so the model would not learn to stop: end the "
        "assistant's messages with `eos_token` in the template, or give rows with a `prompt` and a `completion` of "
        "plain text"
    )


def sequences_of(tokenizer: Any, row: Row, *, pairs: bool) -> list[tuple[list[int], list[bool]]]:
    """Return the sequences of a row: one for supervised learning; for `pairs`, the chosen and the rejected one.

    Raises:
        RecipeError: If columns are missing.
    """
    prompt = row.get("prompt")
    if pairs and {"chosen", "rejected"} <= row.keys():
        return [answered_ids(tokenizer, prompt, row[name]) for name in ("chosen", "rejected")]
    for name in () if pairs else ("completion", "messages", "text"):
        if name in row and (name != "completion" or prompt is not None):
            return [answered_ids(tokenizer, prompt if name == "completion" else None, row[name])]
    wanted = "chosen and rejected" if pairs else "prompt and completion, or messages, or text"
    raise refused("a row", f"has {', '.join(row)}: expected {wanted}")


def padded_rows(
    sequences: Sequence[tuple[Sequence[int], Sequence[bool]]], pad: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad sequences on the right. Returns ids, a mask of tokens, and a mask of answers.

    Shapes: `(batch, seq_len)` each; int64, bool and bool.
    """
    rows = [torch.tensor(row) for row, _ in sequences]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad)
    there = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], batch_first=True)
    answers = pad_sequence([torch.tensor(row) for _, row in sequences], batch_first=True)
    return ids.to(device), there.to(device), answers.to(device)
