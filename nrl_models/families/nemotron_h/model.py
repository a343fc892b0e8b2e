"""Nemotron-H (v2 dense, v3 with experts): Mamba-2 mixers, attention, and squared-ReLU MLPs or experts, one a layer."""

from transformers.models.nemotron_h import modeling_nemotron_h as hf

from nrl_models.common import CombinedQKV, FamilyModel
from nrl_models.families.nemotron_h.published import PUBLISHED


class NemotronHFamily(FamilyModel):
    """What every Nemotron-H model shares."""

    rewrites = {
        hf.NemotronHAttention: CombinedQKV,  # mixers project once, and MLPs have no gate
    }
    # Of Mamba 1, of a rotary embedding that the model does not have, and sizes under another name.
    ignored_config_keys = ("attention_head_dim", "time_step_rank", "norm_eps", "rope_theta", "partial_rotary_factor")
    limits = {
        "packed sequences": "upstream's Mamba mixers carry their state from a document to the next",
    }


NemotronHForCausalLM = ModelClass = NemotronHFamily.head(hf.NemotronHForCausalLM, published=PUBLISHED)
