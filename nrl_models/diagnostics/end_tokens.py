"""Compare the end tokens of the configuration, the generation configuration and the tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from nrl_models.common.checkpoint.local_path import CONFIG_NAME, GENERATION_NAME
from nrl_models.diagnostics.tokenizer_problems import rendered_turn
from nrl_models.errors import listed
from nrl_models.inputs.tokenizers import as_ids

TOKENIZER = "the tokenizer"


@dataclass(frozen=True, slots=True)
class EndTokenFindings:
    """Result of comparing end tokens.

    Args:
        wrong: Contradictions: a source names none of the end tokens that the others name, and cannot be right.
        doubtful: Differences that may be intended.
    """

    wrong: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()


def compare_end_tokens(
    tokenizer: Any, config: PreTrainedConfig, generation: GenerationConfig | None, *, is_default: bool = False
) -> EndTokenFindings:
    """Compare the `eos_token_id` of all sources. Published checkpoints may list more tokens in one than in another.

    A source that shares no token with the others is a contradiction if all its tokens are ordinary text, or if the
    chat template ends a turn with a token of the others. Otherwise it is doubtful, because models may end a turn and a
    document with different tokens.

    Args:
        tokenizer: The tokenizer.
        config: The text configuration.
        generation: The generation configuration; None if the checkpoint has none.
        is_default: Whether config.json has no `eos_token_id`, so `config` has the default of its class. If the
            generation configuration has end tokens, the default is not used, and not compared.
    """
    sources = {
        CONFIG_NAME: {*as_ids(getattr(config, "eos_token_id", None))},
        GENERATION_NAME: {*as_ids(generation.eos_token_id)} if generation is not None else set(),
        TOKENIZER: {*as_ids(tokenizer.eos_token_id)},
    }
    if is_default and sources[GENERATION_NAME]:
        del sources[CONFIG_NAME]
    sources = {name: tokens for name, tokens in sources.items() if tokens}
    ordinary = set().union(*sources.values()) & {*tokenizer.get_vocab().values()} - special_tokens(tokenizer)
    turn_end = turn_end_token(tokenizer)
    wrong, doubtful = [], []
    for name in sources:
        tokens, others = sources[name], {other: ids for other, ids in sources.items() if other != name}
        if not _is_odd(tokens, others):
            continue
        text = f"{_named(name, tokens)}, but {' and '.join(_named(*other) for other in others.items())}"
        if tokens <= ordinary:
            wrong.append(f"{text}; {_words(tokenizer, tokens)} is ordinary text")
        elif name == GENERATION_NAME and turn_end in tokens:
            continue  # a turn ends with another token than a document
        elif name == GENERATION_NAME and turn_end in set.intersection(*others.values()):
            wrong.append(f"{text}; the chat template ends a turn with {turn_end}, so completions do not end there")
        else:
            doubtful.append(text)
    if wrong:  # the others are then odd only because of this one
        return EndTokenFindings(tuple(wrong[:1]))
    if not doubtful and (surplus := sorted(ordinary)):
        holders = [name for name, tokens in sources.items() if tokens & ordinary]
        doubtful.append(f"{' and '.join(holders)}: end token {_words(tokenizer, surplus)} is ordinary text")
    return EndTokenFindings(doubtful=tuple(doubtful[:1]))


def has_key(content: object, key: str) -> bool:
    """Return True if a JSON object, or one inside it, has a key."""
    return isinstance(content, Mapping) and (key in content or any(has_key(part, key) for part in content.values()))


def special_tokens(tokenizer: Any) -> set[int]:
    """Return the ids of added and special tokens, which text does not contain."""
    return {*getattr(tokenizer, "added_tokens_decoder", ()), *tokenizer.all_special_ids}


def turn_end_token(tokenizer: Any) -> int | None:
    """Return the special token with which the chat template ends the assistant's turn; None if there is none."""
    rest = rendered_turn(tokenizer)[1].lstrip()
    ids = tokenizer(rest, add_special_tokens=False)["input_ids"] if rest else []
    return ids[0] if ids and ids[0] in special_tokens(tokenizer) else None


def _is_odd(tokens: set[int], others: Mapping[str, set[int]]) -> bool:
    """Return True if tokens occur in no other source."""
    return bool(others) and not any(tokens & ids for ids in others.values())


def _named(name: str, tokens: Collection[int]) -> str:
    return f"{name} has eos_token_id {listed(map(str, sorted(tokens)))}"


def _words(tokenizer: Any, tokens: Collection[int]) -> str:
    return listed(f"{token} ({tokenizer.convert_ids_to_tokens(token)!r})" for token in sorted(tokens))
