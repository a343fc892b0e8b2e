"""Parity levels with Megatron-Core as the trainer under test: its GPT model of a checkpoint against ours, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nrl_models.auto import auto_class_for
from nrl_models.common.recording import record_calls
from nrl_models.distributed.pipeline.crossing import find_stack
from nrl_models.errors import StateDictError, listed
from nrl_models.family import FamilyModel
from nrl_models.inputs.model_inputs import inputs_for
from nrl_models.megatron.gpt_model import LOCAL, device, logits, megatron_of, start_megatron
from nrl_models.megatron.layer_rules import STATES
from nrl_models.megatron.ranks import from_megatron
from nrl_models.parity.check import CHECKS
from nrl_models.parity.compare import compare_state_dicts, compare_tensors
from nrl_models.parity.noise import NOISE_FACTOR, TOLERANCE, logits_noise, rounded_otherwise
from nrl_models.parity.parity_report import Level, ParityRow, Unit

GRADIENT_TOLERANCE = 1e-4
"""Difference of a gradient that always passes, relative to its largest value."""


def check_megatron(
    path: str | Path, *, checks: Collection[str] = CHECKS, length: int = 64, batch: int = 2, seed: int = 42
) -> list[ParityRow]:
    """Load a checkpoint into our model and Megatron-Core's GPT model, and compare the two.

    Afterwards, this process is a rank of Megatron, because Megatron keeps its groups in globals.

    Args:
        path: Directory of the checkpoint.
        checks: Checks to run, from `nrl_models.parity.check.CHECKS`.
        length: Sequence length.
        batch: Batch size.
        seed: Random seed of the inputs.

    Raises:
        ImportError: If megatron-core is not installed.
        StateDictError: If Megatron's GPT model does not compute the same. Lists all known reasons.
        CheckpointError, UnknownArchitectureError, ...: See `from_pretrained`.
    """
    start_megatron()
    model = auto_class_for(path).from_pretrained(path, dtype=torch.float32, device=device()).eval()
    input_ids = inputs_for(model, length=length, batch=batch, seed=seed)["input_ids"]
    return compare_megatron(model, megatron_of(model), input_ids, checks)


def compare_megatron(
    model: FamilyModel, megatron: Any, input_ids: torch.Tensor, checks: Collection[str] = CHECKS
) -> list[ParityRow]:
    """Compare Megatron's model with ours, which should have the same weights.

    Args:
        model: Our model in fp32 and evaluation mode.
        megatron: Megatron's model.
        input_ids: Token ids, `(batch, seq_len)`.
        checks: Checks to run, from `nrl_models.parity.check.CHECKS`.
    """
    compared: Mapping[Level, Callable[[], ParityRow]] = {
        Level.WEIGHTS: lambda: _weights(model, megatron),
        Level.COMPONENTS: lambda: _layers(model, megatron, input_ids),
        Level.LOGITS: lambda: _logits(model, megatron, input_ids),
        Level.GRADIENTS: lambda: _gradients(model, megatron, input_ids),
    }
    return [compare() for level, compare in compared.items() if level in checks]


def _weights(model: FamilyModel, megatron: Any) -> ParityRow:
    """Check level 1: Megatron's tensors equal ours in its layout, and convert back to ours exactly.

    Overwrites the model's weights during the check, and restores them.
    """
    state_dict = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held = {name: value for name, value in megatron.state_dict().items() if STATES not in name}
    expected = {name: tensor.read(state_dict) for name, tensor in model.state_dict_adapter.layout(LOCAL).items()}
    comparison = compare_state_dicts(expected, held, verbose=False)
    difference = "" if comparison.equal else str(comparison)
    if not difference:
        try:
            for tensor in model.state_dict().values():
                tensor.zero_()
            from_megatron(model, {LOCAL: held})
            back = compare_state_dicts(state_dict, model.state_dict(), verbose=False)
            difference = "" if back.equal else f"back: {back}"
        except StateDictError as error:
            difference = f"back: {error}"
        finally:
            model.load_state_dict(state_dict)
    return ParityRow(
        "level 1: Megatron's weights",
        not difference,
        difference or f"{len(held)} tensors",
        "exact, and back",
        level=Level.WEIGHTS,
    )


def _layers(model: FamilyModel, megatron: Any, input_ids: torch.Tensor) -> ParityRow:
    """Check level 2: compare the output of each Megatron layer with ours, on the inputs of our layer."""
    stack = find_stack(model)
    layers = [f"{stack}.{number}" for number, _ in enumerate(model.get_submodule(stack).children())]
    with record_calls(model, layers, copy=True) as ours, torch.no_grad():
        model(input_ids=input_ids, use_cache=False)
    layer_inputs = [ours[name].inputs[0].transpose(0, 1).contiguous() for name in layers]
    with _layers_given(megatron.decoder.layers, layer_inputs) as outputs, torch.no_grad():
        logits(megatron, input_ids)
    off = {}
    for number, name in enumerate(layers):
        expected = ours[name].outputs[0]
        difference = compare_tensors(expected, outputs[number].transpose(0, 1), verbose=False).max_diff
        off[name] = difference / max(1.0, expected.abs().max().item())
    allowed = TOLERANCE[torch.float32]
    wrong = [name for name in layers if not off[name] <= allowed]
    return ParityRow(
        "level 2: Megatron's layers",
        not wrong,
        f"max_diff {max(off.values()):.1e} of the output's scale in {len(layers)} layers",
        f"at most {allowed:.1e}",
        f"differ: {listed(wrong)}" if wrong else "",
        Level.COMPONENTS,
        max(off.values()),
        allowed,
        Unit.MAX_DIFF,
    )


@contextmanager
def _layers_given(layers: nn.ModuleList, layer_inputs: list[torch.Tensor]) -> Iterator[dict[int, torch.Tensor]]:
    """Run Megatron's layers on `layer_inputs` instead of the previous layer's output, inside a `with` block.

    Yields the output of each layer by its number, filled while the model runs.
    """
    outputs: dict[int, torch.Tensor] = {}

    def before(number: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (layer_inputs[number], *args[1:]), kwargs
        return args, kwargs | {"hidden_states": layer_inputs[number]}

    def after(number: int, module: nn.Module, args: Any, output: Any) -> None:
        outputs[number] = output[0] if isinstance(output, tuple) else output

    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            stack.callback(layer.register_forward_pre_hook(partial(before, number), with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(partial(after, number)).remove)
        yield outputs


def _logits(model: FamilyModel, megatron: Any, input_ids: torch.Tensor) -> ParityRow:
    """Check level 3: compare the logits of the complete models."""
    inputs = {"input_ids": input_ids}
    with torch.no_grad():
        expected, actual = model(**inputs, use_cache=False).logits, logits(megatron, input_ids)
    noise, result = logits_noise(model, inputs), compare_tensors(expected, actual, verbose=False)
    allowed = max(NOISE_FACTOR * noise, TOLERANCE[torch.float32] * max(1.0, expected.abs().max().item()))
    return ParityRow(
        "level 3: Megatron's logits",
        result.max_diff <= allowed,
        f"max_diff {result.max_diff:.1e}",
        f"at most {allowed:.1e}",
        f"rounding difference {noise:.1e}; values up to {expected.abs().max().item():.1f}",
        Level.LOGITS,
        result.max_diff,
        allowed,
        Unit.MAX_DIFF,
    )


def _gradients(model: FamilyModel, megatron: Any, input_ids: torch.Tensor) -> ParityRow:
    """Compare gradients of the next-token loss by Megatron's parameters with ours in its layout."""

    def ours() -> torch.Tensor:
        model_logits: torch.Tensor = model(input_ids=input_ids, use_cache=False).logits
        return model_logits

    expected = _in_layout(model, _gradients_of(model, ours, input_ids))
    with rounded_otherwise(model):
        moved = _in_layout(model, _gradients_of(model, ours, input_ids))
    actual = _gradients_of(megatron, lambda: logits(megatron, input_ids), input_ids)
    largest = {name: gradient.abs().max().item() for name, gradient in expected.items()}
    # Some gradients are zero except for rounding (a key's bias does not change a softmax). They get the others' scale.
    smallest = 1e-3 * max(largest.values())
    off, wrong = {}, []
    for name, gradient in actual.items():
        scale = max(largest[name], smallest)
        noise = (moved[name] - expected[name]).abs().max().item() / scale
        off[name] = compare_tensors(expected[name], gradient, verbose=False).max_diff / scale
        wrong += [] if off[name] <= max(NOISE_FACTOR * noise, GRADIENT_TOLERANCE) else [name]
    return ParityRow(
        "gradients: Megatron's",
        not wrong,
        f"max_diff {max(off.values()):.1e} of the largest value, in {len(off)} tensors",
        f"at most {GRADIENT_TOLERANCE:.0e}, or twice the rounding difference",
        f"differ: {listed(wrong)}" if wrong else "",
        Level.GRADIENTS,
    )


def _gradients_of(
    module: nn.Module, forward: Callable[[], torch.Tensor], input_ids: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return gradients of the next-token loss by parameter (zeros if there are none), and clear them in the module."""
    module.zero_grad()
    functional.cross_entropy(forward()[:, :-1].flatten(0, 1).float(), input_ids[:, 1:].flatten()).backward()
    parameters = dict(module.named_parameters())
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in parameters.items()
    }
    module.zero_grad()
    return gradients


def _in_layout(model: FamilyModel, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert gradients of our parameters to Megatron's layout. Buffers have none."""
    table = model.state_dict_adapter.layout(LOCAL)
    parameters = {
        name: tensor for name, tensor in table.items() if all(part in gradients for part in tensor.parameters)
    }
    return {name: tensor.read(gradients) for name, tensor in parameters.items()}
