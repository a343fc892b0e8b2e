"""Quirks of exporting a model, and of the engines that it is exported to."""

from __future__ import annotations

from collections.abc import Callable

from nrl_models.common.flags import ModelFlag
from nrl_models.quirks import predicates
from nrl_models.quirks.evidence import Evidence, Pattern, VerdictKind
from nrl_models.quirks.quirk import Quirk


def _scaled_on_random_weights(evidence: Evidence) -> bool:
    """Return True if the engine's values are the expected ones times a constant that no weight update reaches."""
    return evidence.kind == VerdictKind.ENGINE and evidence.pattern == Pattern.SCALED and evidence.random_weights


def _stale(part: str) -> Callable[[Evidence], bool]:
    """Return a predicate: whether a module with `part` in its name may have weights from before a refit."""

    def explains(evidence: Evidence) -> bool:
        may_be_stale = evidence.pattern == Pattern.STALE_WEIGHTS or evidence.random_weights
        return evidence.kind == VerdictKind.ENGINE and part in evidence.module and may_be_stale

    return explains


EXPORT = (
    Quirk(
        name="names-on-the-hub",
        symptom="The names of a model's parameters in transformers differ from those in Hub checkpoints. An "
        "engine that receives transformers' names ignores the weights or loads wrong ones.",
        where=("export", "engine"),
        applies=predicates.has_several_names,
        handling="Exports have the names and layout of Hub checkpoints, with separate tensors for each expert. A "
        "refit checks that all arrive.",
        code=("nrl_models.common.state_dict.adapter:StateDictAdapter",),
        off='`iter_export(model, layout="transformers")`',
        probe="differential",
        asks="transformers saves other names than it has in memory",
    ),
)

INFERENCE = (
    Quirk(
        name="engine-dummy-buffers",
        symptom="An engine that starts with random weights also has a random `normalizer`, a buffer that no "
        "weight update reaches. It generates gibberish.",
        where=("engine",),
        applies=lambda subject: ModelFlag.VLLM_LOAD_FORMAT_AUTO in subject.flags,
        handling="For such models (flag `ModelFlag.VLLM_LOAD_FORMAT_AUTO`), nrl_models starts vLLM from the "
        "checkpoint. A refit reports persistent buffers that were not written. `refit-check` and `consistency "
        "--load-format dummy` still start with random weights.",
        code=(
            "nrl_models.common.flags:ModelFlag",
            "nrl_models.engines.vllm:VLLMEngine",
            "nrl_models.engines.vllm.vllm_worker:ConsistencyWorker",
        ),
        fixed="vllm>=0.9.2",
        kept_for="trainers that read the flag and use an older vLLM",
        probe="behavioral",
        asks="vLLM's dummy loader changes derived buffers",
        sources=("https://github.com/vllm-project/vllm/pull/19788",),
        explains=_scaled_on_random_weights,
    ),
    Quirk(
        name="engine-reload-buffers",
        symptom="A refit of a running engine overwrites constants that were derived at startup (a scale, a square "
        "root) with uninitialized memory.",
        where=("engine",),
        every_model=True,
        handling="Refits use vLLM's layerwise reload, which preserves them. `refit-check` compares engine and "
        "trainer after a refit.",
        code=("nrl_models.engines.transfer.reload:WeightReload", "nrl_models.consistency.refit:RefitChecker"),
        off="write to the engine's parameters without `WeightReload`",
        fixed="vllm>=0.32",
        kept_for="servers with an older vLLM",
        probe="behavioral",
        asks="vLLM's reload changes a derived buffer",
        sources=("https://github.com/vllm-project/vllm/pull/44371",),
        explains=_scaled_on_random_weights,
    ),
    Quirk(
        name="engine-tied-head",
        symptom="After a refit, a tied output embedding keeps its old weights: it shares the input embedding's "
        "parameter, but the engine computes with a rearranged copy that the refit does not update.",
        where=("engine",),
        applies=predicates.ties_embeddings,
        handling="Modules that share a parameter are prepared again when all weights have arrived.",
        code=("nrl_models.engines.transfer.reload:WeightReload.finish",),
        probe="behavioral",
        asks="a refit without the workaround leaves vLLM's head unchanged",
        explains=_stale("logits"),
    ),
    Quirk(
        name="engine-experts-on-cpu",
        symptom="On a CPU, a refit leaves expert weights in the checkpoint's memory layout, but the engine's kernels "
        "read them in their own layout.",
        where=("engine",),
        applies=predicates.has_experts,
        handling="The kernel is created again in each refit, which packs the experts.",
        code=("nrl_models.engines.transfer.reload:WeightReload",),
        probe="behavioral",
        asks="a refit without the workaround leaves vLLM's experts unpacked",
        explains=_stale("experts"),
    ),
    Quirk(
        name="engine-batch-norms",
        symptom="A refit replaces the statistics of batch norms (in vision and audio towers) by uninitialized memory, "
        "although they were sent.",
        where=("engine",),
        applies=predicates.has_batch_norms,
        handling="During a refit, vLLM's loader writes into the model's buffers, not into temporary ones.",
        code=("nrl_models.engines.transfer.batch_norms:load_statistics",),
        probe="behavioral",
        asks="vLLM's reload loses the statistics of a batch norm",
    ),
    Quirk(
        name="engine-tokenizer",
        symptom="An engine started without a tokenizer rejects every model that accepts images.",
        where=("engine",),
        applies=predicates.has_towers,
        handling="The tokenizer is skipped only for text models.",
        code=("nrl_models.engines.vllm:VLLMEngine.start",),
        probe="behavioral",
        asks="vLLM's image processor does not start without a tokenizer",
        sources=("https://github.com/vllm-project/vllm/issues/31123",),
    ),
    Quirk(
        name="engine-v0-runtime",
        symptom="vLLM's V0 engine no longer exists. Some scripts still set `NRL_VLLM_USE_V1=0` to select it, which "
        "vLLM ignores.",
        where=("engine",),
        every_model=True,
        handling="`NRL_VLLM_USE_V1=0` raises an error.",
        code=("nrl_models.engines.vllm:VLLMEngine.start",),
        fixed="vllm>=0.11",
        kept_for="scripts that still set the variable",
    ),
)
