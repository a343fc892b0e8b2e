"""Advice and notes for a checkpoint that does not match a model in every part."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from transformers import PreTrainedModel

from nrl_models.common.checkpoint.dequantized import quantized_part, settings_of
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.logs import get_logger
from nrl_models.common.modules import class_name, is_base_model, predicts_words
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.matching import Match
from nrl_models.common.state_dict.ties import as_keywords, tying_keys
from nrl_models.errors import ProblemKind, UnknownArgumentError, listed
from nrl_models.loading.names.checkpoint_names import CheckpointNames
from nrl_models.loading.names.other_parts import modules_of, new_head_names
from nrl_models.loading.shared_classes import shared_class_note

logger = get_logger(__name__)


def note_not_loaded(
    model: PreTrainedModel, files: CheckpointFiles, of_head: Collection[str], of_towers: Collection[str]
) -> None:
    """Log which heads and which other parts of a composite checkpoint are not loaded, if any.

    Args:
        model: The model that does not have them.
        files: The checkpoint.
        of_head: Keys of heads.
        of_towers: Keys of other parts.
    """
    # A base model's ordinary load drops the head; a new head replaces another one.
    log = logger.info if is_base_model(model) else logger.warning
    for keys, kind, report in ((of_head, "heads", log), (of_towers, "other parts", logger.warning_once)):
        if not keys:
            continue
        size = sum(files.tensors[key].nbytes for key in keys if key in files.tensors) / 1e9
        count = f"{len(keys)} tensor{'s' if len(keys) > 1 else ''}"
        report(
            f"{files.folder}: {class_name(model)} does not have the checkpoint's {kind} "
            f"{', '.join(modules_of(model, keys))} ({count}, {size:.2f} GB). They are not loaded, saved or exported."
        )


def require_head(model: PreTrainedModel, head: Collection[str]) -> None:
    """Raise UnknownArgumentError if `new_head=True` was passed for a model without a head."""
    if not head:
        raise UnknownArgumentError(
            f"new_head=True: {class_name(model)} has no head. Leave out new_head, or load a class with "
            "one (nrl_models.AutoModelForSequenceClassification, ...)"
        )


def head_advice(model: PreTrainedModel, names: Iterable[str], new_head: bool) -> list[str]:
    """Return the advice to pass `new_head=True` if some of the tensors that a checkpoint lacks are a head's.

    A language model gets it if it lacks nothing but its head (the checkpoint of a reward model). A load that passed it
    gets none.

    Args:
        model: The model to load.
        names: The model's tensors that the checkpoint lacks, or has in another shape.
        new_head: Whether it was passed.
    """
    names = list(names)
    head = new_head_names(model, names)
    if new_head or not head or is_base_model(model):
        return []
    if predicts_words(model):
        text = f"to train a new head on the model in this checkpoint pass new_head=True: it initializes {listed(head)}"
        return [text] if len(head) == len(names) else []
    return [
        "for a new head on the model in this checkpoint (a reward model from a language model) pass new_head=True: "
        f"it initializes {listed(head)} and skips other heads"
    ]


_ADVICE = {
    ProblemKind.PARTIAL: "the checkpoint is incomplete: download or save it again",
    ProblemKind.DUPLICATED: "keep only one of the duplicated tensors",
    ProblemKind.SHAPE: "config.json and the weights belong to different models",
    ProblemKind.DTYPE: (
        "quantized weights need a quantization_config in config.json: block-wise FP8 and MXFP4 are dequantized "
        "while loading, other methods use transformers' quantizers"
    ),
}
"""Remedy for each kind of problem."""


WRAPPERS = (
    r"^base_model\.model\.",
    r"^module\.",
    r"_orig_mod\.",
    r"_fsdp_wrapped_module\.",
    r"_checkpoint_wrapped_module\.",
)
"""Patterns of the names that PEFT, DDP, torch.compile, FSDP and activation checkpointing add to those of a model."""


def wrapper_advice(adapter: StateDictAdapter, unexpected: Iterable[str]) -> list[str]:
    """Return the advice to rename tensors that were saved from a wrapped model; empty if there are none."""
    used: dict[str, str] = {}
    known = adapter.hub.keys() | adapter.transformers.keys()
    for key in unexpected:
        name, wrappers = key, []
        while patterns := [pattern for pattern in WRAPPERS if re.search(pattern, name)]:
            name = re.sub(patterns[0], "", name)
            wrappers += patterns[:1]
        if wrappers and name in known:
            used |= dict.fromkeys(wrappers, "")
    text = f"the checkpoint was saved from a wrapped model: to remove the wrapper's names, pass key_mapping={used}"
    return [text] if used else []


def advice_for(
    model: PreTrainedModel,
    adapter: StateDictAdapter,
    names: CheckpointNames,
    matches: Match,
    *,
    new_head: bool,
    passed: Collection[str] = (),
) -> list[str]:
    """Return remedies for the problems in `matches`.

    Args:
        model, adapter, names, matches: The model and its match with the checkpoint.
        new_head: Whether a new head was requested, or cannot be a remedy.
        passed: Keywords that replaced values of the configuration.
    """
    kinds = {problem.kind for problem in matches.problems}
    advice = wrapper_advice(adapter, (each.subject for each in matches.problems if each.kind is ProblemKind.UNEXPECTED))
    if advice:
        return advice
    if passed and {ProblemKind.MISSING, ProblemKind.UNEXPECTED, ProblemKind.SHAPE} & kinds:
        advice.append(f"if the checkpoint fits its own config.json, leave out {', '.join(passed)}, which was passed")
    if ProblemKind.MISSING in kinds or ProblemKind.UNEXPECTED in kinds:
        advice.append(
            f"check that this is a complete checkpoint of {class_name(model)}; to load only part of it "
            "pass strict=False"
        )
    if ProblemKind.MISSING in kinds and (keys := tying_keys(model, matches.missing, tie=False)):
        advice.append(f"if the checkpoint ties its head to the embeddings, pass {as_keywords(keys, True)}")
    unfit = {problem.subject for problem in matches.problems if problem.kind is ProblemKind.SHAPE}
    misfits = {name for key in unfit for name in names.parameters(key)}
    advice += head_advice(model, dict.fromkeys((*matches.missing, *sorted(misfits))), new_head)
    if ProblemKind.TIED in kinds:
        advice.append(f"pass {as_keywords(tying_keys(model, adapter.tied), False)} to keep both")
    if {ProblemKind.MISSING, ProblemKind.UNEXPECTED} & kinds and (note := shared_class_note(model.config)):
        advice.append(note)
    if ProblemKind.DTYPE in kinds and (part := quantized_part(model.config)) is not None:
        method = settings_of(part.quantization_config).get("quant_method")
        known = f"quantization_config has quant_method {method!r}, which neither nrl_models nor transformers reads"
        return [f"{known}: load the checkpoint that it was quantized from"]
    if passed:  # which may be the cause of wrong shapes
        kinds.discard(ProblemKind.SHAPE)
    return advice + [text for kind, text in _ADVICE.items() if kind in kinds]
