"""Sections of `numbers` for mixtures of experts: expert parallelism, and checkpoints with quantized experts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tools.release_check.numbers.cases import filled
from tools.release_check.numbers.facts import Facts, Kind, fingerprint
from tools.release_check.numbers.recorded import NotApplicableError, Recorded, forward

EXPERT_LINEAR = re.compile(r"experts\.\d+\.\w+\.weight$")
"""A linear of one expert in a checkpoint."""

TOKENS, CHOICES = 16, 2


def expert_parallel(recorded: Recorded) -> Facts:
    """Run a layer's experts with batched matmuls, with the inputs that a rank receives in expert parallelism.

    A token routed to an expert of another rank has the index `num_experts` and the weight 0. Returns the output, and
    the gradients of hidden states and routing weights.
    """
    _require_experts(recorded)
    # Not `recorded.model()`: the implementation is selected on load.
    model = recorded.load(torch.float32, torch.float32, experts_implementation="batched_mm")
    experts: Any = next((module for module in model.modules() if _is_fused(module)), None)
    if experts is None:
        raise NotApplicableError("experts are not fused")
    count, size = experts.num_experts, getattr(experts, "hidden_dim", None)
    if size is None:
        raise NotApplicableError("no size")
    experts._is_expert_parallel = True  # as transformers' hooks do
    hidden = filled("hidden states", {"shape": [TOKENS, size], "mean": 0.0, "std": 1.0}).requires_grad_()
    indices = torch.arange(TOKENS * CHOICES).view(TOKENS, CHOICES) % (count + 1)
    weights = filled("routing weights", {"shape": [TOKENS, CHOICES], "mean": 0.5, "std": 0.1})
    weights = weights.masked_fill(indices == count, 0.0).requires_grad_()
    output = experts(hidden, indices.clone(), weights)
    output.square().sum().backward()
    assert hidden.grad is not None
    assert weights.grad is not None
    return {
        Kind.NUMBERS: {"output": fingerprint(output)},
        Kind.GRADIENTS: {"hidden states": fingerprint(hidden.grad), "routing weights": fingerprint(weights.grad)},
    }


def int4_experts(recorded: Recorded) -> Facts:
    """Dequantize a checkpoint with int4 experts on load."""
    return _dequantized(recorded, "W4A16")


def fp4_experts(recorded: Recorded) -> Facts:
    """Dequantize a checkpoint with NVFP4 experts on load. They have a scale for each group and one for each tensor."""
    return _dequantized(recorded, "NVFP4A16")


def _dequantized(recorded: Recorded, preset: str) -> Facts:
    _require_experts(recorded)
    from transformers import CompressedTensorsConfig

    path = _write_quantized(recorded, preset)
    torch.manual_seed(0)  # for weights missing in the file
    loaded: Any = recorded.model_class.from_pretrained(
        path,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
        quantization_config=CompressedTensorsConfig(run_compressed=False),
    )
    model, info = loaded
    facts: Facts = {
        Kind.LOADING: {key: sorted(map(str, names)) for key, names in info.items() if names and key != "error_msgs"}
    }
    if not info["missing_keys"]:
        logits = forward(model.eval(), recorded.any_inputs()).logits
        facts[Kind.NUMBERS] = {"logits": fingerprint(logits)}
    return facts


def _write_quantized(recorded: Recorded, preset: str) -> Path:
    """Save the fixture with quantized experts, in the format of compressed-tensors."""
    try:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.compressors.format import infer_module_format
        from compressed_tensors.quantization import preset_name_to_scheme
    except ImportError as error:
        raise NotApplicableError(str(error)) from error
    scheme = preset_name_to_scheme(preset, [r"re:.*\.experts\..*"])
    layout = infer_module_format(torch.nn.Linear, scheme).value
    compressor: Any = BaseCompressor.get_value_from_registry(layout)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in recorded.case.checkpoint().items():
        if not EXPERT_LINEAR.search(name):
            tensors[name] = tensor
            continue
        state = {"weight": tensor, **_scales(tensor, scheme.weights)}
        owner = name.removesuffix("weight")
        tensors |= {owner + key: value.contiguous() for key, value in compressor.compress(state, scheme).items()}
    path = recorded.folder / preset
    config = recorded.config()
    config.dtype, config.architectures = torch.float32, [recorded.case.architecture]
    config.save_pretrained(path)
    file = path / "config.json"
    values = json.loads(file.read_text())
    values["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
        "ignore": [],
    }
    file.write_text(json.dumps(values))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _scales(weight: torch.Tensor, arguments: Any) -> dict[str, torch.Tensor]:
    """Return the scale of every group of a weight, and of the complete weight if the format has one."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    groups = weight.unflatten(1, (-1, arguments.group_size))
    low, high = groups.amin(-1), groups.amax(-1)
    if arguments.strategy != "tensor_group":
        return {"weight_scale": calculate_qparams(low, high, arguments)[0]}
    of_tensor = generate_gparam(low.min(), high.max())
    return {
        "weight_scale": calculate_qparams(low, high, arguments, global_scale=of_tensor)[0],
        "weight_global_scale": of_tensor,
    }


def _require_experts(recorded: Recorded) -> None:
    """Raise NotApplicableError unless the checkpoint has linears of experts."""
    if not any(EXPERT_LINEAR.search(name) for name in recorded.case.tensors):
        raise NotApplicableError("no experts")


def _is_fused(module: torch.nn.Module) -> bool:
    return hasattr(module, "num_experts") and isinstance(getattr(module, "down_proj", None), torch.nn.Parameter)
