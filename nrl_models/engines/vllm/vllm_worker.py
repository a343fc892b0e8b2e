"""Methods that vLLM adds to its workers (`worker_extension_cls`) and runs through `LLM.collective_rpc`.

They only use vLLM's interfaces for the purpose: its reload of weights, and `compute_logits` of its models.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from nrl_models.common.recording import record_calls
from nrl_models.engines.digests import HeldWeights, digested
from nrl_models.engines.engine_types import ModuleCall
from nrl_models.engines.transfer.reload import WeightReload
from nrl_models.engines.transfer.transports import Message, tensors_of
from nrl_models.engines.vllm.vllm_images import ImageWorker
from nrl_models.engines.vllm.vllm_lora import adapter_modules
from nrl_models.logprobs.sampling import Sampling, processed


class ConsistencyWorker(ImageWorker):
    """Mixed into vLLM's worker class. Names begin with `nrl_`, so that they cannot collide with vLLM's."""

    # Set by vLLM's worker.
    model_runner: Any
    vllm_config: Any

    def nrl_model(self) -> torch.nn.Module:
        """Return vLLM's model in this worker."""
        return self.model_runner.get_model()

    def nrl_seed(self, seed: int) -> None:
        """Seed the global generator, which requests without a seed use."""
        torch.manual_seed(seed)

    def nrl_recover(self) -> None:
        """Discard the state of an interrupted step, and all requests, which the scheduler has aborted.

        The scheduler names a finished request only once. If that step was interrupted, the worker would keep it.
        """
        runner = self.model_runner
        if getattr(runner, "execute_model_state", None) is not None:
            runner.execute_model_state = None
        batch = getattr(runner, "input_batch", None)
        if batch is None or not hasattr(batch, "batch_update_builder"):
            return
        batch.batch_update_builder.reset()  # an interrupted step may have begun to read it
        for request in [*batch.req_id_to_index]:
            batch.remove_request(request)
        batch.condense()
        for rows in (batch._req_ids, batch.req_output_token_ids, batch.spec_token_ids):
            rows.clear()  # including requests whose removal was interrupted
        batch.refresh_metadata()
        runner.requests.clear()
        runner.num_prompt_logprobs.clear()

    def nrl_adapter(self, number: int) -> dict[str, list[str]]:
        """Compare a loaded adapter with the model's modules, see `adapter_modules`."""
        return adapter_modules(self.model_runner.lora_manager._adapter_manager, number)

    # Scores of existing tokens under any sampling

    def nrl_process_logits(self, sampling: dict[str, Any] | None) -> None:
        """Process logits according to `sampling` before log-probabilities are computed. None disables this.

        vLLM computes log-probabilities of prompt tokens from raw logits, whatever the request's temperature.
        """
        model = self.nrl_model()
        model.__dict__.pop("compute_logits", None)
        if sampling is None:
            return
        compute: Any = model.compute_logits

        def compute_processed(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits = compute(*args, **kwargs)
            return None if logits is None else processed(logits, Sampling(**sampling))  # None if nothing is sampled

        model.__dict__["compute_logits"] = compute_processed

    # Weights

    def nrl_refit_start(self) -> None:
        """Start a transfer of new weights. An unfinished one is abandoned."""
        if getattr(self, "_nrl_reload", None) is not None:
            self.nrl_refit_abandon()
        self._nrl_digests: dict[str, str] = {}
        self._nrl_reload: WeightReload | None = WeightReload(self.nrl_model(), self.vllm_config)

    def nrl_refit_load(self, message: Message, digests: bool) -> None:
        """Load some weights, by hub name."""
        tensors = tensors_of(message)
        assert self._nrl_reload is not None
        self._nrl_reload.load(digested(tensors, self._nrl_digests) if digests else tensors)

    def nrl_refit_finish(self) -> dict[str, Any]:
        """Apply the new weights. Return their digests, and the names of unwritten parameters and stale buffers."""
        assert self._nrl_reload is not None
        left = self._nrl_reload.finish()
        self._nrl_written = self._nrl_reload.written
        self._nrl_reload.clean_cache(self.vllm_config)
        self._nrl_reload = None
        for reset in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            if hasattr(self.model_runner, reset):
                getattr(self.model_runner, reset)()
        return {"digests": self._nrl_digests, "unwritten": left.parameters, "stale_buffers": left.buffers}

    def nrl_refit_abandon(self) -> bool:
        """End a refit that failed. Return True if some layers have new weights now, and others have old ones."""
        reload, self._nrl_reload = getattr(self, "_nrl_reload", None), None
        return reload.abandon() if reload is not None else True

    def nrl_note_weights(self) -> bool:
        """Record the names and values of the weights that the last refit wrote. Return True if all of them can be read.

        On a CPU, vLLM packs the weights of linears for its kernels, and leaves empty parameters.
        """
        self._nrl_noted: frozenset[str] = getattr(self, "_nrl_written", frozenset())
        held = self._nrl_held_weights()
        self._nrl_held = HeldWeights(held)
        return bool(held) and all(tensor.numel() for tensor in held.values())

    def nrl_unchanged_weights(self) -> list[str]:
        """Return the names of weights of which a part did not change since they were recorded."""
        return self._nrl_held.unchanged(self._nrl_held_weights())

    def _nrl_held_weights(self) -> dict[str, torch.Tensor]:
        # An engine that takes only text leaves parameters of its towers on meta.
        tensors = {name: tensor for name, tensor in self.nrl_model().state_dict().items() if not tensor.is_meta}
        return {name: tensors[name] for name in self._nrl_noted & tensors.keys()}

    # Modules

    def nrl_record_start(self) -> None:
        """Begin to record the inputs and outputs of each module's last call."""
        self._nrl_recording = ExitStack()
        self._nrl_calls = self._nrl_recording.enter_context(record_calls(self.nrl_model(), copy=True))

    def nrl_record_finish(self) -> dict[str, ModuleCall]:
        """Return the recorded calls on the CPU. vLLM's `(tokens, ...)` tensors get a batch dimension."""
        self._nrl_recording.close()
        classes = {name: type(module).__name__ for name, module in self.nrl_model().named_modules()}
        return {
            name: ModuleCall(
                classes[name], *(tuple(tensor.cpu()[None] for tensor in side) for side in (call.inputs, call.outputs))
            )
            for name, call in self._nrl_calls.items()
        }
