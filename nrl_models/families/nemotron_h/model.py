"""Nemotron-H (v2 dense, v3 with experts): Mamba-2 mixers, attention, and squared-ReLU MLPs or experts, one a layer."""

from typing import Any

from transformers.models.nemotron_h import modeling_nemotron_h as hf

from nrl_models.common.documents.layers import ByDocument
from nrl_models.common.projections import CombinedQKV
from nrl_models.family import FamilyModel


class NemotronHFamily(FamilyModel):
    """Declarations shared by all Nemotron-H models."""

    rewrites = {
        hf.NemotronHAttention: CombinedQKV,  # mixers have one projection, and MLPs no gate
        hf.NemotronHMamba2Mixer: ByDocument,
    }
    # A rotary embedding, which the model lacks, an epsilon under another name, and how the vendor's own code schedules.
    ignored_config_keys = ("rope_theta", "partial_rotary_factor", "norm_eps", "moe_shared_expert_overlap")


def _sizes(layers: str, hidden: int, heads: int, key_values: int, **more: Any) -> dict[str, Any]:
    """Return the sizes of a published model. `layers` has one letter per layer, as in its `config.json`."""
    kinds = {"M": "mamba", "-": "mlp", "*": "attention", "E": "moe"}
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": key_values, "head_dim": 128}
    mamba = {"ssm_state_size": 128, "n_groups": 8}
    return {"vocab_size": 131072, "layers_block_type": [kinds[layer] for layer in layers], **sizes, **mamba, **more}


NemotronHForCausalLM = ModelClass = NemotronHFamily.head(
    hf.NemotronHForCausalLM,
    published={
        "Nemotron-Nano-9B-v2": _sizes(
            "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", 4480, 40, 8,
            intermediate_size=15680, mamba_num_heads=128, mamba_head_dim=80,
        ),
        "Nemotron-3-Nano-30B-A3B": _sizes(
            "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 2688, 32, 2,
            intermediate_size=1856, mamba_num_heads=64, mamba_head_dim=64, n_routed_experts=128, num_experts_per_tok=6,
            moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
        ),
    },
)  # fmt: skip
