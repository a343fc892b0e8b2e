"""`from_pretrained` and `from_config`, for families and for plain Hugging Face classes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.checkpoint import given_tensors
from nrl_models.common.checkpoint.dequantised import DequantisedFiles, quantized_part
from nrl_models.common.checkpoint.files import CheckpointFiles, resolve_folder
from nrl_models.common.checkpoint.generations import (
    Identity,
    Watch,
    current,
    identity_at,
    was_replaced,
)
from nrl_models.common.checkpoint.given_tensors import GivenTensors
from nrl_models.common.checkpoint.limits import limited_build
from nrl_models.common.checkpoint.local_path import GENERATION_NAME, is_gguf
from nrl_models.common.config.at_fault import blaming
from nrl_models.common.config.validate import check_config
from nrl_models.common.gguf.gguf_files import GGUFFiles
from nrl_models.common.logs import get_logger
from nrl_models.common.upstream import BUILDING, device_in_context
from nrl_models.distributed.mesh import agreed
from nrl_models.errors import CheckpointError, NRLModelsError, Problem, ProblemKind, UnknownArgumentError
from nrl_models.loading.fit import Tolerance
from nrl_models.loading.keywords import ALIASES, by_own_names, unknown_keywords
from nrl_models.loading.options import LoadOptions
from nrl_models.loading.placement import dispatch, on_cpu, present_device
from nrl_models.loading.quantised import is_read_plain, load_quantised, require_plain_gguf
from nrl_models.loading.read_config import IMPLEMENTATIONS, config_for, generation_config, override, read_config
from nrl_models.loading.sharded import load_sharded
from nrl_models.loading.skeleton import build_skeleton, checked_dtype, construction, resolve_dtype
from nrl_models.loading.weights import load_weights

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint to load, of which only the configuration has been read.

    Attributes:
        name: the directory or hub repository that the caller named; `state_dict` if the call has no path.
        folder: its local directory; None if the call has no path.
        config: its configuration, with the values that were passed as keywords.
        options: how to load it.
        watch: detects that another process replaces the directory during the load; None if `folder` is None.
    """

    name: str
    folder: Path | None
    config: PreTrainedConfig
    options: LoadOptions
    watch: Watch | None


def attempts(path_or_id: str | Path | None, keywords: Mapping[str, Any]) -> Iterator[AbstractContextManager[None]]:
    """An attempt to load a checkpoint, and another where another process replaced it meanwhile.

        for attempt in attempts(path_or_id, keywords):
            with attempt, open_source(path_or_id, keywords) as source:
                loaded = load(choose_class(source.config), source)

    Args:
        path_or_id, keywords: see `open_source`.

    Yields:
        What ends an error inside it where another attempt follows.

    Raises:
        CheckpointError: the checkpoint was replaced again.
        UnknownArgumentError: no path was given, or two.
    """
    path_or_id, keywords = _named_path(path_or_id, keywords)
    if path_or_id is None:
        yield nullcontext()  # nothing that another process could replace
        return
    folder = Path(path_or_id).expanduser() / str(keywords.get("subfolder") or "")
    replaced: list[str] = []
    yield _attempt(folder, replaced, last=keywords.get("mesh") is not None)  # ranks cannot begin again one by one
    if replaced:
        logger.info(f"{folder} was replaced while it was read; it is read again")
        yield _attempt(folder, replaced, last=True)


@contextmanager
def _attempt(folder: Path, replaced: list[str], last: bool) -> Iterator[None]:
    """Note what was replaced while something failed in it, and end the error; raise it in the `last` attempt."""
    with Watch(folder) as watch:
        try:
            yield
        except Exception as error:
            if not watch.changed() or (last and isinstance(error, NRLModelsError)):
                raise
            names = watch.replaced()
            if last:
                raise was_replaced(folder, names) from error
            replaced += names or [str(folder)]  # its files may have moved, all of them


