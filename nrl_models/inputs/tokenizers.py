"""Load a checkpoint's tokenizer, and find the tokens that end a completion."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from nrl_models.common.checkpoint.generations import require_links_inside
from nrl_models.common.checkpoint.json_reading import POINTER, POINTER_ADVICE, pointers_in
from nrl_models.common.checkpoint.local_path import is_gguf
from nrl_models.common.config.generation import generation_settings
from nrl_models.common.gguf import gguf_tables
from nrl_models.common.logs import get_logger
from nrl_models.common.value_checks import is_integer
from nrl_models.errors import ConfigurationError, ConsistencyError, Problem, ProblemKind, listed, one_line, shown

logger = get_logger(__name__)


def load_tokenizer(path: str | Path) -> Any | None:
    """Load the tokenizer of a checkpoint directory or GGUF file; None if there is none.

    Raises:
        ConsistencyError: If the tokenizer does not load.
        CheckpointError: If a file is a link to a file outside of the directory.
    """
    from transformers import AutoTokenizer

    if is_gguf(path):
        return gguf_tables.load_tokenizer(Path(path))
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((Path(path) / name).is_file() for name in names):
        return None
    require_links_inside(Path(path))
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # any error of the tokenizer's code
        if pointers := pointers_in(Path(path)):
            problem = f"the tokenizer in {path} does not load: {listed(pointers)} {POINTER}"
            raise ConsistencyError(problem, f"  What to do: {POINTER_ADVICE}") from error
        raise ConsistencyError(f"the tokenizer in {path} does not load: {one_line(error)}") from error


def end_tokens(path: str | Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the token ids that end a completion: those of the generation configuration, and the tokenizer's end token.

    A vLLM server with the tokenizer uses the same token ids. Token ids outside the vocabulary are left out: no model
    samples them, and vLLM rejects requests with them.

    Args:
        path: Directory of the checkpoint.
        config: Its configuration, used if there is no generation_config.json, as in transformers and vLLM.

    Raises:
        CheckpointError: If a file is a link to a file outside of the directory, or the generation configuration is not
            valid.
        ConfigurationError: If an end token is not a token ID.
    """
    require_links_inside(Path(path))
    generation = generation_settings(Path(path))
    if generation is None:
        generation = GenerationConfig.from_model_config(config)
    ends = {*as_ids(generation.eos_token_id), *tokenizer_ends(path)}
    vocabulary = getattr(config.get_text_config(decoder=True), "vocab_size", math.inf)
    return tuple(sorted(end for end in ends if end < vocabulary))


def tokenizer_ends(path: str | Path) -> tuple[int, ...]:
    """Return the end token of a checkpoint's tokenizer. Empty if there is no tokenizer, or it has no end token."""
    try:
        tokenizer = load_tokenizer(path)
    except ConsistencyError as error:
        logger.warning(f"{error}. Completions do not end at its end token.")
        return ()
    return () if tokenizer is None else as_ids(tokenizer.eos_token_id)


def as_ids(value: Any, key: str = "eos_token_id") -> tuple[int, ...]:
    """Return the end tokens of a configuration, which has none, one or a list of them.

    Args:
        value: The value in the configuration.
        key: Its key, shown in errors.

    Raises:
        ConfigurationError: If one is not a token ID. Negative numbers mean none, as in some published configurations.
    """
    listed = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    if wrong := [each for each in listed if not is_integer(each, -math.inf)]:
        problem = Problem(ProblemKind.CONFIG, key, f"is {shown(wrong[0])}: expected a token ID or a list")
        raise ConfigurationError("invalid token IDs", [problem], ["correct config.json or generation_config.json"])
    return tuple(int(each) for each in listed if each >= 0)
