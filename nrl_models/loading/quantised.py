"""Quantised checkpoints that stay quantised: transformers loads them, because its quantisers replace linears."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.checkpoint.dequantised import METHODS, settings_of
from nrl_models.common.projections import join
from nrl_models.errors import CheckpointError, Problem, ProblemKind
from nrl_models.loading.options import LoadOptions


def is_read_plain(config: PreTrainedConfig, options: LoadOptions) -> bool:
    """Whether a checkpoint is quantised in a way that is read as the plain weights it stands for."""
    if options.quantization_config is not None:
        return False
    quantised_as = getattr(config, "quantization_config", None)
    # As transformers' object or as `config.json` has it.
    return quantised_as is not None and settings_of(quantised_as).get("quant_method") in METHODS


def load_quantised(
    model_class: type[PreTrainedModel],
    folder: Path,
    config: PreTrainedConfig,
    options: LoadOptions,
    construction: dict[str, Any],
) -> PreTrainedModel:
    """A quantised checkpoint, by transformers: its quantisers replace the linears they own, and groups let them be."""
    keywords = construction | {"config": config, "dtype": options.dtype, "device_map": options.destination()}
    if options.quantization_config is not None:
        keywords["quantization_config"] = options.quantization_config
    if options.device_map is not None:
        asked = ("device_map", "offload_folder", "max_memory", "offload_buffers")
        keywords |= {name: getattr(options, name) for name in asked}
    load = vars(PreTrainedModel)["from_pretrained"].__func__  # a family's class has another of that name
    model, info = load(model_class, folder, output_loading_info=True, **keywords)
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
    if options.strict and problems:
        raise CheckpointError(
            f"{folder} does not fit {model_class.__name__}", problems, ["pass strict=False to load it all the same"]
        )
    if getattr(model, "hf_quantizer", None) is None:
        model._weight_conversions = None  # it is dequantised, and saving is not to quantise it again
    join(model)
    return model.eval()
