"""Quirks of loading a model, of its forward pass, and of its training."""

from nrl_models.quirks import predicates
from nrl_models.quirks.evidence import VerdictKind
from nrl_models.quirks.quirk import Quirk

LOADING = (
    Quirk(
        name="fp32-masters",
        symptom="A trainer that gets the checkpoint's bf16 in place of the fp32 it asked for learns nothing: steps of "
        "post-training are smaller than a rounding.",
        where=("load", "trainer"),
        every_model=True,
        handling="The dtype that is asked for is what every parameter has; those that upstream keeps in fp32 stay "
        "fp32.",
        code=("nrl_models.loading.weights:load_weights", "nrl_models.loading.pretrained:load"),
        off='from_pretrained(path, dtype="auto")',
        probe="behavioural",
        asks="a step of 1e-6 leaves a bf16 weight of 1 as it is",
        sources=("https://github.com/NVIDIA-NeMo/Automodel/pull/2419",),
    ),
    Quirk(
        name="strict-config-types",
        symptom="A configuration with `router_aux_loss_coef: 0`, as YAML and JSON write a float of zero, is refused.",
        where=("load",),
        every_model=True,
        handling="Integers are read as floats where the class takes floats only, with a warning; other types are an "
        "error that names the key.",
        code=("nrl_models.common.config.types:with_declared_types",),
        probe="behavioural",
        asks="transformers refuses an integer for a float",
        sources=("https://github.com/NVIDIA-NeMo/RL/pull/2224",),
    ),
    Quirk(
        name="tower-names",
        symptom="A vision tower stays as it was initialised, because checkpoints name it `visual.` and transformers "
        "had lost the renaming.",
        where=("load",),
        applies=predicates.declares("tower-names"),
        handling="Keys are renamed by transformers' own rules and looked for with and without the inner model's "
        "prefix; a tensor that is still missing is an error before anything is written.",
        code=(
            "nrl_models.loading.names.checkpoint_names:CheckpointNames",
            "nrl_models.common.state_dict.matching:match",
        ),
        off="load with transformers' own class",
        fixed="transformers>=5.6",
        kept_for="trainers with an older transformers",
        probe="data",
        asks="transformers does not know the towers' older names",
        sources=("https://github.com/huggingface/transformers/pull/45358",),
        explains=lambda evidence: (
            evidence.kind.is_trainers and any("visual" in name for name in (evidence.module, *evidence.weights))
        ),
    ),
    Quirk(
        name="own-configuration",
        symptom="transformers has no class for this model, so its checkpoints load by code of their own, which breaks "
        "with each release, or not at all.",
        where=("load",),
        applies=predicates.brings_its_own_configuration,
        handling="The family brings configuration and modelling code.",
        code=("nrl_models.registry:_CUSTOM_CONFIG_REGISTRATIONS", "nrl_models.registry:register_custom_configs"),
        off="AutoConfig.from_pretrained(path, trust_remote_code=True), outside this library",
        probe="data",
        asks="transformers' table of configurations lacks its model_type",
    ),
    Quirk(
        name="shared-kv-unused-weights",
        symptom="Published checkpoints hold keys and values of layers that share others'; transformers drops them, and "
        "an engine that reads the saved checkpoint misses them.",
        where=("load", "export"),
        applies=predicates.shares_keys_and_values,
        handling="They stay with the model as pages of the file, and go into the next checkpoint as they were.",
        code=("nrl_models.common.forward.kv_sharing:SharedKeyValues", "nrl_models.loading.weights:keep_unused"),
        probe="behavioural",
        asks="transformers loses them when it loads and saves",
    ),
    Quirk(
        name="mtp-weights",
        symptom="Published checkpoints hold layers of multi-token prediction; transformers drops them without a word, "
        "and engines that draft with the saved checkpoint find none, or run on random ones.",
        where=("load", "export"),
        applies=predicates.has_mtp_weights,
        handling="They stay with the model as pages of the file, frozen, and are saved and exported as they were; "
        "mtp='drop' leaves them out, with a note.",
        code=(
            "nrl_models.common.state_dict.mtp:MTPNames",
            "nrl_models.loading.weights:keep_unused",
            "nrl_models.common.state_dict.adapter:StateDictAdapter.iter_export",
        ),
        probe="behavioural",
        asks="transformers loses them when it loads and saves",
        sources=(
            "https://github.com/huggingface/transformers/issues/46129",
            "https://github.com/vllm-project/vllm/issues/43456",
            "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4819",
        ),
    ),
    Quirk(
        name="frozen-parts",
        symptom="What a class freezes when it is built (computed positions, a router's correction, a patcher of bytes) "
        "trains once transformers has loaded it from a checkpoint.",
        where=("load", "trainer"),
        applies=predicates.freezes_parameters,
        handling="What is loaded is frozen where the class froze it, sharded or not.",
        code=("nrl_models.common.modules:install",),
        off="set requires_grad on the parameters",
        probe="behavioural",
        asks="transformers' from_pretrained unfreezes positions",
    ),
)

