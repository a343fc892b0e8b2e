"""Compare tiny models of an architecture with MLX. Lists its known limits."""

from __future__ import annotations

import pkgutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mlx_lm import models
from mlx_lm.utils import MODEL_REMAPPING

from nrl_models import registry
from nrl_models.consistency.cells import Settings
from nrl_models.consistency.prompts import Prompts
from nrl_models.engines import start_engine
from nrl_models.engines.base import Engine
from nrl_models.engines.hf import HFEngine
from tests.engine.families import SETTINGS, Outcome, Start, compared, tiny_model, without_model
from tools.variants import split_variant, with_variants

BOUND = 1.00001
"""Limit of `token_mult_prob_error` in fp32: a tenth of the limit for vLLM's kernels."""

OVERRIDES: dict[str, dict[str, Any]] = {
    # Published keys that mlx-lm requires, and that transformers does not have or has defaults for.
    "ApertusForCausalLM": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "Exaone4ForCausalLM": {"sliding_window_pattern": "LG"},
    "Gemma4UnifiedForConditionalGeneration": {"text_config": {"hidden_size_per_layer_input": 0}},
    "GlmMoeDsaForCausalLM": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "Lfm2ForCausalLM": {
        "block_dim": 256,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "LongcatFlashForCausalLM": {"attention_method": "MLA", "router_bias": False},
    "PhimoeForCausalLM": {"attention_bias": True, "lm_head_bias": True},
    "Qwen3VLMoeForConditionalGeneration": {"text_config": {"norm_topk_prob": True}},
    "RecurrentGemmaForCausalLM": {"num_key_value_heads": 1},
    "SolarOpenForCausalLM": {"intermediate_size": 384, "first_k_dense_replace": 0, "partial_rotary_factor": 1.0},
    # mlx-lm requires the fourth layer, the first with full attention.
    "Llama4ForConditionalGeneration": {"text_config": {"num_hidden_layers": 4}},
}
"""Configuration values that tiny models need for MLX, in addition to those for all engines."""


LIMITS: dict[str, str] = {
    "Ernie4_5_MoeForCausalLM": "mlx-lm's router omits the correction of scores",
    "Gemma2ForCausalLM": "mlx-lm's code of this model has no sliding window",
    "GemmaForCausalLM": "mlx-lm computes exact GELU, transformers the tanh approximation",
    "Glm4MoeLiteForCausalLM": "transformers' latent norms use another epsilon than the configuration's",
    "GlmForCausalLM": "mlx-lm rotates complete heads; `partial_rotary_factor` is 0.5",
    "JambaForCausalLM": "mlx-lm computes the softmax over the chosen experts only",
    "MistralForCausalLM": "mlx-lm runs it with its Llama code, which has a sliding window only with `layer_types`",
    "Starcoder2ForCausalLM": "mlx-lm's code of this model has no sliding window, and computes exact GELU",
}
"""Architectures that disagree because of a known difference in the code. All others have a verdict."""


def shared_architectures() -> list[str]:
    """List every text generation architecture that mlx-lm (by model type) and the registry have, with its variants."""
    known = {module.name for module in pkgutil.iter_modules(models.__path__)}
    return with_variants(
        architecture
        for architecture in sorted(registry.architectures(aliases=False))
        if not architecture.endswith("Classification")
        and not registry.unmet_requirement(architecture)
        and MODEL_REMAPPING.get(kind := _model_type(architecture), kind) in known
    )


def _model_type(architecture: str) -> str:
    return registry.model_class(architecture).reference_class().config_class.model_type


@contextmanager
def one_mlx() -> Iterator[Start]:
    """Start MLX on a checkpoint in fp32, and stop the previous one. Stops the last one at the end of the block."""
    with ExitStack() as running:

        def start(path: Path, **options: Any) -> Engine:
            running.close()
            return running.enter_context(start_engine("mlx", path, dtype=torch.float32, **options))

        yield start


def compare_mlx_architecture(architecture: str, start: Start, folder: Path) -> Outcome:
    """Refit MLX from random weights and again after a training step, and load the trained weights from files.

    Args:
        architecture: The architecture, or one of its variants.
        start: Starts MLX on a checkpoint.
        folder: An empty folder for checkpoints and measurements.
    """
    try:
        model = tiny_model(architecture, OVERRIDES.get(split_variant(architecture)[0]))
    except Exception as error:  # any exception of the model's code
        return without_model(architecture, error)
    return compared(architecture, model, start, folder, replace(SETTINGS, threshold=BOUND), difference_to_loaded_engine)


def difference_to_loaded_engine(engine: Engine, trainer: HFEngine, prompts: Prompts, settings: Settings) -> str:
    """Compare scores of a refitted engine and one that loaded the same weights. Empty if they agree."""
    tokens = prompts.make(settings.cells()[0], settings.lengths[0], settings.seed)
    with tempfile.TemporaryDirectory() as folder:
        trainer.model.save_pretrained(folder)
        with start_engine("mlx", folder, dtype=torch.float32) as fresh:
            scores = [torch.tensor(each.score(tokens, settings.sampling))[:, 1:] for each in (engine, fresh)]
    difference = (scores[0] - scores[1]).abs().max().item()
    return (
        ""
        if difference == 0
        else f"after the refits, scores differ by {difference:.2g} from an engine that loaded the same weights"
    )
