"""Rows of data, and the token ids of what is in them.

| loss | a row has |
|---|---|
| `sft` | `messages`, of which the last is the answer; or `prompt` and `completion`; or `text` |
| `dpo`, `reward` | `chosen` and `rejected`, and `prompt` unless they are whole chats |
| `grpo`, `dr_grpo`, `dapo` | `prompt`, and what the reward reads; `images` (see `image_prompts`) |

A prompt or an answer is text, or messages (`{"role": ..., "content": ...}`) for the tokenizer's chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from nrl_models.common.checkpoint.json_reading import parse_object, read_bytes
from nrl_models.errors import NRLModelsError, Problem, ProblemKind, RecipeError

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
    """Rows of a file, or of a data set of the hub.

    Args:
        path: a `.jsonl` file, a JSON object on each line; or a data set's name, which needs the package datasets.
        name, split, revision: of a data set of the hub.
        columns: further columns, by name: text in which `$column` stands for another column's value, or messages with
            such texts. A text that is nothing but `$column` is that value itself, a list of messages say.
        images: the column with a row's images: names of files, from the `.jsonl` file's directory, or images as data
            sets of the hub have them; one, or a list. Rows have them, opened, as `images`.

    Raises:
        RecipeError: no such file, what is no JSON, no rows, or no such column.
    """
    if path.endswith(".jsonl"):
        if given := [key for key, value in (("name", name), ("split", split), ("revision", revision)) if value]:
            raise _refused(path, f"is a file, which has no {', '.join(given)}")
        found: Any = list(_lines(Path(path).expanduser()))
    else:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise _refused(path, "is no .jsonl file, and data sets of the hub need: pip install datasets") from error
        found = load_dataset(path, name, split=split or "train", revision=revision)
    if not len(found):
        raise _refused(path, "has no rows")
    if columns:
        found = _Made(found, partial(_with_columns, path, columns))
    return _Made(found, partial(_with_images, path, images)) if images else found


class _Made(Sequence[Row]):
    """Rows that are made of others when they are looked at; the first at once, which shows what columns lack."""

    def __init__(self, found: Sequence[Row], make: Callable[[Row], Row]) -> None:
        self.found, self.make = found, make
        self[0]

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, place: Any) -> Any:
        return self.make(self.found[place])


def _with_columns(path: str, columns: Mapping[str, Any], row: Row) -> Row:
    try:
        return dict(row) | {name: _filled(text, row) for name, text in columns.items()}
    except (KeyError, ValueError) as error:
        raise _refused(path, f"columns: {error} is no column; it has {', '.join(row)}") from error


def _with_images(path: str, column: str, row: Row) -> Row:
    if column not in row:
        raise _refused(path, f"images: {column!r} is no column; it has {', '.join(row)}")
    given = row[column]
    return dict(row) | {
        "images": [_opened(path, column, each) for each in (given if isinstance(given, list) else [given])]
    }


def _opened(path: str, column: str, given: Any) -> Any:
    from PIL import Image  # not at the top: other recipes read no images

    if isinstance(given, Image.Image):
        return given.convert("RGB")
    if not isinstance(given, str):
        raise _refused(path, f"{column} has {type(given).__name__}: expected an image, or a file's name")
    file = Path(path).expanduser().parent / given
    try:
        with Image.open(file) as image:
            return image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise _refused(str(file), f"cannot be read as an image: {error}") from error


def _filled(given: Any, row: Row) -> Any:
    if isinstance(given, Mapping):
        return {name: _filled(value, row) for name, value in given.items()}
    if isinstance(given, list):
        return [_filled(value, row) for value in given]
    alone = str(given).removeprefix("$")
    return row[alone] if given != alone and alone.isidentifier() else Template(str(given)).substitute(row)


def _lines(file: Path) -> Iterator[Row]:
    try:
        data = read_bytes(file)
    except OSError as error:
        raise _refused(str(file), f"cannot be read: {error}") from error
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            yield parse_object(line, f"line {number}", file)


def _refused(path: str, detail: str) -> RecipeError:
    return RecipeError("cannot use the data", [Problem(ProblemKind.FILE, path, detail)])


# Token ids


def prompt_ids(tokenizer: Any, prompt: Any) -> list[int]:
    """Token ids of a prompt, up to where the answer begins.

    Args:
        tokenizer: the checkpoint's.
        prompt: text, which is taken as it is, or messages.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))


def answered_ids(tokenizer: Any, prompt: Any, answer: Any) -> tuple[list[int], list[bool]]:
    """Token ids of a prompt and its answer, and which of them are the answer's, its end included.

    Args:
        tokenizer: the checkpoint's.
        prompt: text or messages; None if `answer` is a whole chat or a whole text.
        answer: text, or messages: those that follow the prompt, or all.

    Raises:
        NRLModelsError: a chat template that writes a prompt otherwise once it is answered, or no answer.
    """
    if prompt is not None and not isinstance(answer, str) and answer[0]["role"] != "assistant":
        prompt = None  # which the chat has in it
    if isinstance(answer, str) and not isinstance(prompt, list):
        start = [] if prompt is None else prompt_ids(tokenizer, prompt)
        rest = list(tokenizer(answer, add_special_tokens=prompt is None)["input_ids"])
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return start + rest + end, [False] * len(start) + [True] * len(rest + end)
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    chat = [*(prompt or []), *answer]
    if len(chat) < 2:
        raise NRLModelsError("a chat has to have a question and an answer")
    start = prompt_ids(tokenizer, chat[:-1] if prompt is None else prompt)
    whole = list(tokenizer.apply_chat_template(chat, return_dict=False))
    if whole[: len(start)] != start:
        raise NRLModelsError(
            "the chat template writes a question otherwise once it is answered, so that what is learnt is not what is "
            "asked: give rows with a `prompt` and a `completion` of plain text"
        )
    return whole, [False] * len(start) + [True] * (len(whole) - len(start))


def sequences_of(tokenizer: Any, row: Row, *, pairs: bool) -> list[tuple[list[int], list[bool]]]:
    """The sequences of a row: one for supervised learning; of `pairs` the chosen and the rejected one.

    Raises:
        RecipeError: columns that are missing.
    """
    prompt = row.get("prompt")
    if pairs and {"chosen", "rejected"} <= row.keys():
        return [answered_ids(tokenizer, prompt, row[name]) for name in ("chosen", "rejected")]
    for name in () if pairs else ("completion", "messages", "text"):
        if name in row and (name != "completion" or prompt is not None):
            return [answered_ids(tokenizer, prompt if name == "completion" else None, row[name])]
    wanted = "chosen and rejected" if pairs else "prompt and completion, or messages, or text"
    raise _refused("a row", f"has {', '.join(row)}: expected {wanted}")


def padded_rows(
    sequences: Sequence[tuple[Sequence[int], Sequence[bool]]], pad: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequences of several lengths, padded on the right: ids, which are there, and which are answers.

    `(sequences, length)` each; int64, bool and bool.
    """
    rows = [torch.tensor(row) for row, _ in sequences]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad)
    there = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], batch_first=True)
    answers = pad_sequence([torch.tensor(row) for _, row in sequences], batch_first=True)
    return ids.to(device), there.to(device), answers.to(device)
