"""Find tokenizers and chat templates that load, and do not encode what they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nrl_models.errors import one_line

TEXT = "What is 2 + 3?"
"""Text that every tokenizer of a language model can encode."""

ANSWER = "The answer is 5."
"""Content of the assistant's turn of a conversation."""


def encoding_problems(tokenizer: Any, *, templates: bool) -> list[str]:
    """Return why a tokenizer cannot encode text or apply its chat template; empty if it can.

    Args:
        tokenizer: the tokenizer.
        templates: whether to apply its chat template to text. Templates of models with images may need lists of parts.
    """
    wrong = []
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    if not ids or set(ids) == {tokenizer.unk_token_id}:
        wrong.append(f"the tokenizer encodes {TEXT!r} as {ids[:4]}: it knows no word of it")
    if templates and getattr(tokenizer, "chat_template", None):
        try:
            prompt = _rendered(tokenizer, [_USER], add_generation_prompt=True)
        except Exception as error:  # any error of the template
            wrong.append(f"the chat template fails: {one_line(error)}")
        else:
            if TEXT not in prompt:
                wrong.append(f"the chat template drops the message: it renders {TEXT!r} as {prompt[:80]!r}")
    return wrong


def missing_generation_prompt(tokenizer: Any) -> list[str]:
    """Return a problem if `add_generation_prompt` adds nothing, but the template begins the assistant's turn with text.

    The model would have to generate that text itself. Templates that begin the turn with nothing, like Mistral's,
    need no generation prompt.

    Args:
        tokenizer: The tokenizer. Templates that fail are reported by `encoding_problems`.
    """
    begin = rendered_turn(tokenizer)[0]
    if not begin:
        return []
    try:
        prompt, without = (_rendered(tokenizer, [_USER], add_generation_prompt=add) for add in (True, False))
    except Exception:  # any error of the template
        return []
    header = begin.removeprefix(prompt).strip()
    if prompt != without or not begin.startswith(prompt) or not header:
        return []
    return [f"the chat template ignores add_generation_prompt: its prompt lacks {header!r}, which begins a turn"]


def rendered_turn(tokenizer: Any) -> tuple[str, str]:
    """Return what the chat template renders before and after the content of the assistant's turn.

    Both are empty if there is no template, or if it renders no such conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        return "", ""
    try:
        text = _rendered(tokenizer, [_USER, {"role": "assistant", "content": ANSWER}])
    except Exception:  # any error of the template, for example if it takes other contents
        return "", ""
    begin, content, end = text.rpartition(ANSWER)
    return (begin, end) if content else ("", "")


_USER = {"role": "user", "content": TEXT}


def _rendered(tokenizer: Any, messages: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
    assert isinstance(text, str)
    return text


def empty_templates(folder: Path) -> list[str]:
    """Return a problem if the checkpoint has an empty file of a chat template."""
    file = folder / "chat_template.jinja"
    return ["chat_template.jinja is empty"] if file.is_file() and not file.read_text().strip() else []
