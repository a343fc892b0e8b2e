"""Convert a transformers configuration to arguments of Megatron-Core's `TransformerConfig` and `GPTModel`.

Some properties are not in a configuration but in a model's code, such as whether rotary pairs are interleaved, or how a
router scores. `readings` lists the alternatives: each is tried on a small model, and one with the same result is used
(`gpt_model`). So this module names no model, and additional computations of a model are detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from nrl_models.common.views.view import HFTensor
from nrl_models.errors import Problem, ProblemKind


@dataclass(frozen=True)
class GPTSettings:
    """Arguments of Megatron's model.

    Args:
        transformer: Arguments of `TransformerConfig`, or of `MLATransformerConfig` for latent attention.
        model: Arguments of `GPTModel`.
        latent: Whether attention is latent (MLA).
    """

    transformer: dict[str, Any]
    model: dict[str, Any]
    latent: bool

    @property
    def experts(self) -> int | None:
        """Number of experts of a mixture; None for a dense model."""
        experts: int | None = self.transformer.get("num_moe_experts")
        return experts

    def reading(self, choices: dict[str, Any]) -> GPTSettings:
        """Return these settings, changed by one element of `readings`."""
        return GPTSettings(self.transformer | choices, self.model, self.latent)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": ACT2FN["relu2"],
}
"""By transformers' name."""

WITHOUT_FUSION = {
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "use_cpu_initialization": True,
    "perform_initialization": False,
}
"""Kernels that are available on all devices, and no dropout, as in inference."""

SCALED_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Values that Megatron's `rope_scaling` assumes."""


def gpt_settings(
    config: PreTrainedConfig, tensors: Mapping[str, HFTensor], dtype: torch.dtype
) -> tuple[GPTSettings, list[Problem]]:
    """Return Megatron's settings for a configuration, and problems for settings without an equivalent.

    Args:
        config: The configuration.
        tensors: The model's tensors in Megatron's layout, with layers of `get_gpt_layer_local_spec`.
        dtype: Dtype of the parameters.
    """
    return _Translation(config, tensors, dtype).settings()


def readings(settings: GPTSettings) -> Iterator[dict[str, Any]]:
    """Yield possible readings of a configuration, the most likely first."""
    options: dict[str, tuple[Any, ...]] = {}
    if not settings.latent:
        options["rotary_interleaved"] = (False, True)
    if settings.experts:
        biased = settings.transformer["moe_router_enable_expert_bias"]
        options["moe_router_score_function"] = ("sigmoid",) if biased else ("softmax", "sigmoid")
        options["moe_router_pre_softmax"] = (False,) if biased else (False, True)
    for choice in product(*options.values()):
        yield dict(zip(options, choice, strict=True))


