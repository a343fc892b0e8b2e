"""`certify --layers`: a checkpoint of the first layers loads, and has their weights; the certificate is narrower."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import new_model
from recipe_inputs import byte_tokenizer
from transformers import LlamaConfig

from nrl_models import AutoModelForCausalLM, registry
from nrl_models.auto import auto_class_for
from nrl_models.certify import Answer, Status, Validity, all_checks, certified, certify, verify
from nrl_models.certify.first_layers import write_first_layers
from nrl_models.certify.report import badge
from nrl_models.errors import CheckpointError, ConfigurationError
from nrl_models.parity.noise import logits_of
from nrl_models.testing.tiny import tiny_config

ARCHITECTURES = [
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3NextForCausalLM",
    "FalconForCausalLM",
]
LAYERS = 4


def saved(name: str, folder: Path, layers: int = LAYERS) -> Path:
    """Save a tiny model with this many layers, in several files."""
    model_class = registry.model_class(name)
    reference = model_class.reference_class()
    values = dict(model_class.tiny)
    config = tiny_config(reference.config_class, values, reference)
    text = config.get_text_config()
    for key, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, key, (value * layers)[:layers])
    text.num_hidden_layers = layers
    torch.manual_seed(0)
    reference._from_config(config).save_pretrained(folder, max_shard_size="1MB")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_first_layers_load_as_model(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "complete")
    truncated = write_first_layers(folder, 2, tmp_path / "truncated")
    complete, model = (auto_class_for(path).from_pretrained(path, dtype=torch.float32) for path in (folder, truncated))
    assert model.config.get_text_config().num_hidden_layers == 2
    expected, actual = complete.state_dict(), model.state_dict()
    assert actual.keys() < expected.keys()
    assert all(torch.equal(expected[key], actual[key]) for key in actual)
    assert sum(path.stat().st_size for path in truncated.glob("*.safetensors")) < sum(
        path.stat().st_size for path in folder.glob("*.safetensors")
    )


def test_first_layers_logits_match_truncated_model(tmp_path: Path) -> None:
    truncated = write_first_layers(saved("LlamaForCausalLM", tmp_path / "complete"), 3, tmp_path / "truncated")
    complete = AutoModelForCausalLM.from_pretrained(tmp_path / "complete").eval()
    model = AutoModelForCausalLM.from_pretrained(truncated).eval()
    complete.model.layers = complete.model.layers[:3]
    inputs = {"input_ids": torch.arange(12)[None]}
    with torch.no_grad():
        assert torch.equal(logits_of(model, inputs), logits_of(complete, inputs))


def test_tokenizer_is_copied(tmp_path: Path) -> None:
    folder = saved("LlamaForCausalLM", tmp_path / "complete")
    byte_tokenizer(LlamaConfig(vocab_size=512)).save_pretrained(folder)
    (folder / "notes.md").write_text("not part of the checkpoint")
    truncated = write_first_layers(folder, 1, tmp_path / "truncated")
    assert (truncated / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not (truncated / "notes.md").exists()


@pytest.mark.parametrize("layers", [LAYERS, LAYERS + 1])
def test_too_many_layers_raise(layers: int, tmp_path: Path) -> None:
    folder = saved("LlamaForCausalLM", tmp_path / "complete")
    with pytest.raises(ConfigurationError, match=f"the model has {LAYERS} layers"):
        write_first_layers(folder, layers, tmp_path / "truncated")
    assert not (tmp_path / "truncated").exists()


def test_tensor_spanning_all_layers_raises(tmp_path: Path) -> None:
    folder = saved("Gemma3nForCausalLM", tmp_path / "complete")
    with pytest.raises(CheckpointError, match="spans all layers"):
        write_first_layers(folder, 2, tmp_path / "truncated")


def checkpoint(folder: Path) -> Path:
    config = tiny_config(LlamaConfig)
    config.max_position_embeddings = 160
    new_model(config).save_pretrained(folder)
    byte_tokenizer(config).save_pretrained(folder)
    return folder


def test_first_layers_certificate_is_narrower(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "tiny")
    selected = ("files", "tokenizer", "weights", "layers", "logits", "gradients")
    certificate = certify(folder, layers=1, out=tmp_path / "out", only=selected)
    assert {result.name for result in certificate.results if result.status is Status.PASSED} == set(selected)
    assert certificate.options["layers"] == 1
    assert "only the first layer" in certificate.sentence
    files = next(result for result in certificate.results if result.name == "files")
    assert files.summary.startswith("12 parameters loaded")  # 9 of a layer; embeddings, norm, head
    verification = verify(tmp_path / "out" / "certificate.json", folder)
    assert verification.validity is Validity.NARROWER
    assert verification.reasons == ("layers: only the first layer was checked",)
    assert "not decided, the first layer</text>" in badge(certificate)


def test_resumed_run_reuses_first_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, truncated = checkpoint(tmp_path / "tiny"), tmp_path / "out" / "first-layers"
    written: list[int] = []

    def write(source: Path, layers: int, target: Path) -> Path:
        written.append(layers)
        return write_first_layers(source, layers, target)

    monkeypatch.setattr(all_checks, "write_first_layers", write)

    def run(**options: bool) -> None:
        certificate = certify(folder, layers=1, out=tmp_path / "out", only=("files",), **options)
        assert certificate.results[0].status is Status.PASSED

    run()
    run()
    assert len(written) == 1
    weights = next(truncated.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")  # damaged, or edited
    run()
    assert len(written) == 2
    (truncated / "tokenizer.json").unlink()
    run()
    assert len(written) == 3
    run(fresh=True)
    assert len(written) == 4
    other = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        other.lm_head.weight.add_(1.0)
    other.save_pretrained(folder)  # another checkpoint, and the same output directory
    run()
    assert len(written) == 5
    assert torch.equal(AutoModelForCausalLM.from_pretrained(truncated).lm_head.weight, other.lm_head.weight)


def test_checks_exceeding_memory_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "tiny")
    monkeypatch.setattr(certified, "available_memory", lambda device: 1_000_000)
    certificate = certify(folder, engine="hf-generate", out=tmp_path / "out")
    assert certificate.answer is Answer.NOT_DECIDED
    by_name = {result.name: result for result in certificate.results}
    assert by_name["files"].status is Status.LEFT_OUT
    assert "for 1 copy of the weights in fp32, 1.0 MB are available" in by_name["files"].summary
    assert "--layers 4" in by_name["logits"].summary
    assert "needs 19.9 MB of memory for 4 copies" in by_name["logits"].summary
    assert by_name["sharding"].status is Status.PASSED  # on meta
