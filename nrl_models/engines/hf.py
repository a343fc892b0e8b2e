"""transformers as an engine: cached decoding with `generate`, prefill with one forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property, wraps
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from nrl_models.common.checkpoint.resolve_folder import folder_on_disk
from nrl_models.common.config.causality import marks_prefix
from nrl_models.common.config.positions import model_limit
from nrl_models.common.dtypes import dtype_name, support_float64
from nrl_models.common.forward.evaluation import evaluating
from nrl_models.common.recording import record_calls
from nrl_models.common.upstream import cache_in, cache_input
from nrl_models.engines.base import Engine
from nrl_models.engines.digests import HeldWeights, tensor_digest
from nrl_models.engines.engine_types import (
    AT_PLACEHOLDER,
    LOGITS,
    Capabilities,
    ModuleCall,
    NamedTensor,
    Sample,
    Tokens,
    by_length,
)
from nrl_models.engines.group_calls import with_groups
from nrl_models.engines.input_checks import require_options, require_recordable
from nrl_models.engines.refit_targets import RefitTargets
from nrl_models.errors import DeviceError, EngineError, NRLModelsError, one_line
from nrl_models.inputs.images import cast, takes_images
from nrl_models.inputs.placeholders import placeholders
from nrl_models.inputs.tokenizers import as_ids, tokenizer_ends
from nrl_models.loading.placement import present_device
from nrl_models.logprobs.head import output_embedding
from nrl_models.logprobs.sampling import Sampling, processed
from nrl_models.logprobs.tokens import token_logprobs
from nrl_models.parity.check import reference_model

TOKENS_AT_A_TIME = 2**14
"""Maximum number of tokens in a scoring forward, which limits the memory of hidden states and attention."""


def _in_evaluation_mode(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an engine's method to run without gradients and dropout, even while its model is being trained."""

    @wraps(method)
    def compute(self: HFEngine, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), evaluating(self.model):
            return method(self, *args, **kwargs)

    return compute


