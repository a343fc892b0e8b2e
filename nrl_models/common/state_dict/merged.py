"""Export a model with PEFT adapters: the merged weights under the names of the base model.

The model is not modified. When a weight is exported, its module is copied, PEFT merges the copy, and the copy is freed.
So everything that PEFT can merge is supported, including adapters of stacked experts (`target_parameters`). The extra
memory is that of one such module.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from nrl_models.common.modules import innermost, is_disabled, own_modules, peft_modules, peft_types, without_wrappers
from nrl_models.common.state_dict import own_tensors
from nrl_models.common.state_dict.adapter import StateDictAdapter, adapter_of
from nrl_models.common.state_dict.savable import require_unsharded_adapters
from nrl_models.common.state_dict.tables import Layout
from nrl_models.common.state_dict.ties import tied_names
from nrl_models.errors import Problem, ProblemKind, StateDictError

_TIED_ADVICE = "put the same adapter on both, or load the model with tie_word_embeddings=False before adding it"
_PLAIN_ADVICE = "load the adapter on a model without quantization and shards, or with VLLMEngine.use_adapter(folder)"


def export_adapter(model: nn.Module) -> StateDictAdapter:
    """Return the adapter for exporting a model to an engine: `export_plan()` and `iter_export(model)`, by hub names.

    Args:
        model: A model of this library, optionally in a `PeftModel` or with adapters. Then the exported tensors are
            those of `merge_and_unload()`, and the model is not modified: active adapters are merged, inactive and
            disabled ones are ignored, as in the model's forward.

    Raises:
        StateDictError: If this is not a model of this library, adapter tensors cannot be merged into a weight (prompts,
            prefixes), PEFT merges several active adapters into other weights than its forward uses (OFT, OSF), only
            one of two tied weights has an adapter, or weights under adapters are quantized or sharded. Lists all
            problems.

    Examples:
        >>> from nrl_models import AutoModelForCausalLM, export_adapter
        >>> model = AutoModelForCausalLM.from_pretrained("demo/checkpoint")
        >>> tensors = dict(export_adapter(model).iter_export(model))
        >>> sorted(tensors)[0]
        'lm_head.weight'
    """
    inner = own_tensors.model_inside(model)
    if not any(peft_modules(inner)) and not own_tensors.parameters_outside(model, inner) and not _foreign(inner):
        adapter: Any = getattr(inner, "state_dict_adapter", None)
        return adapter or adapter_of(inner)
    return MergedAdapter(model)


class MergedAdapter(StateDictAdapter):
    """Adapter of the model without PEFT's modules; `iter_export` yields merged weights.

    Args:
        model: See `export_adapter`.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = innermost(model)
        require_unsharded_adapters(inner)
        super().__init__(without_wrappers(inner, peft=True))
        outside = own_tensors.parameters_outside(model, inner)
        details = dict.fromkeys(outside, "reaches no weight of the model") | _foreign(inner)
        problems = [Problem(ProblemKind.UNEXPECTED, name, detail) for name, detail in details.items()]
        unreached = {name: list(_unreached(name, wrapper)) for name, wrapper in peft_modules(inner)}
        problems += itertools.chain.from_iterable(unreached.values())
        problems += _unmergeable((name, wrapper) for name, wrapper in peft_modules(inner) if not unreached[name])
        self.tied, apart = _merged_ties(inner, self.tied)
        problems += apart
        if problems:
            merges = "train adapters that PEFT merges into weights, such as LoRA of linears or experts"
            advice = [] if all(problem.advice for problem in problems) else [merges]
            raise StateDictError("the adapters cannot be merged into what is exported", problems, advice)

    def retied(self, model: nn.Module) -> Self:
        """Return the same tables with the ties that the merged model currently has."""
        return self._with_ties(_merged_ties(model, tied_names(without_wrappers(model, peft=True)))[0])

    def own_tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the own tensors of the model without adapters, see `StateDictAdapter.own_tensors`."""
        return super().own_tensors(without_wrappers(model, peft=True))

    def hf_views(self, model: nn.Module, *, layout: Layout = "hub") -> dict[str, torch.Tensor]:
        """Return views as `StateDictAdapter.hf_views`, without those of modules with adapters."""
        inner, table = innermost(model), self.layout(layout)
        adapted = tuple(f"{name}." for name, _ in peft_modules(inner))
        views = self._views(inner, layout)
        return {name: view for name, view in views.items() if not table[name].parameters[0].startswith(adapted)}

    def iter_export(
        self, model: nn.Module, max_bytes: int | None = None, *, layout: Layout = "hub"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors as `StateDictAdapter.iter_export`. Weights with adapters are copied and merged when yielded.

        Raises:
            StateDictError: Before the first tensor, if PEFT cannot merge an adapter, or merges it wrongly.
        """
        if problems := _unmergeable(peft_modules(model)):
            raise StateDictError("the adapters cannot be merged into what is exported", problems)
        yield from self._export(innermost(model), max_bytes, layout)

    def _values(self, model: nn.Module, model_tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return _Merged(model, model_tensors)


class _Merged(Mapping[str, torch.Tensor]):
    """The model's tensors by name without adapters, merged when they are read. The last module's tensors are cached."""

    def __init__(self, model: nn.Module, model_tensors: Mapping[str, torch.Tensor]) -> None:
        self._own = model_tensors
        self._wrappers = dict(peft_modules(model))
        self._last: tuple[str, dict[str, torch.Tensor]] = "", {}

    def __getitem__(self, name: str) -> torch.Tensor:
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            if (module := ".".join(parts[:end])) in self._wrappers:
                if self._last[0] != module:
                    self._last = "", {}  # freed before the next one is merged
                    self._last = module, merged_weights(module, self._wrappers[module])
                return self._last[1][name]
        return self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


@torch.no_grad()
def merged_weights(name: str, wrapper: Any) -> dict[str, torch.Tensor]:
    """Return the merged tensors of a module with adapters, by names without adapters. The module is not modified.

    Args:
        name: Name of the module without adapters.
        wrapper: PEFT's module.

    Raises:
        StateDictError: If PEFT cannot merge it.
    """
    try:
        base = _merged(wrapper, _copy(wrapper, {}))
    except _FAILURES as error:
        problem = Problem(ProblemKind.UNEXPECTED, name, f"has an adapter that PEFT does not merge: {error}")
        raise StateDictError("the adapters cannot be merged into what is exported", [problem]) from error
    return {f"{name}.{key}": tensor for key, tensor in base.state_dict().items()}


_FAILURES = (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Errors of PEFT if an adapter cannot be merged, and of torch if it cannot be copied."""


def _copy(wrapper: Any, copied: dict[int, Any]) -> Any:
    """Copy a wrapper, with copies to use by id, except its keywords: PEFT's views of tied adapters cannot be copied."""
    if (keywords := getattr(wrapper, "kwargs", None)) is not None:
        copied[id(keywords)] = keywords
    return copy.deepcopy(wrapper, copied)


def _merged(wrapper: Any, twin: Any) -> Any:
    """Merge a copy of a wrapper and the wrappers inside, and return the module in it."""
    base = without_wrappers(_merged_outside(wrapper, twin))
    if isinstance(base, peft_types()):
        return _merged(base, base)
    for name, nested in list(peft_modules(base)):
        base.set_submodule(name, _merged(nested, nested))
    return base


def _merged_outside(wrapper: Any, twin: Any) -> Any:
    """Merge a copy of a wrapper, and return the module in it, which has wrappers if PEFT trains it as a copy.

    Disabled adapters that were merged in place are unmerged, as in PEFT's next forward.
    """
    for tuner in _tuners(twin):
        if tuner.merged and tuner.disable_adapters:
            tuner.unmerge()
    if is_disabled(wrapper) and hasattr(wrapper, "modules_to_save"):
        return innermost(twin)  # PEFT still unloads the trained copy
    merges = not is_disabled(wrapper) and not getattr(wrapper, "merged", False)
    if hasattr(twin, "unload_and_optionally_merge_module"):
        return twin.unload_and_optionally_merge_module(merges, safe_merge=False, adapter_names=None)
    for tuner in reversed(list(_tuners(twin)) if merges else []):  # an adapter may wrap another adapter's module
        if not tuner.merged:
            tuner.merge(safe_merge=False)
    return twin.get_base_layer()


def _tuners(module: nn.Module) -> Iterator[Any]:
    """Yield PEFT's tuner layers in a module, the outermost first."""
    for layer in module.modules():
        if isinstance(layer, peft_types()[:1]):
            yield layer


def _unmergeable(wrappers: Iterable[tuple[str, Any]]) -> list[Problem]:
    """Return a problem for each wrapper that PEFT cannot merge, or merges into other weights than its forward uses."""
    problems: list[Problem] = []
    compared: dict[object, list[str]] = {}
    for name, wrapper in wrappers:
        if failures := list(_merge_failures(name, wrapper)):
            problems += failures
        elif nested := [(f"{name}.{child_name}", inside) for child_name, inside in peft_modules(innermost(wrapper))]:
            problems += _unmergeable(nested)
        elif _runs_several(wrapper):
            if (structure := _structure(wrapper)) not in compared:
                compared[structure] = list(_merge_differences(wrapper))
            problems += [Problem(ProblemKind.UNEXPECTED, name, detail) for detail in compared[structure]]
    return problems


@torch.no_grad()
def _merge_failures(name: str, wrapper: Any) -> Iterator[Problem]:
    """Try to merge a wrapper: a copy without values, or a real one if that fails, as some merges need values."""
    tensors = (*wrapper.parameters(), *wrapper.buffers())
    try:
        _merged(wrapper, _copy(wrapper, {id(tensor): _on_meta(tensor) for tensor in tensors}))
    except _FAILURES:
        try:
            merged_weights(name, wrapper)
        except StateDictError as error:
            yield from error.problems


def _runs_several(wrapper: Any) -> bool:
    """Return True if the forward of a wrapper applies more than one adapter."""
    active = [name for tuner in _tuners(wrapper) for name in _adapters_of(tuner).intersection(tuner.active_adapters)]
    return len(active) > 1 and not is_disabled(wrapper)


def _structure(wrapper: Any) -> object:
    """Return a key that is equal for wrappers with the same classes, active adapters and shapes."""
    tuners = [(type(tuner), tuple(tuner.active_adapters)) for tuner in _tuners(wrapper)]
    return (*tuners, *((name, part.shape, part.is_meta) for name, part in wrapper.named_parameters()))


@torch.no_grad()
def _merge_differences(wrapper: Any) -> Iterator[str]:
    """Compare a wrapper's forward with that of the merged module, for synthetic adapters and inputs.

    PEFT merges some tuners in another order than its forward applies them (OFT), or merges adapters that its forward
    ignores (OSF). Values are synthetic because new adapters change nothing, so differences would appear in training.
    """
    twin = _copy(wrapper, {}).eval()
    base, generator = innermost(twin), torch.Generator().manual_seed(0)
    inputs = _inputs(base, generator)
    if inputs is None or any(part.is_meta for part in twin.parameters()):
        return  # experts (PEFT only has LoRA, which adds deltas), or a model without values
    of_base = {id(part) for part in base.parameters()}
    for part in twin.parameters():
        if id(part) not in of_base and part.is_floating_point():
            part += 0.2 * torch.randn(part.shape, generator=generator).to(part)
    inputs = inputs.to(base.weight.device) if isinstance(base, nn.Embedding) else inputs.to(base.weight)
    try:
        expected = twin(inputs).float()
        difference = _merged(wrapper, twin)(inputs).float() - expected
    except _FAILURES as error:
        yield f"has several active adapters, and PEFT's forward cannot be compared with the merged module's: {error}"
        return
    if difference.norm() > 0.05 * expected.norm():  # bf16 rounds to 0.01
        names = ", ".join(dict.fromkeys(name for tuner in _tuners(wrapper) for name in tuner.active_adapters))
        yield (
            f"has several active adapters ({names}), which PEFT merges into other weights than its forward uses: "
            "activate only one"
        )


def _inputs(base: nn.Module, generator: torch.Generator) -> torch.Tensor | None:
    """Return random inputs for a linear, embedding or convolution; None for other modules."""
    if isinstance(base, nn.Embedding):
        return torch.randint(base.num_embeddings, (1, 8), generator=generator)
    if isinstance(base, (nn.Linear, Conv1D)):
        width = base.in_features if isinstance(base, nn.Linear) else base.nx
        return torch.randn(1, 8, width, generator=generator)
    if isinstance(base, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        sizes = [step * (size - 1) + 8 for step, size in zip(base.dilation, base.kernel_size, strict=True)]
        return torch.randn(1, base.in_channels, *sizes, generator=generator)
    return None


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _foreign(model: nn.Module) -> dict[str, str]:
    """Return problems by name: PEFT's modules that wrap no module with weights (adaption prompts)."""
    wrappers = tuple(f"{name}." for name, _ in peft_modules(model))
    return {
        name: f"is PEFT's {type(module).__name__}, which is merged into no weight"
        for name, module in own_modules(model)
        if type(module).__module__.partition(".")[0] == "peft" and not f"{name}.".startswith(wrappers)
    }


def _merged_ties(model: nn.Module, tied: Mapping[str, str]) -> tuple[dict[str, str], list[Problem]]:
    """Return the ties of `tied` that remain after merging, and a problem for each tie with only one adapted side.

    If both tied weights have adapters, they stay tied only if the adapters are also tied, so that merged weights agree.
    """
    wrappers = {name: wrapper for name, wrapper in peft_modules(model) if not is_disabled(wrapper)}

    def memory_of_adapter_on(name: str) -> set[int] | None:
        wrapper = next((wrapper for module, wrapper in wrappers.items() if name.startswith(f"{module}.")), None)
        return None if wrapper is None else {part.untyped_storage().data_ptr() for part in wrapper.parameters()}

    ties, problems = {}, []
    for name, saved_name in tied.items():
        first, second = memory_of_adapter_on(name), memory_of_adapter_on(saved_name)
        if (first is None) != (second is None):
            detail = f"is tied to {saved_name}, and only one of them has an adapter: they differ when it is merged"
            problems.append(Problem(ProblemKind.TIED, name, detail, advice=_TIED_ADVICE))
        elif first == second:
            ties[name] = saved_name
    return ties, problems


def _unreached(name: str, wrapper: Any) -> Iterator[Problem]:
    """Yield a problem for each tensor of a wrapper that affects no merged weight, or cannot be merged."""
    base = {id(part) for part in innermost(wrapper).parameters()}
    known = {*wrapper.active_adapters, *_adapters_of(wrapper)}.union(*map(_adapters_of, _tuners(wrapper)))
    for parameter_name, part in wrapper.named_parameters():
        if id(part) in base:
            if not part.is_floating_point():
                detail = f"is quantized ({part.dtype}), under an adapter"
                yield Problem(ProblemKind.DTYPE, f"{name}.{parameter_name}", detail, advice=_PLAIN_ADVICE)
        elif "original_module" not in parameter_name.split(".") and known.isdisjoint(parameter_name.split(".")):
            yield Problem(ProblemKind.UNEXPECTED, f"{name}.{parameter_name}", "reaches no weight of the model")


def _adapters_of(wrapper: Any) -> set[str]:
    """Return the names of a wrapper's adapters, active or not."""
    names: set[str] = set()
    for layer in getattr(wrapper, "adapter_layer_names", ()):
        holder: Any = wrapper
        for part in layer.split("."):
            holder = getattr(holder, part, None)
        if isinstance(holder, (nn.ModuleDict, nn.ParameterDict)):
            names |= set(holder.keys())
    return names
