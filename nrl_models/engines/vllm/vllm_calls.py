"""Requests of a running vLLM, and methods of its workers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from nrl_models.engines.base import Engine
from nrl_models.engines.engine_types import Tokens
from nrl_models.engines.vllm.vllm_faults import discard_requests, end_waiting_on_death
from nrl_models.engines.vllm.vllm_images import with_images
from nrl_models.engines.vllm.vllm_start import import_vllm
from nrl_models.errors import EngineError, one_line

if TYPE_CHECKING:
    from PIL.Image import Image
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest


class VLLMCalls(Engine):
    """The calls to vLLM on which `VLLMEngine` is built.

    Args:
        llm: See `VLLMEngine`.
    """

    _processing: dict[str, Any] | None = None

    def __init__(self, llm: LLM) -> None:
        self.llm, self.config = llm, llm.llm_engine.vllm_config
        self._adapter: LoRARequest | None = None
        self._in_process = not type(llm.llm_engine.engine_core).__name__.startswith(("Sync", "MP", "Async"))
        if not self._in_process:
            end_waiting_on_death(llm.llm_engine.engine_core)

    def _parameters(self, **options: Any) -> SamplingParams:
        return import_vllm().SamplingParams(detokenize=False, **options)

    def _process_logits(self, processing: dict[str, Any] | None) -> None:
        """Set how the workers process logits. Does nothing if the last call for this was complete and the same."""
        if processing != self._processing:
            self._processing = {}  # unknown, if this is interrupted
            self._call("nrl_process_logits", processing)
            self._processing = processing

    def _run(
        self,
        prompts: Sequence[Tokens],
        requests: Sequence[SamplingParams],
        images: Sequence[Sequence[Image]] | None = None,
        processing: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Run requests in one batch.

        Args:
            prompts: Token ids of each prompt.
            requests: Parameters of each prompt.
            images: Images of each prompt, see `Engine.generate`.
            processing: Fields of the `Sampling` that scores are for, see `ConsistencyWorker.nrl_process_logits`.
        """
        self._process_logits(processing)
        # OpenMP has a number of threads per thread. This applies `torch.set_num_threads` of another thread to this one,
        # as torch's first operation would. vLLM's kernels for CPUs fail if the number changes within a step.
        torch.get_num_threads()
        try:
            # vLLM compiles a helper of its sampler, which takes longer than a small check.
            eager = self._in_process and self.config.model_config.enforce_eager
            with torch.compiler.set_stance("force_eager") if eager else nullcontext():
                inputs = with_images(prompts, images)
                return self.llm.generate(inputs, list(requests), use_tqdm=False, lora_request=self._adapter)
        except BaseException as error:
            discard_requests(self.llm, in_process=self._in_process)
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            raise EngineError(f"vLLM failed: {one_line(error)}") from error  # including the death of its engine

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker. Returns the result of each."""
        try:
            return self.llm.collective_rpc(method, args=args)
        except Exception as error:  # any error of vLLM, including the death of its engine
            raise EngineError(f"vLLM failed: {one_line(error)}") from error
