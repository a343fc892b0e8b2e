"""The multi-token prediction (MTP) layer as a module: its output, its training, and its weights in files."""

from __future__ import annotations

import copy
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import assert_same, edit_weights, stored

from nrl_models import AutoModelForCausalLM, BackendConfig, MTPLayer, registry
from nrl_models.common.state_dict.mtp import MTPNames, MTPParts
from nrl_models.errors import StateDictError, UnknownArgumentError
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.mtp_weights import mtp_tensors

NUMBERED, PREFIXED, LATENTS = "Glm4MoeForCausalLM", "Qwen3NextForCausalLM", "DeepseekV3ForCausalLM"
ALL = [NUMBERED, PREFIXED, LATENTS, "Glm4MoeLiteForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"]
TOKENS = torch.randint(5, 200, (2, 12), generator=torch.Generator().manual_seed(0))


def mtp_layer_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a trainable MTP layer as in checkpoints: random, except for the model's embeddings.

    Args:
        model: A model of a family with an `mtp_form`. Its last decoder layer with `self_attn` is the template.
    """
    hub_state = model.state_dict_adapter.to_hf(model.state_dict())
    parts = MTPParts.of(model.mtp_form, MTPNames(model).first)
    attention_names = [name for name in hub_state if name.startswith("model.") and ".self_attn." in name]
    (like,) = re.findall(r"^model\.(?:language_model\.)?layers\.\d+\.", attention_names[-1])
    width = model.config.hidden_size
    tensors = {
        parts.layer + name.removeprefix(like): 0.1 * torch.randn_like(tensor)
        for name, tensor in hub_state.items()
        if name.startswith(like)
    }
    for part in (parts.embedding_norm, parts.hidden_norm, parts.norm):
        tensors[f"{part}.weight"] = 1 + 0.1 * torch.randn(width, dtype=model.dtype)
    tensors[f"{parts.joint}.weight"] = torch.randn(width, 2 * width, dtype=model.dtype) / width**0.5
    for part, embeddings in (
        (parts.input, model.get_input_embeddings()),
        (parts.output, model.get_output_embeddings()),
    ):
        if part:
            tensors[f"{part}.weight"] = embeddings.weight.detach().clone()
    return tensors


def published(architecture: str, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save a checkpoint with an MTP layer in fp64, and return it with the layer's tensors."""
    model = copy.deepcopy(FamilyCase(registry.model_class(architecture)).model(torch.float64))
    model.save_pretrained(folder)
    torch.manual_seed(1)
    mtp = mtp_layer_tensors(model)
    edit_weights(folder, lambda tensors: tensors.update(mtp))
    return folder, mtp


