"""Sizes of published Nemotron-H models, as their `config.json` gives them."""

from typing import Any

_KINDS = {"M": "mamba", "-": "mlp", "*": "attention", "E": "moe"}


def _sizes(pattern: str, hidden: int, heads: int, key_values: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 131072,
        "hidden_size": hidden,
        "layers_block_type": [_KINDS[one] for one in pattern],
        "num_attention_heads": heads,
        "num_key_value_heads": key_values,
        "head_dim": 128,
        "ssm_state_size": 128,
        "n_groups": 8,
        **more,
    }


PUBLISHED = {
    "Nemotron-Nano-9B-v2": _sizes(
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        4480,
        40,
        8,
        intermediate_size=15680,
        mamba_num_heads=128,
        mamba_head_dim=80,
    ),
    "Nemotron-3-Nano-30B-A3B": _sizes(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        2688,
        32,
        2,
        intermediate_size=1856,
        mamba_num_heads=64,
        mamba_head_dim=64,
        n_routed_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
    ),
}
"""Values, by configuration key, of published models; what the class has by default is left out."""
