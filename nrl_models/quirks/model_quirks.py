"""Quirks of loading a model, of its forward pass, and of its training."""

from nrl_models.quirks import predicates
from nrl_models.quirks.evidence import VerdictKind
from nrl_models.quirks.quirk import Quirk

LOADING = (
    Quirk(
        name="fp32-masters",
        symptom="A trainer loads bf16 weights instead of fp32 master weights. Small optimizer steps round away.",
        where=("load", "trainer"),
        every_model=True,
        handling="Parameters load in the requested dtype. Parameters that transformers keeps in fp32 stay in fp32.",
        code=("nrl_models.loading.weights:load_weights", "nrl_models.loading.pretrained:load"),
        off='from_pretrained(path, dtype="auto")',
        probe="behavioral",
        asks="a step of 1e-6 leaves a bf16 weight of 1 unchanged",
        sources=("https://github.com/NVIDIA-NeMo/Automodel/pull/2419",),
    ),
    Quirk(
        name="strict-config-types",
        symptom="A configuration with `router_aux_loss_coef: 0`, as YAML and JSON write the float 0, raises an error.",
        where=("load",),
        every_model=True,
        handling="Integers are read as floats where the class accepts only floats, with a warning. Other types raise "
        "an error that names the key.",
        code=("nrl_models.common.config.types:with_declared_types",),
        probe="behavioral",
        asks="transformers rejects an integer for a float",
        sources=("https://github.com/NVIDIA-NeMo/RL/pull/2224",),
    ),
    Quirk(
        name="tower-names",
        symptom="A vision tower keeps its initial weights, because checkpoints name it `visual.` and transformers "
        "had lost the renaming.",
        where=("load",),
        applies=predicates.declares("tower-names"),
        handling="Keys are renamed by transformers' rules and matched with and without the base model's prefix. A "
        "missing tensor raises an error before any weight is loaded.",
        code=(
            "nrl_models.loading.names.checkpoint_names:CheckpointNames",
            "nrl_models.common.state_dict.matching:match",
        ),
        off="load with transformers' own class",
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
        symptom="transformers concatenates tensors of different sizes when it loads, and saves them as equal parts. "
        "vLLM does not load the saved files.",
        where=("load", "engine"),
        applies=predicates.declares("unequal-parts"),
        handling="The family declares the sizes. Exports and saved files have the published shapes, also those of "
        "transformers' own `save_pretrained` in this process. Files with equal parts load.",
        code=("nrl_models.common.views.hub_parts:register_part_sizes",),
        off="load and save with transformers' own class, in a process without this library",
        probe="data",
        asks="transformers saves these tensors as equal parts",
    ),
    Quirk(
        name="own-configuration",
        symptom="transformers has no class for this model. Its checkpoints need remote code, which breaks with new "
        "releases.",
        where=("load",),
        applies=predicates.brings_its_own_configuration,
        handling="The family includes configuration and modeling code.",
        code=("nrl_models.registry:_CUSTOM_CONFIG_REGISTRATIONS", "nrl_models.registry:register_custom_configs"),
        off="AutoConfig.from_pretrained(path, trust_remote_code=True), outside this library",
        probe="data",
        asks="transformers' table of configurations lacks its model_type",
    ),
    Quirk(
        name="shared-kv-unused-weights",
        symptom="Published checkpoints have keys and values for layers that share those of others. transformers "
        "drops them, and an engine that reads the saved checkpoint misses them.",
        where=("load", "export"),
        applies=predicates.shares_keys_and_values,
        handling="They stay with the model as pages of the file and are saved unchanged.",
        code=("nrl_models.common.forward.kv_sharing:SharedKeyValues", "nrl_models.loading.weights:keep_unused"),
        probe="behavioral",
        asks="transformers loses them when it loads and saves",
    ),
    Quirk(
        name="mtp-weights",
        symptom="Published checkpoints have layers of multi-token prediction. transformers drops them silently, so "
        "engines that use them for drafts find none or random ones.",
        where=("load", "export"),
        applies=predicates.has_mtp_weights,
        handling="They stay with the model as pages of the file, frozen, and are saved and exported unchanged. "
        "mtp='drop' leaves them out, with a warning.",
        code=(
            "nrl_models.common.state_dict.mtp:MTPNames",
            "nrl_models.loading.weights:keep_unused",
            "nrl_models.common.state_dict.adapter:StateDictAdapter.iter_export",
        ),
        probe="behavioral",
        asks="transformers loses them when it loads and saves",
        sources=(
            "https://github.com/huggingface/transformers/issues/46129",
            "https://github.com/vllm-project/vllm/issues/43456",
            "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4819",
        ),
    ),
    Quirk(
        name="frozen-parts",
        symptom="Parameters that a class freezes when it is built (computed positions, a router's correction) "
        "become trainable when transformers loads a checkpoint.",
        where=("load", "trainer"),
        applies=predicates.freezes_parameters,
        handling="Loaded parameters are frozen where the class froze them, sharded or not.",
        code=("nrl_models.common.modules:install",),
        off="set requires_grad on the parameters",
        probe="behavioral",
        asks="transformers' from_pretrained unfreezes positions",
    ),
)

