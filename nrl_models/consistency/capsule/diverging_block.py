"""The first diverging block of the trainer's model: recorded with its weights, and rebuilt without the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from nrl_models.auto import auto_class_for
from nrl_models.common.dtypes import dtype_name
from nrl_models.common.forward.evaluation import evaluating
from nrl_models.common.modules import class_name, install
from nrl_models.engines.engine_types import LOGITS
from nrl_models.errors import CapsuleError
from nrl_models.loading.read_config import read_config
from nrl_models.logprobs.head import output_embedding
from nrl_models.parity.components import Call, run_layer
from nrl_models.parity.noise import TOLERANCE

SCALARS = (bool, int, float, str)

PLAIN = ("name", "config", "dtype", "attention", "arguments")
"""Fields of a block without tensors."""


@dataclass(frozen=True, kw_only=True)
class RecordedBlock:
    """A module of the trainer's model, and one call of it.

    Args:
        name: Name of the module.
        config: Configuration of the model, as in `config.json`.
        dtype: Name of the dtype of the model.
        attention: Attention implementation of the model.
        arguments: Arguments of the call. A tensor is `{"tensor": INDEX}`.
        inputs: Tensors in the arguments.
        outputs: Tensors in the result.
        weights: Parameters and buffers by name.
    """

    name: str
    config: Mapping[str, Any]
    dtype: str
    attention: str | None
    arguments: Any
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    weights: Mapping[str, torch.Tensor]

    @property
    def allowed(self) -> float:
        """Largest difference of the rebuilt block that rounding explains, relative to the output's scale."""
        return TOLERANCE.get(getattr(torch, self.dtype), 0.0) or TOLERANCE[torch.float32]

    def rebuilt(self) -> nn.Module:
        """Build the module from its configuration and weights.

        Raises:
            CapsuleError: If the configuration describes a module with other weights.
            NRLModelsError: If this nrl_models cannot build the model.
        """
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.config))
            options: dict[str, Any] = {} if self.attention is None else {"attn_implementation": self.attention}
            model = auto_class_for(folder).from_config(
                read_config(Path(folder)), device="meta", dtype=getattr(torch, self.dtype), **options
            )
        module = model.get_submodule(self.name)
        expected = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        if expected != self.weights.keys():
            others = ", ".join(sorted(expected ^ self.weights.keys())[:4])
            raise CapsuleError(f"the configuration describes {self.name} with other weights: {others}")
        for name, tensor in self.weights.items():
            install(module, name, tensor.clone())
        return module.eval()

    def error(self) -> float:
        """Run the rebuilt block on the recorded input.

        Returns:
            The largest difference from the recorded output, relative to the output's scale.

        Raises:
            CapsuleError: If it cannot be rebuilt, or returns tensors of other shapes.
        """
        args, kwargs = _decoded(self.arguments, self.inputs)
        outputs = run_layer(self.rebuilt(), Call(tuple(args), kwargs))
        if [tensor.shape for tensor in outputs] != [tensor.shape for tensor in self.outputs] or not outputs:
            raise CapsuleError(f"the rebuilt {self.name} returns tensors of other shapes")
        return max(_difference(first, second) for first, second in zip(outputs, self.outputs, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Return everything but the tensors."""
        of_tensors = {"inputs": len(self.inputs), "outputs": len(self.outputs), "weights": list(self.weights)}
        return {name: getattr(self, name) for name in PLAIN} | of_tensors

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by their names in a capsule."""
        return {
            **{f"block/inputs/{index}": tensor for index, tensor in enumerate(self.inputs)},
            **{f"block/outputs/{index}": tensor for index, tensor in enumerate(self.outputs)},
            **{f"block/weights/{name}": tensor for name, tensor in self.weights.items()},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> RecordedBlock:
        """Parse the output of `to_json` and `tensors`."""
        return cls(
            **{name: content[name] for name in PLAIN},
            inputs=tuple(tensors[f"block/inputs/{index}"] for index in range(content["inputs"])),
            outputs=tuple(tensors[f"block/outputs/{index}"] for index in range(content["outputs"])),
            weights={name: tensors[f"block/weights/{name}"] for name in content["weights"]},
        )


def block_name(model: nn.Module, module: str) -> str:
    """Return the layer that contains a module, or the module itself outside of layers.

    Args:
        model: The trainer's model.
        module: Name of the module, or `LOGITS`.
    """
    if module == LOGITS:
        head = output_embedding(model)
        return next(name for name, other in model.named_modules() if other is head)
    parts = module.split(".")
    layer = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: layer + 1])


def record_block(model: Any, name: str, tokens: Sequence[int]) -> RecordedBlock:
    """Run the trainer's model, and record a module with its weights.

    Args:
        model: The trainer's model.
        name: Name of the module.
        tokens: Token ids.

    Raises:
        CapsuleError: If the module was not called, or an argument cannot be recorded.
    """
    module = model.get_submodule(name)
    calls: list[tuple[Any, list[torch.Tensor]]] = []
    outputs: list[list[torch.Tensor]] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        tensors: list[torch.Tensor] = []
        calls.append((_encoded([list(args), dict(kwargs)], tensors), tensors))

    def after(_: nn.Module, args: Any, output: Any) -> None:
        tensors: list[torch.Tensor] = []
        _encoded([output] if isinstance(output, torch.Tensor) else list(output), tensors)
        outputs.append(tensors)

    with (
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after),
        torch.no_grad(),
        evaluating(model),
    ):
        model(input_ids=torch.tensor([list(tokens)], device=model.device), use_cache=False)
    if not calls or not outputs:
        raise CapsuleError(f"{name} is not called by the model's forward")
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    return RecordedBlock(
        name=name,
        config=config | {"architectures": [class_name(model)]},
        dtype=dtype_name(model.dtype),
        attention=getattr(model.config, "_attn_implementation", None),
        arguments=calls[0][0],
        inputs=tuple(calls[0][1]),
        outputs=tuple(outputs[0]),
        weights={key: each.detach().cpu() for key, each in (*module.named_parameters(), *module.named_buffers())},
    )


def _encoded(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a JSON value for arguments of a module, and add their tensors to a list."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().cpu().clone())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encoded(each, tensors) for each in value]}
    if isinstance(value, Mapping):
        return {"dict": {str(key): _encoded(each, tensors) for key, each in value.items()}}
    if value is None or isinstance(value, SCALARS):
        return value
    raise CapsuleError(f"an argument of type {type(value).__name__} cannot be recorded")


def _decoded(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if not isinstance(value, Mapping):
        return value
    ((kind, held),) = value.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "dict":
        return {key: _decoded(each, tensors) for key, each in held.items()}
    values = [_decoded(each, tensors) for each in held]
    return tuple(values) if kind == "tuple" else values


def _difference(actual: torch.Tensor, recorded: torch.Tensor) -> float:
    scale = max(recorded.float().abs().nan_to_num(posinf=0.0).max().item(), 1e-6) if recorded.numel() else 1.0
    difference = (actual.float() - recorded.float()).abs()
    return difference.nan_to_num(nan=float("inf")).max().item() / scale if difference.numel() else 0.0
