"""Gemma 3n: AltUp, LAuReL and embeddings for each layer; later layers attend to earlier layers' keys and values."""

from transformers.models.gemma3n import modeling_gemma3n as hf

from nrl_models.common.forward.kv_sharing import SharedKeyValues
from nrl_models.common.projections import CombinedGateUp, CombinedQKV
from nrl_models.families.limits import lacks
from nrl_models.families.published import decoder_sizes
from nrl_models.family import FamilyModel


class Gemma3nFamily(SharedKeyValues, FamilyModel):
    """Declarations shared by all Gemma 3n models."""

    rewrites = {
        hf.Gemma3nTextAttention: CombinedQKV,  # Q only in layers that share keys and values
        hf.Gemma3nTextMLP: CombinedGateUp,
        hf.Gemma3nAudioAttention: CombinedQKV,
    }
    limits = lacks("tensor parallelism")


E2B = decoder_sizes(262400, 2048, 8192, 30, 8, 2, num_kv_shared_layers=10, activation_sparsity_pattern=None)

Gemma3nForCausalLM = ModelClass = Gemma3nFamily.head(hf.Gemma3nForCausalLM, published={"Gemma-3n-E2B": E2B})
Gemma3nForConditionalGeneration = Gemma3nFamily.head(
    hf.Gemma3nForConditionalGeneration,
    published={"Gemma-3n-E2B": {"text_config": E2B}},
    # The vision tower is timm's, which only its factory's arguments make smaller. The last tokens of the vocabulary
    # stand for audio, and the very last one pads a clip.
    tiny={
        "vision_config": {
            "hidden_size": 2048,
            "model_args": {"channel_multiplier": 0.0625, "msfa_output_resolution": 2},
        },
        "vision_soft_tokens_per_image": 4,
        "audio_config": {"vocab_offset": 480, "vocab_size": 32},
        "audio_soft_tokens_per_image": 6,
    },
)
