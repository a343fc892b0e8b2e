"""Subprocess of `environment.py`: runs vLLM with the interpreter of its environment.

Imports only vLLM and the standard library, so that it works with any version of them.

Each line of standard input is a JSON request, and each line of standard output is the JSON answer to it. A request has
a number, `id`, which its answer repeats. The first request has keywords of `vllm.LLM`; its answer describes the engine.
If vLLM raises, the answer has the message in `error`. Ctrl-C in a terminal interrupts only the parent process.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from contextlib import suppress
from typing import Any

DISPENSABLE = ("kv_cache_memory_bytes", "logprobs_mode")
"""Keywords that some versions lack. Greedy decoding works without them."""


def main() -> None:
    """Start the engine, then answer requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to standard output

    def answer(number: int, content: dict[str, Any]) -> None:
        print(json.dumps({"id": number} | content), file=answers, flush=True)

    keywords = json.loads(sys.stdin.readline())
    number = keywords.pop("id")
    try:
        llm, described = started(keywords)
    except Exception as error:  # any error of vLLM and the model's code
        answer(number, {"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)
    answer(number, described)
    for line in sys.stdin:
        request = json.loads(line)
        number = request.pop("id")
        try:
            answer(number, {"samples": generated(llm, request)})
        except Exception as error:
            answer(number, {"error": f"{type(error).__name__}: {error}"})
            abort(llm)


def abort(llm: Any) -> None:
    """Abort requests of a failed call, so that they are not part of the next answer."""
    with suppress(Exception):  # an engine that has died
        processor = llm.llm_engine.output_processor
        llm.llm_engine.abort_request(list(getattr(processor, "external_req_ids", processor.request_states)))


def started(keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Start the engine. Returns it and its description."""
    import torch
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    known = getattr(EngineArgs, "__dataclass_fields__", {})
    left_out = [name for name in DISPENSABLE if name in keywords and name not in known]
    if torch.cuda.is_available():
        left_out.append("kv_cache_memory_bytes")
    keywords = {name: value for name, value in keywords.items() if name not in left_out}
    llm = vllm.LLM(**keywords)
    config = llm.llm_engine.vllm_config
    return llm, {
        "vllm": getattr(vllm, "__version__", "unknown"),
        "logprobs_mode": keywords.get("logprobs_mode", "raw_logprobs"),
        "dtype": str(config.model_config.dtype).rpartition(".")[2],
        "max_model_len": config.model_config.max_model_len,
        "vocabulary": config.model_config.get_vocab_size(),
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
    }


def generated(llm: Any, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Generate completions. Returns tokens and log-probabilities, also of the prompts if requested."""
    import vllm

    seeds = request["seeds"]
    sampling = [vllm.SamplingParams(**request["sampling"], seed=seed) for seed in seeds]
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    samples = []
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    for prompt, output in zip(request["prompts"], outputs, strict=True):
        best = output.outputs[0]
        tokens = list(best.token_ids)
        sample = {"tokens": tokens, "finish_reason": best.finish_reason}
        if "logprobs" in request["sampling"]:
            sample["logprobs"] = chosen(best.logprobs, tokens)
        if output.prompt_logprobs is not None:
            sample["prompt_logprobs"] = chosen(output.prompt_logprobs[1:], prompt[1:])
        samples.append(sample)
    return samples


def chosen(places: Any, tokens: list[int]) -> list[float | None]:
    """Look up the log-probability of each token by its id. NaN becomes None, because JSON lacks it."""
    found = [float(place[token].logprob) for place, token in zip(places, tokens, strict=True)]
    return [None if math.isnan(value) else value for value in found]


if __name__ == "__main__":
    main()
