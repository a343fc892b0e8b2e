"""The generated tests on variants of Gemma 4 other than the default configuration."""

from versions import wider_full_attention

from nrl_models.testing.suite.test_files import *  # noqa: F403
from nrl_models.testing.suite.test_layers import *  # noqa: F403
from nrl_models.testing.suite.test_model import *  # noqa: F403
from nrl_models.testing.suite.test_sequences import *  # noqa: F403
from nrl_models.testing.suite.test_state_dict import *  # noqa: F403

TEXT = "nrl_models.families.gemma4.model:Gemma4ForCausalLM"

E2B = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    **wider_full_attention(1, 3, 5),
    "num_kv_shared_layers": 3,  # layers 3 to 5 use the keys and values of layers 1 and 2
    "use_double_wide_mlp": True,
}
A4B = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 128,
    "attention_k_eq_v": True,  # full attention has no `v_proj`
    **wider_full_attention(1, num_key_value_heads=2),
    "hidden_size_per_layer_input": 0,
}
FAMILY_VARIANTS = {"E2B": (TEXT, E2B), "26B-A4B": (TEXT, A4B)}
