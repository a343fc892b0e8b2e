"""The generated tests where a configuration gives a bias to some of a group's linears only."""

from nrl_models.testing.suite.test_files import *  # noqa: F403

# Not what compares with the trace, which proposes no group that is mixed.
from nrl_models.testing.suite.test_layers import test_layer_equivalence  # noqa: F401
from nrl_models.testing.suite.test_model import *  # noqa: F403
from nrl_models.testing.suite.test_state_dict import *  # noqa: F403

FAMILY_VARIANTS = {
    # `q_proj` without a bias and `kv_a_proj_with_mqa` with one: nothing combines.
    "no q_lora": (
        "nrl_models.families.deepseek_v3.model:DeepseekV3ForCausalLM",
        {"q_lora_rank": None, "attention_bias": True},
    ),
    # Queries, keys and values with, the gate of the output without.
    "gated": ("nrl_models.families.table.classes:LagunaForCausalLM", {"attention_bias": True}),
}
