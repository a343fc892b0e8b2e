"""Quirks of loading a model, of its forward pass, and of its training."""

from nrl_models.quirks import predicates
from nrl_models.quirks.evidence import VerdictKind
from nrl_models.quirks.quirk import Quirk

LOADING = (
    Quirk(
        name="fp32-masters",
        symptom="A trainer loads bf16 weights instead of fp32 master weights. Small optimizer steps are lost to "
        "rounding.",
        where=("load", "trainer"),
        every_model=True,
        handling="Parameters load in the requested dtype. Parameters that transformers keeps in fp32 stay in fp32.",
        code=("nrl_models.loading.weights:load_weights", "nrl_models.loading.pretrained:load"),
        off='`from_pretrained(path, dtype="auto")`',
        probe="behavioral",
        asks="a step of 1e-6 leaves a bf16 weight of 1 unchanged",
        sources=("https://github.com/NVIDIA-NeMo/Automodel/pull/2419",),
    ),
    Quirk(
        name="strict-config-types",
        symptom="transformers raises an error if a float in the configuration is written as an integer, such as "
        "`router_aux_loss_coef: 0`.",
        where=("load",),
        every_model=True,
        handling="Integers are converted to floats where the class accepts only floats, with a warning. Other "
        "types raise an error that names the key.",
        code=("nrl_models.common.config.types:with_declared_types",),
        probe="behavioral",
        asks="transformers rejects an integer for a float",
        sources=("https://github.com/NVIDIA-NeMo/RL/pull/2224",),
    ),
    Quirk(
        name="tower-names",
        symptom="Before transformers 5.6, a vision tower kept its initial weights, because checkpoints use the "
        "prefix `visual.` and transformers no longer renamed it.",
        where=("load",),
        applies=predicates.declares("tower-names"),
        handling="Keys are renamed by transformers' rules, and matched with and without the prefix of the base "
        "model. A missing tensor raises an error before any weight is loaded.",
        code=(
            "nrl_models.loading.names.checkpoint_names:CheckpointNames",
            "nrl_models.common.state_dict.matching:match",
        ),
        off="load with transformers' class",
        fixed="transformers>=5.6",
        kept_for="trainers with an older transformers",
        probe="data",
        asks="transformers does not recognize the towers' older names",
        sources=("https://github.com/huggingface/transformers/pull/45358",),
        explains=lambda evidence: (
            evidence.kind.is_trainers and any("visual" in name for name in (evidence.module, *evidence.weights))
        ),
    ),
    Quirk(
        name="unequal-parts",
        symptom="transformers concatenates tensors of different sizes when it loads a checkpoint. When it saves, "
        "it splits the result into equal parts, which vLLM cannot load.",
        where=("load", "engine"),
        applies=predicates.declares("unequal-parts"),
        handling="The family declares the sizes. Exports and saved files have the published shapes, also those of "
        "transformers' `save_pretrained` in the same process. Files with equal parts also load.",
        code=("nrl_models.common.views.hub_parts:register_part_sizes",),
        off="load and save with transformers' class, in a process without nrl_models",
        probe="data",
        asks="transformers saves these tensors as equal parts",
    ),
    Quirk(
        name="own-configuration",
        symptom="transformers has no class for this model. Its checkpoints need remote code, which breaks with new "
        "releases.",
        where=("load",),
        applies=predicates.brings_its_own_configuration,
        handling="nrl_models includes configuration and modeling code.",
        code=("nrl_models.registry:_CUSTOM_CONFIG_REGISTRATIONS", "nrl_models.registry:register_custom_configs"),
        off="`AutoConfig.from_pretrained(path, trust_remote_code=True)` of transformers, in a process without "
        "nrl_models",
        probe="data",
        asks="transformers' table of configurations lacks its model_type",
    ),
    Quirk(
        name="shared-kv-unused-weights",
        symptom="Some layers reuse the keys and values of an earlier layer, but published checkpoints still have "
        "key and value projections for them. transformers drops these weights, so an engine that loads "
        "the saved checkpoint reports them as missing.",
        where=("load", "export"),
        applies=predicates.shares_keys_and_values,
        handling="The weights stay memory-mapped and are saved unchanged.",
        code=("nrl_models.common.forward.kv_sharing:SharedKeyValues", "nrl_models.loading.weights:keep_unused"),
        probe="behavioral",
        asks="transformers drops these weights when it loads and saves",
    ),
    Quirk(
        name="mtp-weights",
        symptom="Published checkpoints have layers for multi-token prediction. transformers drops them silently, "
        "so engines that use them for speculative decoding find no weights, or random ones.",
        where=("load", "export"),
        applies=predicates.has_mtp_weights,
        handling='The weights stay memory-mapped and frozen, and are saved and exported unchanged. `mtp="drop"` '
        "leaves them out, with a warning.",
        code=(
            "nrl_models.common.state_dict.mtp:MTPNames",
            "nrl_models.loading.weights:keep_unused",
            "nrl_models.common.state_dict.adapter:StateDictAdapter.iter_export",
        ),
        probe="behavioral",
        asks="transformers drops these weights when it loads and saves",
        sources=(
            "https://github.com/huggingface/transformers/issues/46129",
            "https://github.com/vllm-project/vllm/issues/43456",
            "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4819",
        ),
    ),
    Quirk(
        name="frozen-parts",
        symptom="Parameters that a class freezes when it is built (position tables, a router's correction bias) "
        "become trainable when transformers loads a checkpoint.",
        where=("load", "trainer"),
        applies=predicates.freezes_parameters,
        handling="Loaded parameters are frozen where the class froze them, sharded or not.",
        code=("nrl_models.common.modules:install",),
        off="set `requires_grad` on the parameters",
        probe="behavioral",
        asks="transformers' from_pretrained unfreezes positions",
    ),
)

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
        asks="transformers computes a batch with images differently without token types",
        sources=("https://github.com/NVIDIA-NeMo/RL/pull/2224",),
    ),
    Quirk(
        name="packed-documents",
        symptom="Documents packed into one sequence attend to each other, unless neither an attention mask nor a "
        "cache is passed. Only then does transformers separate documents by their position IDs.",
        where=("forward",),
        applies=predicates.packs,
        every_model=True,
        handling="If position IDs restart, a mask of ones is dropped and no cache is created.",
        code=("nrl_models.common.documents.packing:keep_documents_apart",),
        probe="behavioral",
        asks="transformers lets packed documents attend to each other under a mask of ones",
    ),
    Quirk(
        name="masks-without-positions",
        symptom="Packed documents always attend to each other, because this decoder ignores position IDs when it "
        "builds masks.",
        where=("forward",),
        applies=predicates.declares("masks-without-positions"),
        handling="nrl_models builds the masks with position IDs.",
        code=("nrl_models.family:FamilyModel.rewrites",),
        probe="behavioral",
        asks="transformers lets packed documents attend to each other without a mask",
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
        asks="the class of transformers raises an error on text",
    ),
    Quirk(
        name="mrope-packed-documents",
        symptom="Packed documents always attend to each other in models with M-RoPE, because masks are built only "
        "from position IDs with several planes. Position IDs of text have one plane.",
        where=("forward",),
        applies=predicates.declares("mrope-packed-documents"),
        handling="Position IDs of text are passed in four planes. The first has the text positions.",
        code=("nrl_models.common.forward.mrope:PackedTextPositions",),
        probe="behavioral",
        asks="transformers lets packed documents attend to each other without a mask",
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
        asks="transformers lets packed documents affect each other without a mask",
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
        symptom="Before transformers 5.5.2, layers that share keys and values computed their own if there was no "
        "cache, with projections that were never trained.",
        where=("forward",),
        applies=predicates.shares_keys_and_values,
        handling="transformers passes shared keys and values outside the cache. A test compares logits with and "
        "without a cache.",
        code=("nrl_models.common.forward.kv_sharing:SharedKeyValues",),
        off="nothing to disable, because such layers no longer have these projections",
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
        handling="If transformers would drop the soft cap, nrl_models uses `eager`, also for the reference in checks.",
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

TRAINING = (
    Quirk(
        name="shared-kv-reentrant-checkpointing",
        symptom="With reentrant activation checkpointing, layers whose keys and values are shared silently get no "
        "gradient.",
        where=("trainer",),
        applies=predicates.shares_keys_and_values,
        handling="Reentrant checkpointing raises an error for such models. Non-reentrant checkpointing computes "
        "correct gradients.",
        code=("nrl_models.common.forward.kv_sharing:SharedKeyValues",),
        probe="differential",
        asks="reentrant checkpointing results in different gradients in transformers",
    ),
    Quirk(
        name="unreachable-parameters",
        symptom="Parameters that do not affect the loss (a vision tower in text-only training) have no optimizer "
        "state, so resuming from a checkpoint fails.",
        where=("trainer",),
        applies=predicates.has_towers,
        handling="`freeze_unreachable` finds these parameters in the autograd graph of the loss, freezes them, and "
        "reports why.",
        code=(
            "nrl_models.common.model_components.freezing:freeze_unreachable",
            "nrl_models.common.model_components.freezing:unreachable_parameters",
        ),
        off="do not call `freeze_unreachable`",
        probe="behavioral",
        asks="torch's AdamW keeps no state for parameters without a gradient",
        sources=("https://github.com/NVIDIA-NeMo/Automodel/pull/1687",),
    ),
    Quirk(
        name="misspelled-freezing",
        symptom="A misspelled key in a freeze configuration has no effect, so the component is trained.",
        where=("trainer",),
        every_model=True,
        handling="An unknown key raises an error that lists the model's components.",
        code=("nrl_models.common.model_components.freezing:freeze",),
        off="set `requires_grad` on the parameters",
        probe="behavioral",
        asks="torch silently accepts a misspelled attribute, such as `parameter.requires_gradient = False`",
        sources=("https://github.com/NVIDIA-NeMo/RL/pull/2224",),
    ),
    Quirk(
        name="tied-weights-under-tp",
        symptom="Tied input and output embeddings become two tensors when tensor parallelism shards them, and are "
        "then trained separately.",
        where=("trainer",),
        applies=predicates.ties_embeddings,
        handling="Both are sharded over the vocabulary, or both are replicated, so they remain one tensor. "
        "Families whose models tie embeddings at every size have the flag "
        "`ModelFlag.SKIP_DTENSOR_TIED_WEIGHTS_CHECK`.",
        code=(
            "nrl_models.distributed.parallel_plan:declared_tensor_plan",
            "nrl_models.distributed.parallelize:divide_model",
            "nrl_models.common.flags:ModelFlag",
        ),
        off="shard with torch's `parallelize_module` and your own plan",
        probe="differential",
        asks="torch's `parallelize_module` separates tied embeddings",
        sources=("https://github.com/NVIDIA-NeMo/RL/issues/227", "https://github.com/NVIDIA-NeMo/Automodel/pull/2571"),
    ),
    Quirk(
        name="routing-flips",
        symptom="In activation checkpointing or in an engine, an MoE model may choose different experts if two "
        "router scores are almost equal. The gradients then belong to a different computation.",
        where=("trainer", "engine"),
        applies=predicates.has_experts,
        handling="`record_routing` records the experts chosen in a forward. `replay_routing` uses them again in "
        "another forward and in activation checkpointing.",
        code=("nrl_models.common.forward.routing:record_routing", "nrl_models.common.forward.routing:replay_routing"),
        off="do not use `replay_routing`",
        probe="behavioral",
        asks="different rounding makes transformers choose different experts in bf16",
        sources=("https://arxiv.org/abs/2510.11370",),
        explains=lambda evidence: evidence.kind in (VerdictKind.PRECISION, VerdictKind.UNSTABLE),
    ),
    Quirk(
        name="full-vocabulary-logits",
        symptom="Log-probabilities computed from logits need several tensors of shape `(tokens, vocab_size)`. A "
        "DPO step may run out of memory.",
        where=("trainer",),
        applies=predicates.has_a_large_vocabulary,
        every_model=True,
        handling="`token_logprobs` works in chunks. The full logits never exist, neither in the forward nor in the "
        "backward pass.",
        code=("nrl_models.logprobs.tokens:token_logprobs", "nrl_models.logprobs.chunked:chunked_statistics"),
        off="`token_logprobs(..., chunk_size=None)`, or `model(...).logits`",
        probe="behavioral",
        asks="the forward of transformers computes all logits",
    ),
    Quirk(
        name="untrained-rows",
        symptom="A prompt with a token that pretraining never saw causes a gradient that is many times too large, "
        "and training diverges.",
        where=("trainer",),
        every_model=True,
        handling="`nrl-models diagnose embeddings` finds such rows of the embeddings, and reinitializes them on "
        "request.",
        code=("nrl_models.diagnostics.embeddings:diagnose_embeddings",),
        off="do not pass `--reinitialize`",
        probe="behavioral",
        asks="a row of zeros gets ten times the gradient of other rows",
    ),
    Quirk(
        name="fused-out-projection",
        symptom="The mixer's fused kernel reads the weight of `out_proj` directly, so an adapter or a hook on that "
        "module has no effect in training.",
        where=("forward", "trainer"),
        applies=predicates.fuses_out_projection,
        handling="PEFT raises an error for `out_proj` of models it supports. For other models, leave `out_proj` "
        "out of the adapter.",
        code=("nrl_models.testing.suite.test_model:test_lora",),
        off="nothing to disable: pass `target_modules` without `out_proj`",
        probe="source",
        asks="the mixer of transformers passes `out_proj.weight` to a kernel",
        sources=("https://github.com/huggingface/transformers/pull/46487",),
    ),
)
