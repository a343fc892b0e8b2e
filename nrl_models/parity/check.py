"""Run all parity levels of a checkpoint against transformers, and locate the diverging modules if one fails."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.auto import auto_class_for
from nrl_models.common.checkpoint.dequantized import quantized_part
from nrl_models.common.checkpoint.files import require_readable
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.forward.soft_cap import reference_attention
from nrl_models.common.gguf.gguf_tables import upstream_source
from nrl_models.common.modules import is_base_model
from nrl_models.common.process_state import BUILDING
from nrl_models.family import FamilyModel
from nrl_models.inputs.model_inputs import inputs_for
from nrl_models.loading.quantized import is_compressed, plain_files
from nrl_models.loading.read_config import generation_config, read_config
from nrl_models.loading.source import again_if_replaced, one_generation
from nrl_models.parity.levels import compare_components, compare_end_to_end, compare_gradients, compare_weights
from nrl_models.parity.localize import localize
from nrl_models.parity.parity_report import FIRST_DIVERGENCE, Level, ParityReport, ParityRow
from nrl_models.parity.precision import Truth

CHECKS = tuple(Level)
"""All levels."""


def check_parity(
    path: str | Path,
    *,
    checks: Collection[str] = CHECKS,
    device: str | torch.device = "cpu",
    length: int = 64,
    batch: int = 2,
    seed: int = 42,
    after_load: Callable[[FamilyModel], object] | None = None,
    **load_options: Any,
) -> ParityReport:
    """Compare a checkpoint loaded here with the same checkpoint loaded by transformers.

    All levels run in fp32, where errors are most visible. All except the first also run in bf16, which is used for
    training. If a level fails in fp32, the first diverging modules are located; in bf16 each row names the worst.

    Args:
        path: Directory of the checkpoint.
        checks: Checks to run: members of `Level` or their values. Default: all.
        device: Device of both models.
        length: Sequence length.
        batch: Batch size; at least 2, for the rounding difference.
        seed: Random seed of the inputs.
        after_load: Called with the model under test after each load, for example to insert an adapter or a bug.
        load_options: Further keywords of `from_pretrained` for the model under test.

    Raises:
        ValueError: If a check is unknown, or the batch size is less than 2.
        CheckpointError, UnknownArchitectureError, ...: See `from_pretrained`.

    Examples:
        >>> from nrl_models import check_parity
        >>> report = check_parity("demo/checkpoint", checks=["1", "3"])
        >>> report.passed
        True
        >>> [row.check for row in report.rows if not row.passed]
        []
    """
    if unknown := sorted(set(checks) - set(CHECKS)):
        raise ValueError(f"unknown checks {unknown}: expected some of {', '.join(CHECKS)}")
    if batch < 2:
        raise ValueError(f"batch {batch}: expected at least 2, for the rounding difference")
    auto_class = auto_class_for(path)
    change = after_load or (lambda model: None)

    def load_both(dtype: torch.dtype) -> tuple[FamilyModel, PreTrainedModel]:
        with one_generation(path):
            model = auto_class.from_pretrained(path, dtype=dtype, device=device, **load_options)
            change(model)
            return model, load_reference(model, path, dtype, device)

    model, reference = again_if_replaced(path, lambda: load_both(torch.float32))
    report = ParityReport(f"{path}: {type(model).__name__} against transformers' {type(reference).__name__}")
    inputs = inputs_for(model, length=length, batch=batch, seed=seed)
    with_labels = inputs_for(model, length=length, batch=batch, seed=seed, labels=not is_base_model(model))

    def compare(truth: Truth | None = None) -> None:
        if Level.COMPONENTS in checks:
            report.add(compare_components(model, reference, inputs, seed, truth))
        if Level.LOGITS in checks:
            report.add(compare_end_to_end(model, reference, inputs, truth))
        if Level.GRADIENTS in checks:
            report.add(compare_gradients(model, reference, with_labels, truth))

    if Level.WEIGHTS in checks:
        report.add(compare_weights(model, reference))
    compare()
    if not report.passed:
        culprits = localize(model, reference, inputs)
        report.add(ParityRow(FIRST_DIVERGENCE, False, str(culprit), "no module diverges") for culprit in culprits)
    if set(checks) - {Level.WEIGHTS}:
        model, reference = again_if_replaced(path, lambda: load_both(torch.bfloat16))
        compare(Truth(reference))
    return report


def load_reference(
    model: PreTrainedModel,
    path: str | Path,
    dtype: torch.dtype | str,
    device: str | torch.device,
    *,
    weights: bool = True,
) -> PreTrainedModel:
    """Load the same checkpoint with transformers, as the reference class of `model`.

    Args:
        model: A model of the checkpoint; it may be on meta.
        path: Directory of the checkpoint.
        dtype: Dtype of the parameters; `auto` uses the checkpoint's.
        device: Device of the model.
        weights: Whether to load the weights. Otherwise they are random.

    Raises:
        CheckpointError: If a file is unsafe to open with transformers, or another process replaced the checkpoint
            while it was read, twice.
    """
    reference_class = type(model).reference_class() if isinstance(model, FamilyModel) else type(model)
    attention = reference_attention(reference_class)
    if weights:
        reference: Any = again_if_replaced(path, lambda: _with_weights(reference_class, model, path, dtype, attention))
    else:
        reference_dtype = model.config.dtype if dtype == "auto" else dtype
        with BUILDING:
            reference = reference_class._from_config(model.config, dtype=reference_dtype, **attention)
    return reference.to(device).eval()


def _with_weights(
    reference_class: type[PreTrainedModel],
    model: PreTrainedModel,
    path: str | Path,
    dtype: torch.dtype | str,
    attention: Mapping[str, Any],
) -> PreTrainedModel:
    """Load the reference model once, from one generation of the checkpoint."""
    with one_generation(path) as (folder, watch):
        source, keywords = upstream_source(folder)
        options: dict[str, Any] = {"dtype": dtype, **attention, **keywords}
        is_gguf = "gguf_file" in keywords
        if not is_gguf:
            watch.saw(require_readable(folder))
            options["use_safetensors"] = True  # never a pickle
        # transformers loads with defaults if this file cannot be read.
        generation = None if is_gguf else generation_config(reference_class, folder)
        keywords.pop("quantization_config", None)
        # transformers ignores some metadata of GGUF files that affects the computation.
        config = copy.deepcopy(model.config) if is_gguf else type(model.config).from_pretrained(source, **keywords)
        dequantized = _plain_weights(folder, config) if is_compressed(config) else None
        if dequantized is not None:
            options["state_dict"] = dequantized
        with BUILDING:
            reference: Any = reference_class.from_pretrained(
                source if dequantized is None else None, config=config, **options
            )
        if dequantized and generation is not None:
            reference.generation_config = generation
    if not is_gguf:
        reference.name_or_path = reference.config.name_or_path = str(path)  # a publish moves the files in `folder`
    return reference


def _plain_weights(folder: Path, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Return the dequantized weights of a compressed-tensors checkpoint, and change `config` accordingly.

    transformers stacks some quantized experts incorrectly, so it loads the dequantized weights.
    """
    part: Any = quantized_part(config)
    files = plain_files(folder, part.quantization_config, None)
    try:
        weights = {key: files.read(tensor) for key, tensor in files.tensors.items()}
    finally:
        files.close()
    del part.quantization_config
    return weights


def reference_model(
    path: str | Path, dtype: torch.dtype | None, device: str | torch.device, *, weights: bool = True
) -> PreTrainedModel:
    """Load a checkpoint with transformers' class, or with the family's reference class if transformers has none.

    Args:
        path: Directory of the checkpoint.
        dtype: Dtype of the parameters; None uses the checkpoint's.
        device: Device of the model.
        weights: Whether to load the weights. Otherwise they are random.
    """
    config = again_if_replaced(path, lambda: read_config(resolve_folder(path)))
    ours = auto_class_for(path).from_config(config, device="meta")
    return load_reference(ours, path, dtype or "auto", device, weights=weights)
