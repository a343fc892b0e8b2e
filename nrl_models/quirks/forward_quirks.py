"""Problems of forward passes."""

from nrl_models.quirks import predicates
from nrl_models.quirks.quirk import Quirk

FORWARD = (
    Quirk(
        name="token-types",
        symptom="Trainers build batches that do not mark image tokens. Without these marks, transformers raises "
        "an error in training mode, or uses a causal mask within images.",
        where=("forward",),
        applies=predicates.declares("token-types"),
        handling="If there are images, nrl_models derives the token types from the token IDs.",
        code=("nrl_models.common.forward.token_types:with_token_types",),
        probe="differential",
        asks="transformers computes a batch with images differently if token types are missing",
        sources=("https://github.com/NVIDIA-NeMo/RL/pull/2224",),
    ),
    Quirk(
        name="packed-documents",
        symptom="Documents packed into one sequence attend to each other if an attention mask or a cache is passed. "
        "transformers separates documents by their position IDs, but only without a mask and without a cache.",
        where=("forward",),
        applies=predicates.packs,
        every_model=True,
        handling="If position IDs restart, a mask of ones is dropped and no cache is created.",
        code=("nrl_models.common.documents.packing:keep_documents_apart",),
        probe="behavioral",
        asks="packed documents attend to each other in transformers if a mask of ones is passed",
    ),
    Quirk(
        name="masks-without-positions",
        symptom="In some models, packed documents always attend to each other, because the decoder ignores position "
        "IDs when it builds masks.",
        where=("forward",),
        applies=predicates.declares("masks-without-positions"),
        handling="nrl_models builds the masks with position IDs.",
        code=("nrl_models.family:FamilyModel.rewrites",),
        probe="behavioral",
        asks="in transformers, packed documents attend to each other if no mask is passed",
    ),
    Quirk(
        name="text-output-without-images",
        symptom="`forward` raises `AttributeError: ... has no attribute 'image_outputs'`, even on text, because "
        "it copies that field from the output of its language model, which lacks it.",
        where=("forward",),
        applies=predicates.declares("text-output-without-images"),
        handling="The field is set to None.",
        code=("nrl_models.common.forward.image_outputs:ImageOutputs",),
        probe="behavioral",
        asks="transformers' class raises an error on text",
    ),
    Quirk(
        name="mrope-packed-documents",
        symptom="In models with M-RoPE, packed text documents attend to each other: transformers separates documents "
        "only by position IDs of shape `(4, batch, length)`, but those of text are `(batch, length)`.",
        where=("forward",),
        applies=predicates.declares("mrope-packed-documents"),
        handling="Position IDs of text are passed in the shape `(4, batch, length)`, in which transformers finds "
        "documents.",
        code=("nrl_models.common.forward.mrope:PackedTextPositions",),
        probe="behavioral",
        asks="in transformers, packed documents attend to each other if no mask is passed",
    ),
    Quirk(
        name="image-masks-in-packed-rows",
        symptom="In packed rows, image tokens attend to the wrong tokens in layers with sliding windows: transformers "
        "uses position IDs as indices into the row, but position IDs restart with each document.",
        where=("forward",),
        applies=predicates.packs_images_with_windows,
        handling="nrl_models uses the index in the row.",
        code=("nrl_models.common.documents.mask_functions:at_columns",),
        since="transformers>=5.23",
        probe="behavioral",
        asks="transformers' class computes an image differently after a packed document",
    ),
    Quirk(
        name="layers-across-documents",
        symptom="Packed documents affect each other, because some layers ignore position IDs. Recurrent layers "
        "carry over the state of the previous document, and some decoders count positions from the start "
        "of the sequence.",
        where=("forward",),
        applies=predicates.declares("layers-across-documents"),
        handling="Each document runs through such a layer or decoder separately.",
        code=("nrl_models.common.documents.layers:ByDocument",),
        probe="behavioral",
        asks="in transformers, packed documents affect each other if no mask is passed",
    ),
    Quirk(
        name="mrope-stale-offsets",
        symptom="A sequence without images is decoded with the position offsets of the last sequence with images.",
        where=("forward",),
        applies=predicates.declares("mrope-stale-offsets"),
        handling="Offsets are reset when a new sequence begins.",
        code=("nrl_models.common.forward.mrope:FreshPositions",),
        probe="behavioral",
        asks="transformers decodes text differently after a sequence with an image",
    ),
    Quirk(
        name="shared-kv-without-cache",
        symptom="Before transformers 5.5.2, layers that should reuse another layer's keys and values computed "
        "their own if there was no cache, with projections that were never trained.",
        where=("forward",),
        applies=predicates.has_unused_keys_and_values,
        handling="None is needed: since 5.5.2, transformers passes shared keys and values outside the cache. A test "
        "compares logits with and without a cache.",
        code=("nrl_models.common.forward.kv_sharing:SharedKeyValues",),
        off="nothing to disable: layers that reuse keys and values no longer have projections for them",
        fixed="transformers>=5.5.2",
        kept_for="trainers with an older transformers, which have to force use_cache=True",
        probe="differential",
        asks="transformers computes different logits without a cache",
        sources=("https://github.com/huggingface/transformers/pull/45312",),
    ),
    Quirk(
        name="soft-cap-under-sdpa",
        symptom="Attention scores silently lose their soft cap, because the default kernel `sdpa` ignores it. The "
        "result differs from the engine's.",
        where=("forward",),
        applies=predicates.caps_attention_scores,
        handling="If transformers would drop the soft cap, nrl_models uses `eager`, also for the transformers model "
        "with which checks compare.",
        code=(
            "nrl_models.common.forward.soft_cap:drops_soft_cap",
            "nrl_models.common.forward.soft_cap:reference_attention",
        ),
        off="load with transformers' class",
        fixed="transformers>=5.21",
        kept_for="transformers 5.16 to 5.20, which nrl_models supports",
        probe="behavioral",
        asks="transformers computes the same with and without a soft cap under sdpa",
        explains=lambda evidence: evidence.kind.is_trainers and "attn" in evidence.module,
    ),
)