@contextmanager
def open_source(path_or_id: str | Path | None, keywords: Mapping[str, Any]) -> Iterator[Source]:
    """Find a checkpoint and read its configuration: enough to choose a class for it. It is watched until the end.

    Args:
        path_or_id: a directory, a GGUF file, or the name of a hub repository; None if `keywords` have it under
            transformers' name, or have `config` and `state_dict`.
        keywords: options, see `LoadOptions`, and values of the configuration.

    Raises:
        CheckpointError, UnknownArchitectureError, RemoteCodeError, UnknownArgumentError, DeviceError, ShardingError:
            as `nrl_models.AutoModelForCausalLM.from_pretrained`.
    """
    path_or_id, keywords = _named_path(path_or_id, keywords)
    options, overrides = LoadOptions.split(keywords)
    with ExitStack() as opened:
        with on_cpu(), agreed(options.mesh, "read the checkpoint's configuration"):
            asked = ("subfolder", "revision", "token", "cache_dir", "gguf_file", "local_files_only")
            folder: Path | None = None
            watch: Watch | None = None
            if path_or_id is not None:
                folder = resolve_folder(path_or_id, **{name: getattr(options, name) for name in asked})
                watch = opened.enter_context(Watch(folder.parent if is_gguf(folder) else folder))
                if not is_gguf(folder):  # a publish may replace the directory; read the one that `watch` observes
                    folder = watch.location
            if isinstance(options.config, PreTrainedConfig):
                config = copy.deepcopy(options.config)
            else:
                place = Path(options.config or folder or "").expanduser()
                place = current(place) if place.exists() else resolve_folder(place)
                config = read_config(place, trust_remote_code=options.trust_remote_code)
            override(config, overrides)
            if path_or_id is not None:
                config.name_or_path = str(path_or_id)
        yield Source(str(path_or_id or given_tensors.NAME), folder, config, options, watch)


PATH_NAME = "pretrained_model_name_or_path"
"""transformers' name of the first argument."""


def _named_path(path_or_id: str | Path | None, keywords: Mapping[str, Any]) -> tuple[str | Path | None, dict[str, Any]]:
    """The path, given as the first argument or under transformers' name, and the other keywords.

    None if there is none, and `config` and `state_dict` take its place.
    """
    given = [path for path in (path_or_id, keywords.get(PATH_NAME)) if path is not None]
    complete = all(keywords.get(name) is not None for name in ("config", "state_dict"))
    if len(given) > 1 or (not given and not complete):
        raise UnknownArgumentError(
            f"expected a directory or the name of a hub repository, once: as the first argument, or as {PATH_NAME}. "
            "Without one, pass both config= and state_dict="
        )
    rest = {name: value for name, value in keywords.items() if name != PATH_NAME}
    return (given[0] if given else None), rest


def load(model_class: type[PreTrainedModel], source: Source) -> Any:
    """Build `model_class`, fill it with the checkpoint's weights, and place it; in evaluation mode.

    Returns:
        The model; with `output_loading_info` it and what was missing or not used.
    """
    model, info = _loaded(model_class, source)
    return (model, info) if source.options.output_loading_info else model


def _loaded(model_class: type[PreTrainedModel], source: Source) -> tuple[PreTrainedModel, dict[str, Any]]:
    options, folder, device = source.options, source.folder, source.options.destination()
    with on_cpu(), ExitStack() as opened:
        with agreed(options.mesh, "prepare the model"):
            config = config_for(model_class, source.config)
            if (
                config is not source.config
                and quantized_part(config) is None
                and (part := quantized_part(source.config))
            ):
                config.quantization_config = part.quantization_config
            with blaming(config, f"check {model_class.__name__}"):
                check_config(model_class, config, options.ignore_config_keys)
            built_with = construction(model_class, options.combine, options.backend, device)
            files: CheckpointFiles
            if options.state_dict is not None or folder is None:
                _require_plain_tensors(options, quantized_part(config))
                files = GivenTensors(options.state_dict or {})
            elif is_gguf(folder):
                require_plain_gguf(folder, options)
                files = GGUFFiles(folder)
            elif (part := quantized_part(config)) is not None and is_read_plain(config, options):
                files = DequantisedFiles(folder, part.quantization_config, options.variant)
                del part.quantization_config  # the model is not quantized, nor is what it saves
            elif options.quantization_config is not None or part is not None:
                _refuse_sharding(source)
                generation_config(model_class, folder)
                seen = {path.name: identity_at(path) for path in folder.glob("*.safetensors*")}
                tolerance = _tolerance(source, config)
                quantised = load_quantised(model_class, folder, config, options, built_with, tolerance)
                _require_in_place(source)
                _require_unchanged(source, seen)
                return quantised
            else:
                files = CheckpointFiles(folder, options.variant)
            opened.callback(files.close)
            with blaming(config, f"build {model_class.__name__}"), limited_build(len(files.tensors)):
                dtype = resolve_dtype(options.dtype, config, files)
                model = build_skeleton(model_class, config, dtype, **built_with)
            generation = None if folder is None else generation_config(model_class, folder)
            _require_in_place(source)
        how: Any = {"dtype": dtype, "device": device, "strict": options.strict, "key_mapping": options.key_mapping}
        how["mtp"] = options.mtp
        how["tolerance"] = _tolerance(source, config)
        if options.mesh is None:
            fit = load_weights(model, files, **how)
        else:
            plan: Any = "auto" if options.plan is None else options.plan
            fit = load_sharded(model, files, options.mesh, plan, **how)
        narrowed = fit.narrowed(files)
        if narrowed and options.dtype == "auto":
            logger.warning(
                f"{source.name} stores {len(narrowed)} tensors ({narrowed[0]}, ...) in a wider dtype than {dtype}, "
                f"in which they are loaded. Pass a wider dtype to keep their values, or dtype={dtype} if intended."
            )
        if generation is not None:
            model.generation_config = generation
        with agreed(options.mesh, "read one checkpoint"):
            _require_unchanged(source, files.seen)
        model.eval()
        if options.device_map is not None:
            dispatch(
                model,
                options.device_map,
                options.offload_folder,
                max_memory=options.max_memory,
                offload_buffers=options.offload_buffers,
            )
        return model, fit.info()


