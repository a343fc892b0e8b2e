"""GGUF files of T5 models: an encoder and a decoder, written like llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import assert_same, problems
from gguf_architectures import Arrays, Case, write
from transformers import T5Config, UMT5Config

from nrl_models import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification, CheckpointError
from nrl_models.common.gguf.gguf_tables import upstream_source
from nrl_models.testing.case import randomize

KEYS: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_epsilon": 1e-6,
    "attention.relative_buckets_count": 32,
    "decoder_start_token_id": 0,
    "vocab_size": 320,
}
HEAD = "lm_head.weight"
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
MODELS = {
    "T5": (T5Config, "Tiny"),
    "UMT5": (UMT5Config, "Tiny umt5"),  # transformers decides by the file's title
}


def convert(name: str, array: Any, config: Any) -> Arrays:
    return {} if name in COPIES else {name: array}  # llama.cpp writes the shared embeddings once


def write_model(
    file: Path,
    kind: str = "T5",
    activation: str = "gated-gelu",
    *,
    has_head: bool = True,
    decoders: int = 2,
    start: int = 0,
) -> Any:
    """Write a random model and return it. Without a head, the file ties it to the embeddings."""
    config_class, title = MODELS[kind]
    config = config_class(
        vocab_size=320,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_decoder_layers=decoders,
        num_heads=4,
        feed_forward_proj=activation,
    )
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    randomize(model)
    head = {"output.weight": torch.randn(320, 64).numpy()} if has_head else {}
    keys = KEYS | {"decoder_start_token_id": start} | ({"decoder_block_count": decoders} if decoders != 2 else {})
    write(file, model, "t5", Case(config, keys, convert), extra=head, title=title)
    return model


def hidden_states(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(2, 20)[None], decoder_input_ids=torch.arange(4, 10)[None], output_hidden_states=True)


def base_model_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("transformer."): value for name, value in tensors.items() if name != HEAD}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("has_head", [True, False])
def test_base_model_round_trip(kind: str, has_head: bool, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", kind, has_head=has_head)
    loaded, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded).__name__ == f"{kind}Model"
    assert info["unexpected_keys"] == ({HEAD} if has_head else set())
    assert_same(loaded.state_dict(), base_model_tensors(model.state_dict()))
    source, keywords = upstream_source(tmp_path)
    assert_same(loaded.state_dict(), transformers.AutoModel.from_pretrained(source, **keywords).state_dict())
    expected = hidden_states(model).decoder_hidden_states[-1]
    assert torch.equal(hidden_states(loaded).last_hidden_state, expected)


@pytest.mark.parametrize("activation", ["relu", "gated-gelu"])
def test_activation_is_gated_gelu_or_relu(activation: str, tmp_path: Path) -> None:
    """No metadata key stores the activation. transformers reads all files as gated ReLU."""
    model = write_model(tmp_path / "model.gguf", activation=activation)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert_same(loaded.state_dict(), base_model_tensors(model.state_dict()))
    expected = hidden_states(model).decoder_hidden_states[-1]
    assert torch.equal(hidden_states(loaded).last_hidden_state, expected)


def test_decoder_with_different_depth(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", decoders=1)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert_same(loaded.state_dict(), base_model_tensors(model.state_dict()))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_classifiers_with_new_head(auto: Any, kind: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", kind)
    loaded = auto.from_pretrained(tmp_path, new_head=True)
    encoder_tensors = {
        name: value for name, value in base_model_tensors(loaded.state_dict()).items() if "class" not in name
    }
    assert_same(
        encoder_tensors,
        {name: value for name, value in base_model_tensors(model.state_dict()).items() if name in encoder_tensors},
    )
    assert "encoder.block.1.layer.1.DenseReluDense.wi_1.weight" in encoder_tensors


@pytest.mark.parametrize("kind", MODELS)
def test_classifier_starts_decoder_with_token_of_file(kind: str, tmp_path: Path) -> None:
    config = write_model(tmp_path / "model.gguf", kind, start=7).config
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, new_head=True, num_labels=2)
    config.decoder_start_token_id, config.num_labels = 7, 2
    expected = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    expected.load_state_dict(loaded.state_dict())
    ids = torch.tensor([[5, 6, 8, 1]])
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, expected(input_ids=ids).logits)


def test_incomplete_file_raises(tmp_path: Path) -> None:
    """Other missing or unexpected tensors still raise if the file has an extra head."""
    write_model(tmp_path / "deep.gguf", decoders=1)
    content = (tmp_path / "deep.gguf").read_bytes()
    (tmp_path / "deep.gguf").write_bytes(content.replace(b"dec.blk.0.attn_q.weight", b"dec.blk.7.attn_q.weight"))
    with pytest.raises(CheckpointError) as raised:
        AutoModel.from_pretrained(tmp_path)
    assert problems(raised.value) == {
        ("missing", "decoder.block.0.layer.0.SelfAttention.q.weight"),
        ("unexpected", "dec.blk.7.attn_q.weight"),
    }
