"""What a model with PEFT adapters exports: the merged weights, under the names of the model without adapters.

The model stays as it is: a module with an adapter is copied when its weights are wanted, PEFT merges the copy, and the
copy goes. So whatever PEFT can merge is exported, adapters of stacked experts (`target_parameters`) among them, at the
cost of one such module's weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nrl_models.common.modules import inside_peft, peft_modules, peft_types
from nrl_models.common.state_dict.adapter import StateDictAdapter, adapter_of
from nrl_models.common.state_dict.tables import Layout
from nrl_models.errors import Problem, ProblemKind, StateDictError


def export_adapter(model: nn.Module) -> StateDictAdapter:
    """What exports a model to an engine: `export_plan()` and `iter_export(model)`, under the hub's names.

    Args:
        model: a model of this library, or a `PeftModel` around one, or one that adapters were added to. With adapters,
            tensors are those of `merge_and_unload()`, and the model is left as it is: active adapters are merged,
            inactive and disabled ones are left out, as in the model's forward.

    Raises:
        StateDictError: adapter tensors that reach no weight of the model (prompts, prefixes), an adapter on one of two
            tied weights, quantised or sharded weights under adapters; all of them.
    """
    if inside_peft(model) is model and not any(peft_modules(model)):
        own: Any = getattr(model, "state_dict_adapter", None)
        return own or adapter_of(cast(PreTrainedModel, model))
    return MergedAdapter(model)


class MergedAdapter(StateDictAdapter):
    """The adapter of the model without PEFT's modules; `iter_export` yields merged weights.

    Args:
        model: see `export_adapter`.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = inside_peft(model)
        super().__init__(_without_adapters(inner, {}))
        inside = {id(part) for part in inner.parameters()}
        outside = [name for name, part in model.named_parameters() if id(part) not in inside]
        problems = [Problem(ProblemKind.UNEXPECTED, name, "reaches no weight of the model") for name in outside]
        adapted: set[str] = set()
        for name, wrapper in peft_modules(inner):
            problems += list(_unreached(name, wrapper))
            adapted |= {own for own in self.own if own.startswith(f"{name}.")}
        for name, kept in self.tied.items():
            if (name in adapted) != (kept in adapted):
                detail = f"is tied to {kept}, and only one of them has an adapter: they differ when it is merged"
                problems.append(Problem(ProblemKind.TIED, name, detail))
        if problems:
            advice = ["merge it by PEFT, and export what remains; or train adapters of the linears or experts"]
            raise StateDictError("the adapters cannot be merged into what is exported", problems, advice)

    def iter_export(
        self, model: nn.Module, max_bytes: int | None = None, *, layout: Layout = "hub"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As `StateDictAdapter.iter_export`; what has an adapter is a copy, merged when its turn comes."""
        yield from self._export(inside_peft(model), max_bytes, layout)

    def _own_tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return super()._own_tensors(_without_adapters(model, {}))

    def _values(self, model: nn.Module, own: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return _Merged(model, own)


class _Merged(Mapping[str, torch.Tensor]):
    """The model's tensors by plain name, merged when they are read; those of one module are kept until the next."""

    def __init__(self, model: nn.Module, own: Mapping[str, torch.Tensor]) -> None:
        self._own = own
        self._wrappers = dict(peft_modules(model))
        self._last: tuple[str, dict[str, torch.Tensor]] = "", {}

    def __getitem__(self, name: str) -> torch.Tensor:
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            if (module := ".".join(parts[:end])) in self._wrappers:
                if self._last[0] != module:
                    self._last = "", {}  # freed before the next is made
                    self._last = module, merged_weights(module, self._wrappers[module])
                return self._last[1][name]
        return self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


@torch.no_grad()
def merged_weights(name: str, wrapper: Any) -> dict[str, torch.Tensor]:
    """The merged tensors of a module with adapters, by their plain names; the module is left as it is.

    Args:
        name: of the module without adapters.
        wrapper: PEFT's module.

    Raises:
        StateDictError: PEFT cannot merge it.
    """
    merges = not _is_off(wrapper) and not getattr(wrapper, "merged", False)
    twin: Any = copy.deepcopy(wrapper)
    try:
        if hasattr(twin, "unload_and_optionally_merge_module"):
            base = twin.unload_and_optionally_merge_module(merge=merges, safe_merge=False, adapter_names=None)
        else:
            if merges:
                twin.merge(safe_merge=False)
            base = twin.get_base_layer()
    except (NotImplementedError, ValueError, TypeError) as error:
        problem = Problem(ProblemKind.UNEXPECTED, name, f"has an adapter that PEFT does not merge: {error}")
        raise StateDictError("the adapters cannot be merged into what is exported", [problem]) from error
    return {f"{name}.{own}": tensor for own, tensor in base.state_dict().items()}


def _base(wrapper: Any) -> nn.Module:
    """The module that PEFT's stands in place of; of a whole copy that is trained, that copy."""
    if hasattr(wrapper, "modules_to_save") and not _is_off(wrapper):
        return wrapper.modules_to_save[wrapper.active_adapters[0]]
    return wrapper.get_base_layer() if hasattr(wrapper, "get_base_layer") else wrapper.original_module


def _is_off(wrapper: Any) -> bool:
    return bool(wrapper.disable_adapters or not wrapper.active_adapters)


def _without_adapters(module: Any, seen: dict[int, nn.Module]) -> Any:
    """A shallow copy of a model with its own modules in place of PEFT's: the same parameters, under plain names."""
    if isinstance(module, peft_types()):
        return _without_adapters(_base(module), seen)
    if id(module) not in seen:
        twin = seen[id(module)] = object.__new__(type(module))
        twin.__dict__.update(module.__dict__)
        children = {name: child and _without_adapters(child, seen) for name, child in module._modules.items()}
        twin.__dict__["_modules"] = children
    return seen[id(module)]


def _unreached(name: str, wrapper: Any) -> Iterator[Problem]:
    """What of a wrapper's tensors no merged weight is made of, or none can be made of."""
    base = {id(part) for part in _base(wrapper).parameters()}
    known = {*wrapper.active_adapters, *_adapters_of(wrapper)}
    for own, part in wrapper.named_parameters():
        if isinstance(part, DTensor):
            yield Problem(ProblemKind.PLAN, f"{name}.{own}", "is sharded, and adapters are merged in one process only")
        elif id(part) in base:
            if not part.is_floating_point():
                yield Problem(ProblemKind.DTYPE, f"{name}.{own}", f"is quantised ({part.dtype}), under an adapter")
        elif "original_module" not in own.split(".") and known.isdisjoint(own.split(".")):
            yield Problem(ProblemKind.UNEXPECTED, f"{name}.{own}", "reaches no weight of the model")


def _adapters_of(wrapper: Any) -> set[str]:
    """The names of a wrapper's adapters, active or not."""
    found: set[str] = set()
    for layer in getattr(wrapper, "adapter_layer_names", ()):
        holder: Any = wrapper
        for part in layer.split("."):
            holder = getattr(holder, part, None)
        if isinstance(holder, (nn.ModuleDict, nn.ParameterDict)):
            found |= set(holder.keys())
    return found
