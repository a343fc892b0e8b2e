"""End tokens of the configuration, the generation configuration and the tokenizer that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest
from recipe_inputs import byte_tokenizer
from transformers import GenerationConfig, LlamaConfig

from nrl_models.diagnostics.end_tokens import EndTokenFindings, compare_end_tokens, turn_end_token

END, TURN, DOCUMENT = 1, 300, 301
"""The tokenizer's end token, and other special tokens."""

ORDINARY = 77

TURNS = "{% for m in messages %}{{ m['role'] }}{{ m['content'] }}<|turn|>{% endfor %}"
"""A chat template whose turns end with `TURN`, not with `END`."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(LlamaConfig(eos_token_id=END), {"<|turn|>": TURN, "<|document|>": DOCUMENT})


def compared(tokenizer: Any, config: Any, generation: Any) -> EndTokenFindings:
    generation_config = None if generation is None else GenerationConfig(eos_token_id=generation)
    return compare_end_tokens(tokenizer, LlamaConfig(eos_token_id=config), generation_config)


@pytest.mark.parametrize(
    ("config", "generation"),
    [
        (END, END),
        (END, None),
        (None, END),
        (END, [END, TURN]),  # Qwen
        (TURN, [TURN, END]),  # Llama 3: config.json names another token of the list
        ([END, TURN], [END]),
    ],
)
def test_sources_with_common_token_agree(tokenizer: Any, config: Any, generation: Any) -> None:
    assert compared(tokenizer, config, generation) == EndTokenFindings()


@pytest.mark.parametrize(
    ("config", "generation", "text"),
    [
        (END, ORDINARY, "generation_config.json has eos_token_id 77, but config.json has eos_token_id 1 and"),
        (END, [ORDINARY], "generation_config.json has eos_token_id 77"),
        (ORDINARY, END, "config.json has eos_token_id 77, but generation_config.json has eos_token_id 1"),
        (ORDINARY, None, "config.json has eos_token_id 77, but the tokenizer has eos_token_id 1"),
        (None, ORDINARY, "generation_config.json has eos_token_id 77, but the tokenizer"),
        (END, TURN, "the chat template ends a turn with 1, so completions do not end there"),
    ],
)
def test_contradicting_end_tokens_are_wrong(tokenizer: Any, config: Any, generation: Any, text: str) -> None:
    findings = compared(tokenizer, config, generation)
    assert text in "; ".join(findings.wrong)
    assert not findings.doubtful


@pytest.mark.parametrize(
    ("config", "generation", "text"),
    [
        (TURN, END, "config.json has eos_token_id 300, but generation_config.json"),
        (TURN, TURN, "the tokenizer has eos_token_id 1, but config.json has eos_token_id 300"),
        (END, [END, ORDINARY], "generation_config.json: end token 77"),
        (TURN, DOCUMENT, "config.json has eos_token_id 300, but"),
    ],
)
def test_possibly_intended_differences_are_doubtful(tokenizer: Any, config: Any, generation: Any, text: str) -> None:
    findings = compared(tokenizer, config, generation)
    assert text in "; ".join(findings.doubtful)
    assert not findings.wrong


def test_class_default_is_used_without_generation_config(tokenizer: Any) -> None:
    generation_config = GenerationConfig(eos_token_id=END)
    assert (
        compare_end_tokens(tokenizer, LlamaConfig(eos_token_id=ORDINARY), generation_config, is_default=True)
        == EndTokenFindings()
    )
    assert compare_end_tokens(tokenizer, LlamaConfig(eos_token_id=ORDINARY), None, is_default=True).wrong


def test_turn_end_token_agrees(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TURNS)
    assert turn_end_token(tokenizer) == TURN
    assert compared(tokenizer, END, TURN) == EndTokenFindings()  # Kimi K2


def test_special_token_without_template_is_doubtful(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    findings = compared(tokenizer, END, TURN)
    assert findings.doubtful
    assert not findings.wrong
