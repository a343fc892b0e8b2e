"""The whole check of a checkpoint: every level compared with transformers, and the modules at fault if it fails."""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from nrl_models.auto import auto_class_for
from nrl_models.common.checkpoint.files import require_readable, resolve_folder
from nrl_models.common.forward.soft_cap import reference_attention
from nrl_models.common.gguf.gguf_tables import upstream_source
from nrl_models.common.modules import is_base_model
from nrl_models.common.upstream import BUILDING
from nrl_models.family import FamilyModel
from nrl_models.inputs.model_inputs import inputs_for
from nrl_models.parity.levels import compare_components, compare_end_to_end, compare_gradients, compare_weights
from nrl_models.parity.localise import localise
from nrl_models.parity.parity_report import Level, ParityReport, ParityRow
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
    **load_options: Any,
) -> ParityReport:
    """Compare a checkpoint loaded here with the same checkpoint loaded by transformers.

    Every level runs in fp32, where a mistake shows best; all but the first also in bf16, which is how models are
    trained. If any fails in fp32, the first modules that diverge are named; in bf16 each row names the worst.

    Args:
        path: the checkpoint's directory.
        checks: which of `CHECKS` to run, as members of `Level` or their values.
        device: where to run them.
        length: tokens in a sequence.
        batch: sequences; at least two, for the noise floor.
        seed: of the random inputs.
        load_options: further keywords of `from_pretrained` for the model under test.

    Raises:
        ValueError: an unknown check, or a batch of less than two.
        CheckpointError, UnknownArchitectureError, ...: as `from_pretrained`.
    """
    if unknown := sorted(set(checks) - set(CHECKS)):
        raise ValueError(f"unknown checks {unknown}: expected some of {', '.join(CHECKS)}")
    if batch < 2:
        raise ValueError(f"batch {batch}: expected at least 2, for the noise floor")
    auto_class = auto_class_for(path)
    model = auto_class.from_pretrained(path, dtype=torch.float32, device=device, **load_options)
    reference = load_reference(model, path, torch.float32, device)
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
        culprits = localise(model, reference, inputs)
        report.add(ParityRow("first divergence", False, str(culprit), "no module diverges") for culprit in culprits)
    if set(checks) - {Level.WEIGHTS}:
        model = auto_class.from_pretrained(path, dtype=torch.bfloat16, device=device, **load_options)
        reference = load_reference(model, path, torch.bfloat16, device)
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
    """Load the same checkpoint with transformers, as the class that `model`'s class must equal.

    Args:
        model: of the checkpoint; it may be on meta.
        path: the checkpoint's directory.
        dtype: of the parameters; `auto` is the checkpoint's.
        device: where to put the model.
        weights: whether to load the weights; otherwise they are random.
    """
    reference_class = type(model).reference_class() if isinstance(model, FamilyModel) else type(model)
    attention = reference_attention(reference_class)
    if weights:
        source, keywords = upstream_source(path)
        options: dict[str, Any] = {"dtype": dtype, **attention, **keywords}
        is_gguf = "gguf_file" in keywords
        if not is_gguf:
            require_readable(resolve_folder(path))
            options["use_safetensors"] = True  # never a pickle
        keywords.pop("quantization_config", None)
        # transformers ignores metadata of GGUF files that changes what is computed.
        config = copy.deepcopy(model.config) if is_gguf else type(model.config).from_pretrained(source, **keywords)
        with BUILDING:
            reference: Any = reference_class.from_pretrained(source, config=config, **options)
    else:
        own = model.config.dtype if dtype == "auto" else dtype
        with BUILDING:
            reference = reference_class._from_config(model.config, dtype=own, **attention)
    return reference.to(device).eval()
