"""`from_pretrained` and `from_config`: one path for families and for plain Hugging Face classes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from nrl_models.common.backend import BackendConfig, Combine, should_combine
from nrl_models.common.checkpoint.dequantised import METHODS, DequantisedFiles, settings_of
from nrl_models.common.checkpoint.files import CONFIG_NAME, CheckpointFiles, resolve_folder
from nrl_models.common.config.types import with_declared_types
from nrl_models.common.config.validate import check_config
from nrl_models.common.projections import join
from nrl_models.common.state_dict.matching import is_wide_float
from nrl_models.errors import (
    CheckpointError,
    Problem,
    ProblemKind,
    RemoteCodeError,
    UnknownArchitectureError,
    UnknownArgumentError,
    in_words,
)
from nrl_models.loading.placement import DeviceMap, device_in_context, dispatch, minding_context, refuse_meta
from nrl_models.loading.weights import load_weights

logger = logging.get_logger(__name__)

IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Values transformers takes like configuration values, though `config.json` has no such keys."""

ClassFor = Callable[[PreTrainedConfig, Path | None], type[PreTrainedModel]]
"""Chooses the model class for a configuration, and the folder it came from if it came from one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What `from_pretrained` takes beside values of the configuration.

    Args:
        config: a configuration to use in place of the checkpoint's.
        dtype: of the parameters, fp32 masters included; "auto" is the configuration's, else the
            checkpoint's. What transformers keeps in fp32 stays fp32.
        device: where to put the model; None is that of a `torch.device(...)` around the call, else the CPU, or
            with a mesh this rank's device.
        device_map: how to spread the model over several devices of this process, the CPU and the disk, as
            transformers takes it: "auto", one device, or a device for each module.
        offload_folder, offload_buffers, max_memory: where what a device map puts on "disk" goes, whether buffers
            go with it, and how much each device may hold.
        quantization_config: how transformers is to quantise the linears while it loads them (QLoRA).
        combine: whether projections of one input run as one matmul: True, False, or "auto", which
            follows the measurements in docs/benchmarks.md. It chooses speed only: parameters, their names and
            every file are the same. `nrl_models.common.projections.report` says what came together.
        backend: attention and expert implementations, and `combine` unless that is given.
        mesh: the ranks to shard the model over; every rank calls this, and reads only the slices it holds. Its
            dimensions are named `fsdp`, `ep`, `tp` (any of them, in this order); see
            `nrl_models.distributed.parallelize`.
        plan: how to shard it: "auto" (what None stands for), rules that change that, or a
            `nrl_models.distributed.ParallelPlan`.
        strict: whether the checkpoint must hold exactly this model. False initialises what is
            missing and skips what is not known, with a warning that lists both: for a new head on
            a base model.
        revision, token, cache_dir, subfolder: where and how to get a hub repository.
        trust_remote_code: run code that comes with the checkpoint, if neither transformers nor a
            registered family knows its `model_type`.
        ignore_config_keys: keys of the configuration, by name or path (`text_config.use_x`), that may have values
            nobody reads or honours: see `nrl_models.common.config.validate.check_config`.
    """

    config: PreTrainedConfig | None = None
    dtype: str | torch.dtype = "auto"
    device: str | int | torch.device | None = None
    device_map: DeviceMap | None = None
    offload_folder: str | Path | None = None
    offload_buffers: bool = False
    max_memory: Mapping[int | str, int | str] | None = None
    quantization_config: Any = None
    combine: Combine = True
    backend: BackendConfig | None = None
    mesh: DeviceMesh | None = None
    plan: Any = None
    strict: bool = True
    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | Path | None = None
    subfolder: str = ""
    trust_remote_code: bool = False
    ignore_config_keys: Collection[str] | str = ()

    def check_destination(self) -> None:
        """Refuse to put one model in two places, or in none.

        Raises:
            UnknownArgumentError: keywords that exclude one another.
            DeviceError: weights are to go to meta.
        """
        refuse_meta(self.device, self.device_map)
        given = [name for name in ("device", "device_map", "mesh") if getattr(self, name) is not None]
        if len(given) > 1 and given != ["device", "mesh"]:
            raise UnknownArgumentError(
                f"{' and '.join(given)}: expected one of them, as each says where the model goes"
            )
        if self.plan is not None and self.mesh is None:
            raise UnknownArgumentError("plan says how to shard over a mesh: pass mesh, too")

    def destination(self) -> torch.device:
        """The device that is asked for, or by default the CPU, with a mesh this rank's device."""
        if self.device is not None:
            return torch.device(self.device)
        if self.mesh is None or self.mesh.device_type == "cpu":
            return torch.device("cpu")
        kind = self.mesh.device_type
        return torch.device(kind, torch.get_device_module(kind).current_device())


