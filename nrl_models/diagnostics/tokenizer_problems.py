"""Find tokenizers and chat templates that load, and do not encode what they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nrl_models.errors import one_line

TEXT = "What is 2 + 3?"
"""Text that every tokenizer of a language model can encode."""


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
            messages = [{"role": "user", "content": TEXT}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # any error of the template
            wrong.append(f"the chat template fails: {one_line(error)}")
        else:
            if TEXT not in prompt:
                wrong.append(f"the chat template drops the message: it renders {TEXT!r} as {prompt[:80]!r}")
    return wrong


def empty_templates(folder: Path) -> list[str]:
    """Return a problem if the checkpoint has an empty file of a chat template."""
    file = folder / "chat_template.jinja"
    return ["chat_template.jinja is empty"] if file.is_file() and not file.read_text().strip() else []
