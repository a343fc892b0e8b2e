"""Main loop of an engine's subprocess, and vLLM as its model, which `environment.py` runs with another interpreter.

Imports only vLLM and the standard library, so that it works with any version of them.

Each line of standard input is a JSON request, and each line of standard output is the JSON answer to it. A request has
a number, `id`, which its answer repeats. The first request has the load options; its answer describes the model. Later
requests name a `call`. If a call fails, the answer has the message in `error`. Ctrl-C in a terminal interrupts only the
parent process.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

DISPENSABLE = ("kv_cache_memory_bytes", "logprobs_mode")
"""Keywords that some versions lack. Greedy decoding works without them."""


def serve(load: Callable[..., Any]) -> None:
    """Load a model, then answer requests until standard input ends.

    Args:
        load: Returns the model, given the load options. Requests can call the model's public methods.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other code's prints must not mix with the answers

    def answer(line: str, give: Callable[..., dict[str, Any]]) -> bool:
        request = json.loads(line)
        number = request.pop("id")
        try:
            content = give(**request)
        except Exception as error:  # any error of the engine and the model's code
            content = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": number} | content), file=answers, flush=True)
        return "error" not in content

    models: list[Any] = []

    def first(**options: Any) -> dict[str, Any]:
        models.append(load(**options))
        described: dict[str, Any] = models[0].describe()
        return described

    if not answer(sys.stdin.readline(), first):
        sys.exit(1)
    for line in sys.stdin:
        answer(line, lambda call, **options: getattr(models[0], call)(**options))


class VLLM:
    """vLLM as the model of a subprocess.

    Args:
        keywords: Keywords of `vllm.LLM`.
    """

    def __init__(self, **keywords: Any) -> None:
        import torch
        import vllm
        from vllm.engine.arg_utils import EngineArgs

        known = getattr(EngineArgs, "__dataclass_fields__", {})
        left_out = [name for name in DISPENSABLE if name in keywords and name not in known]
        if torch.cuda.is_available():
            left_out.append("kv_cache_memory_bytes")
        self.keywords = {name: value for name, value in keywords.items() if name not in left_out}
        self.vllm, self.llm = vllm, vllm.LLM(**self.keywords)

    def describe(self) -> dict[str, Any]:
        """Return version and settings."""
        config = self.llm.llm_engine.vllm_config
        return {
            "vllm": getattr(self.vllm, "__version__", "unknown"),
            "logprobs_mode": self.keywords.get("logprobs_mode", "raw_logprobs"),
            "dtype": str(config.model_config.dtype).rpartition(".")[2],
            "max_model_len": config.model_config.max_model_len,
            "vocabulary": config.model_config.get_vocab_size(),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        }

    def generate(
        self, prompts: list[list[int]], sampling: dict[str, Any], max_new_tokens: int, seeds: list[int], ends: Any
    ) -> dict[str, Any]:
        """Sample a continuation of each prompt. Without `ends`, nothing ends it early."""
        options = sampling | {"max_tokens": max_new_tokens, "logprobs": 0}
        options |= {"ignore_eos": ends is None, "stop_token_ids": ends}
        samples = []
        for output in self._run(prompts, seeds, options):
            best = output.outputs[0]
            tokens = list(best.token_ids)
            logprobs = chosen(best.logprobs, tokens)
            samples.append({"tokens": tokens, "logprobs": logprobs, "finish_reason": best.finish_reason})
        return {"samples": samples}

    def score(self, sequences: list[list[int]], sampling: dict[str, Any], last: int | None) -> dict[str, Any]:
        """Return the log-probability of each token except the first, at temperature 1."""
        options = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}
        outputs = self._run(sequences, [0] * len(sequences), options)
        pairs = zip(outputs, sequences, strict=True)
        return {"scores": [chosen(output.prompt_logprobs[1:], tokens[1:]) for output, tokens in pairs]}

    def _run(self, prompts: list[list[int]], seeds: list[int], options: dict[str, Any]) -> Any:
        """Run vLLM. Greedy decoding has no seeds."""
        options = options | {"detokenize": False}
        prompt_seeds = seeds if options["temperature"] > 0 else [None] * len(prompts)
        sampling = [self.vllm.SamplingParams(**options, seed=seed) for seed in prompt_seeds]
        try:
            return self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        except Exception:
            abort(self.llm)
            raise


def abort(llm: Any) -> None:
    """Abort requests of a failed call, so that they are not part of the next answer."""
    with suppress(Exception):  # an engine that has died
        processor = llm.llm_engine.output_processor
        llm.llm_engine.abort_request(list(getattr(processor, "external_req_ids", processor.request_states)))


def chosen(positions: Any, tokens: list[int]) -> list[float | None]:
    """Look up the log-probability of each token by its id. NaN becomes None, because JSON lacks it."""
    logprobs = [float(candidates[token].logprob) for candidates, token in zip(positions, tokens, strict=True)]
    return [None if math.isnan(value) else value for value in logprobs]


if __name__ == "__main__":
    serve(VLLM)
