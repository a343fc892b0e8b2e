"""Faults of a checkpoint's files, configuration, tokenizer and draft layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoints import WEIGHTS, edit_config, edit_weights

from nrl_models.certify import Side
from nrl_models.common.flags import MTPForm
from nrl_models.common.state_dict.mtp import MTPParts
from tests.certify.checkpoints_of import Edit

UP = "model.layers.1.mlp.up_proj.weight"

Tensors = dict[str, torch.Tensor]


def weights(edit: Callable[[Tensors], object]) -> Edit:
    return lambda folder: edit_weights(folder, edit)


def config(**values: Any) -> Edit:
    return lambda folder: edit_config(folder, **values)


def text(name: str, change: Callable[[str], str]) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).write_text(change((folder / name).read_text()))

    return edit


def content(name: str, change: Callable[[Any], object]) -> Edit:
    """Change a JSON file."""

    def edit(folder: Path) -> None:
        data = json.loads((folder / name).read_text())
        change(data)
        (folder / name).write_text(json.dumps(data))

    return edit


def truncate(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1000])


def with_token(number: int) -> Edit:
    def add(data: Any) -> None:
        data["model"]["vocab"]["<|new|>"] = number
        data["added_tokens"].append({**data["added_tokens"][0], "id": number, "content": "<|new|>"})

    return content("tokenizer.json", add)


def index_to_a_missing_shard(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    names = {"lm_head.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def poison(value: float) -> Edit:
    return weights(lambda tensors: tensors[UP][3].fill_(value))


LLAMA: dict[str, tuple[Side, Edit]] = {
    "a tensor is missing": (Side.FILES, weights(lambda tensors: tensors.pop(UP))),
    "a surplus tensor": (Side.FILES, weights(lambda tensors: tensors.update({"model.extra": torch.ones(2)}))),
    "a tensor has another shape": (Side.FILES, weights(lambda tensors: tensors.update({UP: tensors[UP][:-1].clone()}))),
    "a tensor is transposed": (Side.FILES, weights(lambda tensors: tensors.update({UP: tensors[UP].T.contiguous()}))),
    "a tensor of integers": (Side.FILES, weights(lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)}))),
    "NaN in a tensor": (Side.FILES, poison(float("nan"))),
    "infinity in a tensor": (Side.FILES, poison(float("inf"))),
    "a file cut off": (Side.FILES, truncate),
    "a file of zeros": (Side.FILES, lambda folder: (folder / WEIGHTS).write_bytes(bytes(5000))),
    "a shard that is missing": (Side.FILES, index_to_a_missing_shard),
    "config.json is no JSON": (Side.CONFIG, text("config.json", lambda data: data[:-20])),
    "a misspelled key": (Side.CONFIG, config(rope_thet=5e5)),
    "a key of another model": (Side.CONFIG, config(final_logit_softcapping=30.0)),
    "an unknown activation": (Side.CONFIG, config(hidden_act="silly")),
    "an unknown architecture": (Side.CONFIG, config(architectures=["LamaForCausalML"], model_type="lama")),
    "another intermediate size": (Side.CONFIG, config(intermediate_size=96)),
    "too few layers": (Side.CONFIG, config(num_hidden_layers=1)),
    "too many layers": (Side.CONFIG, config(num_hidden_layers=3)),
    "heads that do not divide": (Side.CONFIG, config(num_attention_heads=7, head_dim=None)),
    "another vocabulary size": (Side.CONFIG, config(vocab_size=300)),
    "an unknown kind of RoPE": (Side.CONFIG, config(rope_parameters={"rope_type": "rope9", "rope_theta": 1e4})),
    "an end token outside the vocabulary": (Side.CONFIG, config(eos_token_id=99_999)),
    "an end token of generation outside": (
        Side.CONFIG,
        lambda folder: (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 99_999]})),
    ),
    "another end token of generation": (
        Side.CONFIG,
        lambda folder: (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 77})),
    ),
    "another end token in config.json only": (Side.CONFIG, config(eos_token_id=77)),
    "a doubled YaRN factor": (
        Side.CONFIG,
        config(
            max_position_embeddings=256,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ),
    "no positions": (Side.CONFIG, config(max_position_embeddings=0)),
    "an epsilon below 0": (Side.CONFIG, config(rms_norm_eps=-1.0)),
    "a padding token outside the vocabulary": (Side.CONFIG, config(pad_token_id=99_999)),
    "an integer dtype": (Side.CONFIG, config(dtype="int8")),
    "a temperature below 0": (
        Side.CONFIG,
        lambda folder: (folder / "generation_config.json").write_text(
            json.dumps({"do_sample": True, "temperature": -1.0})
        ),
    ),
    "more tokens than embedding rows": (Side.TOKENIZER, with_token(5000)),
    "two tokens with one id": (Side.TOKENIZER, with_token(40)),
    "tokenizer.json is no JSON": (Side.TOKENIZER, text("tokenizer.json", lambda data: data[:-20])),
    "a chat template that fails": (
        Side.TOKENIZER,
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] "),
    ),
    "a chat template without the message": (
        Side.TOKENIZER,
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0]['role'] }}"),
    ),
    "an empty chat template": (
        Side.TOKENIZER,
        lambda folder: (folder / "chat_template.jinja").write_text(""),
    ),
    "a chat template without a generation prompt": (
        Side.TOKENIZER,
        lambda folder: (folder / "chat_template.jinja").write_text(
            "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}{% endfor %}"
        ),
    ),
    "a tokenizer without words": (
        Side.TOKENIZER,
        content("tokenizer.json", lambda data: data["model"].update(vocab={"<pad>": 0, "<end>": 1})),
    ),
}
"""Faults of a Llama's checkpoint, with their source."""