def _require_in_place(source: Source) -> None:
    """Raise if a save moved the generation settings before they were read. Without them, the defaults would count."""
    if source.watch is not None:
        source.watch.require(GENERATION_NAME)


def _require_unchanged(source: Source, seen: Mapping[str, Identity | None]) -> None:
    """Raise if the files that were read are not those of the directory now. A state dict has no files."""
    if source.watch is not None:
        source.watch.saw(seen)
        source.watch.check()


def _require_plain_tensors(options: LoadOptions, quantized: PreTrainedConfig | None) -> None:
    """Raise UnknownArgumentError if a state dict would be read as anything but plain tensors."""
    others = [name for name in ("gguf_file", "variant", "quantization_config") if getattr(options, name)]
    if quantized is not None and "quantization_config" not in others:
        others.append("the configuration's quantization_config")
    if others:
        raise UnknownArgumentError(
            f"{', '.join(others)} with state_dict=: a state dict is loaded as the unquantized tensors that it holds. "
            "Leave out one of them"
        )


def _tolerance(source: Source, config: PreTrainedConfig) -> Tolerance:
    """What of a checkpoint need not fit the model that is built from `config`, a part of its configuration or all."""
    composite = source.config if config is not source.config else None
    return Tolerance(source.options.new_head, source.options.ignore_mismatched_sizes, composite)


def _refuse_sharding(source: Source) -> None:
    if source.options.mesh is not None:
        problem = Problem(ProblemKind.DTYPE, "quantization_config", "a quantised model is not sharded")
        raise CheckpointError(f"cannot load {source.name}", [problem], ["load it without mesh"])


NEW_MODEL_OPTIONS = ("dtype", "device", "combine", "backend", "ignore_config_keys", *IMPLEMENTATIONS)
"""The options of `from_config`."""


def from_config(model_class: type[PreTrainedModel], config: PreTrainedConfig, **keywords: Any) -> PreTrainedModel:
    """A model with new weights: for a given seed, bit-identical to transformers' initialisation.

    Args:
        model_class: its class.
        config: left unchanged.
        keywords: some of `NEW_MODEL_OPTIONS`. `dtype`, of the parameters, and `device` are by default the
            configuration's, and that of a `torch.device(...)` around the call; on `"meta"` there are shapes without
            weights. The others are as in `LoadOptions`.

    Raises:
        UnknownArgumentError: other keywords, or values that mean nothing.
        ConfigurationError: a value of the configuration that the model's code cannot use.
    """
    named = by_own_names(keywords)
    if unknown := [name for name in named if name not in NEW_MODEL_OPTIONS]:
        raise UnknownArgumentError(unknown_keywords(unknown, (*NEW_MODEL_OPTIONS, *ALIASES)))
    config = config_for(model_class, copy.deepcopy(config))
    with blaming(config, f"check {model_class.__name__}"):
        check_config(model_class, config, named.get("ignore_config_keys", ()))
    device = present_device(named.get("device") or device_in_context() or "cpu")
    options = construction(model_class, named.get("combine", True), named.get("backend"), device)
    options |= {name: named[name] for name in IMPLEMENTATIONS if name in named}
    if named.get("dtype") not in (None, "auto"):
        options["dtype"] = config.dtype = checked_dtype(named["dtype"])
    with BUILDING, device, blaming(config, f"build {model_class.__name__}"):
        return model_class._from_config(config, **options)
