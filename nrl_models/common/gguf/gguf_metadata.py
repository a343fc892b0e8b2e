"""Metadata of a GGUF file that affects the computation, but is not in transformers' tables.

transformers ignores keys that are not in its tables: factors of rotary embeddings, soft caps, windows. Here, each key
of the file's architecture is used, has no effect, or raises. The keys are those of llama.cpp (`gguf.constants.Keys`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from nrl_models.common.gguf.gguf_header import GGUFHeader, refused
from nrl_models.common.value_checks import is_number
from nrl_models.errors import Problem, ProblemKind, shown

NO_EFFECT = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "pooling_type",
        "expert_feed_forward_length",
        "feed_forward_length",
        "tensor_data_layout",
        "vocab_size",
    }
)
"""Keys without effect, or keys that are compared with the shapes of tensors, unless a setting has their value."""

MAY_BE_NONE = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""Keys that are zero for a model without attention or without a feed-forward layer."""

SETTINGS: Mapping[str, tuple[str, ...]] = {
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.key_length_swa": ("head_dim",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "norm_eps"),
    "attention.relative_buckets_count": ("relative_attention_num_buckets",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "attention.sliding_window": ("sliding_window",),
    "attention.value_length_swa": ("head_dim",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "context_length": ("n_positions",),
    "decoder_block_count": ("num_decoder_layers",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_shared_count": ("n_shared_experts",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "feed_forward_length": ("intermediate_size", "n_inner", "d_ff", "ffn_hidden_size"),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "logit_scale": ("logit_scale",),
    "sliding_window": ("sliding_window",),
    "ssm.conv_kernel": ("conv_kernel",),
    "ssm.inner_size": ("intermediate_size",),
    "ssm.state_size": ("state_size",),
    "ssm.time_step_rank": ("time_step_rank",),
    "use_parallel_residual": ("use_parallel_residual", "parallel_attn"),
    "vocab_size": ("vocab_size",),
}
"""For a key the names that a configuration may have for it."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.max_alibi_bias": (8.0,),
    "attention.scale": (1.0,),
    "embedding_scale": (1.0,),
    "expert_weights_scale": (1.0,),
    "logit_scale": (1.0,),
    "residual_scale": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
}
"""Values without effect. Zero also has none, except for `NEVER_OFF`."""

NEVER_OFF = ("attention.causal", "rope.scaling.yarn_ext_factor")
"""Keys for which zero or false changes the computation."""

OFF = frozenset(
    {
        "expert_group_scale",
        "interleave_moe_layer_step",
        "moe_every_n_layers",
        "n_deepstack_layers",
        "nextn_predict_layers",
        "router_logit_softcapping",
        "ssm.dt_b_c_rms",
        "ssm.group_count",
        "swiglu_clamp_exp",
        "swiglu_clamp_shexp",
    }
)
"""Keys of unsupported features. Zero and false disable them."""

HEAD_SIZES = ("attention.key_length", "attention.value_length")
ROTARY_SIZES = ("rope.dimension_count", "rope.dimension_count_swa")
PATTERN = "attention.sliding_window_pattern"
SCALING = "rope.scaling."
SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""

LAYERS_OF_27B = (46, 62)
"""Numbers of layers for which llama.cpp scales attention by `hidden_size / num_attention_heads`.

Files have no key for `query_pre_attn_scalar`. All other models of such architectures are scaled by the size of a head.
"""

YARN: Mapping[str, str] = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""Keys below `rope.scaling.`, and their names in `rope_parameters`."""


def with_all_metadata(header: GGUFHeader, values: Mapping[str, Any], read: Mapping[str, Any]) -> dict[str, Any]:
    """Add values from the metadata that transformers' table lacks to the values of a configuration.

    Args:
        header: Header of the file.
        values: Values that transformers derives from the metadata.
        read: transformers' table for the architecture, by key without the architecture's name.

    Raises:
        CheckpointError: If keys affect the computation, but the model's configuration has no value for them.
    """
    keys = {
        key.partition(".")[2]: value
        for key, value in header.values.items()
        if key.startswith(f"{header.architecture}.")
    }
    _require_numbers(header, keys)
    config = AutoConfig.for_model(**values)
    settings = _Settings(config, {name: setting for name, setting in read.items() if setting is not None})
    in_order = sorted(keys, key=lambda key: key not in HEAD_SIZES)  # other keys depend on the size of a head
    unread = [key for key in in_order if not settings.take(key, keys[key], keys)]
    settings.scale_attention(keys)
    if unread:
        problems = [
            Problem(
                ProblemKind.UNSUPPORTED,
                f"{header.architecture}.{key}",
                f"is {shown(keys[key])}, which {type(config).__name__} has no value for",
                header.file.name,
            )
            for key in unread
        ]
        advice = "load the safetensors that the file was made from; llama.cpp computes with these values"
        raise refused(header.file, problems, advice)
    return {name: value for name, value in values.items() if name not in settings.misnamed} | settings.changed


def _require_numbers(header: GGUFHeader, keys: Mapping[str, Any]) -> None:
    """Check the values that scale rotary embeddings.

    Raises:
        CheckpointError: One is not a number, or a factor of YaRN is negative.
    """
    kind = keys.get(f"{SCALING}type", "linear")
    names = {"linear": ("factor",), "yarn": ("factor", "attn_factor", "yarn_attn_factor", *YARN)}.get(kind, ())
    problems = []
    for key in (SCALING + name for name in names if SCALING + name in keys):
        least = {"least": 0.0} if kind == "yarn" and key == f"{SCALING}factor" else {}
        if not is_number(keys[key], **least):
            detail = f"is {shown(keys[key])}, expected a number{' of at least 0' if least else ''}"
            problems.append(Problem(ProblemKind.CONFIG, f"{header.architecture}.{key}", detail, header.file.name))
    if problems:
        raise refused(header.file, problems, "correct the file's metadata, or download it again")


class _Settings:
    """Configuration values derived from metadata keys.

    Args:
        config: Configuration that transformers reads from the metadata.
        read: Keys that transformers reads, and its names of their values.

    Attributes:
        changed: The values.
        misnamed: Names in transformers' table that the configuration class lacks, so it ignores their values.
    """

    def __init__(self, config: PreTrainedConfig, read: Mapping[str, str]) -> None:
        # Values under names that its class lacks are kept and have no effect.
        declared = {*type(config)().to_dict(), *config.attribute_map}
        self._own: Mapping[str, Any] = {name: value for name, value in config.to_dict().items() if name in declared}
        self._rope: Mapping[str, Any] = self._own.get("rope_parameters") or {}
        # Where layers have heads of different sizes, the shapes of tensors are checked against them.
        self._heads_differ = any("head_dim" in layer for layer in (self._own.get("per_layer_config") or {}).values())
        self._head_size = self._own.get("head_dim") or self._own.get("d_kv")
        if self._head_size is None and (heads := getattr(config, "num_attention_heads", None)):
            self._head_size = config.hidden_size // heads
        has_experts = any(name in self._own for name in SETTINGS["expert_count"])
        self._normalizes_experts = has_experts and not any(
            name in self._own for name in SETTINGS["expert_weights_norm"]
        )
        self._gating = SIGMOID if "expert_gating_func" in read else SOFTMAX  # only sigmoid routers have it in a table
        self.misnamed = {
            name
            for key, name in read.items()
            if name not in declared and (key in NO_EFFECT or self._names_of(key) or key == "expert_gating_func")
        }
        self._read = {key for key, name in read.items() if name in declared or not self._names_of(key)}
        if read.get("rope.dimension_count") == "head_dim":  # which is the size of a head only if all of it is rotated
            self._read.remove("rope.dimension_count")
        self.changed: dict[str, Any] = {}

    def take(self, key: str, value: Any, keys: Mapping[str, Any]) -> bool:
        """Use a key. Returns False if no setting corresponds to it."""
        if key.startswith(SCALING):
            return self._take_scaling(key, keys)
        if key == "expert_gating_func":
            return bool(value == self._gating)
        if key == "expert_weights_norm" and self._normalizes_experts:
            return bool(value)
        if key in self._read or (key in MAY_BE_NONE and value == 0):
            return True
        if key == "attention.head_count_kv" and value == keys.get("attention.head_count") and not self._names_of(key):
            return True
        if self._heads_differ and key in ROTARY_SIZES:
            return bool(value == keys.get(key.replace("rope.dimension_count", "attention.key_length")))
        if key in HEAD_SIZES:
            return self._heads_differ or (_agree(keys, HEAD_SIZES) and self._take_head_size(value))
        if key == "rope.dimension_count":
            return self._take_rotary_size(value)
        if key in ("rope.freq_base", "rope.freq_base_swa"):
            return self._take_theta(key, value)
        if key == PATTERN:
            return self._take_pattern(value)
        return self._set(key, value) or key in NO_EFFECT or _changes_nothing(key, value)

    def scale_attention(self, keys: Mapping[str, Any]) -> None:
        """Set `query_pre_attn_scalar`, which files have no key for, as llama.cpp computes it."""
        if "query_pre_attn_scalar" not in self._own or self._head_size is None:
            return
        is_27b = keys.get("block_count") in LAYERS_OF_27B
        scalar = self._own["hidden_size"] // self._own["num_attention_heads"] if is_27b else self._head_size
        if scalar != self._own["query_pre_attn_scalar"]:
            self.changed["query_pre_attn_scalar"] = scalar

    def _names_of(self, key: str) -> list[str]:
        """Return the names of settings that the configuration has for a key."""
        return [name for name in SETTINGS.get(key, ()) if name in self._own]

    def _set(self, key: str, value: Any) -> bool:
        name = next(iter(self._names_of(key)), None)
        if name is None:
            return False
        if name == "sliding_window" or name.endswith("softcapping"):
            value = value or None  # llama.cpp writes 0 for none
        if isinstance(value, tuple) and len(set(value)) == 1:  # one for each layer
            value = value[0]
        if _same(value, self._own[name]):
            return True
        # A window that the model has switched off would be set and not be used.
        if isinstance(value, tuple) or (name == "sliding_window" and not self._own.get("use_sliding_window", True)):
            return value is None
        self.changed[name] = value
        return True

    def _take_pattern(self, value: Any) -> bool:
        """Use the layers with a window: a flag per layer, or the period of layers without one."""
        layers = self._own.get("layer_types")
        if not value or layers is None:
            return not value
        slides = value if isinstance(value, tuple) else [(layer + 1) % value != 0 for layer in range(len(layers))]
        self.changed["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
        return True

    def _take_head_size(self, value: Any) -> bool:
        if value == self._head_size:
            return True
        if "head_dim" not in self._own:
            return False
        self.changed["head_dim"] = self._head_size = value
        return True

    def _take_rotary_size(self, value: Any) -> bool:
        parameters = self._rope.get("full_attention", self._rope)
        share = parameters.get("partial_rotary_factor", self._own.get("partial_rotary_factor"))
        if self._head_size is None or value == int(self._head_size * (1.0 if share is None else share)):
            return self._head_size is not None
        if share is None:
            return False
        self.changed["partial_rotary_factor"] = value / self._head_size
        return True

    def _take_theta(self, key: str, value: Any) -> bool:
        layer_type = "sliding_attention" if key.endswith("_swa") else "full_attention"
        if layer_type in self._rope:
            return _same(value, self._rope[layer_type].get("rope_theta"))
        if layer_type == "sliding_attention" or not self._rope:
            return False
        if not _same(value, self._rope.get("rope_theta")):
            self.changed["rope_theta"] = value
        return True

    def _take_scaling(self, key: str, keys: Mapping[str, Any]) -> bool:
        name, kind = key.removeprefix(SCALING), keys.get(f"{SCALING}type", "linear")  # linear is llama.cpp's default
        factor = keys.get(f"{SCALING}factor") or 1.0
        if kind == "none" or name in ("finetuned", "original_context_length"):
            return True
        if kind == "linear" and name in ("type", "factor"):
            if factor != 1.0:
                self.changed["rope_scaling"] = {"rope_type": "linear", "factor": factor}
            return True
        if kind == "yarn" and name in ("type", "factor", "attn_factor", "yarn_attn_factor", *YARN):
            self.changed["rope_scaling"] = _yarn(factor, keys)
            return True
        return _changes_nothing(key, keys[key])


def _yarn(factor: float, keys: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {name: keys[SCALING + key] for key, name in YARN.items() if keys.get(SCALING + key)}
    scale = (keys.get(f"{SCALING}attn_factor") or 1.0) * (keys.get(f"{SCALING}yarn_attn_factor") or 1.0)
    if scale != 1.0:  # llama.cpp multiplies the factor of YaRN by it; transformers replaces that
        parameters["attention_factor"] = scale * (0.1 * math.log(factor) + 1.0)
    return {"rope_type": "yarn", "factor": factor, **parameters}


def _changes_nothing(key: str, value: Any) -> bool:
    is_known = key in SETTINGS or key in NEUTRAL or key in OFF or key.startswith(SCALING)
    is_off = is_known and key not in NEVER_OFF and value is not None and not value
    return is_off or value in NEUTRAL.get(key, ())


def _agree(keys: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    """Return True if several keys have the same value, or are missing."""
    return len({keys[name] for name in names if name in keys}) <= 1


def _same(value: Any, held: Any) -> bool:
    """Return True if two values are equal, comparing numbers in fp32, as GGUF stores them."""
    if isinstance(value, (int, float)) and isinstance(held, (int, float)):
        return abs(value - held) <= 1e-6 * max(abs(value), abs(held))
    if isinstance(value, tuple) and isinstance(held, (tuple, list)):
        return list(value) == list(held)
    return bool(value == held)