def draft_tensors(tensors: Tensors, layers: int) -> Tensors:
    """Tensors of a draft layer for a Glm4Moe: those of the last decoder layer, norms and a projection."""
    parts = MTPParts.of(MTPForm.NUMBERED, layers)
    last = f"model.layers.{layers - 1}."
    drafts = {parts.layer + name.removeprefix(last): tensor.clone() for name, tensor in tensors.items() if last in name}
    norm = tensors["model.norm.weight"]
    generator = torch.Generator().manual_seed(0)
    width = len(norm)
    drafts |= {f"{name}.weight": norm.clone() for name in (parts.embedding_norm, parts.hidden_norm, parts.norm)}
    drafts[f"{parts.joint}.weight"] = torch.randn(width, 2 * width, generator=generator) / width
    drafts[f"{parts.input}.weight"] = tensors["model.embed_tokens.weight"].clone()
    drafts[f"{parts.output}.weight"] = tensors["lm_head.weight"].clone()
    return drafts


def drafted(change: Callable[[Tensors], object]) -> Edit:
    """Add a draft layer, changed by `change`, to a checkpoint."""

    def edit(folder: Path) -> None:
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        edit_config(folder, num_nextn_predict_layers=1)

        def add(tensors: Tensors) -> None:
            drafts = draft_tensors(tensors, layers)
            change(drafts)
            tensors.update(drafts)

        edit_weights(folder, add)

    return edit


def _name_of(drafts: Tensors, part: str) -> str:
    return next(name for name in drafts if name.endswith(part))


DRAFTS: dict[str, tuple[Side, Edit]] = {
    "a draft layer with NaN": (
        Side.FILES,
        drafted(lambda drafts: drafts[_name_of(drafts, "eh_proj.weight")][0].fill_(float("nan"))),
    ),
    "a draft layer of zeros": (Side.FILES, drafted(lambda drafts: drafts[_name_of(drafts, "o_proj.weight")].zero_())),
    "a draft layer that lacks a tensor": (
        Side.FILES,
        drafted(lambda drafts: drafts.pop(_name_of(drafts, "enorm.weight"))),
    ),
    "a draft layer with a transposed tensor": (
        Side.FILES,
        drafted(
            lambda drafts: drafts.update({(name := _name_of(drafts, "eh_proj.weight")): drafts[name].T.contiguous()})
        ),
    ),
    "a draft layer with other embeddings": (
        Side.FILES,
        drafted(lambda drafts: drafts[_name_of(drafts, "embed_tokens.weight")].mul_(2)),
    ),
}
"""Faults of a Glm4Moe's draft layer."""
