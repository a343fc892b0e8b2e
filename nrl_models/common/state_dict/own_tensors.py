"""A model's own tensors, without wrappers and gathered if they are sharded."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nrl_models.common.logs import get_logger
from nrl_models.common.modules import innermost, is_flattened, named_tensors, own_modules, own_name, without_wrappers
from nrl_models.common.process_state import BUILDING
from nrl_models.common.state_dict import layouts
from nrl_models.common.state_dict.blocks import check_reads, check_writes
from nrl_models.common.state_dict.kept_tensors import keep, kept_by
from nrl_models.common.state_dict.matching import is_wide_float
from nrl_models.common.upstream_conversions import loaded_conversions, set_loaded_conversions
from nrl_models.common.upstream_torch import FLATTENED, FSDP1_NAME, is_traceable_wrapper_subclass, module_wrappers
from nrl_models.common.views.view import HFTensor, region_of
from nrl_models.errors import Problem, ProblemKind, StateDictError

logger = get_logger(__name__)


def own_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's own tensors, detached, by their own names.

    Args:
        model: A model, which may be wrapped. With FSDP1, every rank has to call this, because it gathers the tensors.
    """
    if is_flattened(model) and not is_inside_fsdp1(model):
        names = {own_name(name): tensor for name, tensor in model.state_dict().items()}
        root = innermost(model, peft=False)
        depth = next(name for name, module in model.named_modules() if module is root)
        prefix = f"{own_name(depth)}." if own_name(depth) else ""
        return {name.removeprefix(prefix): tensor for name, tensor in names.items()}
    return dict(without_wrappers(innermost(model)).state_dict())


def model_inside(model: Any) -> PreTrainedModel:
    """Return the model inside all wrappers.

    Raises:
        StateDictError: If that is not a model of transformers or this library, such as `AveragedModel`.
    """
    inner = innermost(model)
    if isinstance(inner, PreTrainedModel):
        return inner
    modules = inner.named_modules() if isinstance(inner, nn.Module) else ()
    parts = [name for name, part in modules if isinstance(part, PreTrainedModel)]
    detail = "is neither a model of this library nor a wrapper of torch, accelerate or PEFT"
    advice = f"pass the model inside: model.{parts[0]}" if parts else "pass a model that from_pretrained returns"
    raise StateDictError(
        "the model has no hub names", [Problem(ProblemKind.UNEXPECTED, type(inner).__name__, detail)], [advice]
    )


def parameters_outside(model: nn.Module, inner: nn.Module) -> list[str]:
    """Return names of parameters that are in `model` but not in its inner model: PEFT's prompts and prefixes."""
    inside = {id(part) for part in inner.parameters()}
    return [name for name, part in model.named_parameters() if id(part) not in inside]


class Gathered(Mapping[str, torch.Tensor]):
    """Mapping of unsharded tensors. Tensors sharded by `fully_shard` are gathered when they are read, on every rank.

    Args:
        tensors: Tensors by name. The last gathered one is cached, because parts of a stack are read consecutively.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._last: tuple[str, torch.Tensor | None] = "", None

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        if not isinstance(tensor, DTensor):
            return tensor
        if self._last[0] != name:
            self._last = "", None  # freed before the next one is gathered
            self._last = name, tensor.full_tensor()
        assert self._last[1] is not None
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return a dtype that can represent the values of all `dtypes`."""
    return reduce(torch.promote_types, dtypes)


def is_inside_fsdp1(model: nn.Module) -> bool:
    """Return True if FSDP1 has flattened parameters of a model, and gathers them in a module around it."""
    kinds = tuple(kind for kind, name in module_wrappers() if name == FSDP1_NAME)
    gathered = {id(part) for module in model.modules() if isinstance(module, kinds) for part in module.parameters()}
    return any(getattr(part, FLATTENED, False) and id(part) not in gathered for part in model.parameters())