KEYWORDS = tuple(field.name for field in fields(LoadOptions))


@minding_context
def from_pretrained(class_for: ClassFor, path_or_id: str | Path, **options: Any) -> PreTrainedModel:
    """A model with a checkpoint's weights, in evaluation mode.

    The model is built with parameters on meta and real buffers, so nothing is allocated twice and no
    buffer (a RoPE table, a scale) is ever left unset.

    Args:
        class_for: chooses the class.
        path_or_id: a folder, or the name of a hub repository.
        options: see `LoadOptions`; all others are values of the configuration. It raises what
            `nrl_models.AutoModelForCausalLM.from_pretrained` does.
    """
    given = LoadOptions(**{name: options.pop(name) for name in KEYWORDS if name in options})
    given.check_destination()
    with ExitStack() as opened:

        def prepare() -> Prepared:
            prepared = _prepare(class_for, path_or_id, given, options)
            if prepared.files is not None:
                opened.callback(prepared.files.close)
            return prepared

        if given.mesh is None:
            prepared = prepare()
            if prepared.files is None:
                return prepared.model
            narrowed = load_weights(
                prepared.model, prepared.files, dtype=prepared.dtype, device=prepared.device, strict=given.strict
            )
        else:
            from nrl_models.loading.sharded import load_sharded  # built upon this module; only sharding asks for it

            plan: Any = "auto" if given.plan is None else given.plan
            prepared, narrowed = load_sharded(prepare, given.mesh, plan, strict=given.strict)
    model, resolved, folder = prepared.model, prepared.dtype, prepared.folder
    if narrowed and given.dtype == "auto":
        logger.warning(
            f"{path_or_id} stores {len(narrowed)} tensors ({narrowed[0]}, ...) with more precision than {resolved}, "
            f"in which they are loaded. Pass a wider dtype to keep their values, or dtype={resolved} if this is meant."
        )
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.eval()
    if given.device_map is None:
        return model
    return dispatch(
        model,
        given.device_map,
        given.offload_folder,
        max_memory=given.max_memory,
        offload_buffers=given.offload_buffers,
    )


@dataclass(slots=True)
class Prepared:
    """A model to fill, and what to fill it from.

    Args:
        model: with parameters on meta and real buffers; or loaded already, if `files` is None.
        folder: the checkpoint's.
        files: the checkpoint's tensors.
        dtype: of the parameters.
        device: where to put them.
    """

    model: PreTrainedModel
    folder: Path
    files: CheckpointFiles | None
    dtype: torch.dtype
    device: torch.device


