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
"""A template that ends turns with another token than documents."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(LlamaConfig(eos_token_id=END), {"<|turn|>": TURN, "<|document|>": DOCUMENT})


def compared(tokenizer: Any, config: Any, generation: Any) -> EndTokenFindings:
    own = None if generation is None else GenerationConfig(eos_token_id=generation)
    return compare_end_tokens(tokenizer, LlamaConfig(eos_token_id=config), own)


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
def test_sources_that_share_a_token_agree(tokenizer: Any, config: Any, generation: Any) -> None:
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
def test_contradictions_are_wrong(tokenizer: Any, config: Any, generation: Any, text: str) -> None:
    found = compared(tokenizer, config, generation)
    assert text in "; ".join(found.wrong)
    assert not found.doubtful


@pytest.mark.parametrize(
    ("config", "generation", "text"),
    [
        (TURN, END, "config.json has eos_token_id 300, but generation_config.json"),
        (TURN, TURN, "the tokenizer has eos_token_id 1, but config.json has eos_token_id 300"),
        (END, [END, ORDINARY], "generation_config.json: end token 77"),
        (TURN, DOCUMENT, "config.json has eos_token_id 300, but"),
    ],
)
def test_differences_that_may_be_intended_are_doubtful(tokenizer: Any, config: Any, generation: Any, text: str) -> None:
    found = compared(tokenizer, config, generation)
    assert text in "; ".join(found.doubtful)
    assert not found.wrong


def test_default_of_the_class_counts_only_without_a_generation_configuration(tokenizer: Any) -> None:
    own = GenerationConfig(eos_token_id=END)
    assert compare_end_tokens(tokenizer, LlamaConfig(eos_token_id=ORDINARY), own, is_default=True) == EndTokenFindings()
    assert compare_end_tokens(tokenizer, LlamaConfig(eos_token_id=ORDINARY), None, is_default=True).wrong


def test_generation_may_end_at_the_end_of_a_turn(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TURNS)
    assert turn_end_token(tokenizer) == TURN
    assert compared(tokenizer, END, TURN) == EndTokenFindings()  # Kimi K2


def test_without_a_template_another_special_token_is_doubtful(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    found = compared(tokenizer, END, TURN)
    assert found.doubtful
    assert not found.wrong
