"""Subprocess of `mlx.py`: runs an mlx-lm model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_flatten, tree_map, tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_config, load_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nrl_models.common.dtypes import same_kind, wrong_kind
from nrl_models.engines.digests import HEAD, tensor_digest, tied_apart
from nrl_models.engines.processes.environment_worker import serve
from nrl_models.engines.processes.worker_loop import DecodingStep, WorkerModel
from nrl_models.engines.transfer.transports import Message, tensors_of
from nrl_models.errors import EngineError, listed
from nrl_models.loading.read_config import read_config


class MLXModel(WorkerModel):
    """An mlx-lm model.

    Args:
        path: Directory of the checkpoint.
        dtype: Dtype of the parameters; None uses the checkpoint's. Below fp32, mlx-lm keeps some in another dtype.
        weights: Whether to load the weights. Otherwise they are random.
        seed: Random seed of random weights.
    """

    def __init__(self, path: str, dtype: str | None, weights: bool, seed: int) -> None:
        mx.random.seed(seed)
        keys = with_older_keys(read_config(Path(path)).to_dict(), load_config(Path(path)))
        self.model, config = load_model(Path(path), lazy=True, model_config=keys)
        if not weights:
            self._randomize()
        if "quantization" in config or "quantization_config" in config:
            raise ValueError("its weights are quantized, which changes mlx-lm's results: dequantize the checkpoint")
        if dtype is not None:
            wanted = getattr(mx, dtype)
            changes: Callable[[str], bool] = getattr(self.model, "cast_predicate", lambda name: True)
            self.model.update(
                tree_map_with_path(
                    lambda name, value: (
                        value.astype(wanted)
                        if mx.issubdtype(value.dtype, mx.floating) and (wanted == mx.float32 or changes(name))
                        else value
                    ),
                    self.model.parameters(),
                )
            )
        mx.eval(self.model.parameters())

    def _randomize(self) -> None:
        """Replace the weights from the files, which are not read yet, with random ones."""
        self.model.update(
            tree_map(
                lambda value: (
                    mx.random.normal(value.shape, scale=0.02).astype(value.dtype)
                    if mx.issubdtype(value.dtype, mx.floating)
                    else value
                ),
                self.model.parameters(),
            )
        )

    def describe(self) -> dict[str, Any]:
        """Return versions, the model's class, the dtype of most parameters, and the number of logits."""
        sizes: dict[mx.Dtype, int] = {}
        parameters: Any = tree_flatten(self.model.parameters())
        for _, value in parameters:
            sizes[value.dtype] = sizes.get(value.dtype, 0) + value.size
        return {
            "mlx": version("mlx"),
            "mlx-lm": version("mlx-lm"),
            "class": f"{type(self.model).__module__}:{type(self.model).__name__}",
            "dtype": str(max(sizes, key=lambda dtype: sizes[dtype])).rpartition(".")[2],
            "device": str(mx.default_device()),
            "vocabulary": self.model(mx.array([[0]])).shape[-1],
        }

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return logits, see `WorkerModel.logits`."""
        return as_torch(self.model(mx.array([tokens]))[0])

    def decoding(self) -> DecodingStep:
        """Return a decoding step that uses mlx-lm's cache."""
        cache = make_prompt_cache(self.model)
        return lambda new_tokens: as_torch(self.model(mx.array(new_tokens), cache=cache)[:, -1])

    # New weights

    def receive(self, message: Message, digests: bool) -> dict[str, Any]:
        """Receive weights, see `WorkerModel.receive`. Digests are those of MLX's arrays."""
        new = {name: as_array(tensor) for name, tensor in tensors_of(message)}
        self.arrived |= new
        return {"digests": {name: tensor_digest(as_stored(value)) for name, value in new.items()} if digests else {}}

    def apply(self) -> dict[str, Any]:
        """Load the received weights. If the model does not accept some of them, nothing changes."""
        arrived, self.arrived = self.arrived, {}
        parameters = dict(tree_flatten(self.model.parameters()))
        _require_tied(arrived, parameters)
        _require_all_experts(arrived)
        if hasattr(self.model, "sanitize"):
            # Use another instance of the class, which only sanitizes: a model with tied embeddings may drop the head.
            model_class: Any = type(self.model)
            args = self.model.args if hasattr(self.model, "args") else self.model.config
            arrived = model_class(args).sanitize(arrived)
        wrong = [
            f"{name} of shape {tuple(value.shape)}: "
            + (f"expected {tuple(parameters[name].shape)}" if name in parameters else "the model has no such tensor")
            for name, value in arrived.items()
            if name not in parameters or parameters[name].shape != value.shape
        ]
        wrong += [
            wrong_kind(name, _torch_dtype(value), _torch_dtype(parameters[name]))
            for name, value in arrived.items()
            if name in parameters and not same_kind(_torch_dtype(value), _torch_dtype(parameters[name]))
        ]
        if wrong:
            raise ValueError("; ".join(wrong[:4]))
        new = {name: value.astype(parameters[name].dtype) for name, value in arrived.items()}
        mx.eval(new)
        self.model.load_weights(list(new.items()), strict=False)
        return {"unwritten": sorted(parameters.keys() - new.keys())}


def _torch_dtype(value: mx.array) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, str(value.dtype).rpartition(".")[2])
    return dtype


