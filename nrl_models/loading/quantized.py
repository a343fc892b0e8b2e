"""Load checkpoints that stay quantized through transformers, whose quantizers replace linears."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers import AutoHfQuantizer

from nrl_models.common.checkpoint.dequantized import METHODS, DequantizedFiles, quantized_part, settings_of
from nrl_models.common.checkpoint.files import SAVE_AGAIN, CheckpointFiles
from nrl_models.common.compressed import compressed_files
from nrl_models.common.config.at_fault import blaming
from nrl_models.common.logs import get_logger
from nrl_models.common.modules import class_name, owner_of
from nrl_models.common.process_state import BUILDING
from nrl_models.common.projections import join
from nrl_models.common.state_dict.kept_tensors import keep, keeps_unused, kept_from
from nrl_models.common.state_dict.layouts import base_prefix, note_quantized_names, renamed_keys
from nrl_models.common.state_dict.mtp import MTPNames
from nrl_models.common.state_dict.ties import tied_names
from nrl_models.common.switches import is_off
from nrl_models.common.upstream import has_quantizer, quantizer_name, requests_dequantization
from nrl_models.common.upstream_conversions import Renaming, get_model_conversion_mapping, set_loaded_conversions
from nrl_models.errors import CheckpointError, ConfigurationError, Problem, ProblemKind, one_line
from nrl_models.loading.fit import former_buffers, joined
from nrl_models.loading.mtp_layers.mtp_notes import keeps, note_mtp
from nrl_models.loading.names.fit_advice import head_advice, note_not_loaded, require_head
from nrl_models.loading.names.other_parts import accepted_parts, new_head_names
from nrl_models.loading.options import LoadOptions

logger = get_logger(__name__)


def is_compressed(config: PreTrainedConfig) -> bool:
    """Return True if a checkpoint is in the format of compressed-tensors."""
    part = quantized_part(config)
    return part is not None and settings_of(part.quantization_config).get("quant_method") == compressed_files.METHOD


def is_known_method(config: PreTrainedConfig) -> bool:
    """Return True if transformers has a quantizer for a checkpoint's `quant_method`.

    It ignores the `quantization_config` of other methods. Then tensors are matched as those of an unquantized model.
    """
    part = quantized_part(config)
    return part is not None and has_quantizer(settings_of(part.quantization_config))


def is_read_plain(config: PreTrainedConfig, options: LoadOptions) -> bool:
    """Return True if a checkpoint is quantized with a method that is dequantized on load.

    Raises:
        CheckpointError: `options.quantization_config` requests that a compressed-tensors checkpoint stays quantized.
    """
    if (part := quantized_part(config)) is None:
        return False
    # A transformers object, or the mapping from `config.json`.
    method, requested = settings_of(part.quantization_config).get("quant_method"), options.quantization_config
    dequantizes = requested is None or requests_dequantization(requested, method)
    if is_compressed(config):
        if not dequantizes:
            detail = f"is {type(requested).__name__}, and {method} checkpoints are dequantized on load"
            problem = Problem(ProblemKind.DTYPE, "quantization_config", detail)
            advice = "leave it out, or pass CompressedTensorsConfig(dequantize=True)"
            raise CheckpointError(f"cannot load {config.name_or_path}", [problem], [advice])
        return True
    return quantizer_name(method) in METHODS and (dequantizes or _cannot_stay_quantized(config, options, method))


def _cannot_stay_quantized(config: PreTrainedConfig, options: LoadOptions, method: str | None) -> bool:
    """Return True if transformers dequantizes a checkpoint against the request, because this machine has no kernels.

    Raises:
        ConfigurationError: If transformers does not support the quantization.
    """
    requested = settings_of(options.quantization_config)
    if quantizer_name(requested.get("quant_method")) != quantizer_name(method):
        return False
    with blaming(config, "quantize the model"):
        quantizer = AutoHfQuantizer.from_config(copy.deepcopy(options.quantization_config), pre_quantized=True)
        quantizer.validate_environment(device_map=options.destination(), weights_only=True)
    return bool(quantizer.quantization_config.dequantize)


def plain_files(folder: Path, quantized_as: Any, variant: str | None) -> CheckpointFiles:
    """Open a checkpoint that is dequantized on load; see `is_read_plain`.

    Args:
        folder, variant: See `CheckpointFiles`.
        quantized_as: The configuration's `quantization_config`.

    Raises:
        CheckpointError, UnmetRequirementError: See `CompressedFiles` and `DequantizedFiles`.
    """
    if settings_of(quantized_as)["quant_method"] == compressed_files.METHOD:
        return compressed_files.CompressedFiles(folder, quantized_as, variant)
    return DequantizedFiles(folder, quantized_as, variant)


def require_plain_gguf(file: Path, options: LoadOptions) -> None:
    """Raise if options request anything but dequantized weights of a GGUF file.

    Raises:
        CheckpointError: If `quantization_config` requests another format.
    """
    asked = options.quantization_config
    if asked is None or requests_dequantization(asked, "gguf"):
        return
    method = settings_of(asked).get("quant_method")
    detail = f"requests {getattr(method, 'value', method)}, but a GGUF file is dequantized on load"
    advice = "leave it out; to quantize those weights, first write them with `nrl-models convert`, then load the result"
    raise CheckpointError(f"cannot load {file}", [Problem(ProblemKind.DTYPE, "quantization_config", detail)], [advice])


@dataclass(frozen=True, slots=True)
class _Accepted:
    """Differences that transformers reports and the options accept."""

    missing: Collection[Any]
    of_head: Collection[Any]
    of_towers: Collection[Any]
    mismatched: Collection[Any]

    def has(self, kind: ProblemKind, key: Any) -> bool:
        """Return True if a reported key is accepted."""
        accepted = {
            ProblemKind.MISSING: self.missing,
            ProblemKind.UNEXPECTED: {*self.of_head, *self.of_towers},
            ProblemKind.SHAPE: self.mismatched,
        }
        return key in accepted[kind]


def _accepted(
    model: PreTrainedModel,
    info: Mapping[str, Any],
    files: CheckpointFiles,
    options: LoadOptions,
    composite: PreTrainedConfig | None,
) -> _Accepted:
    unexpected = [str(key) for key in info.get("unexpected_keys", ())]
    renamed = {key: key for key in (*files.tensors, *unexpected)}
    heads, towers = accepted_parts(model, renamed, unexpected, files.tensors, options, composite)
    missing = new_head_names(model, info.get("missing_keys", ())) if options.new_head else []
    mismatched = info.get("mismatched_keys", ()) if options.ignore_mismatched_sizes else ()
    return _Accepted(missing, heads, towers, mismatched)


def _unused(model: PreTrainedModel, keys: Iterable[str], key_mapping: Mapping[str, str] | None) -> list[str]:
    """Return the keys of tensors that the family keeps, whose linears the model does not have."""
    ignored, unused_pattern = joined(model._keys_to_ignore_on_load_unexpected or ()), keeps_unused(model)
    candidates = [key for key in keys if ignored.search(key) and unused_pattern.search(key)]
    conversions = get_model_conversion_mapping(model, dict(key_mapping) if key_mapping else None)
    owners = {name.rpartition(".")[0] for name in model.state_dict(keep_vars=True)}
    prefix = base_prefix(model)

    def is_used(name: str) -> bool:  # also a part of a quantized tensor, such as `weight.absmax`
        owner = name.rpartition(".")[0]
        return bool(owner) and (bool({owner, prefix + owner, owner.removeprefix(prefix)} & owners) or is_used(owner))

    return [key for key, name in renamed_keys(candidates, conversions, Renaming()).items() if not is_used(name)]


def _require_quantized_ties(model: PreTrainedModel) -> None:
    """Check that bitsandbytes' linears have its weights. transformers ties some to embeddings, which stay plain.

    Raises:
        ConfigurationError: If some have other weights, with which their forward fails.
    """
    tied = {name: (owner_of(model, name)[0], source_name) for name, source_name in tied_names(model).items()}
    plain = {
        name.rpartition(".")[0]: (
            f"is tied to {source_name}, which is not quantized, so {type(linear).__name__} cannot run"
        )
        for name, (linear, source_name) in tied.items()
        if type(linear).__module__.startswith("bitsandbytes.") and type(linear.weight) is nn.Parameter
    }
    if plain:
        problems = [Problem(ProblemKind.TIED, name, detail) for name, detail in plain.items()]
        advice = f"add {', '.join(map(repr, plain))} to llm_int8_skip_modules of the BitsAndBytesConfig"
        raise ConfigurationError(f"{class_name(model)} cannot be quantized by bitsandbytes", problems, [advice])


def load_quantized(
    model_class: type[PreTrainedModel],
    opened: CheckpointFiles,
    config: PreTrainedConfig,
    options: LoadOptions,
    construction: dict[str, Any],
    overrides: Mapping[str, Any],
    composite: PreTrainedConfig | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a quantized checkpoint with transformers. Linears that its quantizers replace are not fused.

    Args:
        model_class, config, options: Model class, configuration and options of the load.
        opened: The checkpoint's files, validated and open.
        construction: Keywords for the model's constructor.
        overrides: Values of the configuration that were passed as keywords.
        composite: See `Tolerance`.

    Returns:
        The model, and transformers' loading info.

    Raises:
        CheckpointError: If tensors are missing, unexpected or mismatched, unless `strict=False`.
        ConfigurationError: If transformers does not support the quantization, or a linear is tied to embeddings and
            bitsandbytes would quantize it.
        FamilyImportError: If a required package is missing.
    """
    folder = opened.folder
    keywords = construction | {"config": config, "dtype": options.dtype, "device_map": options.destination()}
    if options.quantization_config is not None:
        keywords["quantization_config"] = options.quantization_config
    if options.device_map is not None:
        asked = ("device_map", "offload_folder", "max_memory", "offload_buffers")
        keywords |= {name: getattr(options, name) for name in asked}
    keywords |= {name: getattr(options, name) for name in ("key_mapping", "variant", "ignore_mismatched_sizes")}
    load = vars(PreTrainedModel)["from_pretrained"].__func__  # a family's class overrides it
    if isinstance(options.quantization_config, Mapping):  # other configurations checked their values when created
        overrides = {**overrides, "quantization_config": options.quantization_config}
    try:
        # Never load a pickle, which transformers would use if there are no safetensors.
        with BUILDING, blaming(config, f"load {model_class.__name__} quantized", overrides):
            model, info = load(model_class, folder, output_loading_info=True, use_safetensors=True, **keywords)
    except OSError as error:
        problem = Problem(ProblemKind.FILE, folder.name, one_line(error))
        raise CheckpointError(f"cannot load {folder}", [problem], [SAVE_AGAIN]) from error
    _require_quantized_ties(model)
    kinds = {
        "missing_keys": ProblemKind.MISSING,
        "unexpected_keys": ProblemKind.UNEXPECTED,
        "mismatched_keys": ProblemKind.SHAPE,
    }
    names = MTPNames(model)
    of_mtp = names.among(opened.tensors)  # transformers reports them under other names, experts stacked
    if options.new_head:
        require_head(model, new_head_names(model, model.state_dict(keep_vars=True)))
    former = joined(former_buffers(model))
    accepted = _accepted(model, info, opened, options, composite)
    problems = [
        Problem(kind, str(key), "reported by transformers, which loads quantized checkpoints")
        for name, kind in kinds.items()
        for key in sorted(info.get(name, ()), key=str)
        if not (of_mtp and names.may_be(str(key))) and not accepted.has(kind, key)
        if kind is not ProblemKind.UNEXPECTED or not former.search(str(key))
    ]
    problems += names.incomplete(of_mtp) if keeps(model, options.mtp) else []
    if options.strict and problems:
        of_head = head_advice(model, sorted(info.get("missing_keys", ())), options.new_head)
        remedies = ["pass strict=False to load it anyway", *of_head]
        raise CheckpointError(f"{folder} does not fit {model_class.__name__}", problems, remedies)
    if accepted.missing or accepted.mismatched:
        initialized = sorted({*accepted.missing, *(name for name, *_ in accepted.mismatched)})
        logger.warning(f"{folder} does not hold all of {class_name(model)}: initialized {', '.join(initialized)}.")
    note_not_loaded(model, opened, accepted.of_head, accepted.of_towers)
    if getattr(model, "hf_quantizer", None) is None:
        set_loaded_conversions(model, None)  # dequantized: saving must not quantize it again
    elif options.key_mapping:
        note_quantized_names(model, opened.tensors, options.key_mapping)
    join(model)
    note_mtp(model, opened, of_mtp, options.mtp)
    if keeps(model, options.mtp) and not is_off("mtp-weights"):
        keep(model, kept_from(opened, of_mtp, model.dtype, is_mtp=True))
    if not is_off("shared-kv-unused-weights"):
        keep(model, kept_from(opened, _unused(model, opened.tensors, options.key_mapping), model.dtype))
    return model.eval(), info
