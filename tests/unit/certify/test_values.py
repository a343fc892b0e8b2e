"""Wrong values and weights that load without an error must not pass `certify`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import WEIGHTS, edit_config, edit_weights, new_model
from recipe_inputs import byte_tokenizer
from transformers import LlamaConfig, Qwen3MoeConfig

from nrl_models.certify import Certificate, Side, Status, certify
from nrl_models.diagnostics.rope_values import contradicting_rope
from nrl_models.testing.tiny import tiny_config

LAYERS = "model.layers."
LAST = f"{LAYERS}1."
CHECKS = ("files", "tokenizer", "values")

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(new_model(tiny_config(LlamaConfig)), tmp_path_factory.mktemp("values") / "tiny")


def saved(model: torch.nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    byte_tokenizer(model.config).save_pretrained(folder)
    return folder


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny, tmp_path / "copy")


def certified(folder: Path) -> Certificate:
    return certify(folder, only=CHECKS, out=folder.parent / "out")


def outcome(folder: Path, status: Status) -> tuple[str, Side | None]:
    (result,) = certified(folder).with_status(status)
    return result.summary, result.side


def test_correct_values_pass(tiny: Path) -> None:
    assert {result.name for result in certified(tiny).with_status(Status.PASSED)} == {*CHECKS}


@pytest.mark.parametrize(
    ("values", "summary"),
    [
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
            "rope_parameters.rope_theta is -1: expected more than 1",
        ),
        ({"pad_token_id": 99_999}, "Padding_idx must be within num_embeddings"),  # the model cannot be built
        ({"dtype": "int8"}, "torch.int8"),
    ],
)
def test_invalid_config_values_fail(copy: Path, values: dict[str, object], summary: str) -> None:
    edit_config(copy, **values)
    message, side = outcome(copy, Status.FAILED)
    assert summary in message
    assert side is Side.CONFIG


@pytest.mark.parametrize(
    ("values", "summary"),
    [
        ({"temperature": -1.0, "do_sample": True}, "temperature is -1.0, expected 0 to inf"),
        ({"top_p": 2.0, "do_sample": True}, "top_p is 2.0, expected 0 to 1"),
        ({"pad_token_id": 99_999}, "pad_token_id is 99999"),
    ],
)
def test_invalid_generation_config_values_fail(copy: Path, values: dict[str, object], summary: str) -> None:
    (copy / "generation_config.json").write_text(json.dumps(values))
    message, side = outcome(copy, Status.FAILED)
    assert summary in message
    assert side is Side.CONFIG


@pytest.mark.parametrize(
    ("values", "summary"),
    [
        ({"rms_norm_eps": 1.0}, "rms_norm_eps is 1, larger than 0.01"),
        ({"attention_dropout": 0.5}, "attention_dropout is 0.5"),
        ({"pad_token_id": -1}, "pad_token_id is -1"),
        ({"eos_token_id": 3}, "config.json has eos_token_id 3, but the tokenizer has eos_token_id 2"),
    ],
)
def test_implausible_values_are_not_decided(copy: Path, values: dict[str, object], summary: str) -> None:
    edit_config(copy, **values)
    (copy / "generation_config.json").unlink(missing_ok=True)
    assert summary in outcome(copy, Status.NOT_DECIDED)[0]


def copy_first_layer(tensors: Tensors) -> None:
    for name in list(tensors):
        if name.startswith(LAST):
            tensors[name] = tensors[name.replace(LAST, f"{LAYERS}0.")].clone()


@pytest.mark.parametrize(
    ("change", "summary"),
    [
        (lambda tensors: tensors[f"{LAST}self_attn.o_proj.weight"].zero_(), "zero weights"),
        (lambda tensors: tensors[f"{LAST}input_layernorm.weight"].zero_(), "zero weights"),
        (lambda tensors: tensors[f"{LAST}mlp.up_proj.weight"].mul_(1e4), "100 times as large as in another layer"),
        (lambda tensors: tensors["lm_head.weight"].zero_(), "zero weights: lm_head.weight"),
        (copy_first_layer, "equal weights"),
    ],
)
def test_implausible_weights_are_not_decided(copy: Path, change: Callable[[Tensors], object], summary: str) -> None:
    edit_weights(copy, change)
    assert summary in outcome(copy, Status.NOT_DECIDED)[0]


@pytest.mark.parametrize(("expert", "summary"), [(None, "zero weights"), (".experts.0.", "equal weights")])
def test_unsaved_experts_are_not_decided(tmp_path: Path, expert: str | None, summary: str) -> None:
    folder = saved(new_model(tiny_config(Qwen3MoeConfig)), tmp_path / "moe")

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            if ".experts.1." in name:
                other = tensors[name.replace(".experts.1.", expert)] if expert else torch.zeros_like(tensors[name])
                tensors[name] = other.clone()

    edit_weights(folder, change)
    message, _ = outcome(folder, Status.NOT_DECIDED)
    assert summary in message
    assert "[1]" in message


def test_index_with_missing_files_is_not_decided(copy: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00009-of-00009.safetensors"}}
    (copy / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert "names files that do not exist" in outcome(copy, Status.NOT_DECIDED)[0]


@pytest.mark.parametrize(
    ("template", "summary"),
    [("{{ messages[0]['role'] }}", "the chat template drops the message"), ("", "chat_template.jinja is empty")],
)
def test_chat_template_dropping_message_fails(copy: Path, template: str, summary: str) -> None:
    (copy / "chat_template.jinja").write_text(template)
    message, side = outcome(copy, Status.FAILED)
    assert summary in message
    assert side is Side.TOKENIZER


def test_chat_template_without_generation_prompt_fails(copy: Path) -> None:
    turns = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    (copy / "chat_template.jinja").write_text(turns)
    message, side = outcome(copy, Status.FAILED)
    assert "the chat template ignores add_generation_prompt: its prompt lacks '<|assistant|>'" in message
    assert side is Side.TOKENIZER


@pytest.mark.parametrize(
    "template",
    [
        # Mistral: the completion directly follows the user's turn.
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %} "
        "{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}",
        # The prompt opens a reasoning block, but assistant messages in the conversation have none.
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>{% endif %}",
        # gpt-oss: the model generates the channel.
        "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}final{% endif %}{{ m['content'] }}"
        "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        # The template raises for conversations with several messages.
        "{{ messages[0]['content'] }}{% if messages[1:] %}{{ raise_exception('one message only') }}{% endif %}",
    ],
)
def test_chat_templates_of_published_models_pass(copy: Path, template: str) -> None:
    (copy / "chat_template.jinja").write_text(template)
    assert not certified(copy).with_status(Status.FAILED)


def test_yarn_factor_contradicting_length_fails(copy: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    edit_config(copy, max_position_embeddings=256, rope_parameters=rope | {"factor": 8.0})
    message, side = outcome(copy, Status.FAILED)
    assert (
        "rope_parameters.factor is 8, but max_position_embeddings 256 / original_max_position_embeddings 64" in message
    )
    assert "set the factor to 4, or max_position_embeddings to 512" in message
    assert side is Side.CONFIG


@pytest.mark.parametrize(
    ("longest", "rope"),
    [
        (256, {"rope_type": "yarn", "factor": 4.0}),
        (80, {"rope_type": "yarn", "factor": 4.0}),  # Qwen3: YaRN is enabled by hand, with the original length
        (1024, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),  # Llama 3.1
    ],
)
def test_rope_of_published_models_passes(copy: Path, longest: int, rope: dict[str, object]) -> None:
    rope |= {"rope_theta": 1e4, "original_max_position_embeddings": 64}
    edit_config(copy, max_position_embeddings=longest, rope_parameters=rope)
    assert {result.name for result in certified(copy).with_status(Status.PASSED)} == {*CHECKS}


@pytest.mark.parametrize(
    ("rope", "values"),
    [
        ({"factor": 3.0, "mrope_section": [2, 1, 1]}, {}),  # Qwen3-VL
        ({"factor": 16.0}, {"max_sequence_length": 1024}),  # Yarn-Mistral-7b-128k
    ],
)
def test_yarn_factors_of_published_models_pass(rope: dict[str, object], values: dict[str, int]) -> None:
    rope |= {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    assert not contradicting_rope(LlamaConfig(max_position_embeddings=256, rope_parameters=rope, **values))


def test_class_default_end_token_is_not_compared(copy: Path) -> None:
    """A text configuration of Llama 3 in a vision model may have no end token. Llama's default is ordinary text."""
    config = json.loads((copy / "config.json").read_text())
    del config["eos_token_id"]
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    byte_tokenizer(LlamaConfig(eos_token_id=3)).save_pretrained(copy)
    assert {result.name for result in certified(copy).with_status(Status.PASSED)} == {*CHECKS}
    (copy / "generation_config.json").unlink()  # generation then ends at the default
    assert "config.json has eos_token_id 2" in outcome(copy, Status.NOT_DECIDED)[0]


def test_non_integer_token_id_error_names_key(copy: Path) -> None:
    edit_config(copy, bos_token_id="<s>")
    message, _ = outcome(copy, Status.FAILED)
    assert "bos_token_id" in message


def test_pretraining_tp_is_noted(copy: Path) -> None:
    edit_config(copy, pretraining_tp=2)
    summaries = {result.name: result.summary for result in certified(copy).with_status(Status.PASSED)}
    assert "config.json pretraining_tp is 2 and has no effect" in summaries["values"]
