"""Tests of Baichuan that go beyond the generated tests, because model and reference share the same code there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import edit_config, stored
from torch.nn import functional as F
from transformers.masking_utils import create_causal_mask

from nrl_models import AutoModelForCausalLM
from nrl_models.common.projections import report
from nrl_models.common.upstream import cache_input
from nrl_models.families.baichuan import modeling as hf
from nrl_models.families.baichuan.configuration import BaichuanConfig
from nrl_models.families.baichuan.model import BaichuanForCausalLM
from nrl_models.testing.case import randomize
from nrl_models.testing.tiny import tiny_config

SIZES = {
    "Baichuan-7B": ({"vocab_size": 64000, "max_position_embeddings": 4096}, "rotary", False),
    "Baichuan-13B": ({"vocab_size": 64000}, "alibi", False),
    "Baichuan2-7B": ({"vocab_size": 125696, "max_position_embeddings": 4096}, "rotary", True),
    "Baichuan2-13B": ({"vocab_size": 125696}, "alibi", True),
}


def new_reference(**values: object) -> hf.BaichuanForCausalLM:
    torch.manual_seed(0)
    model = hf.BaichuanForCausalLM._from_config(tiny_config(BaichuanConfig, values))
    randomize(model)
    return model.eval()


@pytest.mark.parametrize("name", SIZES)
def test_published_configs_imply_position_type_and_head(name: str) -> None:
    values, positions, normalized = SIZES[name]
    config = BaichuanConfig(**values)
    assert config.position_embedding_type == positions
    assert config.normalize_head is normalized
    assert BaichuanConfig(**config.to_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 40])
def test_alibi_slopes_match_paper(heads: int) -> None:
    slopes = hf.alibi_slopes(heads)
    assert len(slopes) == len(set(slopes)) == heads
    power = 2 ** (heads.bit_length() - 1)
    assert slopes[:power] == pytest.approx([2 ** (-8 * (head + 1) / power) for head in range(power)])
    between = [2 ** (-8 * (2 * head + 1) / (2 * power)) for head in range(heads - power)]
    assert slopes[power:] == pytest.approx(between)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_alibi_attention_matches_formula(attn: str) -> None:
    model = new_reference(num_attention_heads=12, hidden_size=240)  # slopes for twelve heads combine two sequences
    model.set_attn_implementation(attn)
    layer, states = model.model.layers[0].self_attn, torch.randn(2, 9, 240)
    mask_inputs = {"inputs_embeds": states, "attention_mask": None, "position_ids": None}
    mask = model.model._alibi_mask(0, mask_inputs | cache_input(create_causal_mask, None))
    with torch.no_grad():
        positions = model.model.rotary_emb(states, torch.arange(9)[None])
        actual, _ = layer(states, attention_mask=mask, position_embeddings=positions)
        query, key, value = (
            F.linear(states, projection.weight).view(2, 9, 12, 20)
            for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        # As in the remote code: a bias that depends only on the key's position. It differs by a constant per row.
        bias = torch.tensor(hf.alibi_slopes(12))[:, None, None] * torch.arange(9)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / 20**0.5 + bias
        scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
        expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value).reshape(2, 9, 240) @ layer.o_proj.weight.T
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_normalized_head_logits() -> None:
    model = new_reference(normalize_head=True)
    input_ids = torch.randint(16, 480, (2, 7))
    before = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        states = model.model(input_ids).last_hidden_state
        logits = model(input_ids).logits
    unit = before / before.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(logits, states @ unit.T, atol=1e-5, rtol=1e-5)
    assert torch.equal(model.lm_head.weight, before)  # the remote code overwrites the weight here


def test_hub_layout_has_fused_qkv(tmp_path: Path) -> None:
    reference = new_reference(max_position_embeddings=64)
    reference.save_pretrained(tmp_path)
    tensors = stored(tmp_path)
    attention = reference.model.layers[1].self_attn
    packed = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(tensors["model.layers.1.self_attn.W_pack.weight"], packed)
    assert not any(name in key for key in tensors for name in ("q_proj", "k_proj", "v_proj"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, combine=True)
    assert type(model) is BaichuanForCausalLM
    assert torch.equal(model.model.layers[1].self_attn.qkv_proj.weight, packed)
    assert all(group.joined for group in report(model))
    # The packed hub tensor combines three parameters and is not a view, so a refit receives a copy.
    assert "model.layers.1.self_attn.W_pack.weight" not in model.state_dict_adapter.hf_views(model)
    exported = dict(model.state_dict_adapter.iter_export(model))
    assert exported.keys() == tensors.keys()
    assert torch.equal(exported["model.layers.1.self_attn.W_pack.weight"], packed)


def test_published_config_json_loads(tmp_path: Path) -> None:
    new_reference(normalize_head=False).save_pretrained(tmp_path)
    edit_config(
        tmp_path,
        position_embedding_type=None,
        normalize_head=None,
        architectures=["BaichuanForCausalLM"],
        auto_map={"AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"},  # not needed, so not executed
        z_loss_weight=0,
        _from_model_config=True,
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model.model.rotary_emb) is hf.BaichuanNoRotation
    assert type(model.lm_head) is torch.nn.Linear


def test_z_loss_adds_squared_max_logit() -> None:
    model = new_reference()
    input_ids = torch.randint(16, 480, (2, 7))
    with torch.no_grad():
        plain = model(input_ids, labels=input_ids)
        model.config.z_loss_weight = 0.5
        loss = model(input_ids, labels=input_ids).loss
    largest = plain.logits[:, :-1].max(-1).values
    torch.testing.assert_close(loss, plain.loss + 0.5 * (largest**2).mean())


def test_alibi_with_flash_attention_raises() -> None:
    model = new_reference()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="cannot add ALiBi's biases: load the model with 'sdpa' or 'eager'"):
        model(torch.randint(16, 480, (1, 4)))


def test_unknown_position_embedding_type_raises() -> None:
    with pytest.raises(Exception, match="expected 'rotary' \\(7B\\) or 'alibi' \\(13B\\)"):
        BaichuanConfig(position_embedding_type="rope")


def test_alibi_attention_has_no_tp_plan() -> None:
    assert not any("self_attn" in name for name in BaichuanConfig().base_model_tp_plan)
    assert any("self_attn" in name for name in BaichuanConfig(max_position_embeddings=64).base_model_tp_plan)
