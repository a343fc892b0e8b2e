"""Layers that use earlier layers' keys and values: gradients, checkpoints, and unused weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import assert_same, edit_weights, stored
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from versions import needs

from nrl_models import unreachable_parameters
from nrl_models.common.upstream import ENABLE_CHECKPOINTING
from nrl_models.errors import CheckpointError, UnknownArgumentError
from nrl_models.families.gemma3n.model import Gemma3nForCausalLM
from nrl_models.families.gemma4.model import Gemma4ForCausalLM, Gemma4ForConditionalGeneration
from nrl_models.families.gemma4.variants import E2B
from nrl_models.testing.case import FamilyCase

pytestmark = needs("Gemma4ForCausalLM", "Gemma3nForCausalLM")

CASES = {
    "Gemma4ForCausalLM": FamilyCase(Gemma4ForCausalLM, tiny=E2B),
    "Gemma4ForConditionalGeneration": FamilyCase(Gemma4ForConditionalGeneration, tiny={"text_config": E2B}),
    "Gemma3nForCausalLM": FamilyCase(Gemma3nForCausalLM),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def shared_layers(case: FamilyCase, model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, tuple(case.model_class.rewrites)) and getattr(layer, "is_kv_shared_layer", False)
    ]


@every_case
def test_kv_shared_layers_have_only_query_projection(case: FamilyCase) -> None:
    layers = shared_layers(case, case.model())
    assert len(layers) == case.config.get_text_config().num_kv_shared_layers > 0
    for _, layer in layers:
        assert type(layer.q_proj) is nn.Linear
        assert not hasattr(layer, "qkv_proj")
        assert not hasattr(layer, "k_proj")


def gradients(model: nn.Module, case: FamilyCase, **options: object) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**case.inputs(labels=True), **options).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@every_case
@pytest.mark.parametrize("use_cache", [False, True])
def test_checkpointing_keeps_gradients_of_shared_kv(case: FamilyCase, use_cache: bool) -> None:
    _, model = case.new_pair()
    model.train()
    expected = gradients(model, case, use_cache=False)
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(gradients(model, case, use_cache=use_cache), expected, atol=1e-5, rtol=1e-5)
    # The gradient depends on the layers that share: without them, keys and values have another gradient.
    for _, layer in shared_layers(case, model):
        layer.o_proj.register_forward_pre_hook(lambda module, args: (args[0].detach(),))
    cut = gradients(model, case, use_cache=False)
    changed = [name for name in cut if (cut[name] - expected[name]).abs().max() > 1e-4]
    assert any("k_proj" in name for name in changed)
    assert any("v_proj" in name for name in changed)


@every_case
def test_cache_does_not_change_logits(case: FamilyCase) -> None:
    model, inputs = case.model(), case.inputs()
    with torch.no_grad():
        with_cache, without = (model(**inputs, use_cache=use).logits for use in (True, False))
    torch.testing.assert_close(with_cache, without, atol=1e-5, rtol=1e-5)


@every_case
def test_reentrant_checkpointing_raises(case: FamilyCase) -> None:
    _, model = case.new_pair()
    for kwargs in ({"use_reentrant": True}, {"use_reentrant": True, "preserve_rng_state": False}):
        with pytest.raises(UnknownArgumentError, match=r"attend to earlier ones' keys and values.*use_reentrant=False"):
            model.gradient_checkpointing_enable(kwargs)
        with pytest.raises(UnknownArgumentError, match="use_reentrant=False"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    assert not model.is_gradient_checkpointing
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.is_gradient_checkpointing


@pytest.mark.filterwarnings("error::FutureWarning")
@every_case
def test_current_name_of_checkpointing_logs_no_deprecation(case: FamilyCase) -> None:
    model = case.model()
    enable = getattr(model, ENABLE_CHECKPOINTING)
    with pytest.raises(UnknownArgumentError, match="use_reentrant=False"):
        enable({"use_reentrant": True})
    enable({"use_reentrant": False})
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert layers
    assert all(layer.gradient_checkpointing for layer in layers)


def test_reentrant_checkpointing_without_kv_sharing() -> None:
    model = Gemma4ForCausalLM.from_config(FamilyCase(Gemma4ForCausalLM).config)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert model.is_gradient_checkpointing


@pytest.fixture
def with_unused(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[FamilyCase, Path, dict[str, torch.Tensor]]:
    """Save a checkpoint with unused key and value weights for the sharing layers. Returns those weights."""
    case: FamilyCase = request.param
    folder = tmp_path / "published"
    case.reference(torch.bfloat16).save_pretrained(folder)
    unused: dict[str, torch.Tensor] = {}

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for query in [name for name in tensors if name.endswith("self_attn.q_proj.weight")]:
            prefix = query.removesuffix("q_proj.weight")
            if "vision" in prefix or f"{prefix}k_proj.weight" in tensors:
                continue
            unused.update(
                {
                    f"{prefix}k_proj.weight": torch.randn(64, 256).half(),  # another dtype than the model's
                    f"{prefix}v_proj.weight": torch.randn(64, 256).bfloat16(),
                    f"{prefix}k_norm.weight": torch.randn(16),
                }
            )
        tensors.update(unused)

    edit_weights(folder, add)
    assert len(unused) == 3 * case.config.get_text_config().num_kv_shared_layers
    return case, folder, unused


@pytest.mark.parametrize("with_unused", CASES.values(), ids=CASES, indirect=True)
def test_unused_kv_weights_are_saved_again(
    with_unused: tuple[FamilyCase, Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    case, folder, unused = with_unused
    published = stored(folder)
    model = case.model_class.from_pretrained(folder)
    assert not any(name in key for key in model.state_dict() for name in unused)
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(
        parameter.numel() for parameter in case.reference().parameters()
    )
    model.save_pretrained(tmp_path / "again", max_shard_size="1MB")
    assert_same(stored(tmp_path / "again"), published)
    model.save_pretrained(folder)  # overwrites the file that they are read from
    assert_same(stored(folder), published)
    assert_same(stored(tmp_path / "again"), stored(folder))
    _, info = case.reference_class.from_pretrained(folder, output_loading_info=True)
    assert not info["unexpected_keys"]


@pytest.mark.parametrize("with_unused", [CASES["Gemma4ForCausalLM"]], ids=["Gemma4"], indirect=True)
def test_kv_weights_of_nonexistent_layers_raise(
    with_unused: tuple[FamilyCase, Path, dict[str, torch.Tensor]],
) -> None:
    case, folder, _ = with_unused
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.9.self_attn.k_proj.weight": torch.ones(2, 2)}))
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.9\.self_attn\.k_proj\.weight"):
        case.model_class.from_pretrained(folder)


@every_case
def test_loss_on_all_inputs_reaches_every_parameter(case: FamilyCase) -> None:
    _, model = case.new_pair()
    model.train()
    assert unreachable_parameters(model, lambda: model(**case.inputs(labels=True), use_cache=False).loss) == {}


def test_loss_on_text_does_not_reach_towers() -> None:
    case = CASES["Gemma4ForConditionalGeneration"]
    _, model = case.new_pair()
    model.train()
    reasons = unreachable_parameters(model, lambda: model(**case.inputs(labels=True, images=False)).loss)
    outside_text = {name for name, _ in model.named_parameters() if "vision" in name or "audio" in name}
    assert reasons.keys() == outside_text
    assert set(reasons.values()) == {"belongs to a module that is never called"}


def test_images_are_bidirectional_without_token_types() -> None:
    case = CASES["Gemma4ForConditionalGeneration"]
    model, inputs = case.model(), case.inputs()
    assert inputs["mm_token_type_ids"].any()
    model.config.text_config.use_bidirectional_attention = "vision"
    try:
        with torch.no_grad():
            expected = model(**inputs).logits
            without = {name: value for name, value in inputs.items() if name != "mm_token_type_ids"}
            assert torch.equal(model(**without).logits, expected)
            embeddings = model.get_input_embeddings()(inputs["input_ids"])
            from_embeddings = {name: value for name, value in without.items() if name != "input_ids"}
            assert torch.equal(model(**from_embeddings, inputs_embeds=embeddings).logits, expected)
            causal = case.reference_class.forward(model, **without).logits  # as in transformers
        assert (causal - expected).abs().max() > 1e-3
    finally:
        model.config.text_config.use_bidirectional_attention = None
