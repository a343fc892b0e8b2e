"""Loads checkpoints that stay quantised through transformers, whose quantisers replace linears."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CompressedTensorsConfig, PreTrainedConfig, PreTrainedModel

from nrl_models.common.checkpoint.dequantised import METHODS, DequantisedFiles, quantized_part, settings_of
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.config.at_fault import blaming
from nrl_models.common.logs import get_logger
from nrl_models.common.modules import class_name, is_base_model
from nrl_models.common.projections import join
from nrl_models.common.state_dict.kept_tensors import keep, kept_from
from nrl_models.common.state_dict.mtp import MTPNames
from nrl_models.common.switches import is_off
from nrl_models.common.upstream import BUILDING, set_loaded_conversions
from nrl_models.errors import CheckpointError, Problem, ProblemKind, one_line
from nrl_models.loading.fit import (
    EXACT,
    Tolerance,
    head_advice,
    keeps,
    note_mtp,
    note_not_loaded,
    require_head,
)
from nrl_models.loading.names.other_parts import head_keys, new_head_names, tower_keys
from nrl_models.loading.options import LoadOptions

logger = get_logger(__name__)

COMPRESSED_TENSORS = "compressed-tensors"
"""A `quant_method` whose checkpoints transformers dequantizes on load if asked."""

NVFP4_SCALE = ".weight_global_scale"
"""The end of the name of a scale that only NVFP4 has."""


def is_read_plain(config: PreTrainedConfig, options: LoadOptions) -> bool:
    """Whether a checkpoint is quantised with a method that is dequantised while loading."""
    if options.quantization_config is not None:
        return False
    part = quantized_part(config)
    # A transformers object, or the mapping from `config.json`.
    return part is not None and settings_of(part.quantization_config).get("quant_method") in METHODS


def require_plain_gguf(file: Path, options: LoadOptions) -> None:
    """Refuse to load a GGUF file as anything but the plain weights it stands for.

    Raises:
        CheckpointError: `quantization_config` asks for something else.
    """
    asked = options.quantization_config
    if asked is None:
        return
    settings = settings_of(asked)
    method = settings.get("quant_method")
    if method == "gguf" and settings.get("dequantize"):
        return
    detail = f"asks for {getattr(method, 'value', method)}, and a GGUF file is read as the plain weights it stands for"
    advice = "leave it out; to quantise those weights, write them with `nrl-models convert` first, and load that"
    raise CheckpointError(f"cannot load {file}", [Problem(ProblemKind.DTYPE, "quantization_config", detail)], [advice])


def _files(model: PreTrainedModel, folder: Path, options: LoadOptions, stored_as: Any) -> CheckpointFiles:
    """The checkpoint's files, for what transformers does not load: as the model is, quantised or not.

    Args:
        model, folder, options: what was loaded, from where, and how.
        stored_as: the checkpoint's `quantization_config`, if it has one.
    """
    if getattr(model, "hf_quantizer", None) is None and settings_of(stored_as or {}).get("quant_method") in METHODS:
        return DequantisedFiles(folder, stored_as, options.variant)
    return CheckpointFiles(folder, options.variant)


def _require_supported(folder: Path, options: LoadOptions) -> None:
    """Check a checkpoint's files, and that transformers reads them right.

    Raises:
        CheckpointError: files that are not read, or experts in NVFP4.
    """
    files = CheckpointFiles(folder, options.variant)
    files.close()
    experts = [key for key in files.tensors if ".experts." in key and key.endswith(NVFP4_SCALE)]
    if experts:
        problem = files.tensors[experts[0]].problem(
            ProblemKind.DTYPE,
            f"and {len(experts) - 1} others are of experts in NVFP4, which transformers dequantizes to wrong values "
            "(huggingface/transformers#48371)",
        )
        advice = "load the checkpoint that it was quantized from, or one with experts in FP8"
        raise CheckpointError(f"cannot load {folder}", [problem], [advice])


@dataclass(frozen=True, slots=True)
class _Accepted:
    """What transformers reports and a `Tolerance` accepts."""

    missing: Collection[Any]
    of_head: Collection[Any]
    of_towers: Collection[Any]
    mismatched: Collection[Any]

    def has(self, kind: ProblemKind, key: Any) -> bool:
        """Whether a reported key is accepted."""
        accepted = {
            ProblemKind.MISSING: self.missing,
            ProblemKind.UNEXPECTED: {*self.of_head, *self.of_towers},
            ProblemKind.SHAPE: self.mismatched,
        }
        return key in accepted[kind]


def _accepted(
    model: PreTrainedModel, info: Mapping[str, Any], files: CheckpointFiles, options: LoadOptions, tolerance: Tolerance
) -> _Accepted:
    unexpected = [str(key) for key in info.get("unexpected_keys", ())]
    renamed = {key: key for key in (*files.tensors, *unexpected)}
    heads: set[str] = set()
    towers: set[str] = set()
    if unexpected and (tolerance.new_head or is_base_model(model)):
        heads = head_keys(model, renamed, unexpected, options.key_mapping)
    if tolerance.composite is not None and (rest := [key for key in unexpected if key not in heads]):
        towers = tower_keys(model, tolerance.composite, rest, options.key_mapping)
    missing = new_head_names(model, info.get("missing_keys", ())) if tolerance.new_head else []
    return _Accepted(missing, heads, towers, info.get("mismatched_keys", ()) if tolerance.mismatched else ())


def load_quantised(
    model_class: type[PreTrainedModel],
    folder: Path,
    config: PreTrainedConfig,
    options: LoadOptions,
    construction: dict[str, Any],
    tolerance: Tolerance = EXACT,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a quantised checkpoint with transformers; linears that its quantisers replace are not grouped.

    Args:
        model_class, folder, config, options: what to load, from where, and how.
        construction: keywords for the model's constructor.
        tolerance: what need not fit.

    Returns:
        The model, and what transformers says of how it was loaded.

    Raises:
        CheckpointError: missing, unexpected or mismatched tensors, unless `strict=False`.
        ConfigurationError: transformers refuses how it is quantised.
        FamilyImportError: a package that this takes is missing.
    """
    _require_supported(folder, options)
    keywords = construction | {"config": config, "dtype": options.dtype, "device_map": options.destination()}
    if options.quantization_config is not None:
        keywords["quantization_config"] = options.quantization_config
    if options.device_map is not None:
        asked = ("device_map", "offload_folder", "max_memory", "offload_buffers")
        keywords |= {name: getattr(options, name) for name in asked}
    keywords |= {name: getattr(options, name) for name in ("key_mapping", "variant", "ignore_mismatched_sizes")}
    part = quantized_part(config)
    stored_as = copy.deepcopy(part.quantization_config) if part is not None else None
    if options.quantization_config is None and settings_of(stored_as or {}).get("quant_method") == COMPRESSED_TENSORS:
        keywords["quantization_config"] = CompressedTensorsConfig(run_compressed=False)
    load = vars(PreTrainedModel)["from_pretrained"].__func__  # a family's class overrides it
    try:
        # Never a pickle, which transformers would take where there is nothing else.
        with BUILDING, blaming(config, f"load {model_class.__name__} quantised"):
            model, info = load(model_class, folder, output_loading_info=True, use_safetensors=True, **keywords)
    except OSError as error:
        problem = Problem(ProblemKind.FILE, folder.name, one_line(error))
        advice = "only safetensors are read: convert pickled weights once with transformers"
        raise CheckpointError(f"cannot load {folder}", [problem], [advice]) from error
    kinds = {
        "missing_keys": ProblemKind.MISSING,
        "unexpected_keys": ProblemKind.UNEXPECTED,
        "mismatched_keys": ProblemKind.SHAPE,
    }
    files = _files(model, folder, options, stored_as)
    names = MTPNames(model)
    of_mtp = names.among(files.tensors)  # transformers reports them under other names, experts stacked
    if tolerance.new_head:
        require_head(model, new_head_names(model, model.state_dict(keep_vars=True)))
    accepted = _accepted(model, info, files, options, tolerance)
    problems = [
        Problem(kind, str(key), "reported by transformers, which loads quantised checkpoints")
        for name, kind in kinds.items()
        for key in sorted(info.get(name, ()), key=str)
        if not (of_mtp and names.may_be(str(key))) and not accepted.has(kind, key)
    ]
    problems += names.incomplete(of_mtp) if keeps(model, options.mtp) else []
    if options.strict and problems:
        remedies = ["pass strict=False to load it anyway", *head_advice(model, sorted(info.get("missing_keys", ())))]
        raise CheckpointError(f"{folder} does not fit {model_class.__name__}", problems, remedies)
    if accepted.missing or accepted.mismatched:
        initialized = sorted({*accepted.missing, *(name for name, *_ in accepted.mismatched)})
        logger.warning(f"{folder} does not hold all of {class_name(model)}: initialized {', '.join(initialized)}.")
    note_not_loaded(model, files, accepted.of_head, accepted.of_towers)
    if getattr(model, "hf_quantizer", None) is None:
        set_loaded_conversions(model, None)  # dequantised: saving must not quantise it again
    join(model)
    note_mtp(model, files, of_mtp, options.mtp)
    if keeps(model, options.mtp) and not is_off("mtp-weights"):
        keep(model, kept_from(files, of_mtp, model.dtype, is_mtp=True))
    files.close()
    return model.eval(), info
