"""Validate answers of an engine in another process field by field, because they are untrusted data."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from nrl_models.common.trust.servers import hidden
from nrl_models.engines.engine_types import AT_PLACEHOLDER, Sample, Tokens
from nrl_models.errors import EngineError, shown

MINUS_INFINITY = -9999.0
"""Value that vLLM sends for -infinity and all lower values, because JSON has no infinity."""

LARGEST_LOGPROB = 0.1
"""Maximum of log-probabilities. Rounding in a bfloat16 softmax can make them exceed 0."""

MOST_TOKENS = 2**31
"""Limit of token ids if the vocabulary size is unknown."""

_TOKEN_NAME = re.compile(r"token_id:(\d{1,10})")


@dataclass(frozen=True, slots=True)
class Checked:
    """Read values of an answer. Each method raises an `EngineError` with field, value and expected value.

    Args:
        engine_name: Name of the engine in errors.
        vocabulary: Number of token ids; None if unknown.
        secrets: Texts to hide in errors, in case the engine's answer repeats them.
    """

    engine_name: str
    vocabulary: int | None = None
    secrets: tuple[str, ...] = ()

    def error(self, text: str) -> EngineError:
        """Return an error about the engine, without secrets."""
        return EngineError(hidden(f"{self.engine_name} {text}", self.secrets))

    def wrong(self, field: str, value: Any, expected: str) -> NoReturn:
        """Raise the error for a field."""
        # Shorten the value to a line, because an answer may be long or deeply nested. Hide secrets before that, because
        # a truncated or escaped secret would not be recognized.
        if isinstance(value, str):
            value = hidden(value, self.secrets)
        plain = isinstance(value, (str, int, float, type(None)))
        description = shown(value) if plain else f"a {type(value).__name__}"
        raise self.error(f"returned an invalid answer: {field} is {description}, expected {expected}")

    def mapping(self, value: Any, field: str) -> dict[str, Any]:
        """Check a JSON object."""
        return value if isinstance(value, dict) else self.wrong(field, value, "an object")

    def listed(self, value: Any, field: str, length: int | None = None) -> list[Any]:
        """Check a list, and its length if one is passed."""
        if not isinstance(value, list):
            self.wrong(field, value, "a list")
        if length is not None and len(value) != length:
            self.wrong(f"the length of {field}", len(value), str(length))
        return value

    def text(self, value: Any, field: str) -> str:
        """Check a name: a printable string."""
        return value if isinstance(value, str) and value.isprintable() else self.wrong(field, value, "a name")

    def whole(self, value: Any, field: str, least: int, below: int = MOST_TOKENS) -> int:
        """Check an integer from `least` to `below`, exclusive."""
        if type(value) is not int or not least <= value < below:
            self.wrong(field, value, f"a whole number from {least} to {below - 1}")
        return value

    def token_ids(self, value: Any, field: str) -> tuple[int, ...]:
        """Check a list of token ids in the vocabulary."""
        below = MOST_TOKENS if self.vocabulary is None else self.vocabulary
        return tuple(
            self.whole(token, f"{field}[{index}]", 0, below) for index, token in enumerate(self.listed(value, field))
        )

    def named_token_ids(self, value: Any, field: str) -> tuple[int, ...] | None:
        """Parse ids that are written as names, `token_id:5`. Returns None if the names are text."""
        matches = [_TOKEN_NAME.fullmatch(name) if isinstance(name, str) else None for name in self.listed(value, field)]
        if not matches or None in matches:
            return None
        return self.token_ids([int(match[1]) for match in matches if match], field)

    def samples(self, answers: Sequence[Any], prompts: Sequence[Tokens]) -> list[Sample]:
        """Read the completion of each prompt."""
        samples = []
        for number, (value, prompt) in enumerate(zip(answers, prompts, strict=True)):
            at = f"samples[{number}]"
            sample = self.mapping(value, at)
            tokens = self.token_ids(sample.get("tokens"), f"{at}.tokens")
            logprobs = self.logprobs(sample.get("logprobs"), f"{at}.logprobs", len(tokens))
            samples.append(Sample(tuple(prompt), tokens, logprobs, str(sample.get("finish_reason") or "unfinished")))
        return samples

    def logprobs(self, value: Any, field: str, length: int | None = None) -> tuple[float, ...]:
        """Check a list of log-probabilities, see `logprob`."""
        listed = self.listed(value, field, length)
        return tuple(self.logprob(each, f"{field}[{index}]") for index, each in enumerate(listed))

    def logprob(self, value: Any, field: str) -> float:
        """Parse a log-probability. NaN is sent as null, and -inf as -9999 by vLLM, because JSON lacks both."""
        if value is None:
            return math.nan
        if type(value) not in (int, float) or not value <= LARGEST_LOGPROB:
            self.wrong(field, value, "a log-probability: a number of at most 0")
        return -math.inf if value <= MINUS_INFINITY else float(value)

    def logprobs_by_id(self, value: Any, tokens: Sequence[int], field: str) -> list[float]:
        """Return the log-probability of each of `tokens`, looked up by id. The first token has NaN."""
        result = [math.nan]
        for index, (candidates, token) in enumerate(zip(self.listed(value, field, len(tokens)), tokens, strict=True)):
            if index:
                at = f"{field}[{index}]"
                candidate = self.mapping(candidates, at).get(str(token))
                result.append(self.logprob(self.mapping(candidate, f"{at}[{token}]").get("logprob"), f"{at}[{token}]"))
        return result


def require_complete(
    engine_name: str, samples: Sequence[Sample], max_new_tokens: int, *, ignore_end: bool, beyond_limit: bool
) -> None:
    """Check the lengths of samples. For arguments, see `Engine.generate`.

    Raises:
        EngineError: If a sample has too many tokens, ended too early, or was aborted.
    """
    lengths = [len(sample.tokens) for sample in samples]
    if max(lengths, default=0) > max_new_tokens:
        raise EngineError(f"{engine_name} generated {max(lengths)} tokens, but max_new_tokens is {max_new_tokens}")
    short = [index for index, length in enumerate(lengths) if length != max_new_tokens]
    cut = [index for index in short if samples[index].finish_reason == "length"]
    if cut and not beyond_limit:
        raise EngineError(
            f"{engine_name} stopped sequences {cut} at its own limit, after {[lengths[index] for index in cut]} "
            f"tokens; max_new_tokens is {max_new_tokens}. Request fewer tokens, or raise the limit (vLLM: "
            "max_new_tokens of --override-generation-config, or --max-model-len)"
        )
    known = ("length", "stop", AT_PLACEHOLDER)
    if ended := {index: samples[index].finish_reason for index in short if samples[index].finish_reason not in known}:
        reasons = ", ".join(dict.fromkeys(map(repr, ended.values())))
        raise EngineError(
            f"{engine_name} ended sequences {list(ended)} with finish_reason {reasons}, after "
            f"{[lengths[index] for index in ended]} tokens; expected 'stop', or {max_new_tokens} tokens. The "
            "completions are incomplete: generate them again, after any pause or weight update of the engine"
        )
    at_placeholders = [index for index in short if samples[index].finish_reason == AT_PLACEHOLDER]
    if at_placeholders and ignore_end:
        raise EngineError(
            f"{engine_name} sampled the placeholder of an image, video or audio in sequences {at_placeholders}, which "
            "ends a completion: with these, pass ignore_end=False"
        )
    if short and ignore_end and not beyond_limit:
        raise EngineError(
            f"{engine_name} generated {[lengths[index] for index in short]} tokens for sequences {short}, but "
            f"{max_new_tokens} were requested, past the end of text: the engine ignores `ignore_eos`"
        )