FORWARD = (
    Quirk(
        name="token-types",
        symptom="Batches that a trainer makes itself say of no token that it is an image's; upstream refuses them in "
        "training, or attends causally within images.",
        where=("forward",),
        applies=predicates.declares("token-types"),
        handling="The family fills them in from the tokens, where there are images.",
        code=("nrl_models.common.forward.token_types:with_token_types",),
        probe="differential",
        asks="upstream computes a batch with images otherwise if it has no token types",
        sources=("https://github.com/NVIDIA-NeMo/RL/pull/2224",),
    ),
    Quirk(
        name="packed-documents",
        symptom="Documents packed into one row attend to each other, because transformers looks at positions only "
        "where there is neither a mask nor a cache.",
        where=("forward",),
        applies=predicates.packs,
        every_model=True,
        handling="A mask of ones is dropped and no cache is made where positions start again.",
        code=("nrl_models.common.forward.packing:keep_documents_apart",),
        probe="behavioural",
        asks="upstream lets packed documents meet under a mask of ones",
    ),
    Quirk(
        name="masks-without-positions",
        symptom="Packed documents attend to each other in any case, because this decoder makes its masks without "
        "positions.",
        where=("forward",),
        applies=predicates.declares("masks-without-positions"),
        handling="The family makes the masks with positions.",
        code=("nrl_models.family:FamilyModel.rewrites",),
        probe="behavioural",
        asks="upstream lets packed documents meet without any mask",
    ),
    Quirk(
        name="text-output-without-images",
        symptom="The forward raises `AttributeError: ... has no attribute 'image_outputs'`, with and without images, "
        "because it copies that field from its language model's output, which has none.",
        where=("forward",),
        applies=predicates.declares("text-output-without-images"),
        handling="The field is set to None.",
        code=("nrl_models.common.forward.image_outputs:ImageOutputs",),
        probe="behavioural",
        asks="upstream's class raises on text",
    ),
    Quirk(
        name="mrope-packed-documents",
        symptom="Packed documents attend to each other in any case, because masks are made from positions in several "
        "planes only, and plain ones have one.",
        where=("forward",),
        applies=predicates.declares("mrope-packed-documents"),
        handling="Plain positions are given in four planes, of which the first is the text's.",
        code=("nrl_models.common.forward.mrope:PackedTextPositions",),
        probe="behavioural",
        asks="upstream lets packed documents meet without any mask",
    ),
    Quirk(
        name="layers-across-documents",
        symptom="Packed documents change each other, because some layers do not look at positions: those that keep a "
        "state along a sequence go on from the document before, and some decoders count positions from a row's "
        "beginning.",
        where=("forward",),
        applies=predicates.declares("layers-across-documents"),
        handling="Each document goes through such a layer, or decoder, by itself.",
        code=("nrl_models.common.forward.layer_by_document:ByDocument",),
        probe="behavioural",
        asks="upstream lets packed documents meet without any mask",
    ),
    Quirk(
        name="mrope-stale-offsets",
        symptom="A sequence without images decodes with the offsets of the last one that had some.",
        where=("forward",),
        applies=predicates.declares("mrope-stale-offsets"),
        handling="Offsets are forgotten when a new sequence begins.",
        code=("nrl_models.common.forward.mrope:FreshPositions",),
        probe="behavioural",
        asks="upstream decodes text otherwise after it has seen an image",
    ),
    Quirk(
        name="shared-kv-without-cache",
        symptom="Without a cache, layers that share keys and values computed them by projections that were never "
        "trained.",
        where=("forward",),
        applies=predicates.shares_keys_and_values,
        handling="transformers hands them on beside the cache; a test holds both ways to the same logits.",
        code=("nrl_models.common.forward.kv_sharing:SharedKeyValues",),
        off="there is nothing to switch off: such layers have no projections any more",
        fixed="transformers>=5.5.2",
        kept_for="trainers with an older transformers, which have to force use_cache=True",
        probe="differential",
        asks="upstream computes otherwise without a cache",
        sources=("https://github.com/huggingface/transformers/pull/45312",),
    ),
    Quirk(
        name="soft-cap-under-sdpa",
        symptom="Attention scores silently lose their soft cap, because `sdpa`, the default kernel, does not "
        "look at it: another model than an engine computes.",
        where=("forward",),
        applies=predicates.caps_attention_scores,
        handling="Where transformers would drop the cap, a family's class, and what it is compared with, is computed "
        "by `eager`.",
        code=(
            "nrl_models.common.forward.soft_cap:drops_soft_cap",
            "nrl_models.common.forward.soft_cap:reference_attention",
        ),
        off="load with transformers' own class",
        fixed="transformers>=5.21",
        kept_for="transformers 5.16 to 5.20, which this package takes",
        probe="behavioural",
        asks="upstream computes the same with and without a cap under sdpa",
        explains=lambda evidence: evidence.kind.is_trainers and "attn" in evidence.module,
    ),
)