def read_all(table: Mapping[str, HFTensor], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a table whose own tensors exist, as views if possible.

    Raises:
        ShardingError: If own tensors are sharded, and this rank does not hold a complete Hugging Face tensor.
    """
    wanted = {
        name: tensor for name, tensor in table.items() if all(parameter in tensors for parameter in tensor.parameters)
    }
    check_reads(wanted.values(), tensors)
    return {name: tensor.read(tensors) for name, tensor in wanted.items()}


def assemble(
    name: str,
    shape: tuple[int, ...],
    sources: list[tuple[str, HFTensor]],
    state_dict: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Assemble an own tensor from Hugging Face tensors. A source that is the complete tensor is returned as it is.

    Args:
        name: Name of the own tensor.
        shape: Its shape.
        sources: Keys and Hugging Face tensors that fill it.
        state_dict: Tensors by key.
    """
    first, target = sources[0]
    if len(sources) == 1 and target.view is not None and target.view.region_in(shape) == region_of(shape):
        return state_dict[first]
    check_writes(state_dict, [key for key, _ in sources], name)
    dtype = widest(state_dict[key].dtype for key, _ in sources)
    assembled = state_dict[first].new_empty(shape, dtype=dtype)
    for key, target in sources:
        target.write_into(name, assembled, state_dict[key])
    return assembled


TO_ENGINE = (
    "engines get merged weights from nrl_models.export_adapter(model).iter_export(model)",
    "or vLLM's LoRA gets the adapter: model.save_pretrained(folder), then VLLMEngine.use_adapter(folder)",
)
"""How to export a model with adapters."""

TO_FILES = (
    "save the adapter: PeftModel.save_pretrained(folder), or the tensors of peft.get_peft_model_state_dict(model)",
    "or save merged weights: merged = dict(nrl_models.export_adapter(peft_model).iter_export(peft_model, "
    'layout="transformers")), then peft_model.get_base_model().save_pretrained(folder, state_dict=merged)',
)
"""How to save a model with adapters."""


def require_no_peft(has_peft: bool, advice: Sequence[str] = TO_ENGINE) -> None:
    """Raise if the model has PEFT adapters, because its own weights lack them.

    Args:
        has_peft: Whether it has adapters.
        advice: `TO_ENGINE` or `TO_FILES`.
    """
    if has_peft:
        problem = Problem(ProblemKind.UNEXPECTED, "PEFT's adapters", "are in the model, separate from its weights")
        verb = "saved" if advice is TO_FILES else "exported"
        raise StateDictError(f"the {verb} weights would lack the adapters", [problem], advice)


def require_values(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise if weights of a model are quantized, complex, or on meta: offloaded, or never loaded.

    Args:
        model: The model.
        tensors: Its own tensors.
    """
    require_unquantized(quantized_weights(model, stored_formats(model)))
    require_real(model, tensors)
    require_in_memory(tensors)


def require_real(model: nn.Module, tensors: Mapping[str, Any], action: str = "exported") -> None:
    """Raise if own tensors are complex where the class has floats: loading would drop imaginary parts. Lists all."""
    if not (dtypes := {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype.is_complex}):
        return
    built = as_built(without_wrappers(model, peft=True), torch.float32).state_dict()
    if problems := [
        Problem(ProblemKind.DTYPE, name, f"is of {dtype}, expected a floating-point dtype")
        for name, dtype in dtypes.items()
        if name in built and built[name].is_floating_point()
    ]:
        advice = "convert them to real numbers: parameter.data = parameter.data.real"
        raise StateDictError(f"complex weights cannot be {action}", problems, [advice])


def require_in_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise if tensors are on meta, which has no values."""
    if problems := [
        Problem(ProblemKind.MISSING, name, "is on meta") for name, tensor in tensors.items() if tensor.is_meta
    ]:
        advice = [
            "load the model without offloading (device_map), or save it with save_pretrained and load the copy",
            "from_config(device='meta') gives shapes only: load a checkpoint with from_pretrained",
        ]
        raise StateDictError("tensors to export have no values in memory", problems, advice)


class StoredFormats(NamedTuple):
    """Weights of a model that are not stored as plain floats, by name, with their formats.

    Attributes:
        opaque: Packed modules of torch, and tensor subclasses. safetensors cannot write them.
        bitsandbytes: Packed weights of bitsandbytes.
        narrow: Parameters in integers and 8-bit floats. Also buffers in these dtypes if their module has no weight.
    """

    opaque: dict[str, str]
    bitsandbytes: dict[str, str]
    narrow: dict[str, str]

    @property
    def packed(self) -> dict[str, str]:
        """Weights that are packed, with their formats."""
        return self.opaque | self.bitsandbytes


_EXPORT_ADVICE = "export a model that is loaded without quantization, or start the engine on the saved checkpoint"


def stored_formats(model: nn.Module) -> StoredFormats:
    """Return the weights that are not stored as plain floats. Cheap, because adapters call it to detect changes."""
    formats = StoredFormats({}, {}, {})
    for prefix, module in own_modules(model, duplicates=True):
        dot = f"{prefix}." if prefix else ""
        if type(module).__module__.startswith("torch.ao.nn.") and hasattr(module, "_packed_params"):
            formats.opaque[f"{dot}weight"] = f"{type(module).__module__}.{type(module).__qualname__}"
        holds_weight = bool(module._modules) or "weight" in module._parameters
        for name, tensor in (*module._parameters.items(), *(() if holds_weight else module._buffers.items())):
            if tensor is None:
                continue
            if is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor):
                formats.opaque[dot + name] = type(tensor).__name__
            elif getattr(tensor, "bnb_quantized", False):
                formats.bitsandbytes[dot + name] = f"{type(tensor).__name__} of {tensor.dtype}"
            elif not tensor.is_complex() and (not tensor.is_floating_point() or tensor.itemsize == 1):
                formats.narrow[dot + name] = f"{type(tensor).__name__} of {tensor.dtype}"
    return formats


def quantized_weights(model: nn.Module, stored: StoredFormats) -> dict[str, str]:
    """Return weights that are stored quantized, by the name of the unquantized weight, and their format.

    The quantized weight has this name, or another one in the same module (`W_q`, `qweight`, `weight_packed`).
    """
    if not stored.narrow:
        return stored.packed
    plain = without_wrappers(model, peft=True)
    built = as_built(plain)
    every = built.named_parameters(remove_duplicate=False)  # a tie's names, as only one of them may be quantized
    wide = {name for name, weight in every if weight.is_floating_point() and weight.itemsize > 1}
    quantized = stored.packed | {name: kind for name, kind in stored.narrow.items() if name in wide}
    inside = {name.rpartition(".")[0]: name for name in reversed(stored.narrow)}
    for name in sorted(wide - {name for name, *_ in named_tensors(plain)}):
        if (other := inside.get(name.rpartition(".")[0])) is not None:
            quantized[name] = f"{other.rpartition('.')[2]}: {stored.narrow[other]}"
    return quantized


def require_unquantized(quantized: Mapping[str, str], action: str = "exported", advice: str = _EXPORT_ADVICE) -> None:
    """Raise if weights are quantized, because engines or files would get their storage in place of weights.

    Args:
        quantized: See `quantized_weights`.
        action: Participle in the message: `exported` or `saved`.
        advice: Advice in the message.

    Raises:
        StateDictError: If there are any. Lists all weights.
    """
    if quantized:
        problems = [Problem(ProblemKind.DTYPE, name, f"is quantized ({kind})") for name, kind in quantized.items()]
        raise StateDictError(f"quantized weights cannot be {action}", problems, [advice])


def as_built(model: Any, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return a model on meta with the names and shapes that the configuration of `model` gives.

    Args:
        model: The model, for example one that FSDP1 has flattened.
        dtype: Dtype of the result, which is torch's default dtype during the call. Default: that of the first parameter
            with a dtype that can be the default: not int8 or float8.
    """
    if dtype is None:
        dtypes = (parameter.dtype for parameter in model.parameters())
        dtype = next(filter(is_wide_float, dtypes), torch.get_default_dtype())
    with BUILDING, torch.device("meta"):
        built = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    set_loaded_conversions(built, loaded_conversions(model))
    layouts.note_loaded_names(built, layouts.loaded_names(model))
    keep(built, kept_by(model))
    return built


def extra_modules(model: PreTrainedModel) -> list[str]:
    """Return the names of modules next to a language model's decoder that its class does not have: value heads."""
    base, head = model.base_model, model.get_output_embeddings()
    if base is model or head is None:
        return []
    others = [
        name
        for name, part in model.named_children()
        if part is not base and part.state_dict() and all(module is not head for module in part.modules())
    ]
    built = as_built(model) if others else model
    return [name for name in others if not hasattr(built, name)]


def for_engines(tensors: Mapping[str, HFTensor], extra_modules: Sequence[str]) -> dict[str, HFTensor]:
    """Return the tensors to export without those of `extra_modules`, and log the modules once."""
    if extra_modules:
        names = ", ".join(extra_modules)
        logger.warning_once(f"{names}: not exported, because the model's class and engines do not have this module")
    prefixes = tuple(f"{name}." for name in extra_modules)
    return {name: tensor for name, tensor in tensors.items() if not tensor.parameters[0].startswith(prefixes)}


def computed_weights(model: PreTrainedModel) -> list[str]:
    """Return names of weights that torch computes from other tensors, unless the model's class defines them so."""
    names = layouts.computed_weights(model)
    built = set(layouts.computed_weights(as_built(model))) if names else set()
    return [name for name in names if name not in built]


COMPUTED = "is computed from other tensors (by a parametrization, pruning, or weight or spectral norm)"
STORE_COMPUTED = (
    "use a copy of the model that stores the result: torch.nn.utils.parametrize.remove_parametrizations(module, name), "
    "torch.nn.utils.prune.remove(module, name)"
)


def require_stored(computed: list[str]) -> None:
    """Raise if the model computes weights from other tensors, which engines do not have."""
    if computed:
        problems = [Problem(ProblemKind.UNEXPECTED, name, COMPUTED) for name in computed]
        raise StateDictError("engines do not have the tensors of these weights", problems, [STORE_COMPUTED])
