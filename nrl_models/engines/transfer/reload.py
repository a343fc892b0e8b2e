"""A reload of a vLLM model's weights: vLLM's own layerwise reload, and what that leaves out.

It uses nothing but what vLLM offers for the purpose: `load_weights`, and the layerwise reload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from nrl_models.common.switches import is_off
from nrl_models.engines.engine_types import NamedTensor
from nrl_models.engines.transfer.as_published import as_published


@dataclass(frozen=True, slots=True)
class Unwritten:
    """What a reload left as it was, by the engine's names.

    Args:
        parameters: parameters that nothing was written to.
        buffers: persistent buffers that nothing was written to.
        halves: modules of which some elements were written and others not: padding, or tensors that were not given.
    """

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    halves: frozenset[str]


HEAD_BIAS = "lm_head.bias"
"""What vLLM, with transformers' classes, registers when it comes. In a layer whose weight is still awaited its reload
then drops it, and safetensors, in which tensors reach another process, keeps no order: so it goes last."""


class WeightReload:
    """One reload of a model's weights, from its start until `finish` or `abandon`.

    Args:
        model: vLLM's, in its worker.
        vllm_config: vLLM's.
    """

    def __init__(self, model: Any, vllm_config: Any) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.model, self.vllm_config = model, vllm_config
        self._loaded: set[str] = set()
        self._last: list[NamedTensor] = []
        # Names with an underscore are vLLM's own constants (scales of a quantised cache), which no checkpoint has.
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._buffers = _names(
            (name, buffer)
            for name, buffer in model.state_dict(keep_vars=True).items()
            if name not in parameters and not name.rpartition(".")[2].startswith("_")
        )
        self._tied = [] if is_off("engine-tied-head") else _tied_modules(model)
        # vLLM packs experts for its CPU kernels only where it makes a kernel, which it does not on a reload: they would
        # be left as they were sent, and read as if packed. So it is made to make the kernel again.
        self._kernels: list[tuple[Any, Any]] = []
        if next(model.parameters()).device.type == "cpu" and not is_off("engine-experts-on-cpu"):
            for module in model.modules():
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    self._kernels.append((method, method.moe_kernel))
                    method.moe_kernel = None
        with self._loading():
            initialize_layerwise_reload(model)
        # What is to be written: vLLM has now undone its processing of the weights (derived ones are gone), and untied.
        tied = {id(parameter) for module in self._tied for parameter in module.parameters(recurse=False)}
        self._parameters = _names(
            (name, parameter)
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if id(parameter) not in tied
        )

    def load(self, tensors: Iterable[NamedTensor]) -> None:
        """Take some weights, by hub name."""
        self._load(self._put_off(tensors))

    def _put_off(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """All but what goes last."""
        for name, tensor in tensors:
            if name.endswith(HEAD_BIAS):
                self._last.append((name, tensor.clone()))  # its memory may be the sender's, for the next bucket
            else:
                yield name, tensor

    def _load(self, tensors: Iterable[NamedTensor]) -> None:
        with self._loading():
            self._loaded |= set(self.model.load_weights(as_published(self.model, tensors)) or ())

    def halves(self) -> frozenset[str]:
        """Names of modules of which some elements were given so far, and others not.

        What was put off is loaded first: it may be what a module is complete with.
        """
        last, self._last = self._last, []
        if last:
            self._load(last)
        return frozenset(
            name
            for name, module in self.model.named_modules()
            if (info := _info(module)).can_load() and 0 < info.load_numel < (info.load_numel_total or 0)
        )

    def finish(self) -> Unwritten:
        """Make the new weights take effect; returns what was not written."""
        halves = self.halves()
        # A loader may report weights as written that it wrote past vLLM's reload, which then restores the old weights.
        missed = set()
        for name, module in self.model.named_modules():
            info = _info(module)
            if info.can_load() and info.load_numel_total and not info.load_numel and module not in self._tied:
                missed |= {f"{name}.{own}" for own, _ in module.named_parameters(recurse=False)}
        self._end()
        return Unwritten(self._left(self._parameters, missed), self._left(self._buffers), halves)

    def abandon(self) -> bool:
        """End it: what was given all its weights keeps them, the rest has its old ones. Returns if anything changed."""
        changed = False
        for module in self.model.modules():
            info = _info(module)
            if info.can_load():
                # vLLM restores the old weights of a layer that was given none.
                info.loaded_weights.clear()
                info.load_numel = 0
            else:
                changed = True
        self._end()
        return changed

    def _end(self) -> None:
        """Have vLLM finish its layerwise reload, and prepare again what it leaves out."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._loading():
            finalize_layerwise_reload(self.model, self.vllm_config.model_config)
            # vLLM prepares again (packs for its kernels) the modules that were given a weight. A tied output embedding
            # that is a module of its own is given none, and would go on with what was packed from the old one.
            for module in self._tied:
                if (method := getattr(module, "quant_method", None)) is not None:
                    method.process_weights_after_loading(module)
        for method, kernel in self._kernels:
            if method.moe_kernel is None:  # of experts that were not sent
                method.moe_kernel = kernel

    def _left(self, expected: Iterable[tuple[str, ...]], missed: Set[str] = frozenset()) -> tuple[str, ...]:
        """The first name of each tensor that was not written under any of its names."""
        return tuple(names[0] for names in expected if self._loaded.isdisjoint(names) or not missed.isdisjoint(names))

    @contextmanager
    def _loading(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            yield


def _info(module: torch.nn.Module) -> Any:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return get_layerwise_info(module)


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
