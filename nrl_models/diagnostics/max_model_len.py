"""Diagnostic 1: does the engine keep to `max_model_len`?

An engine that does not reads and writes behind its tables once a sequence is long enough.
"""

from __future__ import annotations

from collections.abc import Sequence

from nrl_models.diagnostics.result import Diagnosis
from nrl_models.engines.base import Engine
from nrl_models.errors import EngineError
from nrl_models.logprobs.sampling import Sampling

PROMPT_TOKENS = 8


def diagnose_max_model_len(engine: Engine, subject: str, prompt: Sequence[int]) -> Diagnosis:
    """Ask for more tokens than fit, and see where the engine stops.

    Args:
        engine: started with a small limit (the guide's is 20).
        subject: the checkpoint, for the output.
        prompt: token ids; of a long one the first 8 are used.

    Raises:
        EngineError: the engine has no limit of its own, or one that leaves no room.
    """
    result = Diagnosis("max-model-len", subject)
    known = engine.capabilities()
    limit = known.max_length
    if not known.own_limit or limit is None:
        raise EngineError(f"{engine.name} has no limit of its own, so there is nothing to check")
    prompt = list(prompt)[: min(PROMPT_TOKENS, limit - 1)]
    if not prompt:
        raise EngineError(f"a limit of {limit} leaves no room for a prompt and a token")
    result.measured = {"max_model_len": limit, "prompt_tokens": len(prompt)}
    result.say(f"Prompt tokens: {len(prompt)}")
    try:
        sample = engine.generate([prompt], Sampling(0.0), max_new_tokens=limit, beyond_limit=True)[0]
    except EngineError as error:
        result.say(f"Refused: {error}")
        result.measured["refused"] = True
        return result.finish()
    total = len(prompt) + len(sample.tokens)
    result.say(f"Generated tokens: {len(sample.tokens)}")
    result.say(f"Total tokens: {total}")
    result.measured |= {"generated_tokens": len(sample.tokens), "total_tokens": total, "refused": False}
    return result.finish("" if total <= limit else f"{total} tokens, and max_model_len is {limit}")
