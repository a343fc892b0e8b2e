"""Models that take audio, alone or beside images and video, and the tower that others take from its package."""

from nrl_models.families.limits import NEEDS_AUDIO, lacks
from nrl_models.families.table.row import CAUSAL, CONDITIONAL, GATE_UP, QKV, Row

ROWS: dict[str, Row] = {
    "cosmos3_omni": Row("Cosmos3Omni", CONDITIONAL, mixins={"Model": "FreshPositions"}, since="5.11"),
    "fun_asr_nano": Row("FunAsrNano", CONDITIONAL, {"Attention": QKV}, since="5.17"),
    "glmasr": Row("GlmAsr", CONDITIONAL),
    "granite_speech": Row(
        "GraniteSpeech", CONDITIONAL, {"ConformerAttention": "to_q to_kv"}, lacks("activation checkpointing")
    ),
    "granite_speech_plus": Row(
        "GraniteSpeechPlus",
        CONDITIONAL,
        {"ConformerAttention": "to_q to_kv"},
        lacks("activation checkpointing"),
        since="5.8",
    ),
    "moss_transcribe_diarize": Row("MossTranscribeDiarize", CONDITIONAL, since="5.23"),
    "nemotron_h_omni": Row(
        "",
        ("NemotronH_Omni_Reasoning_V3",),
        tiny={
            "audio_token_id": 487,
            "audio_config": {
                "hidden_size": 256,
                "intermediate_size": 512,
                "num_hidden_layers": 2,
                "projection_hidden_size": 256,
                "projection_bias": False,
                **dict.fromkeys(("dropout", "layerdrop", "activation_dropout", "attention_dropout"), 0.0),
                "initializer_range": 0.2,  # with less, audio is lost among the biases
            },
        },
        since="5.18",
    ),
    "omniasr": Row("OmniASR", CONDITIONAL, {"Attention": QKV}, since="5.24"),
    "parakeet": Row("Parakeet", (), {"EncoderAttention": QKV}),
    "qwen2_5_omni": Row(
        "",
        ("Qwen2_5OmniThinkerForConditionalGeneration",),
        {
            "Qwen2_5OmniVisionAttention": "q k v",
            "Qwen2_5OmniMLP": GATE_UP,
            "Qwen2_5OmniAttention": QKV,
            "Qwen2MLP": GATE_UP,
        },
        lacks("generate"),
        mixins={"Qwen2_5OmniThinkerTextModel": "PackedTextPositions"},
        since="5.6",
    ),
    "qwen2_audio": Row("Qwen2Audio", CONDITIONAL),
    "qwen3_asr": Row("Qwen3ASR", CONDITIONAL, {"AudioAttention": QKV}, since="5.13"),
    "qwen3_omni_moe": Row(
        "Qwen3OmniMoe",
        ("ThinkerForConditionalGeneration",),
        {"ThinkerTextAttention": QKV, "AudioAttention": QKV},
        lacks("generate", "tensor parallelism"),
        since="5.6",
    ),
    "vibevoice_asr": Row(
        "VibeVoiceAsr",
        CONDITIONAL,
        tiny={  # filters double at each of six strides
            "acoustic_tokenizer_encoder_config": {"num_filters": 2, "vae_std": 0.0},  # no noise on the latents
            "semantic_tokenizer_encoder_config": {"num_filters": 2},
        },
    ),
    "voxtral": Row("Voxtral", CONDITIONAL, tiny={"audio_token_id": 480, "audio_config": {"intermediate_size": 512}}),
    "voxtral_realtime": Row(
        "VoxtralRealtime",
        CONDITIONAL,
        {"MLP": GATE_UP, "TextAttention": QKV, "TextMLP": GATE_UP},
        NEEDS_AUDIO | {"generate": "transformers' `generate` ends where the audio does"},
    ),
    "whisper": Row("Whisper", CAUSAL),
}