TRAINING = (
    Quirk(
        name="shared-kv-reentrant-checkpointing",
        symptom="Under reentrant checkpointing no gradient reaches the layers whose keys and values others share, and "
        "nothing says so.",
        where=("trainer",),
        applies=predicates.shares_keys_and_values,
        handling="Reentrant checkpointing is refused for such models; the other kind passes those gradients.",
        code=("nrl_models.common.forward.kv_sharing:SharedKeyValues",),
        probe="differential",
        asks="reentrant checkpointing gives other gradients upstream",
    ),
    Quirk(
        name="unreachable-parameters",
        symptom="Parameters that a loss does not reach (a tower in text-only training) have no state in the optimiser, "
        "and a run that goes on from its checkpoint misses it.",
        where=("trainer",),
        applies=predicates.has_towers,
        handling="They are found by walking the loss's graph, frozen, and reported with the reason.",
        code=("nrl_models.common.freezing:freeze_unreachable", "nrl_models.common.freezing:unreachable_parameters"),
        off="do not call freeze_unreachable",
        probe="behavioural",
        asks="torch's AdamW keeps no state for what got no gradient",
        sources=("https://github.com/NVIDIA-NeMo/Automodel/pull/1687",),
    ),
    Quirk(
        name="misspelt-freezing",
        symptom="A key of a freeze configuration that is misspelt, or an attribute that is, freezes nothing, and the "
        "component trains.",
        where=("trainer",),
        every_model=True,
        handling="Keys are strict: one that is no component of the model is an error that lists those that are.",
        code=("nrl_models.common.freezing:freeze",),
        off="set requires_grad on the parameters",
        probe="behavioural",
        asks="torch takes a misspelt attribute for its own",
        sources=("https://github.com/NVIDIA-NeMo/RL/pull/2224",),
    ),
    Quirk(
        name="tied-weights-under-tp",
        symptom="Embedding and head that are one tensor come apart when tensor parallelism divides them, and train as "
        "two.",
        where=("trainer",),
        applies=predicates.ties_embeddings,
        handling="Both are divided alike, over the vocabulary, or neither, and what is one tensor stays one; families "
        "that tie at every size say so by ModelFlag.SKIP_DTENSOR_TIED_WEIGHTS_CHECK.",
        code=(
            "nrl_models.distributed.parallel_plan:declared_tensor_plan",
            "nrl_models.distributed.parallelize:divide_model",
            "nrl_models.common.flags:ModelFlag",
        ),
        off="torch's parallelize_module with a plan of one's own",
        probe="differential",
        asks="torch's parallelize_module parts a tied pair",
        sources=("https://github.com/NVIDIA-NeMo/RL/issues/227", "https://github.com/NVIDIA-NeMo/Automodel/pull/2571"),
    ),
    Quirk(
        name="routing-flips",
        symptom="Recomputed activations, or another engine's, choose other experts where two scores are a rounding "
        "apart, and gradients belong to another computation.",
        where=("trainer", "engine"),
        applies=predicates.has_experts,
        handling="What one run chose is recorded and replayed in another, and in recomputation.",
        code=("nrl_models.common.forward.routing:record_routing", "nrl_models.common.forward.routing:replay_routing"),
        off="do not enter replay_routing",
        probe="behavioural",
        asks="rounding otherwise makes upstream choose other experts in bf16",
        sources=("https://arxiv.org/abs/2510.11370",),
        explains=lambda evidence: evidence.kind in (VerdictKind.PRECISION, VerdictKind.UNSTABLE),
    ),
    Quirk(
        name="full-vocabulary-logits",
        symptom="Log-probabilities from logits take a tensor of tokens times vocabulary several times over, and a "
        "step of DPO runs out of memory.",
        where=("trainer",),
        applies=predicates.has_a_large_vocabulary,
        every_model=True,
        handling="token_logprobs works in chunks; the full logits never exist, forward or backward.",
        code=("nrl_models.logprobs.tokens:token_logprobs", "nrl_models.logprobs.chunked:chunked_statistics"),
        off="token_logprobs(..., chunk_size=None), or model(...).logits",
        probe="behavioural",
        asks="upstream's forward makes all logits",
    ),
    Quirk(
        name="untrained-rows",
        symptom="A prompt with a token that pretraining never met gets a gradient that is many times too large, and "
        "training diverges.",
        where=("trainer",),
        every_model=True,
        handling="`nrl-models diagnose embeddings` finds such rows in the files, and draws them again.",
        code=("nrl_models.diagnostics.embeddings:diagnose_embeddings",),
        off="do not pass --reinitialise",
        probe="behavioural",
        asks="a row of zeros gets a gradient ten times that of any other",
    ),
    Quirk(
        name="fused-out-projection",
        symptom="The mixer's fused kernel reads the weight of `out_proj` itself, so that an adapter or a hook on that "
        "module does nothing in training.",
        where=("forward", "trainer"),
        applies=predicates.fuses_out_projection,
        handling="PEFT refuses `out_proj` of the models it knows, and the generated test of adapters targets what it "
        "adapts in the Hugging Face model; elsewhere leave `out_proj` out of the adapter.",
        code=("nrl_models.testing.suite.test_model:test_lora",),
        off="name target_modules without out_proj",
        probe="source",
        asks="upstream's mixer hands `out_proj.weight` to a kernel",
        sources=("https://github.com/huggingface/transformers/pull/46487",),
    ),
)