def _require_all_experts(names: Collection[str]) -> None:
    """Check that no expert lacks a tensor that others of its layer have, because mlx-lm stacks the tensors of experts.

    Raises:
        EngineError: If some are missing. Lists their names.
    """
    experts: dict[str, dict[str, set[int]]] = {}
    for name in names:
        layer, _, rest = name.partition(".experts.")
        number, _, part = rest.partition(".")
        if number.isdigit():
            experts.setdefault(layer, {}).setdefault(part, set()).add(int(number))
    missing = [
        f"{layer}.experts.{number}.{part}"
        for layer, parts in experts.items()
        for part, numbers in parts.items()
        for number in sorted(set(range(1 + max(map(max, parts.values())))) - numbers)
    ]
    if missing:
        raise EngineError(f"the refit lacks {listed(missing)}, which mlx-lm stacks with others: send all weights")


def _require_tied(arrived: dict[str, mx.array], parameters: Collection[str]) -> None:
    """Check that a head sent to a model without one equals the embeddings, because mlx-lm would drop it.

    Raises:
        EngineError: If it differs from all tensors of its shape in the refit.
    """
    for name, head in arrived.items():
        if name.endswith(HEAD) and not any(each.endswith(HEAD) for each in parameters):
            others = {other: value for other, value in arrived.items() if other != name and value.shape == head.shape}
            if not any(mx.array_equal(value, head).item() for value in others.values()):
                raise EngineError(tied_apart(name, listed(others) or "the embeddings"))


def with_older_keys(config: dict[str, Any], stated: dict[str, Any]) -> dict[str, Any]:
    """Add the keys that configurations had before transformers 5, which mlx-lm still reads.

    For example, mlx-lm reads `rope_theta`, and uses a default if it is missing. A model saved by transformers 5 has
    `rope_parameters` instead, so mlx-lm would apply the wrong rotation without an error.

    Args:
        config: The configuration as transformers completes it.
        stated: The keys in the file. None is only passed if the file has it. mlx-lm has defaults for missing keys.
    """
    settings: dict[str, Any] = {
        name: with_older_keys(value, stated.get(name) or {})
        if name.endswith("_config") and name != "per_layer_config" and isinstance(value, dict)
        else value
        for name, value in config.items()
    }
    older: dict[str, Any] = {name[1:]: value for name, value in settings.items() if name.startswith("_")}
    model_type = str(settings.get("model_type"))
    newer = CONFIG_MAPPING[model_type].attribute_map if model_type in CONFIG_MAPPING else {}
    for older_name, name in newer.items():
        older[older_name] = settings.get(name)
    heads = settings.get("num_attention_heads")
    if isinstance(heads, int) and "hidden_size" in settings:
        older["head_dim"] = settings["hidden_size"] // heads
    if isinstance(words := settings.get("text_config"), dict):
        if "vocab_size" in words:
            older["vocab_size"] = words["vocab_size"]
        if "tie_word_embeddings" in stated:  # in transformers, this belongs to the complete model
            settings["text_config"] = words | {"tie_word_embeddings": stated["tie_word_embeddings"]}
    older |= _older_rope(settings.get("rope_parameters") or {})
    settings |= _older_layers(settings)
    return (
        {name: None for name in stated if name in settings}
        | {name: value for name, value in older.items() if settings.get(name) is None}
        | {name: value for name, value in settings.items() if value is not None}
    )


def _older_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return older keys of rotary embeddings."""
    layered = "rope_theta" not in rope
    rope, local = (rope.get("full_attention") or {}, rope.get("sliding_attention") or {}) if layered else (rope, {})
    older = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    if "rope_theta" in local:
        older["rope_local_base_freq"] = local["rope_theta"]
    return older | {"rope_scaling": None if rope.get("rope_type", "default") == "default" else rope}


def _older_layers(settings: dict[str, Any]) -> dict[str, Any]:
    """Return older keys for different kinds of layers: the interval of full attention, and its separate sizes.

    If `layer_types` exists, transformers uses only it, so the older keys may contradict it.
    """
    kinds = settings.get("layer_types") or []
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    older: dict[str, Any] = {}
    if full and full == list(range(full[0], len(kinds), full[0] + 1)):
        key = "full_attention_interval" if "linear_attention" in kinds else "sliding_window_pattern"
        if not isinstance(settings.get(key), str):
            older[key] = full[0] + 1
    layers = {int(layer): values for layer, values in (settings.get("per_layer_config") or {}).items()}
    if full and all(layers.get(index) == layers.get(full[0]) for index in full):
        for name, value in (layers.get(full[0]) or {}).items():
            older["num_global_" + name.removeprefix("num_") if name.startswith("num_") else f"global_{name}"] = value
    return older


def as_torch(value: mx.array) -> torch.Tensor:
    """Convert logits to a torch tensor in fp32."""
    return torch.from_numpy(np.array(value.astype(mx.float32)))


def as_stored(value: mx.array) -> torch.Tensor:
    """Convert an array to a torch tensor with the same bits."""
    if value.dtype == mx.bfloat16:  # which NumPy lacks
        return torch.from_numpy(np.array(value.view(mx.uint16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(value))


def as_array(tensor: torch.Tensor) -> mx.array:
    """Copy a tensor to MLX, with the same bits. FP8 becomes uint8, as in `mx.load`, because MLX has no FP8."""
    if tensor.dtype.is_floating_point and tensor.itemsize == 1:
        tensor = tensor.view(torch.uint8)
    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.view(torch.uint16).numpy()).view(mx.bfloat16)
    return mx.array(tensor.numpy(), mx.float64 if tensor.dtype == torch.float64 else None)


if __name__ == "__main__":
    serve(MLXModel)