def _prepare(class_for: ClassFor, path_or_id: str | Path, given: LoadOptions, overrides: Mapping[str, Any]) -> Prepared:
    """What comes before anything is read. A quantised checkpoint is loaded, by transformers."""
    folder = resolve_folder(
        path_or_id, subfolder=given.subfolder, revision=given.revision, token=given.token, cache_dir=given.cache_dir
    )
    if given.config is None:
        config = read_config(folder, trust_remote_code=given.trust_remote_code)
    else:
        config = copy.deepcopy(given.config)
    _override(config, overrides)
    config.name_or_path = str(path_or_id)
    model_class = class_for(config, folder)
    config = config_for(model_class, config)
    check_config(model_class, config, given.ignore_config_keys)
    device = given.destination()
    construction = _construction(model_class, given.combine, given.backend, device)
    quantised_as = given.quantization_config or getattr(config, "quantization_config", None)
    is_read_plain = given.quantization_config is None and _method(quantised_as) in METHODS
    if quantised_as is not None and not is_read_plain:
        if given.mesh is not None:
            problem = Problem(ProblemKind.DTYPE, "quantization_config", "a quantised model is not sharded")
            raise CheckpointError(f"cannot load {path_or_id}", [problem], ["load it without mesh"])
        quantised = _load_quantised(model_class, folder, config, given, construction, device)
        return Prepared(quantised, folder, None, quantised.dtype, device)
    if is_read_plain:
        del config.quantization_config  # the model is not quantised, and what it saves is not
    files = DequantisedFiles(folder, quantised_as) if is_read_plain else CheckpointFiles(folder)
    dtype = _resolve_dtype(given.dtype, config, files)
    with _meta_parameters():
        model = model_class._from_config(config, dtype=dtype, **construction)
    _compute_buffers_again(model)
    return Prepared(model, folder, files, dtype, device)


def _load_quantised(
    model_class: type[PreTrainedModel],
    folder: Path,
    config: PreTrainedConfig,
    given: LoadOptions,
    construction: dict[str, Any],
    device: torch.device,
) -> PreTrainedModel:
    """A quantised checkpoint, by transformers: its quantisers replace the linears they own, and groups let them be."""
    options = construction | {"config": config, "dtype": given.dtype, "device_map": device}
    if given.quantization_config is not None:
        options["quantization_config"] = given.quantization_config
    if given.device_map is not None:
        asked = ("device_map", "offload_folder", "max_memory", "offload_buffers")
        options |= {name: getattr(given, name) for name in asked}
    load = vars(PreTrainedModel)["from_pretrained"].__func__  # a family's class has another of that name
    model, info = load(model_class, folder, output_loading_info=True, **options)
    kinds = {
        "missing_keys": ProblemKind.MISSING,
        "unexpected_keys": ProblemKind.UNEXPECTED,
        "mismatched_keys": ProblemKind.SHAPE,
    }
    problems = [
        Problem(kind, str(key), "reported by transformers, which loads quantised checkpoints")
        for name, kind in kinds.items()
        for key in sorted(info.get(name, ()), key=str)
    ]
    if given.strict and problems:
        raise CheckpointError(
            f"{folder} does not fit {model_class.__name__}", problems, ["pass strict=False to load it all the same"]
        )
    if getattr(model, "hf_quantizer", None) is None:
        model._weight_conversions = None  # it is dequantised, and saving is not to quantise it again
    join(model)
    return model.eval()


def from_config(
    class_for: ClassFor,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype | None = None,
    device: str | int | torch.device | None = None,
    combine: Combine = True,
    backend: BackendConfig | None = None,
    ignore_config_keys: Collection[str] | str = (),
) -> PreTrainedModel:
    """A model with new weights: under a seed, bit for bit those transformers initialises.

    Args:
        class_for: chooses the class.
        config: the configuration; not changed.
        dtype: of the parameters; None is the configuration's.
        device: where to build it; None is as for `from_pretrained`, and `"meta"` gives shapes without weights.
        combine, backend, ignore_config_keys: as in `LoadOptions`.
    """
    config = copy.deepcopy(config)
    model_class = class_for(config, None)
    config = config_for(model_class, config)
    check_config(model_class, config, ignore_config_keys)
    torch_device = torch.device(device_in_context() or "cpu" if device is None else device)
    options = _construction(model_class, combine, backend, torch_device)
    if dtype is not None:
        options["dtype"] = dtype
    with torch_device:
        return model_class._from_config(config, **options)


