"""Rows with values of other types, tokenizers without special tokens, and texts that begin with one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from recipe_inputs import byte_tokenizer
from tokenizers import processors
from transformers import LlamaConfig

from nrl_models.errors import NRLModelsError, RecipeError, UnknownArgumentError
from nrl_models.recipes.reward_rules import boxed, last_number
from nrl_models.recipes.rollouts import PolicyLoop
from nrl_models.recipes.rows import answered_ids, prompt_ids
from nrl_models.testing.tiny import tiny_config

CONFIG = tiny_config(LlamaConfig)
TOKENIZER = byte_tokenizer(CONFIG)
QUESTION = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("answer", [None, 5, {"role": "assistant", "content": "Ho"}, ["Ho"], [{"content": "Ho"}]])
def test_invalid_answer_types_raise(answer: Any) -> None:
    with pytest.raises(NRLModelsError, match=r"the answer is .*: expected text, or a list of messages"):
        answered_ids(TOKENIZER, QUESTION, answer)


@pytest.mark.parametrize("prompt", [None, 5, QUESTION[0], ["Hi"], [{"role": "user"}]])
def test_invalid_prompt_types_raise(prompt: Any) -> None:
    with pytest.raises(NRLModelsError, match=r"the prompt is .*: expected text, or a list of messages"):
        prompt_ids(TOKENIZER, prompt)
    if prompt is not None:
        with pytest.raises(NRLModelsError, match=r"the prompt is .*: expected text, or a list of messages"):
            answered_ids(TOKENIZER, prompt, "Ho")


def test_text_with_bos_is_not_prefixed_again() -> None:
    """Chats that were rendered to text begin with BOS, and the tokenizer prepends one."""
    tokenizer = byte_tokenizer(CONFIG, {"<start>": 300})
    tokenizer.bos_token = "<start>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", 300)]
    )
    assert tokenizer.decode(tokenizer("<start>Hi")["input_ids"]) == "<start><start>Hi"
    for prompt in ("Hi", "<start>Hi"):
        assert tokenizer.decode(prompt_ids(tokenizer, prompt)) == "<start>Hi"
        assert tokenizer.decode(answered_ids(tokenizer, None, prompt)[0]) == "<start>Hi<end>"


def test_tokenizer_without_eos_raises() -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.eos_token = None
    with pytest.raises(NRLModelsError, match="has no `eos_token`, so the model would not learn to stop"):
        answered_ids(tokenizer, "Hi", "Ho")


def test_unknown_token_is_not_end_of_turn() -> None:
    """A tokenizer without a token for a line break writes its unknown token there."""
    tokenizer = byte_tokenizer(CONFIG, {"<unknown>": 300})
    tokenizer.unk_token = "<unknown>"
    tokenizer.chat_template = tokenizer.chat_template.replace("eos_token", "'<unknown>'")
    with pytest.raises(NRLModelsError, match="no end-of-turn token after an answer"):
        answered_ids(tokenizer, QUESTION, "Ho")


@pytest.mark.parametrize("rule", [last_number, boxed])
def test_reward_rule_names_missing_column(rule: Any) -> None:
    with pytest.raises(RecipeError, match="a row: has solution: expected answer, the right answer"):
        rule({"solution": "3"}, "3", True)


@pytest.mark.parametrize("name", ["group", "new_tokens", "updates"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_invalid_policy_loop_numbers_raise(name: str, value: Any) -> None:
    parts: Any = dict.fromkeys(("model", "optimizer", "engine", "tokenizer", "reward", "settings"))
    with pytest.raises(UnknownArgumentError, match=f"{name}=.*: expected a whole number above 0"):
        PolicyLoop(**parts, **{"group": 2, "new_tokens": 4, name: value})
