"""Reload the weights of a vLLM model: vLLM's layerwise reload, plus the steps that it omits.

Uses only vLLM's interfaces for this purpose: `load_weights` and the layerwise reload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from nrl_models.common.dtypes import same_kind, wrong_kind
from nrl_models.common.state_dict.buckets import YieldedTensor, require_unchanged
from nrl_models.common.switches import is_off
from nrl_models.common.upstream_torch import TorchDispatchMode, tree_leaves
from nrl_models.engines.digests import HEAD, tensor_digest, tied_apart
from nrl_models.engines.engine_types import NamedTensor
from nrl_models.engines.transfer.as_published import as_published
from nrl_models.engines.transfer.batch_norms import load_statistics
from nrl_models.engines.transfer.incomplete import holes_in, joined, kept_tensors
from nrl_models.engines.transfer.sent_tensors import is_finite, keeps_range, require_range
from nrl_models.errors import EngineError, listed


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Tensors that a reload did not write, by the engine's names.

    Args:
        parameters: Parameters without any write, and incomplete parameters with the missing part (a fused projection
            without its key, experts without one of their matrices).
        buffers: Persistent buffers without any write.
    """

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


HEAD_BIAS = "lm_head.bias"
"""vLLM with transformers' classes registers this parameter when it arrives. If the layer's weight has not arrived yet,
its reload then drops it. safetensors does not keep the order of tensors in another process, so it is loaded last."""