@contextmanager
def _meta_parameters() -> Iterator[None]:
    """Models built inside have parameters on meta, which nobody initialises, and real buffers."""
    with init_empty_weights(include_buffers=False):
        patched: Any = nn.Module
        register_on_meta = patched.register_parameter

        def register(module: Any, name: str, param: nn.Parameter | None) -> None:
            register_on_meta(module, name, param)
            if param is not None:
                module._parameters[name]._is_hf_initialized = True

        patched.register_parameter = register
        yield  # accelerate restores the original


def _compute_buffers_again(model: PreTrainedModel) -> None:
    """Fill buffers that no checkpoint holds as transformers does when it loads: outside the model's dtype.

    A table that was computed while bf16 was the default dtype has the rounding of bf16 in it, even if it is kept in
    fp32 (Gemma 3n's `inv_timescales`).
    """
    module: Any
    for module in model.modules():
        derived = any(module._buffers.get(name) is not None for name in module._non_persistent_buffers_set)
        module._is_hf_initialized = not derived  # transformers' mark of what its initialisation must leave alone
    model.initialize_weights()


def config_for(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration `model_class` takes: `config`, or the text model's within it.

    Raises:
        UnknownArchitectureError: `config` is another model's.
    """
    wanted = model_class.config_class
    # By name too, because code that comes with a checkpoint may be imported twice.
    if wanted is None or isinstance(config, wanted) or type(config).__name__ == wanted.__name__:
        return config
    if isinstance(text := config.get_text_config(), wanted):
        text.name_or_path = config.name_or_path
        return text
    raise UnknownArchitectureError(
        f"{config.name_or_path or 'the configuration'} is a {type(config).__name__} (model_type "
        f"{config.model_type!r}), and {model_class.__name__} takes a {wanted.__name__}. "
        "Use that model's class, or an auto class (nrl_models.AutoModelForCausalLM, ...), which chooses it."
    )


_OTHER_SHARDING = ("distributed_config", "tp_plan", "tp_size", "device_mesh")


def _override(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> None:
    """Set `overrides`, values by the configuration's own names, on `config`.

    Raises:
        UnknownArgumentError: names it does not have, or values of another type than it takes.
    """
    if other := [name for name in overrides if name in _OTHER_SHARDING]:
        raise UnknownArgumentError(
            f"{', '.join(other)}: transformers' own sharded loading is not what loads here. Pass "
            "mesh=init_device_mesh(device, sizes, mesh_dim_names=('fsdp', 'tp')) and plan='auto' (docs/scaling.md)"
        )
    unknown = [name for name in overrides if name not in IMPLEMENTATIONS and not _is_value(config, name)]
    if unknown:
        raise UnknownArgumentError(_unknown_keywords(unknown, config))
    try:
        for name, value in with_declared_types(type(config), overrides, "what was passed").items():
            if name in IMPLEMENTATIONS:
                setattr(config, f"_{name}", value)
            elif isinstance(nested := getattr(config, name), PreTrainedConfig) and isinstance(value, Mapping):
                setattr(config, name, type(nested)(**(nested.to_dict() | dict(value))))
            else:
                setattr(config, name, value)
    except StrictDataclassFieldValidationError as error:
        raise UnknownArgumentError(f"{name}={value!r}: {in_words(error)}") from error


def _is_value(config: PreTrainedConfig, name: str) -> bool:
    return name != "torch_dtype" and hasattr(config, name) and not callable(getattr(config, name))


def read_config(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of the checkpoint in `folder`.

    Raises:
        CheckpointError: `config.json` is no JSON object, or has a value of a type its class does not take.
        UnknownArchitectureError: a `model_type` nobody knows.
        RemoteCodeError: it needs the checkpoint's own code, and that was not allowed.
    """
    needs_its_code = _needs_its_code(folder, trust_remote_code)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=needs_its_code)
    except StrictDataclassFieldValidationError as refused:
        if needs_its_code:
            raise
        try:
            return _with_declared_types(folder)
        except StrictDataclassFieldValidationError as error:
            raise CheckpointError(
                f"cannot load {folder}",
                [Problem(ProblemKind.CONFIG, CONFIG_NAME, in_words(error))],
                ["give the value in the type that is expected"],
            ) from refused


