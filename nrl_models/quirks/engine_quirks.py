"""Quirks of exporting a model, and of the engines that it is exported to."""

from __future__ import annotations

from collections.abc import Callable

from nrl_models.common.flags import ModelFlag
from nrl_models.quirks import predicates
from nrl_models.quirks.evidence import Evidence, Pattern, VerdictKind
from nrl_models.quirks.quirk import Quirk


def _scaled_on_random_weights(evidence: Evidence) -> bool:
    """What a constant that no weight update reaches looks like: all that follows is the expected times a number."""
    return evidence.kind == VerdictKind.ENGINE and evidence.pattern == Pattern.SCALED and evidence.random_weights


def _stale(part: str) -> Callable[[Evidence], bool]:
    """Whether a module with `part` in its name may have kept the weights of before a refit."""

    def explains(evidence: Evidence) -> bool:
        may_be_stale = evidence.pattern == Pattern.STALE_WEIGHTS or evidence.random_weights
        return evidence.kind == VerdictKind.ENGINE and part in evidence.module and may_be_stale

    return explains


EXPORT = (
    Quirk(
        name="names-on-the-hub",
        symptom="An engine is sent the names that transformers has in memory, which differ from those on the hub, and "
        "takes none of them, or the wrong ones.",
        where=("export", "engine"),
        applies=predicates.has_several_names,
        handling="Exports have the hub's names and layout, experts one by one; the refit checks that all arrive.",
        code=("nrl_models.common.state_dict.adapter:StateDictAdapter",),
        off='iter_export(model, layout="transformers")',
        probe="differential",
        asks="transformers saves under other names than it has in memory",
    ),
)

INFERENCE = (
    Quirk(
        name="engine-dummy-buffers",
        symptom="An engine that starts on random weights has a random `normalizer`, too, which no weight update "
        "reaches, and generates gibberish.",
        where=("engine",),
        applies=lambda subject: ModelFlag.VLLM_LOAD_FORMAT_AUTO in subject.flags,
        handling="Families say so by ModelFlag.VLLM_LOAD_FORMAT_AUTO: vLLM then starts on the checkpoint. A refit "
        "reports persistent buffers that were not written. `refit-check` and `consistency --load-format dummy` start "
        "on random weights all the same, which is what they are for.",
        code=(
            "nrl_models.common.flags:ModelFlag",
            "nrl_models.engines.vllm:VLLMEngine",
            "nrl_models.engines.vllm_worker:ConsistencyWorker",
        ),
        fixed="vllm>=0.9.2",
        kept_for="trainers that read the flag beside an older vLLM",
        probe="behavioural",
        asks="vLLM's dummy loader changes derived buffers",
        sources=("https://github.com/vllm-project/vllm/pull/19788",),
        explains=_scaled_on_random_weights,
    ),
    Quirk(
        name="engine-reload-buffers",
        symptom="A refit of a running engine leaves constants that were derived when it started (a scale, a root) at "
        "whatever memory held.",
        where=("engine",),
        every_model=True,
        handling="Refits go through vLLM's layerwise reload, which keeps them, and are compared with the trainer "
        "after.",
        code=("nrl_models.engines.transfer.reload:WeightReload", "nrl_models.consistency.refit:RefitChecker"),
        off="write to the engine's parameters past WeightReload",
        fixed="vllm>=0.32",
        kept_for="engines of an older version, reached over HTTP",
        probe="behavioural",
        asks="vLLM's reload changes a derived buffer",
        sources=("https://github.com/vllm-project/vllm/pull/44371",),
        explains=_scaled_on_random_weights,
    ),
    Quirk(
        name="engine-tied-head",
        symptom="After a refit, a tied output embedding that the engine keeps as a module of its own goes on with what "
        "was packed from the old weights.",
        where=("engine",),
        applies=predicates.ties_embeddings,
        handling="Modules that share a parameter are prepared again once all weights are there.",
        code=("nrl_models.engines.transfer.reload:WeightReload.finish",),
        probe="behavioural",
        asks="a refit with the quirk switched off leaves vLLM's head as it was",
        explains=_stale("logits"),
    ),
    Quirk(
        name="engine-experts-on-cpu",
        symptom="On a CPU a refit leaves stacks of experts as they were sent, and the engine reads them as if they "
        "were packed for its kernels.",
        where=("engine",),
        applies=predicates.has_experts,
        handling="The kernel is made again with each refit, which packs the experts.",
        code=("nrl_models.engines.transfer.reload:WeightReload",),
        probe="behavioural",
        asks="a refit with the quirk switched off leaves vLLM's experts unpacked",
        explains=_stale("experts"),
    ),
    Quirk(
        name="engine-tokenizer",
        symptom="An engine that is started without a tokenizer, which it does not need to be given tokens, refuses "
        "every model with images.",
        where=("engine",),
        applies=predicates.has_towers,
        handling="The tokenizer is left out for text-only models.",
        code=("nrl_models.engines.vllm:VLLMEngine.start",),
        probe="behavioural",
        asks="vLLM's processor of images refuses to start without a tokenizer",
        sources=("https://github.com/vllm-project/vllm/issues/31123",),
    ),
    Quirk(
        name="engine-v0-runtime",
        symptom="Trainers chose vLLM's first runtime by NRL_VLLM_USE_V1=0; it is gone, and what was asked for would be "
        "silently ignored.",
        where=("engine",),
        every_model=True,
        handling="NRL_VLLM_USE_V1=0 is an error that says so.",
        code=("nrl_models.engines.vllm:VLLMEngine.start",),
        fixed="vllm>=0.11",
        kept_for="environments that still set the variable",
    ),
)
