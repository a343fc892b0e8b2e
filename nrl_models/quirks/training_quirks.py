"""Problems of training."""

from nrl_models.quirks import predicates
from nrl_models.quirks.evidence import VerdictKind
from nrl_models.quirks.quirk import Quirk

TRAINING = (
    Quirk(
        name="shared-kv-reentrant-checkpointing",
        symptom="With reentrant activation checkpointing, layers that share their keys and values silently get no "
        "gradient.",
        where=("trainer",),
        applies=predicates.shares_keys_and_values,
        handling="Reentrant checkpointing raises an error for such models. Non-reentrant checkpointing computes "
        "correct gradients.",
        code=("nrl_models.common.forward.reentrant:RefusesReentrantCheckpointing",),
        probe="differential",
        asks="in transformers, gradients with reentrant checkpointing differ from those without",
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
        asks="torch silently accepts a misspelled attribute of a parameter (`parameter.requires_gradient = False`), "
        "which is how a misspelled key stays unnoticed",
        sources=("https://github.com/NVIDIA-NeMo/RL/pull/2224",),
    ),
    Quirk(
        name="tied-weights-under-tp",
        symptom="Tied input and output embeddings become two tensors when tensor parallelism shards them, and are "
        "then trained separately.",
        where=("trainer",),
        applies=predicates.ties_embeddings,
        handling="Both are sharded over the vocabulary, or both are replicated, so they remain one tensor. "
        "Some trainers refuse to shard models with tied embeddings. If all models of a family tie them, the flag "
        "`ModelFlag.SKIP_DTENSOR_TIED_WEIGHTS_CHECK` tells these trainers that they may shard the family's models.",
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
        symptom="If two router scores are almost equal, an MoE model may choose different experts in the engine than "
        "in the trainer's forward. The same can happen when activation checkpointing recomputes the forward; gradients "
        "then belong to a different computation.",
        where=("trainer", "engine"),
        applies=predicates.has_experts,
        handling="`record_routing` records the experts chosen in a forward. `replay_routing` uses them again in "
        "another forward and in activation checkpointing.",
        code=("nrl_models.common.forward.routing:record_routing", "nrl_models.common.forward.routing:replay_routing"),
        off="do not use `replay_routing`",
        probe="behavioral",
        asks="different rounding makes transformers choose different experts in bf16",
        sources=("https://arxiv.org/abs/2510.11370",),
        explains=lambda evidence: evidence.kind in (VerdictKind.PRECISION, VerdictKind.ROUNDING, VerdictKind.UNSTABLE),
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
        asks="an embedding row of zeros (untrained rows may be zeros) gets ten times the gradient of other rows",
    ),
    Quirk(
        name="fused-out-projection",
        symptom="The fused kernel of Mamba layers reads the weight of `out_proj` directly, so an adapter or a hook on "
        "that module has no effect in training.",
        where=("forward", "trainer"),
        applies=predicates.fuses_out_projection,
        handling="None. PEFT raises an error if `target_modules` contains `out_proj`, but only for model types that it "
        "knows. For other models, leave `out_proj` out.",
        code=("nrl_models.testing.suite.test_model:test_lora",),
        off="nothing to disable",
        probe="source",
        asks="the mixer of transformers passes `out_proj.weight` to a kernel",
        sources=("https://github.com/huggingface/transformers/pull/46487",),
    ),
)
