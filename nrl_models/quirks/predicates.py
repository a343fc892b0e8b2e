"""Predicates that select the models of a quirk, by configuration and family declarations, never by a model's name."""

from __future__ import annotations

from collections.abc import Callable

from nrl_models.common.forward.kv_sharing import SharedKeyValues
from nrl_models.common.forward.reentrant import layers_of_shared_keys
from nrl_models.common.model_components.freezing import components_of
from nrl_models.common.modules import predicts_words
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.mtp import MTPNames
from nrl_models.common.upstream_torch import BatchNorm
from nrl_models.family import FamilyModel
from nrl_models.quirks.subject import Subject

LARGE_VOCABULARY = 2**15
"""Vocabulary size from which the logits of 8,192 tokens need a gigabyte in fp32."""


def declares(name: str) -> Callable[[Subject], bool]:
    """Create a predicate: True if a class of the model declares that it handles the quirk `name`."""
    return lambda subject: name in subject.handled


def packs(subject: Subject) -> bool:
    """Return True if the family keeps packed documents apart."""
    return isinstance(subject.model, FamilyModel) and "packed sequences" not in subject.model.limits


def packs_images_with_windows(subject: Subject) -> bool:
    """Return True if packed rows may have images whose tokens attend to each other in layers with sliding windows."""
    windows = getattr(subject.text, "sliding_window", None) is not None
    return windows and packs(subject) and "token-types" in subject.handled


def shares_keys_and_values(subject: Subject) -> bool:
    """Return True if later layers attend to keys and values of earlier layers, or may do so at another size."""
    layers = list(layers_of_shared_keys(subject.model))
    return bool(layers) if subject.any_size else any(layers)


def has_unused_keys_and_values(subject: Subject) -> bool:
    """Return True if checkpoints have weights of keys and values for layers that use an earlier layer's."""
    return isinstance(subject.model, SharedKeyValues) and shares_keys_and_values(subject)


def has_mtp_weights(subject: Subject) -> bool:
    """Return True if checkpoints of the model may have weights of multi-token prediction."""
    return MTPNames(subject.model).known and predicts_words(subject.model)


def ties_embeddings(subject: Subject) -> bool:
    """Return True if input and output embeddings are one tensor."""
    return bool(subject.model.all_tied_weights_keys)


def has_experts(subject: Subject) -> bool:
    """Return True if some layers choose experts."""
    return "freeze_routers" in components_of(subject.model)


def has_batch_norms(subject: Subject) -> bool:
    """Return True if a part of the model is a batch norm."""
    return any(isinstance(module, BatchNorm) for module in subject.model.modules())


def has_towers(subject: Subject) -> bool:
    """Return True if the model accepts images, video or audio."""
    return any(getattr(subject.model.config, name, None) is not None for name in ("vision_config", "audio_config"))


def has_several_names(subject: Subject) -> bool:
    """Return True if the model's tensors have other names on the hub than in transformers."""
    adapter = StateDictAdapter(subject.model)
    return adapter.hub.keys() != adapter.transformers.keys()


def has_a_large_vocabulary(subject: Subject) -> bool:
    """Return True if the logits of a batch are larger than the model's activations."""
    return subject.any_size or subject.text.vocab_size >= LARGE_VOCABULARY


def brings_its_own_configuration(subject: Subject) -> bool:
    """Return True if transformers has no class for the model's configuration."""
    return type(subject.model.config).__module__.startswith("nrl_models.")


def fuses_out_projection(subject: Subject) -> bool:
    """Return True if the model has state-space mixers whose fused kernel applies the output projection."""
    return any(
        all(hasattr(module, name) for name in ("A_log", "D", "dt_bias", "conv1d", "out_proj"))
        for module in subject.model.modules()
    )


def freezes_parameters(subject: Subject) -> bool:
    """Return True if the model's class freezes some parameters when it is built."""
    return any(not parameter.requires_grad for parameter in subject.model.parameters())


def caps_attention_scores(subject: Subject) -> bool:
    """Return True if attention scores are soft-capped."""
    return getattr(subject.text, "attn_logit_softcapping", None) is not None
