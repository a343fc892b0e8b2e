"""Conditions that select classes for a generated test by their declarations, without building models."""

from __future__ import annotations

import inspect
from typing import Any

from huggingface_hub.errors import StrictDataclassClassValidationError

from nrl_models.common.config.positions import has_encoder
from nrl_models.common.config.walk import all_values
from nrl_models.inputs.images import image_token
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.mtp_weights import declares_mtp


def scores_every_token(case: FamilyCase) -> bool:
    """Return True if logits have a row per token, unlike those of a sequence classifier."""
    return not case.reference_class.__name__.endswith("SequenceClassification")


def takes_text(case: FamilyCase) -> bool:
    """Return True if the class accepts `input_ids`, unlike some image-only models."""
    return _takes(case, "input_ids")


def reads_what_it_writes(case: FamilyCase) -> bool:
    """Return True if prompt and completion are one sequence, unlike in encoder-decoder models."""
    return not (_takes(case, "decoder_input_ids") and has_encoder(case.config_class()))


def shares_prompts(case: FamilyCase) -> bool:
    """Return True if sequences may share a prompt in a row, according to the limits that the class declares."""
    return case.model_class.limits.keys().isdisjoint({"shared prompts", "packed sequences"})


def takes_image_types(case: FamilyCase) -> bool:
    """Return True if the class accepts `mm_token_type_ids`, which mark image tokens, and has an image token."""
    return _takes(case, "mm_token_type_ids") and image_token(case.config) is not None


def generates(case: FamilyCase) -> bool:
    """Return True if the class supports `generate`."""
    return case.model_class.can_generate()


def ties_embeddings(case: FamilyCase) -> bool:
    """Return True if the class names parameters that it can tie, and its configuration allows it (DBRX's does not)."""
    config_class: Any = case.config_class
    try:
        config_class(tie_word_embeddings=True)
    except StrictDataclassClassValidationError:
        return False
    return bool(case.model_class._tied_weights_keys)


def chooses_experts(case: FamilyCase) -> bool:
    """Return True if the configuration has an enabled mixture, with a number of experts or of chosen experts."""
    values = dict(all_values(case.config_class(**case.tiny_values)))
    counts = [key for key in values if "expert" in key or "topk" in key]
    is_on = all(values[key] is not False for key in values if key in MIXTURE_SWITCHES)
    return is_on and any(values[key] for key in counts)


def has_mtp(case: FamilyCase) -> bool:
    """Return True if checkpoints of the class have weights of multi-token prediction."""
    return declares_mtp(case.reference_class)


MIXTURE_SWITCHES = ("enable_moe_block", "is_moe")
"""Keys that disable a mixture of experts, even if other keys describe its experts."""


def _takes(case: FamilyCase, argument: str) -> bool:
    return argument in inspect.signature(case.reference_class.forward).parameters