FORWARD = (
    Quirk(
        name="token-types",
        symptom="Batches that a trainer builds do not mark image tokens. transformers raises in training, or "
        "attends causally within images.",
        where=("forward",),
        applies=predicates.declares("token-types"),
        handling="The family derives the types from the tokens if there are images.",
        code=("nrl_models.common.forward.token_types:with_token_types",),
        probe="differential",
        asks="upstream computes a batch with images differently without token types",
        sources=("https://github.com/NVIDIA-NeMo/RL/pull/2224",),
    ),
    Quirk(
        name="packed-documents",
        symptom="Documents packed into one row attend to each other, because transformers reads positions only "
        "without a mask and without a cache.",
        where=("forward",),
        applies=predicates.packs,
        every_model=True,
        handling="Where positions restart, a mask of ones is dropped and no cache is created.",
        code=("nrl_models.common.documents.packing:keep_documents_apart",),
        probe="behavioral",
        asks="upstream lets packed documents attend to each other under a mask of ones",
    ),
    Quirk(
        name="masks-without-positions",
        symptom="Packed documents always attend to each other, because this decoder builds its masks without "
        "positions.",
        where=("forward",),
        applies=predicates.declares("masks-without-positions"),
        handling="The family builds the masks with positions.",
        code=("nrl_models.family:FamilyModel.rewrites",),
        probe="behavioral",
        asks="upstream lets packed documents attend to each other without a mask",
    ),
    Quirk(
        name="text-output-without-images",
        symptom="The forward raises `AttributeError: ... has no attribute 'image_outputs'`, with and without "
        "images, because it copies that field from its language model's output.",
        where=("forward",),
        applies=predicates.declares("text-output-without-images"),
        handling="The field is set to None.",
        code=("nrl_models.common.forward.image_outputs:ImageOutputs",),
        probe="behavioral",
        asks="upstream's class raises on text",
    ),
    Quirk(
        name="mrope-packed-documents",
        symptom="Packed documents always attend to each other, because masks are built only from positions with "
        "several planes, and text positions have one.",
        where=("forward",),
        applies=predicates.declares("mrope-packed-documents"),
        handling="Text positions are passed in four planes, the first of which is the text's.",
        code=("nrl_models.common.forward.mrope:PackedTextPositions",),
        probe="behavioral",
        asks="upstream lets packed documents attend to each other without a mask",
    ),
    Quirk(
        name="layers-across-documents",
        symptom="Packed documents change each other, because some layers ignore positions: layers with a state "
        "continue the previous document, and some decoders count positions from the beginning of the row.",
        where=("forward",),
        applies=predicates.declares("layers-across-documents"),
        handling="Each document runs through such a layer or decoder separately.",
        code=("nrl_models.common.documents.layers:ByDocument",),
        probe="behavioral",
        asks="upstream lets packed documents change each other without a mask",
    ),
    Quirk(
        name="mrope-stale-offsets",
        symptom="A sequence without images decodes with the offsets of the last sequence with images.",
        where=("forward",),
        applies=predicates.declares("mrope-stale-offsets"),
        handling="Offsets are reset when a new sequence begins.",
        code=("nrl_models.common.forward.mrope:FreshPositions",),
        probe="behavioral",
        asks="upstream decodes text differently after it has seen an image",
    ),
    Quirk(
        name="shared-kv-without-cache",
        symptom="Without a cache, layers that share keys and values computed them with projections that were never "
        "trained.",
        where=("forward",),
        applies=predicates.shares_keys_and_values,
        handling="transformers passes them on outside the cache. A test compares logits with and without a cache.",
        code=("nrl_models.common.forward.kv_sharing:SharedKeyValues",),
        off="there is nothing to switch off: such layers have no projections any more",
        fixed="transformers>=5.5.2",
        kept_for="trainers with an older transformers, which have to force use_cache=True",
        probe="differential",
        asks="upstream computes different logits without a cache",
        sources=("https://github.com/huggingface/transformers/pull/45312",),
    ),
    Quirk(
        name="soft-cap-under-sdpa",
        symptom="Attention scores silently lose their soft cap, because the default kernel `sdpa` ignores it. The "
        "result differs from the engine's.",
        where=("forward",),
        applies=predicates.caps_attention_scores,
        handling="Where transformers would drop the cap, the family's class and its reference use `eager`.",
        code=(
            "nrl_models.common.forward.soft_cap:drops_soft_cap",
            "nrl_models.common.forward.soft_cap:reference_attention",
        ),
        off="load with transformers' own class",
        fixed="transformers>=5.21",
        kept_for="transformers 5.16 to 5.20, which this package takes",
        probe="behavioral",
        asks="upstream computes the same with and without a cap under sdpa",
        explains=lambda evidence: evidence.kind.is_trainers and "attn" in evidence.module,
    ),
)

