"""Tests of Kimi-VL that go beyond the generated tests, because model and reference share the same code there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import edit_config, stored

from nrl_models import AutoModelForImageTextToText
from nrl_models.families.kimi_vl import modeling as hf
from nrl_models.families.kimi_vl import moonvit
from nrl_models.families.kimi_vl.configuration import KimiVLConfig, MoonViTConfig
from nrl_models.families.kimi_vl.model import KimiVLForConditionalGeneration
from nrl_models.testing.case import FamilyCase

CASE = FamilyCase(KimiVLForConditionalGeneration)
GRID = [[4, 6], [8, 8], [2, 2]]


@pytest.fixture(scope="module")
def tower() -> hf.MoonViTModel:
    """A tower with an eight-by-eight position table: one image has that size, the others do not."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96}
    config = MoonViTConfig(**sizes, init_pos_emb_height=8, init_pos_emb_width=8)
    model = hf.MoonViTModel._from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def patches(grid: list[list[int]]) -> torch.Tensor:
    count = sum(height * width for height, width in grid)
    return torch.randn(count, 3, 14, 14, generator=torch.Generator().manual_seed(1))


def test_rotary_positions_rotate_by_column_and_row() -> None:
    states = torch.randn(24, 2, 16)
    turned = moonvit.rotate(states, moonvit.rotary_angles([[4, 6]], 16, 10000.0, states.device))
    for patch in range(24):
        row, column = divmod(patch, 6)
        for pair in range(8):
            frequency = 10000.0 ** (-4 * (pair // 2) / 16)
            angle = torch.tensor((row if pair % 2 else column) * frequency)
            factor = torch.polar(torch.tensor(1.0), angle)
            for head in range(2):
                number = torch.complex(states[patch, head, 2 * pair], states[patch, head, 2 * pair + 1])
                expected = torch.view_as_real(number * factor)
                torch.testing.assert_close(turned[patch, head, 2 * pair : 2 * pair + 2], expected)


@torch.no_grad()
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_packed_images_match_separate_images(tower: hf.MoonViTModel, attn: str) -> None:
    tower.set_attn_implementation(attn)
    pixels = patches(GRID)
    packed = tower(pixels, torch.tensor(GRID)).last_hidden_state
    assert packed.shape == (6 + 16 + 1, 4, 64)
    sizes = [height * width for height, width in GRID]
    alone = [
        tower(image, torch.tensor([size])).last_hidden_state
        for image, size in zip(pixels.split(sizes), GRID, strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_token_merges_square_of_patches(tower: hf.MoonViTModel) -> None:
    seen = {}
    handle = tower.encoder.final_layernorm.register_forward_hook(lambda _, args, output: seen.update(rows=output))
    merged = tower(patches([[4, 6]]), torch.tensor([[4, 6]])).last_hidden_state
    handle.remove()
    rows = seen["rows"].view(4, 6, 64)
    assert torch.equal(merged[4], torch.stack([rows[2, 2], rows[2, 3], rows[3, 2], rows[3, 3]]))


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([[4, 4]], "are 16 patches, but pixel_values has 24"),
        ([[3, 8]], r"\[\[3, 8\]\] patches cannot be merged by 2 x 2"),
    ],
)
def test_invalid_grids_raise(tower: hf.MoonViTModel, grid: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tower(patches([[4, 6]]), torch.tensor(grid))


def test_images_without_placeholder_tokens_raise() -> None:
    inputs = CASE.inputs()
    inputs["input_ids"] = torch.full_like(inputs["input_ids"], 17)
    with pytest.raises(ValueError, match="input_ids has 0 places for them"):
        CASE.model()(**inputs)


@torch.no_grad()
def test_image_features_replace_placeholder_tokens() -> None:
    model, inputs = CASE.model(), CASE.inputs()
    images = model.get_image_features(inputs["pixel_values"], inputs["image_grid_hws"])
    embeddings = model.get_input_embeddings()(inputs["input_ids"])
    is_placeholder = inputs["input_ids"] == model.config.media_placeholder_token_id
    embeddings[is_placeholder] = images
    expected = model.language_model(inputs_embeds=embeddings).logits
    assert torch.equal(model(**inputs).logits, expected)


def test_saved_names_match_hub(tmp_path: Path) -> None:
    CASE.reference().save_pretrained(tmp_path)
    names = set(stored(tmp_path))
    assert {
        "vision_tower.patch_embed.proj.weight",
        "vision_tower.patch_embed.pos_emb.weight",
        "vision_tower.encoder.blocks.0.norm0.weight",
        "vision_tower.encoder.blocks.0.wqkv.bias",
        "vision_tower.encoder.blocks.0.wo.weight",
        "vision_tower.encoder.blocks.0.mlp.fc0.weight",
        "vision_tower.encoder.final_layernorm.weight",
        "multi_modal_projector.pre_norm.weight",
        "multi_modal_projector.linear_1.weight",
        "multi_modal_projector.linear_2.weight",
        "language_model.model.embed_tokens.weight",
        "language_model.model.layers.1.mlp.experts.3.gate_proj.weight",
        "language_model.lm_head.weight",
    } <= names


def test_remote_code_in_checkpoint_is_not_needed(tmp_path: Path) -> None:
    CASE.reference().save_pretrained(tmp_path)
    edit_config(tmp_path, auto_map={"AutoConfig": "configuration_kimi_vl.KimiVLConfig"})
    assert type(AutoModelForImageTextToText.from_pretrained(tmp_path)) is KimiVLForConditionalGeneration


def test_config_json_round_trip() -> None:
    config = KimiVLConfig()
    assert KimiVLConfig(**config.to_dict()).to_dict() == config.to_dict()
    assert config.text_config.n_routed_experts == 64
    assert config.image_token_id == 163605