class HFEngine(Engine):
    """A transformers model as an engine. The trainer is also an `HFEngine`, with this library's model.

    Args:
        model: A causal language model. It runs in evaluation mode, and its mode is restored afterwards.
        name: Name in reports: `hf-generate`, `trainer`, `reference`.
        max_length: Maximum number of tokens of a sequence. Default: the configuration's.
    """

    _held = HeldWeights({})

    def __init__(self, model: Any, name: str = "hf-generate", max_length: int | None = None) -> None:
        self.model, self.name = model, name
        self.max_length = max_length or model_limit(model.config)
        support_float64(model)

    @classmethod
    def start(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        max_length: int | None = None,
        load_format: str = "auto",
        seed: int = 0,
        device: str = "cpu",
        **unknown: Any,
    ) -> HFEngine:
        """Load a checkpoint with transformers.

        Args:
            path, dtype, max_length, load_format, seed: See `start_engine`.
            device: Device of the model.
            unknown: Unknown options, which raise an error.

        Raises:
            EngineError: If an option is unknown or invalid, or transformers cannot load the checkpoint.
            DeviceError: If the device does not exist, or is meta.
        """
        known = ("device", "dtype", "load_format", "max_length", "seed")
        require_options("hf-generate", unknown, known, load_format=load_format, max_length=max_length, seed=seed)
        if present_device(device).type == "meta":
            raise DeviceError(f"device={str(device)!r} cannot hold weights: start the engine on cpu or an accelerator")
        if load_format == "dummy":
            torch.manual_seed(seed)
        try:
            # Tensors created in inference mode cannot be updated by a refit outside it.
            with torch.inference_mode(False):
                model = reference_model(path, dtype, device, weights=load_format == "auto")
        except (NRLModelsError, OSError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # any error of transformers for damaged or mismatched files
            raise EngineError(f"transformers does not load {path}: {one_line(error)}") from error
        return cls(model, max_length=max_length)

    def capabilities(self) -> Capabilities:
        """Return capabilities: everything except a prefix cache."""
        return Capabilities(
            refit=True,
            modules=True,
            images=takes_images(self.model),
            max_length=self.max_length,
            vocabulary=self.model.get_input_embeddings().weight.shape[0],
            dtype=self.model.dtype,
        )

    def describe(self) -> dict[str, Any]:
        """Return version and settings."""
        return {
            "engine": self.name,
            "transformers": version("transformers"),
            "class": f"{type(self.model).__module__}:{type(self.model).__name__}",
            "dtype": dtype_name(self.model.dtype),
            "device": str(self.model.device),
        }

    @_in_evaluation_mode
    def _generate(
        self,
        prompts: Sequence[Tokens],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        seed: int,
        ignore_end: bool,
        model_inputs: Sequence[Mapping[str, torch.Tensor]] | None = None,
    ) -> list[Sample]:
        """Generate in batches of prompts with equal lengths, without padding. Prompts with images must be equal."""
        if not self.model.can_generate():
            kind = type(self.model).__name__
            raise EngineError(
                f"{self.name} cannot generate tokens: {kind} does not predict tokens. Use a language model"
            )
        results: dict[int, Sample] = {}
        ends = set() if ignore_end else {*as_ids(self.model.generation_config.eos_token_id), *self._tokenizer_ends}
        prefix_types = marks_prefix(self.model)
        generator = torch.Generator(self.model.device).manual_seed(seed)
        for indices in by_length(prompts, model_inputs):
            inputs = {} if model_inputs is None else model_inputs[indices[0]]
            stops = ends | placeholders(self.model.config, inputs)
            config = GenerationConfig(
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(stops) or None,
                pad_token_id=0,
            )
            sampler = _TokenSampler(sampling, generator)
            batch = torch.tensor([list(prompts[index]) for index in indices], device=self.model.device)
            with self._plain_generation():
                sequences = self.model.generate(
                    input_ids=batch,
                    attention_mask=torch.ones_like(batch),
                    generation_config=config,
                    logits_processor=LogitsProcessorList([sampler]),
                    **self._of_batch(inputs, batch),
                )
            new = sequences[:, batch.shape[1] :].tolist()
            logprobs = torch.cat(sampler.logprobs, dim=1).double().tolist()
            for row, index in enumerate(indices):
                stop = next((position for position, token in enumerate(new[row]) if token in stops), None)
                size, reason = (None, "length") if stop is None else (stop + 1, "stop")
                if stop is not None and new[row][stop] not in ends:
                    size, reason = stop, AT_PLACEHOLDER
                tokens = tuple(new[row][:size])
                values = tuple(logprobs[row][:size])
                results[index] = Sample(tuple(prompts[index]), tokens, values, reason, prefix_types=prefix_types)
        return [results[index] for index in range(len(prompts))]

    @cached_property
    def _tokenizer_ends(self) -> tuple[int, ...]:
        """The end token of the tokenizer that was saved with the model."""
        return tokenizer_ends(saved) if (saved := folder_on_disk(getattr(self.model, "name_or_path", ""))) else ()

    def _of_batch(self, inputs: Mapping[str, torch.Tensor], batch: torch.Tensor) -> dict[str, Any]:
        """Repeat the inputs of a prompt for a batch of copies of this prompt."""
        return {
            name: torch.cat([value] * len(batch)) if isinstance(value, torch.Tensor) else value
            for name, value in cast(dict(inputs), self.model).items()
        }

    @contextmanager
    def _plain_generation(self) -> Iterator[None]:
        """Disable the checkpoint's generation settings (penalties, processors) while the context is open."""
        generation_config = self.model.generation_config
        self.model.generation_config = GenerationConfig()
        try:
            yield
        finally:
            self.model.generation_config = generation_config

    @_in_evaluation_mode
    def _score(
        self,
        sequences: list[list[int]],
        sampling: Sampling,
        *,
        last: int | None,
        full_logits: bool = False,
        model_inputs: Sequence[Mapping[str, torch.Tensor]] | None = None,
    ) -> list[list[float]]:
        """Score as in `Engine.score`. Sequences of equal length are scored together, so nothing is padded.

        Args:
            sequences, sampling, last: See `Engine.score`.
            full_logits: Whether to use the model's own logits instead of computing log-probabilities in chunks, so that
                hooks on the output embedding take effect.
            model_inputs: Image inputs of each sequence, see `Sample.sequence_inputs`.
        """
        results: dict[int, list[float]] = {}
        processing = sampling.processing
        for indices in by_length(sequences, model_inputs):
            rows = max(1, TOKENS_AT_A_TIME // len(sequences[indices[0]]))
            for start in range(0, len(indices), rows):
                some = indices[start : start + rows]
                batch = torch.tensor([sequences[index] for index in some], device=self.model.device)
                wanted = torch.ones_like(batch, dtype=torch.bool)
                wanted[:, : 0 if last is None else max(0, batch.shape[1] - last)] = False
                chunk_size = None if full_logits else "auto"
                more: dict[str, Any] = {} if model_inputs is None else self._of_batch(model_inputs[some[0]], batch)
                scores = token_logprobs(
                    self.model, batch, score=wanted, chunk_size=chunk_size, **asdict(processing), **more
                )
                values = scores.logprobs.double().masked_fill(scores.outside, -math.inf)
                values[~(scores.mask | scores.outside)] = math.nan
                for index, row in zip(some, values.tolist(), strict=True):
                    results[index] = row
        return [results[index] for index in range(len(sequences))]

    @torch.no_grad()
    def _refit(self, sent: Iterator[list[NamedTensor]], digests: bool) -> dict[str, Any]:
        targets = RefitTargets(self.model, self.name)
        arrived: dict[str, str] = {}
        written: set[str] = set()
        for name, tensor in chain.from_iterable(map(targets.without_aliases, sent)):
            target = targets.find(name, tensor)
            arrived[name] = tensor_digest(tensor) if digests else ""
            if target is None:
                continue
            self._changed = True
            for parameter in target.parameters:
                target.write_into(parameter, targets.held[parameter], tensor)
            written.add(target.name)
        targets.require_tied(targets.held)
        missing = targets.missing(written)
        buffers = dict(self.model.named_buffers())
        return {
            "digests": arrived if digests else {},
            "unwritten": [name for name, parameter in missing.items() if parameter not in buffers],
            "stale_buffers": [name for name, parameter in missing.items() if parameter in buffers],
        }

    def note_weights(self) -> bool:
        """Record hashes of the weights, see `Engine.note_weights`."""
        self._held = HeldWeights(self.model.state_dict())
        return True

    def unchanged_weights(self) -> list[str]:
        """Return the names of unchanged weights, see `Engine.unchanged_weights`."""
        return self._held.unchanged(self.model.state_dict())

    @_in_evaluation_mode
    def module_calls(self, tokens: Tokens, *, decode_last: bool = False) -> dict[str, ModuleCall]:
        """Record the calls of all modules, see `Engine.module_calls`."""
        require_recordable(self, tokens, decode_last=decode_last)
        batch = torch.tensor([list(tokens)], device=self.model.device)
        inputs: dict[str, Any] = {"input_ids": batch, "use_cache": False}
        if decode_last:
            before = self.model(input_ids=batch[:, :-1], use_cache=True)
            cache = cache_input(self.model.forward, cache_in(before))
            inputs = {"input_ids": batch[:, -1:], "use_cache": True, **cache}
        with record_calls(self.model) as calls:
            logits = self.model(**inputs).logits
        classes = {name: type(module).__name__ for name, module in self.model.named_modules()}
        result = {
            name: ModuleCall(classes[name], tuple(call.inputs), tuple(call.outputs))
            for name, call in calls.items()
            if name
        }
        result = with_groups(self.model, result)
        head = output_embedding(self.model)
        name = next(name for name, module in self.model.named_modules() if module is head)
        result[LOGITS] = ModuleCall(type(self.model).__name__, result[name].inputs, (logits,))
        return result


class _TokenSampler(LogitsProcessor):
    """Draw a token for each row according to `Sampling`, and record its log-probability.

    transformers draws from torch's global generator, whose state belongs to the caller and to other threads. Here it
    selects the token that this class has drawn, which is the only finite logit.

    Args:
        sampling: Processing of the logits.
        generator: Generator on the device of the logits.
    """

    def __init__(self, sampling: Sampling, generator: torch.Generator) -> None:
        self.sampling, self.generator = sampling, generator
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = processed(scores.float(), self.sampling)
        if self.sampling.greedy:
            tokens = scores.argmax(-1, keepdim=True)
        else:
            tokens = torch.multinomial(scores.softmax(-1), 1, generator=self.generator)
        self.logprobs.append(scores.log_softmax(-1).gather(-1, tokens))
        return torch.full_like(scores, -math.inf).scatter(-1, tokens, 0.0)
