"""Code to delete once upstream has fixed a quirk, by its name. Used by the tripwires."""

REMOVE = {
    "fp32-masters": "nothing: advise bf16 masters in docs/loading.md",
    "strict-config-types": "nrl_models/common/config/types.py and its two uses in pretrained.py",
    "tower-names": "this entry",
    "unequal-parts": "nrl_models/common/views/hub_parts.py and `part_sizes` in the row of the family",
    "own-configuration": (
        "the family's modeling.py and configuration.py and its rows of "
        "_CUSTOM_CONFIG_REGISTRATIONS; make it a row of the table of standard families"
    ),
    "shared-kv-unused-weights": "SharedKeyValues.keeps_unused and keep_unused",
    "mtp-weights": "nothing: engines need these weights in any case",
    "frozen-parts": "this entry. Loaded parameters stay frozen without it",
    "token-types": "with_token_types in the family that the tripwire names",
    "packed-documents": "keep_documents_apart, and its use in FamilyModel",
    "masks-without-positions": "the decoder's rewrite in the family that the tripwire names",
    "text-output-without-images": "nrl_models/common/forward/image_outputs.py and `repairs` in the row of the family",
    "mrope-packed-documents": "PackedTextPositions in the family that the tripwire names",
    "layers-across-documents": "ByDocument in the family that the tripwire names",
    "mrope-stale-offsets": "FreshPositions in the family that the tripwire names",
    "shared-kv-without-cache": "this entry",
    "soft-cap-under-sdpa": "nrl_models/common/forward/soft_cap.py and its uses",
    "shared-kv-reentrant-checkpointing": "SharedKeyValues._enable_checkpointing",
    "unreachable-parameters": "freeze_unreachable",
    "misspelled-freezing": "the check of keys in freeze",
    "tied-weights-under-tp": "the flag, and the vocabulary's rules in declared_tensor_plan",
    "routing-flips": "nothing: routing is discrete",
    "full-vocabulary-logits": "nothing: token_logprobs can call upstream's function",
    "untrained-rows": "nothing: a diagnostic",
    "fused-out-projection": "this entry",
    "names-on-the-hub": "nothing: the layouts are derived, and become equal",
    "engine-dummy-buffers": "ModelFlag.VLLM_LOAD_FORMAT_AUTO, and the families' use of it",
    "engine-reload-buffers": "this entry",
    "engine-tied-head": "_nrl_tied in vllm_worker.py",
    "engine-experts-on-cpu": "_nrl_kernels in vllm_worker.py",
    "engine-tokenizer": "needs_tokenizer in engines/vllm/vllm_start.py",
    "engine-v0-runtime": "_refuse_v0 in engines/vllm.py",
}
