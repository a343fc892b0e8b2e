"""Memory of every recipe at full size: training and engine fit on the devices named in its comment."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from config.published_configs import values_of
from recipes.test_every_recipe import ALIASES
from transformers import AutoConfig, PreTrainedConfig

from nrl_models import registry
from nrl_models.common.trust.servers import VLLMS
from nrl_models.losses.named import PreferenceLoss
from nrl_models.recipes import read_recipe, recipes
from nrl_models.recipes.recipe import PolicyRecipe

GPU = 80e9
"""Memory of a device in bytes."""

TRAINING_BYTES = 16
"""Bytes per trained weight in fp32: weight, gradient and two AdamW states."""

REFERENCE_BYTES = 4
"""Bytes per weight of the reference."""

USABLE_SHARE = 0.95
"""Share of a device for weights and engine. Activations need the rest."""

ENGINE_BYTES = 1.5e9
"""Bytes of an engine in addition to its weights and cache, on each device: activations and logits of a step."""

NAMES = {
    **ALIASES,
    "unsloth/gpt-oss-20b-BF16": "openai/gpt-oss-20b",
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": "Qwen/Qwen3-0.6B",
}

_COMMENT = re.compile(r"# ([\d.]+) billion parameters at 16 bytes .*: (\d+) devices? of 80 GB")


def configuration(repository: str) -> dict[str, Any]:
    """Return the published configuration of a recipe's model, without its quantization."""
    values = values_of(NAMES.get(repository, repository))
    return {key: value for key, value in values.items() if key != "quantization_config"}


def published_config(repository: str) -> PreTrainedConfig:
    """Return the published configuration of a recipe's model, of transformers' class."""
    values = configuration(repository)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def cache_bytes(config: PreTrainedConfig, tokens: int, ranks: int) -> float:
    """Return the bytes on each device of the keys and values of one sequence in bf16. vLLM does not start with less.

    Assumes that all layers keep all tokens, with the most heads and the largest heads of any layer. Sliding windows and
    latents need less.
    """
    text = config.get_text_config()
    sizes = text.to_dict()

    def largest(suffix: str) -> int:
        return max((value for key, value in sizes.items() if key.endswith(suffix) and value), default=0)

    heads = sizes["num_attention_heads"]
    key_value_heads = largest("key_value_heads") or heads
    head_size = largest("head_dim") or sizes["hidden_size"] // heads
    return 2 * 2 * text.num_hidden_layers * key_value_heads * head_size * tokens / min(ranks, key_value_heads)


def parameters(config: PreTrainedConfig) -> int:
    """Return the number of parameters of a model with this configuration."""
    (architecture,) = config.architectures
    if registry.unmet_requirement(architecture):
        pytest.skip(f"{architecture} needs another transformers")
    model = registry.model_class(architecture).from_config(config, device="meta", dtype=torch.bfloat16)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in recipes() if not name.startswith("demo/")])
def test_recipe_fits_devices_in_comment(name: str) -> None:
    file = recipes()[name]
    recipe = read_recipe(file)
    found = _COMMENT.search(file.read_text())
    config = published_config(recipe.model.arguments["pretrained_model_name_or_path"])
    weights = parameters(config)
    devices = int(found[2]) if found else 1
    assert found is None or float(found[1]) == pytest.approx(weights / 1e9, rel=0.03)
    engine = 0.0
    if isinstance(recipe, PolicyRecipe):
        tokens = recipe.training.max_prompt + recipe.training.new_tokens
    if isinstance(recipe, PolicyRecipe) and recipe.engine.name == "hf-generate":
        engine = 2 * weights + cache_bytes(config, tokens, 1) + ENGINE_BYTES  # one device has the whole engine
    elif isinstance(recipe, PolicyRecipe):
        assert recipe.engine.name in VLLMS
        options = recipe.engine.options
        ranks = options.get("tensor_parallel_size", 1)
        engine = options["gpu_memory_utilization"] * GPU
        assert ranks <= devices
        needed = 2 * weights / ranks + cache_bytes(config, tokens, ranks) + ENGINE_BYTES
        assert needed <= engine, f"the engine needs {needed / 1e9:.1f} GB on a device, and has {engine / 1e9:.1f}"
    keeps_reference = isinstance(recipe.loss, PreferenceLoss) or getattr(recipe.loss, "kl", 0) > 0
    share = (TRAINING_BYTES + REFERENCE_BYTES * keeps_reference) * weights / devices
    assert share + engine <= USABLE_SHARE * GPU, f"{share / 1e9:.1f} GB for training, {engine / 1e9:.1f} for the engine"


def test_most_recipes_document_their_size() -> None:
    assert sum(bool(_COMMENT.search(file.read_text())) for file in recipes().values()) > 15
