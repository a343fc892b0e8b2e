"""Methods that vLLM adds to its workers (`worker_extension_cls`) and calls by `LLM.collective_rpc`.

They use nothing but what vLLM offers for the purpose: `load_weights`, its layerwise reload, and the model interface
`compute_logits`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import safetensors.torch
import torch

from nrl_models.common.recording import record_calls
from nrl_models.common.switches import is_off
from nrl_models.engines.base import ModuleCall, NamedTensor, digested
from nrl_models.logprobs.sampling import Sampling, processed


class ConsistencyWorker:
    """Mixed into vLLM's worker class. Names begin with `nrl_`, so that they cannot collide with vLLM's."""

    # Set by vLLM's worker.
    model_runner: Any
    vllm_config: Any

    def nrl_model(self) -> torch.nn.Module:
        """The model in this worker."""
        return self.model_runner.get_model()

    def nrl_seed(self, seed: int) -> None:
        """Seed the random numbers of requests that have none of their own."""
        torch.manual_seed(seed)

    # Scores of given tokens under any sampling

    def nrl_process_logits(self, sampling: dict[str, Any] | None) -> None:
        """From now on, process logits as `sampling` says before log-probabilities are taken; None ends that.

        vLLM takes the log-probabilities of prompt tokens from raw logits, whatever the request's temperature.
        """
        model = self.nrl_model()
        model.__dict__.pop("compute_logits", None)
        if sampling is None:
            return
        compute: Any = model.compute_logits

        def compute_processed(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits = compute(*args, **kwargs)
            return None if logits is None else processed(logits, Sampling(**sampling))  # None where nothing is sampled

        model.__dict__["compute_logits"] = compute_processed

    # Weights

    def nrl_refit_start(self) -> None:
        """Begin to take new weights."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._nrl_loaded: set[str] = set()
        self._nrl_digests: dict[str, str] = {}
        model = self.nrl_model()
        # Names with an underscore are vLLM's own constants (scales of a quantised cache), which no checkpoint has.
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._nrl_buffers = _names(
            (name, buffer)
            for name, buffer in model.state_dict(keep_vars=True).items()
            if name not in parameters and not name.rpartition(".")[2].startswith("_")
        )
        self._nrl_tied = [] if is_off("engine-tied-head") else _tied_modules(model)
        # vLLM packs experts for its CPU kernels only where it makes a kernel, which it does not on a reload: they would
        # be left as they were sent, and read as if packed. So it is made to make the kernel again.
        self._nrl_kernels: list[tuple[Any, Any]] = []
        if next(model.parameters()).device.type == "cpu" and not is_off("engine-experts-on-cpu"):
            for module in model.modules():
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    self._nrl_kernels.append((method, method.moe_kernel))
                    method.moe_kernel = None
        with self._nrl_loading():
            initialize_layerwise_reload(model)
        # What is to be written: vLLM has now undone its processing of the weights (derived ones are gone), and untied.
        tied = {id(parameter) for module in self._nrl_tied for parameter in module.parameters(recurse=False)}
        self._nrl_parameters = _names(
            (name, parameter)
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if id(parameter) not in tied
        )

    def nrl_refit_load(self, tensors: Iterable[NamedTensor] | bytes, digests: bool) -> None:
        """Take some weights, by hub name; bytes are a safetensors file, as sent by another process."""
        given = safetensors.torch.load(tensors).items() if isinstance(tensors, bytes) else tensors
        with self._nrl_loading():
            model: Any = self.nrl_model()
            loaded = model.load_weights(digested(given, self._nrl_digests) if digests else iter(given))
        self._nrl_loaded |= set(loaded or ())

    def nrl_refit_finish(self) -> dict[str, Any]:
        """Make the new weights take effect; returns what was written and what was not."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        model = self.nrl_model()
        # A loader may report weights as written that it wrote past vLLM's reload, which then restores the old weights.
        missed = set()
        for name, module in model.named_modules():
            info = get_layerwise_info(module)
            if info.can_load() and info.load_numel_total and not info.load_numel and module not in self._nrl_tied:
                missed |= {f"{name}.{own}" for own, _ in module.named_parameters(recurse=False)}
        self._nrl_end_reload()
        for reset in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            if hasattr(self.model_runner, reset):
                getattr(self.model_runner, reset)()
        return {
            "digests": self._nrl_digests,
            "unwritten": self._nrl_left(self._nrl_parameters, missed),
            "stale_buffers": self._nrl_left(self._nrl_buffers),
        }

    def nrl_refit_abandon(self) -> None:
        """End a refit that failed: layers that were given all their weights keep them, the others keep the old ones."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for module in self.nrl_model().modules():
            info = get_layerwise_info(module)
            if info.can_load():
                # vLLM restores the old weights of a layer that was given none.
                info.loaded_weights.clear()
                info.load_numel = 0
        self._nrl_end_reload()

    def _nrl_end_reload(self) -> None:
        """Have vLLM finish its layerwise reload, and prepare again what it leaves out."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._nrl_loading():
            finalize_layerwise_reload(self.nrl_model(), self.vllm_config.model_config)
            # vLLM prepares again (packs for its kernels) the modules that were given a weight. A tied output embedding
            # that is a module of its own is given none, and would go on with what was packed from the old one.
            for module in self._nrl_tied:
                if (method := getattr(module, "quant_method", None)) is not None:
                    method.process_weights_after_loading(module)
        for method, kernel in self._nrl_kernels:
            if method.moe_kernel is None:  # of experts that were not sent
                method.moe_kernel = kernel

    def _nrl_left(self, expected: Iterable[tuple[str, ...]], missed: Set[str] = frozenset()) -> list[str]:
        """The first name of each tensor that was not written under any of its names."""
        return [names[0] for names in expected if self._nrl_loaded.isdisjoint(names) or not missed.isdisjoint(names)]

    @contextmanager
    def _nrl_loading(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            yield

    # Modules

    def nrl_record_start(self) -> None:
        """Begin to record the inputs and outputs of each module's last call."""
        self._nrl_recording = ExitStack()
        self._nrl_calls = self._nrl_recording.enter_context(record_calls(self.nrl_model(), copy=True))

    def nrl_record_finish(self) -> dict[str, ModuleCall]:
        """What was recorded, on the CPU; vLLM's tensors are `(tokens, ...)` and get a batch dimension."""
        self._nrl_recording.close()
        classes = {name: type(module).__name__ for name, module in self.nrl_model().named_modules()}
        return {
            name: ModuleCall(
                classes[name], *(tuple(tensor.cpu()[None] for tensor in side) for side in (call.inputs, call.outputs))
            )
            for name, call in self._nrl_calls.items()
        }


def _names(tensors: Iterable[NamedTensor]) -> list[tuple[str, ...]]:
    """All names of each tensor: a model may hold a layer in two places, and its loader report only one of them."""
    names: dict[int, list[str]] = {}
    kept = []  # so that no id is given away twice
    for name, tensor in tensors:
        kept.append(tensor)
        names.setdefault(id(tensor), []).append(name)
    return [tuple(aliases) for aliases in names.values()]


def _tied_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules that share a parameter with an earlier module."""
    seen: dict[torch.nn.Parameter, torch.nn.Module] = {}
    modules = []
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if seen.setdefault(parameter, module) is not module:
                modules.append(module)
    return modules
