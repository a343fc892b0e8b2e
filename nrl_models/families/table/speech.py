"""Models that accept audio, with or without images and video, and an audio tower that other models use."""

from nrl_models.families.limits import NEEDS_AUDIO, OTHER_MASKS, lacks
from nrl_models.families.table.row import GATE_UP, QKV, Row

ROWS: dict[str, Row] = {
    "cosmos3_omni": Row(
        "Cosmos3OmniForConditionalGeneration", mixins={"Cosmos3OmniModel": "FreshPositions"}, since="5.11"
    ),
    "fun_asr_nano": Row("FunAsrNanoForConditionalGeneration", {"FunAsrNanoAttention": QKV}, since="5.17"),
    "gemma4_unified": Row(
        "Gemma4UnifiedForCausalLM Gemma4UnifiedForConditionalGeneration",
        {"Gemma4UnifiedTextAttention": QKV, "Gemma4UnifiedTextMLP": GATE_UP},
        {f"Gemma4UnifiedForConditionalGeneration: {name}": reason for name, reason in OTHER_MASKS.items()},
        tiny={"audio_config": {}},
        repairs={"Gemma4UnifiedForConditionalGeneration": "token types"},
        since="5.10",
    ),
    "glmasr": Row("GlmAsrForConditionalGeneration"),
    "granite_speech": Row(
        "GraniteSpeechForConditionalGeneration",
        {"GraniteSpeechConformerAttention": "to_q to_kv"},
        lacks("activation checkpointing"),
    ),
    "granite_speech_plus": Row(
        "GraniteSpeechPlusForConditionalGeneration",
        {"GraniteSpeechPlusConformerAttention": "to_q to_kv"},
        lacks("activation checkpointing"),
        since="5.8",
    ),
    "moss_transcribe_diarize": Row("MossTranscribeDiarizeForConditionalGeneration", since="5.23"),
    "nemotron_h_omni": Row(
        "NemotronH_Omni_Reasoning_V3",
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
    "omniasr": Row("OmniASRForConditionalGeneration", {"OmniASRAttention": QKV}, since="5.24"),
    "parakeet": Row("", {"ParakeetEncoderAttention": QKV}),
    "phi4_multimodal": Row("Phi4MultimodalForCausalLM", {"Phi4MultimodalVisionAttention": QKV}),
    "qwen2_5_omni": Row(
        "Qwen2_5OmniThinkerForConditionalGeneration",
        {
            "Qwen2_5OmniVisionAttention": "q k v",
            "Qwen2_5OmniMLP": GATE_UP,
            "Qwen2_5OmniAttention": QKV,
            "Qwen2MLP": GATE_UP,
        },
        mixins={"Qwen2_5OmniThinkerTextModel": "PackedTextPositions"},
        tiny={"vision_start_token_id": 490},  # published, without a default in transformers
        since="5.6",
    ),
    "qwen2_audio": Row("Qwen2AudioForConditionalGeneration"),
    "qwen3_asr": Row("Qwen3ASRForConditionalGeneration", {"Qwen3ASRAudioAttention": QKV}, since="5.13"),
    "qwen3_omni_moe": Row(
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        {"Qwen3OmniMoeThinkerTextAttention": QKV, "Qwen3OmniMoeAudioAttention": QKV},
        lacks("tensor parallelism"),
        tiny={"vision_start_token_id": 490},  # published, without a default in transformers
        since="5.6",
    ),
    "vibevoice_asr": Row(
        "VibeVoiceAsrForConditionalGeneration",
        tiny={  # filters double at each of six strides
            "acoustic_tokenizer_encoder_config": {"num_filters": 2, "vae_std": 0.0},  # no noise on the latents
            "semantic_tokenizer_encoder_config": {"num_filters": 2},
        },
    ),
    "voxtral": Row(
        "VoxtralForConditionalGeneration", tiny={"audio_token_id": 480, "audio_config": {"intermediate_size": 512}}
    ),
    "voxtral_realtime": Row(
        "VoxtralRealtimeForConditionalGeneration",
        {"VoxtralRealtimeMLP": GATE_UP, "VoxtralRealtimeTextAttention": QKV, "VoxtralRealtimeTextMLP": GATE_UP},
        NEEDS_AUDIO | {"generate": "transformers' `generate` ends where the audio does"},
    ),
    "whisper": Row("WhisperForCausalLM"),
}