def _with_declared_types(folder: Path) -> PreTrainedConfig:
    """The configuration in `folder`, integers taken for floats where its class wants floats."""
    values, _ = PreTrainedConfig.get_config_dict(folder)
    config_class = CONFIG_MAPPING[values["model_type"]]
    return config_class.from_dict(with_declared_types(config_class, values, str(folder / CONFIG_NAME)))


def _needs_its_code(folder: Path, trust_remote_code: bool) -> bool:
    """Whether only the checkpoint's own code can read its configuration. Refuse it if that is not allowed."""
    try:
        content = json.loads((folder / CONFIG_NAME).read_text())
        model_type = content.get("model_type")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(
            f"cannot load {folder}", [Problem(ProblemKind.FILE, CONFIG_NAME, f"is not a JSON object: {error}")]
        ) from error
    if model_type in CONFIG_MAPPING:
        return False
    if "auto_map" in content:
        if trust_remote_code:
            return True
        raise RemoteCodeError(
            f"{folder} brings its own code for model_type {model_type!r} ({content['auto_map']}), and running it was "
            "not allowed. Read that code; if you trust it, pass trust_remote_code=True."
        )
    close = get_close_matches(str(model_type), list(CONFIG_MAPPING), n=3)
    hint = f" Close names: {', '.join(close)}." if close else ""
    raise UnknownArchitectureError(
        f"{folder / CONFIG_NAME} has model_type {model_type!r}, which neither transformers nor a registered family "
        f"knows.{hint} It may need a newer transformers, or a family that registers its configuration."
    )


def _unknown_keywords(unknown: Iterable[str], config: PreTrainedConfig) -> str:
    known = [*KEYWORDS, *IMPLEMENTATIONS, *config.to_dict()]
    lines = []
    for name in unknown:
        close = ["dtype"] if name == "torch_dtype" else get_close_matches(name, known, n=3, cutoff=0.7)
        lines.append(name + (f" (did you mean {' or '.join(close)}?)" if close else ""))
    return (
        f"unknown keyword{'s' if len(lines) > 1 else ''} {', '.join(lines)}: expected one of "
        f"{', '.join((*KEYWORDS, *IMPLEMENTATIONS))}, or a key of {type(config).__name__}"
    )


def _construction(
    model_class: type[PreTrainedModel], combine: Combine, backend: BackendConfig | None, device: torch.device
) -> dict[str, Any]:
    """Keywords for `model_class._from_config`."""
    given = backend or BackendConfig()
    combined = should_combine(given.combine if combine is True else combine, device)
    options: dict[str, Any] = given.implementations()
    # A plain Hugging Face class has nothing to combine.
    return options | {"combine": combined} if hasattr(model_class, "rewrites") else options


def _method(quantised_as: Any) -> str:
    """What a quantisation is called, as transformers' object or as `config.json` has it."""
    return "none" if quantised_as is None else str(settings_of(quantised_as).get("quant_method", "an unnamed method"))


def _resolve_dtype(dtype: str | torch.dtype, config: PreTrainedConfig, files: CheckpointFiles) -> torch.dtype:
    """The dtype to load in: "auto" is the configuration's, else that of the first floating-point tensor."""
    if dtype == "auto":
        configured = config.dtype or config.get_text_config().dtype
        if configured is None:
            plain = (tensor for key, tensor in files.tensors.items() if key not in files.dequantised)
            floats = (tensor.dtype for tensor in plain if tensor.dtype.is_floating_point)
            return next((dtype for dtype in floats if dtype.itemsize > 1), torch.get_default_dtype())
        dtype = configured
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not is_wide_float(resolved):
        raise UnknownArgumentError(f"dtype={dtype!r}: expected 'auto' or a floating-point dtype such as torch.bfloat16")
    return resolved
