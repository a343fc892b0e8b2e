"""The generated tests on configurations in which only some linears of a group have a bias."""

from nrl_models.testing.suite.test_files import *  # noqa: F403

# Excludes tests that compare with the trace, because the trace proposes no group with mixed biases.
from nrl_models.testing.suite.test_layers import test_layer_equivalence  # noqa: F401
from nrl_models.testing.suite.test_model import *  # noqa: F403
from nrl_models.testing.suite.test_state_dict import *  # noqa: F403

FAMILY_VARIANTS = {
    # `q_proj` without a bias and `kv_a_proj_with_mqa` with one: nothing is combined.
    "no q_lora": (
        "nrl_models.families.deepseek_v3.model:DeepseekV3ForCausalLM",
        {"q_lora_rank": None, "attention_bias": True},
    ),
    # Queries, keys and values with a bias, the output gate without.
    "gated": ("nrl_models.families.table.classes:LagunaForCausalLM", {"attention_bias": True}),
}