class WeightReload:
    """One reload of a model's weights, until `finish` or `abandon`.

    Args:
        model: vLLM's model in its worker.
        vllm_config: Configuration of vLLM.
    """

    def __init__(self, model: Any, vllm_config: Any) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.model, self.vllm_config = model, vllm_config
        self._loaded: set[str] = set()
        self._given: set[str] = set()
        self._last: list[NamedTensor] = []
        self._kept: list[YieldedTensor] = []
        # Names with an underscore are vLLM's own constants (scales of a quantized cache), which are in no checkpoint.
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._buffers = _names(
            (name, buffer)
            for name, buffer in model.state_dict(keep_vars=True).items()
            if name not in parameters and not name.rpartition(".")[2].startswith("_")
        )
        self._tied = [] if is_off("engine-tied-head") else _tied_modules(model)
        # vLLM packs experts for its CPU kernels only when it creates a kernel. A reload does not create one, so the
        # experts would stay unpacked and be read as packed. Removing the kernel makes vLLM create it again.
        self._kernels: list[tuple[Any, Any]] = []
        if next(model.parameters()).device.type == "cpu" and not is_off("engine-experts-on-cpu"):
            for module in model.modules():
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    self._kernels.append((method, method.moe_kernel))
                    method.moe_kernel = None
        with self._loading():
            initialize_layerwise_reload(model)
        # Tensors to write. By now, vLLM has undone its processing of the weights (derived ones are gone), and untied.
        tied = {id(parameter) for module in self._tied for parameter in module.parameters(recurse=False)}
        self._parameters = _names(
            (name, parameter)
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if id(parameter) not in tied
        )
        has_head = any(all(name.endswith(HEAD) for name in names) for names in self._parameters)
        configs = vllm_config.model_config.hf_config, vllm_config.model_config.hf_text_config
        self._ties = not has_head and any(getattr(config, "tie_word_embeddings", False) for config in configs)
        self._dtypes = {tensor.dtype for tensor in model.state_dict(keep_vars=True).values()}
        self._head: tuple[str, str] | None = None
        self._embeddings: dict[str, str] = {}
        self._hooks = [] if is_off("engine-batch-norms") else load_statistics(model)

    def load(self, tensors: Iterable[NamedTensor]) -> None:
        """Load some weights, by hub name.

        Raises:
            EngineError: If a tensor of an earlier call was changed before its layer was complete.
        """
        bucket = list(tensors)
        self._require_kept(bucket)
        self._load(self._put_off(bucket))
        before = {id(item.tensor): item for item in self._kept}
        self._kept = [before.get(id(item.tensor), item) for item in kept_tensors(self.model)]

    def _require_kept(self, bucket: Iterable[NamedTensor] = ()) -> None:
        """Check that no tensor that vLLM keeps was changed. A generator may reuse its memory for the next bucket."""
        if any(item.may_have_changed() for item in self._kept):
            require_unchanged([*self._kept, *(YieldedTensor(*pair) for pair in bucket)], "its layer was complete")

    def _put_off(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Yield all tensors except those to load last."""
        for name, tensor in tensors:
            if name.endswith(HEAD_BIAS):
                self._last.append((name, tensor.clone()))  # the sender may reuse the memory for the next bucket
            else:
                yield name, tensor

    def _load(self, tensors: Iterable[NamedTensor]) -> None:
        named_tensors = list(self._noted(tensors))
        sent = {tensor.dtype for _, tensor in named_tensors}
        # The check sees every operation, which takes as long as the reload. Usually, no conversion can be wrong.
        pairs = [(dtype, held) for dtype in sent for held in self._dtypes]
        is_safe = all(same_kind(*pair) and keeps_range(*pair) for pair in pairs)
        kinds = None if is_safe else _SameKind()
        with self._loading(), kinds or nullcontext():
            published = as_published(self.model, named_tensors if kinds is None else kinds.named(named_tensors))
            self._loaded |= set(self.model.load_weights(published) or ())

    def _noted(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Yield all tensors except the head of a model with tied embeddings, which has no parameter for it."""
        for name, tensor in tensors:
            self._given.add(name)
            self.note_tied(name, tensor)
            if self._head is None or self._head[0] != name:
                yield name, tensor

    def note_tied(self, name: str, tensor: torch.Tensor) -> None:
        """Record a tensor for `require_tied`, if it may be a head or embeddings of a model that ties them."""
        if self._ties and tensor.dim() == 2:
            if name.endswith(HEAD):
                self._head = name, tensor_digest(tensor)
            elif tensor.shape[0] == self.vllm_config.model_config.get_vocab_size():
                self._embeddings[tensor_digest(tensor)] = name

    def require_tied(self) -> None:
        """Check that a head sent to a model with tied embeddings equals the embeddings.

        Raises:
            EngineError: If it differs, or the embeddings were not sent.
        """
        if self._head is not None and self._head[1] not in self._embeddings:
            raise EngineError(tied_apart(self._head[0], listed(self._embeddings.values()) or "the embeddings"))

    @property
    def written(self) -> frozenset[str]:
        """Names of the tensors that the model's loader wrote, by the engine's names."""
        return frozenset(self._loaded)

    def lacking(self) -> dict[str, str]:
        """Return incomplete tensors of modules that received some weights, each with a description of the missing part.

        Loads the deferred tensor first, because it may complete a module.
        """
        last, self._last = self._last, []
        if last:
            self._load(last)
        lacking: dict[str, str] = {}
        expected = (names for names in (*self._parameters, *self._buffers) if self._loaded.isdisjoint(names))
        absent = {name for names in expected for name in names}
        for name, module in self.model.named_modules():
            info = _info(module)
            if info.can_load() and 0 < info.load_numel < (info.load_numel_total or 0):
                with self._loading():
                    holes = holes_in(module, info)
                lacking |= {
                    joined(name, tensor_name): self._described(name, tensor_name, *sizes)
                    for tensor_name, sizes in holes.items()
                }
                own_names = {joined(name, tensor_name) for tensor_name in (*module._parameters, *module._buffers)}
                lacking |= {each: f"{each} (not sent)" for each in own_names & absent}
        return lacking

    def _described(self, module: str, tensor_name: str, missing: int, total: int) -> str:
        """Describe the missing part of a parameter: hub names that vLLM fuses into it, and the number of elements."""
        owner, _, fused = module.rpartition(".")
        parts = (getattr(self.model, "packed_modules_mapping", None) or {}).get(fused, [])
        layer = ".".join(owner.split(".")[-3:])
        absent = [
            part for part in parts if not any(name.endswith(f"{layer}.{part}.{tensor_name}") for name in self._given)
        ]
        names = f"without {' and '.join(absent)}, " if 0 < len(absent) < len(parts) else ""
        return f"{joined(module, tensor_name)} ({names}{missing:,} of {total:,} elements not sent)"

    def finish(self) -> Unwritten:
        """Apply the new weights, and return the unwritten ones. Incomplete modules keep their old weights.

        Without this, vLLM would build an incomplete layer from uninitialized memory.

        Raises:
            EngineError: See `load` and `require_tied`.
        """
        self.require_tied()
        self._require_kept()
        lacking = self.lacking()
        incomplete = {name.rpartition(".")[0] for name in lacking}
        dropped: list[str] = []
        missed = set()
        for name, module in self.model.named_modules():
            info = _info(module)
            if not (info.can_load() and info.load_numel_total):
                continue
            if name in incomplete:
                names = dict.fromkeys(joined(name, tensor_name) for tensor_name, _ in info.loaded_weights)
                dropped += [lacking.get(each, f"{each} (its module lacks another tensor)") for each in names]
                _drop(info)
            elif not info.load_numel and module not in self._tied:
                # A loader may bypass vLLM's reload and report weights as written. The reload then restores old ones.
                missed |= {joined(name, tensor_name) for tensor_name, _ in module.named_parameters(recurse=False)}
        self._end()
        return Unwritten((*dropped, *self._left(self._parameters, missed)), self._left(self._buffers))

    @staticmethod
    def clean_cache(vllm_config: Any) -> None:
        """Zero cache memory that has NaN or infinite values.

        Attention multiplies masked entries of a block by 0, which keeps NaN. After weights that computed such values,
        the first generation with valid weights would otherwise be NaN. Only the last layer of each kind is read: a
        token that is NaN in one layer is NaN in all later ones. Kinds of layers may have separate blocks.
        """
        layers = list(vllm_config.compilation_config.static_forward_context.values())
        last = {(type(layer), getattr(layer, "sliding_window", None)): layer for layer in layers}
        if all(map(is_finite, _cache_of(last.values()))):
            return
        for tensor in _cache_of(layers):
            if not is_finite(tensor):
                tensor.zero_()

    def abandon(self) -> bool:
        """Stop the reload. Complete modules get new weights, others keep the old ones. Returns True if any changed."""
        changed = False
        for module in self.model.modules():
            info = _info(module)
            if info.can_load():
                _drop(info)
            else:
                changed = True
        self._end()
        return changed

    def _end(self) -> None:
        """Finish vLLM's layerwise reload, then repeat the processing steps that it omits."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        for hook in self._hooks:
            hook.remove()
        with self._loading():
            finalize_layerwise_reload(self.model, self.vllm_config.model_config)
            # vLLM processes the weights again (packs them for its kernels) for modules that received a weight. A tied
            # output embedding in a separate module receives none, so its packed copy would still be the old one.
            for module in self._tied:
                if (method := getattr(module, "quant_method", None)) is not None:
                    method.process_weights_after_loading(module)
        for method, kernel in self._kernels:
            if method.moe_kernel is None:  # the experts were not sent
                method.moe_kernel = kernel

    def _left(self, expected: Iterable[tuple[str, ...]], missed: Set[str] = frozenset()) -> tuple[str, ...]:
        """Return the first name of each tensor that was not written under any of its names."""
        return tuple(names[0] for names in expected if self._loaded.isdisjoint(names) or not missed.isdisjoint(names))

    @contextmanager
    def _loading(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            yield


class _SameKind(TorchDispatchMode):
    """Check dtypes while it is open: a loader may convert a tensor only to a dtype of the same kind (see `same_kind`),
    in which its values are finite.

    `Tensor.copy_`, by which vLLM's loaders write, converts between all dtypes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, str] = {}
        self._last = ""

    def named(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Yield the same tensors, and record their names for errors."""
        for self._last, tensor in tensors:
            self._names[tensor.data_ptr()] = self._last
            yield self._last, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].dtype != args[0].dtype:
            name = self._names.get(args[1].data_ptr(), self._last)
            if not same_kind(args[1].dtype, args[0].dtype):
                raise EngineError(wrong_kind(name, args[1].dtype, args[0].dtype))
            require_range(name, args[1], args[0].dtype)
        return func(*args, **(kwargs or {}))


def _cache_of(layers: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the cache memory of layers."""
    for leaf in tree_leaves([getattr(layer, "kv_cache", None) for layer in layers]):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _drop(info: Any) -> None:
    """Discard the new weights of a layer. vLLM then restores its old weights."""
    info.loaded_weights.clear()
    info.load_numel = 0


def _info(module: torch.nn.Module) -> Any:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return get_layerwise_info(module)


def _names(tensors: Iterable[NamedTensor]) -> list[tuple[str, ...]]:
    """Return all names of each tensor. A layer may be in a model twice, and its loader may report only one name."""
    names: dict[int, list[str]] = {}
    references = []  # keeps objects alive, so that ids are unique
    for name, tensor in tensors:
        references.append(tensor)
        names.setdefault(id(tensor), []).append(name)
    return [tuple(aliases) for aliases in names.values()]


def _tied_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that share a parameter with an earlier module."""
    seen: dict[torch.nn.Parameter, torch.nn.Module] = {}
    modules = []
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if seen.setdefault(parameter, module) is not module:
                modules.append(module)
    return modules