class _Translation:
    def __init__(self, config: Any, tensors: Mapping[str, HFTensor], dtype: torch.dtype) -> None:
        self.config, self.tensors, self.dtype = config, tensors, dtype
        self.problems: list[Problem] = []

    def settings(self) -> tuple[GPTSettings, list[Problem]]:
        config = self.config
        latent = self._has("self_attention.linear_kv_down_proj.weight")
        heads = config.num_attention_heads
        transformer: dict[str, Any] = WITHOUT_FUSION | {
            "num_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "num_attention_heads": heads,
            "ffn_hidden_size": self._first("intermediate_size", "moe_intermediate_size"),
            "normalization": "LayerNorm" if "decoder.final_layernorm.bias" in self.tensors else "RMSNorm",
            "layernorm_epsilon": self._first("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon") or 1e-5,
            "activation_func": self._activation(),
            "gated_linear_unit": self._is_gated(),
            "add_bias_linear": self._has("self_attention.linear_proj.bias"),
            "add_qkv_bias": self._has("self_attention.linear_qkv.bias"),
            "qk_layernorm": self._has("self_attention.k_layernorm.weight", "self_attention.kv_layernorm.weight"),
            "params_dtype": self.dtype,
            "pipeline_dtype": self.dtype,
            "bf16": self.dtype == torch.bfloat16,
        }
        if latent:
            transformer |= self._latent()
        else:
            transformer |= {
                "num_query_groups": self._first("num_key_value_heads") or heads,
                "kv_channels": self._first("head_dim") or config.hidden_size // heads,
            }
        if self._has("mlp.router.weight"):
            transformer |= self._mixture()
        transformer |= self._windows()
        rope = self._latent_rope() if latent else self._rope()
        model = {
            "vocab_size": config.vocab_size,
            "max_sequence_length": config.max_position_embeddings,
            "parallel_output": False,
            "position_embedding_type": "rope",
            "share_embeddings_and_output_weights": "output_layer.weight" not in self.tensors,
        }
        if latent:
            transformer |= rope
        else:
            model |= rope
        return GPTSettings(transformer, model, latent), self.problems

    def _has(self, *ends: str) -> bool:
        """Return True if a layer has a tensor whose name ends with one of these."""
        return any(name.endswith(ends) for name in self.tensors)

    def _is_gated(self) -> bool:
        """Return True if the first linear of an MLP has twice as many outputs as the second has inputs."""
        name = next(name for name in self.tensors if name.endswith("linear_fc2.weight"))
        first, second = self.tensors[name.replace("linear_fc2", "linear_fc1")], self.tensors[name]
        return first.shape[0] == 2 * second.shape[1]

    def _first(self, *keys: str) -> Any:
        """Return the value of the first key that the configuration has and that is not None, or None."""
        values = (getattr(self.config, key, None) for key in keys)
        return next((value for value in values if value is not None), None)

    def _refuse(self, key: str, value: object, expected: str) -> None:
        detail = f"is {value!r}; Megatron-Core's GPT model has {expected}"
        self.problems.append(Problem(ProblemKind.UNSUPPORTED, key, detail))

    def _activation(self) -> Callable[[torch.Tensor], torch.Tensor]:
        name = self._first("hidden_act", "hidden_activation", "activation_function")
        if name not in ACTIVATIONS:
            self._refuse("hidden_act", name, f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS.get(name, functional.silu)

    def _latent(self) -> dict[str, Any]:
        config = self.config
        return {
            "q_lora_rank": config.q_lora_rank,
            "kv_lora_rank": config.kv_lora_rank,
            "qk_head_dim": config.qk_nope_head_dim,
            "qk_pos_emb_head_dim": config.qk_rope_head_dim,
            "v_head_dim": config.v_head_dim,
        }

    def _mixture(self) -> dict[str, Any]:
        experts = self._first("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        width = self._first("moe_intermediate_size") or self.config.intermediate_size
        shared = self._first("shared_expert_intermediate_size")
        if shared is None and self._has("mlp.shared_experts.linear_fc2.weight"):
            shared = width * (self._first("n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or 1)
        sparse = [
            int(f"decoder.layers.{layer}.mlp.router.weight" in self.tensors)
            for layer in range(self.config.num_hidden_layers)
        ]
        groups = self._first("n_group") or 1
        return {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": shared or None,
            "moe_shared_expert_gate": self._has("mlp.shared_experts.gate_weight"),
            "moe_layer_freq": sparse,
            "moe_router_topk": self._first("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk"),
            "moe_router_topk_scaling_factor": self._first("routed_scaling_factor", "router_scaling_factor"),
            "moe_router_enable_expert_bias": self._has("mlp.router.expert_bias"),
            "moe_router_num_groups": groups if groups > 1 else None,
            "moe_router_group_topk": self._first("topk_group") if groups > 1 else None,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
            "moe_aux_loss_coeff": 0.0,
        }

    def _windows(self) -> dict[str, Any]:
        """Return arguments for sliding windows, and for layers without rotary positions."""
        kinds = self._first("layer_types")
        window = self._first("sliding_window")
        arguments: dict[str, Any] = {}
        if kinds is not None and (foreign := sorted(set(kinds) - {"full_attention", "sliding_attention"})):
            self._refuse("layer_types", foreign, "full and sliding attention only")
        sliding = [kind == "sliding_attention" for kind in kinds] if kinds is not None else None
        if (
            window is not None
            and getattr(self.config, "use_sliding_window", True)
            and (sliding is None or any(sliding))
        ):
            arguments["window_size"] = (window - 1, 0)
            if sliding is not None and not all(sliding):
                arguments["window_attn_skip_freq"] = [int(slides) for slides in sliding]
        rotary = self._first("no_rope_layers")  # 1 for layers with rotary positions
        if rotary is not None and not all(rotary):
            arguments["no_rope_freq"] = [int(not has) for has in rotary]
        return arguments

    def _rope(self) -> dict[str, Any]:
        """Return arguments of `GPTModel` for rotary positions."""
        rope, kind = self._rope_parameters("default", "llama3")
        arguments = {"rotary_base": rope.get("rope_theta"), "rotary_percent": rope.get("partial_rotary_factor", 1.0)}
        if kind == "llama3":
            if other := {key: rope.get(key) for key, value in SCALED_ROPE.items() if rope.get(key) != value}:
                self._refuse("rope_parameters", other, f"{SCALED_ROPE}")
            arguments |= {"rope_scaling": True, "rope_scaling_factor": rope.get("factor")}
        return arguments

    def _latent_rope(self) -> dict[str, Any]:
        """Return arguments of `MLATransformerConfig` for the rotary positions of latent attention."""
        rope, kind = self._rope_parameters("default", "yarn")
        arguments = {"rope_type": "rope", "rotary_base": rope.get("rope_theta"), "rotary_scaling_factor": 1.0}
        if kind == "yarn":
            arguments |= {
                "rope_type": "yarn",
                "rotary_scaling_factor": rope["factor"],
                "original_max_position_embeddings": rope["original_max_position_embeddings"],
                "beta_fast": rope.get("beta_fast", 32.0),
                "beta_slow": rope.get("beta_slow", 1.0),
                "mscale": rope.get("mscale", 1.0),
                "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
            }
        return arguments

    def _rope_parameters(self, *kinds: str) -> tuple[dict[str, Any], str]:
        """Return the rotary parameters and their type, one of `kinds`."""
        rope = dict(self._first("rope_parameters") or {})
        if "rope_theta" not in rope:
            self._refuse("rope_parameters", rope, "one rotary base for all layers")
        kind = rope.get("rope_type", "default")
        if kind not in kinds:
            self._refuse("rope_parameters.rope_type", kind, " and ".join(kinds))
        return rope, kind