TRAINING = (
    Quirk(
        name="shared-kv-reentrant-checkpointing",
        symptom="With reentrant checkpointing, layers whose keys and values are shared silently get no gradient.",
        where=("trainer",),
        applies=predicates.shares_keys_and_values,
        handling="Reentrant checkpointing raises an error for such models. Non-reentrant checkpointing computes the "
        "gradients.",
        code=("nrl_models.common.forward.kv_sharing:SharedKeyValues",),
        probe="differential",
        asks="reentrant checkpointing gives different gradients upstream",
    ),
    Quirk(
        name="unreachable-parameters",
        symptom="Parameters that a loss does not reach (a tower in text-only training) have no optimizer state, and "
        "a resumed run misses it.",
        where=("trainer",),
        applies=predicates.has_towers,
        handling="They are found from the loss's graph, frozen, and reported with the reason.",
        code=(
            "nrl_models.common.model_components.freezing:freeze_unreachable",
            "nrl_models.common.model_components.freezing:unreachable_parameters",
        ),
        off="do not call freeze_unreachable",
        probe="behavioral",
        asks="torch's AdamW keeps no state for parameters without a gradient",
        sources=("https://github.com/NVIDIA-NeMo/Automodel/pull/1687",),
    ),
    Quirk(
        name="misspelled-freezing",
        symptom="A misspelled key of a freeze configuration freezes nothing, and the component trains.",
        where=("trainer",),
        every_model=True,
        handling="Keys are strict: an unknown key raises an error that lists the model's components.",
        code=("nrl_models.common.model_components.freezing:freeze",),
        off="set requires_grad on the parameters",
        probe="behavioral",
        asks="torch accepts a misspelled attribute",
        sources=("https://github.com/NVIDIA-NeMo/RL/pull/2224",),
    ),
    Quirk(
        name="tied-weights-under-tp",
        symptom="Tied embeddings and head become two tensors when tensor parallelism divides them, and train "
        "separately.",
        where=("trainer",),
        applies=predicates.ties_embeddings,
        handling="Both are divided over the vocabulary, or neither, and stay one tensor. Families that tie at every "
        "size have ModelFlag.SKIP_DTENSOR_TIED_WEIGHTS_CHECK.",
        code=(
            "nrl_models.distributed.parallel_plan:declared_tensor_plan",
            "nrl_models.distributed.parallelize:divide_model",
            "nrl_models.common.flags:ModelFlag",
        ),
        off="torch's parallelize_module with a plan of one's own",
        probe="differential",
        asks="torch's parallelize_module separates a tied pair",
        sources=("https://github.com/NVIDIA-NeMo/RL/issues/227", "https://github.com/NVIDIA-NeMo/Automodel/pull/2571"),
    ),
    Quirk(
        name="routing-flips",
        symptom="Recomputed activations, or an engine, choose other experts where two scores differ by a rounding. "
        "Gradients then belong to another computation.",
        where=("trainer", "engine"),
        applies=predicates.has_experts,
        handling="The choice of one run is recorded and replayed in another, and in recomputation.",
        code=("nrl_models.common.forward.routing:record_routing", "nrl_models.common.forward.routing:replay_routing"),
        off="do not enter replay_routing",
        probe="behavioral",
        asks="another rounding makes upstream choose other experts in bf16",
        sources=("https://arxiv.org/abs/2510.11370",),
        explains=lambda evidence: evidence.kind in (VerdictKind.PRECISION, VerdictKind.UNSTABLE),
    ),
    Quirk(
        name="full-vocabulary-logits",
        symptom="Log-probabilities computed from logits need several tensors of tokens times vocabulary, and a step "
        "of DPO runs out of memory.",
        where=("trainer",),
        applies=predicates.has_a_large_vocabulary,
        every_model=True,
        handling="token_logprobs works in chunks. The full logits never exist, neither forward nor backward.",
        code=("nrl_models.logprobs.tokens:token_logprobs", "nrl_models.logprobs.chunked:chunked_statistics"),
        off="token_logprobs(..., chunk_size=None), or model(...).logits",
        probe="behavioral",
        asks="upstream's forward materializes all logits",
    ),
    Quirk(
        name="untrained-rows",
        symptom="A prompt with a token that pretraining never saw gets a gradient that is many times too large, and "
        "training diverges.",
        where=("trainer",),
        every_model=True,
        handling="`nrl-models diagnose embeddings` finds such rows in the files and reinitializes them on request.",
        code=("nrl_models.diagnostics.embeddings:diagnose_embeddings",),
        off="do not pass --reinitialize",
        probe="behavioral",
        asks="a row of zeros gets ten times the gradient of other rows",
    ),
    Quirk(
        name="fused-out-projection",
        symptom="The mixer's fused kernel reads the weight of `out_proj` directly, so an adapter or a hook on that "
        "module has no effect in training.",
        where=("forward", "trainer"),
        applies=predicates.fuses_out_projection,
        handling="PEFT rejects `out_proj` for models it supports. The generated LoRA test targets the same modules "
        "as for the Hugging Face model. Otherwise leave `out_proj` out of the adapter.",
        code=("nrl_models.testing.suite.test_model:test_lora",),
        off="name target_modules without out_proj",
        probe="source",
        asks="upstream's mixer passes `out_proj.weight` to a kernel",
        sources=("https://github.com/huggingface/transformers/pull/46487",),
    ),
)
