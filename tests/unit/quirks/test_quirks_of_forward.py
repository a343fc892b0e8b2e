"""Quirks of the forward. Without the workaround, the bug shows in our model as in transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import quirk_probes as probes
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from versions import case_of, since

from nrl_models import registry
from nrl_models.common.forward.image_outputs import ImageOutputs
from nrl_models.common.switches import quirks_off
from nrl_models.errors import UnknownArgumentError
from nrl_models.testing.case import FamilyCase, randomize

PLAIN = FamilyCase(registry.model_class("LlamaForCausalLM"))
NO_POSITIONS = FamilyCase(registry.model_class("GptOssForCausalLM"))
MROPE = FamilyCase(registry.model_class("Qwen2_5_VLForConditionalGeneration"))
STATE = FamilyCase(registry.model_class("Qwen3NextForCausalLM"))
IMAGES = FamilyCase(registry.model_class("Gemma3ForConditionalGeneration"))
SHARING = case_of("Gemma3nForCausalLM")
LLAMA4 = case_of("Llama4ForConditionalGeneration")
NEEDS_IMAGE_OUTPUTS = issubclass(LLAMA4.reference_class, ImageOutputs)


def meet(case: FamilyCase, *, mask: bool) -> bool:
    return probes.documents_share_attention(case.model(), case.inputs(images=False), mask=mask)


def test_symptom_of_packed_documents() -> None:
    with quirks_off("packed-documents"):
        assert meet(PLAIN, mask=True)


def test_cure_of_packed_documents() -> None:
    assert not meet(PLAIN, mask=True)


def test_symptom_of_masks_without_positions() -> None:
    with quirks_off("masks-without-positions"):
        assert meet(NO_POSITIONS, mask=False)


def test_cure_of_masks_without_positions() -> None:
    assert not meet(NO_POSITIONS, mask=False)


@pytest.mark.skipif(not NEEDS_IMAGE_OUTPUTS, reason="the installed transformers runs as it is")
def test_symptom_of_text_output_without_images() -> None:
    with quirks_off("text-output-without-images"):
        assert probes.text_raises(LLAMA4.model(), LLAMA4.inputs(images=False))


def test_cure_of_text_output_without_images() -> None:
    assert not probes.text_raises(LLAMA4.model(), LLAMA4.inputs(images=True))


def test_symptom_of_mrope_packed_documents() -> None:
    with quirks_off("mrope-packed-documents"):
        assert meet(MROPE, mask=False)


def test_cure_of_mrope_packed_documents() -> None:
    assert not meet(MROPE, mask=False)


@since("5.23")
def test_symptom_of_image_masks_in_packed_rows() -> None:
    with quirks_off("image-masks-in-packed-rows"):
        assert probes.image_depends_on_text_before(IMAGES.model(), IMAGES.inputs(batch=1))


def test_cure_of_image_masks_in_packed_rows() -> None:
    assert not probes.image_depends_on_text_before(IMAGES.model(), IMAGES.inputs(batch=1))


def test_symptom_of_layers_across_documents() -> None:
    with quirks_off("layers-across-documents"):
        assert meet(STATE, mask=False)


def test_cure_of_layers_across_documents() -> None:
    assert not meet(STATE, mask=False)


def offsets_stay() -> bool:
    return probes.offsets_stay(MROPE.model(), MROPE.inputs(images=True), MROPE.inputs(images=False)["input_ids"])


def test_symptom_of_mrope_stale_offsets() -> None:
    with quirks_off("mrope-stale-offsets"):
        assert offsets_stay()


def test_cure_of_mrope_stale_offsets() -> None:
    assert not offsets_stay()


def test_symptom_of_token_types() -> None:
    with quirks_off("token-types"):
        assert probes.images_are_causal(IMAGES.model(), IMAGES.inputs())


def test_cure_of_token_types() -> None:
    assert not probes.images_are_causal(IMAGES.model(), IMAGES.inputs())


def test_symptom_of_shared_kv_without_cache() -> None:
    """These layers only have the keys and values that transformers passes between layers, no projections."""
    model = SHARING.model()
    layer = next(module for module in model.modules() if getattr(module, "is_kv_shared_layer", False))
    assert not hasattr(layer, "k_proj")

    def forget(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"shared_kv_states": {}}

    handle = layer.register_forward_pre_hook(forget, with_kwargs=True)
    try:
        with pytest.raises(KeyError), torch.no_grad():
            model(**SHARING.inputs(), use_cache=False)
    finally:
        handle.remove()


def test_cure_of_shared_kv_without_cache() -> None:
    model, inputs = SHARING.model(), SHARING.inputs()
    with torch.no_grad():
        with_cache, without = (model(**inputs, use_cache=use).logits for use in (True, False))
    torch.testing.assert_close(without, with_cache, atol=1e-5, rtol=1e-5)


def test_symptom_of_shared_kv_reentrant_checkpointing() -> None:
    with quirks_off("shared-kv-reentrant-checkpointing"):
        assert probes.reentrant_checkpointing_loses_gradients(SHARING.model(), SHARING.inputs(labels=True))


def test_cure_of_shared_kv_reentrant_checkpointing() -> None:
    with pytest.raises(UnknownArgumentError, match="use_reentrant=False"):
        probes.reentrant_checkpointing_loses_gradients(SHARING.model(), SHARING.inputs(labels=True))


CAPPED = FamilyCase(registry.model_class("Gemma2ForCausalLM"), tiny={"attn_logit_softcapping": 0.05})


def test_symptom_of_soft_cap_under_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates the former transformers, whose class declares `sdpa` support although that kernel ignores the cap."""
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *args, softcap=None, **options: sdpa(*args, **options))
    model = CAPPED.model_class.from_config(CAPPED.config)
    randomize(model)
    model.config._attn_implementation = "sdpa"
    assert probes.soft_cap_is_dropped(model.eval(), CAPPED.inputs())


def test_cure_of_soft_cap_under_sdpa() -> None:
    assert not probes.soft_cap_is_dropped(CAPPED.model(), CAPPED.inputs())