def loaded(architecture: str, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    folder, mtp = published(architecture, folder)
    return read(folder), mtp


def read(folder: Path) -> Any:
    """Load in fp64, which does not group experts."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, backend=BackendConfig(experts="eager")
    ).eval()  # fmt: skip


def last_hidden(model: Any, input_ids: torch.Tensor = TOKENS, **options: Any) -> torch.Tensor:
    return model(input_ids, output_hidden_states=True, **options).hidden_states[-1]


def reference_logits(model: Any, mtp: dict[str, torch.Tensor], folder: Path) -> torch.Tensor:
    """Compute the logits with transformers' decoder class, with the MTP layer as an additional decoder layer."""
    parts, number = MTPParts.of(model.mtp_form, MTPNames(model).first), model.config.num_hidden_layers
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = number + 1
    for key, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if getattr(config, key, None):
            setattr(config, key, [*getattr(config, key), kind])
    extra_layer = {
        name.replace(parts.layer, f"model.layers.{number}."): tensor
        for name, tensor in mtp.items()
        if name.startswith(parts.layer) and name.removesuffix(".weight") not in parts.others
    }
    edit_weights(folder, lambda tensors: [tensors.pop(name) for name in mtp] and tensors.update(extra_layer))
    reference = type(model).reference_class()
    decoder = reference.from_pretrained(
        folder, config=config, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval().model  # fmt: skip

    def norm(name: str, values: torch.Tensor) -> torch.Tensor:
        module = copy.deepcopy(decoder.norm)
        module.weight.data.copy_(mtp[f"{name}.weight"])
        return module(values)

    embeddings = decoder.embed_tokens(TOKENS[:, 1:-1])
    if parts.input:
        embeddings[:, 0] = 0.0
    joined = torch.cat(
        [norm(parts.embedding_norm, embeddings), norm(parts.hidden_norm, last_hidden(model)[:, :-2])], -1
    )  # fmt: skip
    joined = joined @ mtp[f"{parts.joint}.weight"].T
    length = joined.shape[1]
    positions = torch.arange(length)[None]
    # Before 5.23, the class of a vision-language model requires positions per axis.
    axes = positions[None].expand(3, -1, -1) if hasattr(decoder.rotary_emb, "mrope_section") else positions
    output = decoder.layers[number](
        joined,
        attention_mask=torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None],
        position_ids=positions,
        position_embeddings=decoder.rotary_emb(joined, axes),
    )
    output = output[0] if isinstance(output, tuple) else output
    return norm(parts.norm, output) @ model.lm_head.weight.T


@pytest.mark.long
@pytest.mark.parametrize("architecture", ALL)
def test_mtp_layer_matches_transformers_decoder_layer(architecture: str, tmp_path: Path) -> None:
    model, mtp = loaded(architecture, tmp_path / "published")
    layer = MTPLayer(model)
    with torch.no_grad():
        output = layer(last_hidden(model), TOKENS)
        expected = reference_logits(model, mtp, tmp_path / "published")
    torch.testing.assert_close(output.logits, expected, rtol=1e-5, atol=1e-5)
    loss = F.cross_entropy(expected.flatten(0, 1).float(), TOKENS[:, 2:].flatten())
    torch.testing.assert_close(output.loss, loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("architecture", [NUMBERED, PREFIXED])
def test_trained_weights_are_saved_and_exported(architecture: str, tmp_path: Path) -> None:
    model, mtp = loaded(architecture, tmp_path / "published")
    before, names = model.state_dict(), [name for name, _ in model.named_parameters()]
    layer = MTPLayer(model)
    adapter = model.state_dict_adapter
    assert_same({name: tensor for name, tensor in adapter.iter_export(model) if name in mtp}, mtp)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = layer(last_hidden(model), TOKENS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert [name for name, _ in model.named_parameters()] == names
    assert all(parameter.grad is None for parameter in model.parameters()), "only the MTP layer is trained"
    assert_same(model.state_dict(), before)

    exported = dict(adapter.iter_export(model))
    assert [name for name, _, _ in adapter.export_plan()] == list(exported)
    parts = MTPParts.of(model.mtp_form, MTPNames(model).first)
    embeddings = {f"{part}.weight" for part in (parts.input, parts.output) if part}
    corrections = {name for name in mtp if name.endswith("e_score_correction_bias")}  # buffers
    assert {name for name in mtp if torch.equal(exported[name], mtp[name])} == embeddings | corrections
    assert_same(
        {name: exported[name] for name in exported.keys() - mtp.keys()}, dict(stored_without_mtp(tmp_path, mtp))
    )
    model.save_pretrained(tmp_path / "again")
    again = read(tmp_path / "again")
    with torch.no_grad():
        same = MTPLayer(again)(last_hidden(again), TOKENS).loss, layer(last_hidden(model), TOKENS).loss
    torch.testing.assert_close(*same)


def stored_without_mtp(folder: Path, mtp: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in stored(folder / "published").items() if name not in mtp}


def test_export_has_trained_output_embedding(tmp_path: Path) -> None:
    model, _ = loaded(NUMBERED, tmp_path)
    MTPLayer(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    exported = dict(model.state_dict_adapter.iter_export(model))
    assert torch.equal(exported[f"model.layers.{MTPNames(model).first}.shared_head.head.weight"], model.lm_head.weight)


def test_copies_are_independent_of_later_training(tmp_path: Path) -> None:
    model, mtp = loaded(PREFIXED, tmp_path)
    layer = MTPLayer(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    with torch.no_grad():
        layer.joint.weight.zero_()
    for copied in copies:
        exported = dict(copied.state_dict_adapter.iter_export(copied))
        assert_same({name: exported[name] for name in mtp}, mtp)
    assert not dict(model.state_dict_adapter.iter_export(model))["mtp.fc.weight"].any()


def test_loss_through_model_trains_the_model(tmp_path: Path) -> None:
    model, _ = loaded(PREFIXED, tmp_path)
    model.requires_grad_(False)
    layer = MTPLayer(model)
    assert all(parameter.requires_grad for parameter in layer.parameters()), "only the model is frozen"
    model.requires_grad_(True)
    layer(last_hidden(model), TOKENS, through_model=True).loss.backward()
    for part in (model.lm_head, model.model.embed_tokens, model.model.layers[0], layer):
        assert all(parameter.grad is not None for parameter in part.parameters())


@pytest.mark.parametrize("architecture", [NUMBERED, PREFIXED])
def test_padding_does_not_change_loss_or_logits(architecture: str, tmp_path: Path) -> None:
    model, _ = loaded(architecture, tmp_path)
    layer = MTPLayer(model)
    alone = layer(last_hidden(model, TOKENS[:1]), TOKENS[:1])
    for before, after in ((0, 5), (3, 0)):
        input_ids = F.pad(TOKENS[:1], (before, after), value=7)
        mask = F.pad(torch.ones_like(TOKENS[:1]), (before, after))
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        for position_kwargs in ({}, {"position_ids": positions}):
            output = layer(
                last_hidden(model, input_ids, attention_mask=mask, **position_kwargs),
                input_ids,
                attention_mask=mask,
                **position_kwargs,
            )
            torch.testing.assert_close(output.loss, alone.loss, rtol=1e-6, atol=1e-7)
            end = before + alone.logits.shape[1]
            torch.testing.assert_close(output.logits[:, before:end], alone.logits, rtol=1e-5, atol=1e-5)


def test_packed_documents_and_labels(tmp_path: Path) -> None:
    model, _ = loaded(NUMBERED, tmp_path)
    layer = MTPLayer(model)
    rows = [TOKENS[:1, :7], TOKENS[1:, :5]]
    packed, positions = torch.cat(rows, 1), torch.cat([torch.arange(7), torch.arange(5)])[None]
    output = layer(last_hidden(model, packed, position_ids=positions), packed, position_ids=positions)
    alone = [layer(last_hidden(model, row), row) for row in rows]
    torch.testing.assert_close(output.logits[:, :5], alone[0].logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.logits[:, 7:], alone[1].logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.loss, (5 * alone[0].loss + 3 * alone[1].loss) / 8, rtol=1e-5, atol=1e-7)
    labels = rows[0].clone()
    labels[:, :4] = -100
    labeled_loss = F.cross_entropy(alone[0].logits[0, 2:].float(), rows[0][0, 4:])
    torch.testing.assert_close(layer(last_hidden(model, rows[0]), rows[0], labels=labels).loss, labeled_loss)
    masked_loss = layer(last_hidden(model, rows[0]), rows[0], labels=torch.full_like(labels, -100)).loss
    assert masked_loss == 0.0


def test_mtp_layer_uses_attn_implementation_of_model(tmp_path: Path) -> None:
    folder, _ = published(NUMBERED, tmp_path)
    for attention in ("eager", "sdpa"):
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
        layer = MTPLayer(model)
        assert layer.decoder.config._attn_implementation == attention
        assert type(layer.decoder.layers[0].self_attn) is type(model.model.layers[0].self_attn)


# Errors


def test_untrainable_mtp_layer_raises(tmp_path: Path) -> None:
    folder, _ = published(NUMBERED, tmp_path / "numbered")
    without = AutoModelForCausalLM.from_pretrained(folder, mtp="drop")
    with pytest.raises(UnknownArgumentError, match="loaded without MTP weights"):
        MTPLayer(without)
    other = AutoModelForCausalLM.from_pretrained(folder)
    other.config.num_nextn_predict_layers = 2
    with pytest.raises(UnknownArgumentError, match=r"num_nextn_predict_layers=2: one MTP layer can be trained"):
        MTPLayer(other)
    mimo = FamilyCase(registry.model_class("MiMoV2FlashForCausalLM")).model()
    with pytest.raises(UnknownArgumentError, match="MiMoV2FlashForCausalLM: its MTP layers cannot be trained here"):
        MTPLayer(mimo)
    with pytest.raises(ValueError, match=r"as of hidden_states \(2, 12\), with at least three tokens"):
        MTPLayer(AutoModelForCausalLM.from_pretrained(folder))(torch.zeros(2, 12, 64), TOKENS[:, :5])


def test_vision_language_model_raises(tmp_path: Path) -> None:
    architecture = "Qwen3_5ForConditionalGeneration"
    reference = FamilyCase(registry.model_class(architecture)).reference()
    reference.save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda tensors: tensors.update(mtp_tensors(reference)))
    with pytest.raises(UnknownArgumentError, match="accepts images"):
        MTPLayer(registry.model_class(architecture).from_pretrained(tmp_path))


def test_error_lists_mismatched_decoder_tensors(tmp_path: Path) -> None:
    folder, mtp = published(NUMBERED, tmp_path)
    layer = "model.layers.2."
    assert f"{layer}self_attn.q_proj.weight" in mtp

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(f"{layer}self_attn.q_proj.weight")
        tensors[f"{layer}mlp.experts.0.down_proj.weight"] = torch.ones(3, 3)
        tensors[f"{layer}mlp.strange.weight"] = torch.ones(3)

    edit_weights(folder, damage)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(StateDictError) as raised:
        MTPLayer(model)
    assert {problem.subject.removeprefix(layer) for problem in raised.value.problems} == {
        "self_attn.q_proj.weight", "mlp.experts.0.down_proj.weight", "mlp.strange.weight",
    }  # fmt: skip


def test_error_lists_mismatched_norms_and_heads(tmp_path: Path) -> None:
    folder, _ = published(NUMBERED, tmp_path)
    layer = "model.layers.2."

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(f"{layer}shared_head.norm.weight")
        tensors[f"{layer}enorm.weight"] = torch.ones(3)
        tensors[f"{layer}shared_head.head.weight"] += 1

    edit_weights(folder, damage)
    with pytest.raises(StateDictError) as raised:
        MTPLayer(AutoModelForCausalLM.from_pretrained(folder))
    assert {problem.subject.removeprefix(layer) for problem in raised.value.problems} == {
        "shared_head.norm.weight", "enorm.weight", "shared_head.head.weight",
    }  # fmt: skip
