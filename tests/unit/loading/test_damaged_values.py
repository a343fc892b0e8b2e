"""Invalid configuration values raise typed errors that name the key, before weights are read."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nrl_models import AutoModelForCausalLM, AutoModelForSequenceClassification, registry
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.checkpoint.limits import check_limits, limited_build
from nrl_models.errors import CheckpointError, ConfigurationError, NRLModelsError, UnknownArgumentError
from nrl_models.testing.case import FamilyCase


@pytest.fixture(autouse=True)
def fail_on_weight_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(CheckpointFiles, "read", fail)
    monkeypatch.setattr(CheckpointFiles, "read_joined", fail)


@pytest.mark.long
@pytest.mark.parametrize(
    ("values", "subjects", "message"),
    [
        ({"num_attention_heads": 0}, "config.json", "num_attention_heads is 0: ZeroDivisionError"),
        ({"hidden_size": -256}, "hidden_size", "negative"),
        ({"intermediate_size": -1}, "intermediate_size", "negative"),
        ({"vocab_size": 10**12}, "vocab_size", "expected at most 67,108,864"),
        ({"max_position_embeddings": 10**10}, "max_position_embeddings", "expected at most 67,108,864"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers", "expected at most 20,000"),
        ({"num_labels": 2**31}, "num_labels", "expected at most 1,048,576"),
        ({"num_hidden_layers": 9_000}, "the configuration", r"more than 20,\d+ tensors, but the checkpoint has"),
        ({"head_dim": 2**31}, "head_dim", "expected at most"),
        ({"hidden_act": "silly"}, "hidden_act", "is 'silly': KeyError"),
        ({"rope_parameters": {"rope_type": "yarm", "rope_theta": 1.0}}, "rope_parameters.rope_type", "is 'yarm'; only"),
        ({"rope_parameters": {"rope_type": [], "rope_theta": 1.0}}, "", "unhashable"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "1"}}, "rope_parameters.rope_theta", "TypeError"),
        ({"rope_theta": "10000.0", "rope_parameters": None}, "", "TypeError"),
        ({"dtype": "float23"}, "config.json", "dtype is 'float23': AttributeError"),
        ({"dtype": None, "torch_dtype": "torch.bfloat16"}, "config.json", "torch_dtype is 'torch.bfloat16'"),
        ({"dtype": "int8"}, "dtype", "is torch.int8, expected a floating-point dtype such as bfloat16"),
        ({"pad_token_id": 512}, "pad_token_id, vocab_size", "is 512: AssertionError: Padding_idx"),
        ({"model_type": []}, "model_type", r"is \[\], expected a name"),
        ({"architectures": 3}, "architectures", "is 3, expected a list of names"),
        ({"quantization_config": 3}, "config.json", "quantization_config is 3: AttributeError"),
        ({"quantization_config": {"quant_method": []}}, "", "unhashable"),
    ],
    ids=str,
)
def test_invalid_config_value_raises(folder: Path, values: dict[str, Any], subjects: str, message: str) -> None:
    edit_config(folder, **values)
    with pytest.raises((CheckpointError, ConfigurationError), match=message) as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    if subjects:
        assert sorted(problem.subject for problem in caught.value.problems) == subjects.split(", ")


@pytest.mark.parametrize("key", ["num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers"])
@pytest.mark.parametrize("value", [-2, -1])
def test_negative_size_raises_with_its_key(folder: Path, key: str, value: int) -> None:
    edit_config(folder, **{key: value})
    with pytest.raises(ConfigurationError, match=rf"{key}: is {value}[:,]") as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert [problem.subject for problem in caught.value.problems] == [key]


@pytest.mark.parametrize("key", ["num_local_experts", "intermediate_size", "num_key_value_heads"])
def test_negative_size_that_modules_copy_raises_with_its_key(key: str) -> None:
    config = copy.deepcopy(FamilyCase(registry.model_class("MixtralForCausalLM")).config)
    setattr(config, key, -2)
    with pytest.raises(ConfigurationError, match=f"{key}: is -2: RuntimeError") as caught:
        AutoModelForCausalLM.from_config(config)
    assert [problem.subject for problem in caught.value.problems] == [key]


def test_negative_number_of_layers_as_keyword_raises(folder: Path) -> None:
    with pytest.raises(UnknownArgumentError, match="num_hidden_layers is -1, expected at least 0 layers"):
        AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=-1)


@pytest.mark.parametrize(
    ("keywords", "subject", "advice"),
    [
        ({"id2label": None}, "id2label", "pass a different value for id2label, or leave it out"),
        ({"id2label": 5}, "id2label", "pass a different value for id2label, or leave it out"),
        ({"attn_implementation": 5}, "attn_implementation", "pass a different value for attn_implementation,"),
        ({"experts_implementation": "grouped_mm"}, "experts_implementation", "pass a different value for experts_"),
        (
            {"hidden_act": "silly", "num_labels": 2},
            "hidden_act",
            "pass a different value for hidden_act, or leave it out",
        ),
    ],
    ids=str,
)
def test_error_names_invalid_keyword(folder: Path, keywords: dict[str, Any], subject: str, advice: str) -> None:
    # Before 5.18, transformers rejects some of these values before the configuration is built.
    expected = rf"{subject}(: was passed as |=).*\n  What to do: {advice}"
    with pytest.raises((ConfigurationError, UnknownArgumentError), match=expected) as caught:
        AutoModelForSequenceClassification.from_pretrained(folder, **keywords)
    if isinstance(caught.value, ConfigurationError):
        assert [problem.subject for problem in caught.value.problems] == [subject]


def test_error_names_config_key_despite_valid_keywords(folder: Path) -> None:
    edit_config(folder, hidden_act="silly")
    with pytest.raises(ConfigurationError, match=r"hidden_act: is 'silly': .*\n.*correct num_labels or the configur"):
        AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)


SIZES = (3, "16", [], [16], [16, 16, 16], [16, 0], [16, -16], [16.0, 16], [16, None], {}, True)


@pytest.mark.parametrize("size", SIZES, ids=repr)
def test_invalid_fp8_block_size_raises(folder: Path, size: Any) -> None:
    edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": size})
    with pytest.raises(CheckpointError, match=r"weight_block_size: is .*expected the rows and columns of a block"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("content", ["{", "[]", "null", "[" * 10**5, '{"watermarking_config": 3}'])
def test_invalid_generation_config_raises(folder: Path, content: str) -> None:
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert [problem.subject for problem in caught.value.problems] == ["generation_config.json"]


def test_deeply_nested_config_raises(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", "a": ' + "[" * 10**5 + "]" * 10**5 + "}")
    with pytest.raises(CheckpointError, match="nested deeper than 64 levels"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.long
def test_published_configs_are_within_limits() -> None:
    for file in Path(__file__).parents[1].glob("config/published/*.json"):
        check_limits(json.loads(file.read_text()), file)
    for config_class in set(CONFIG_MAPPING.values()):
        try:
            values = config_class().to_dict()
        except Exception:  # some classes have no default
            continue
        check_limits(values, config_class.__name__)


@pytest.mark.parametrize(
    "table",
    [
        lambda: torch.ones(10**5, 10**5),
        lambda: torch.ones((10**5, 10**5), dtype=torch.bool),
        lambda: torch.arange(0, 10**10, 2),
        lambda: torch.arange(10**10, dtype=torch.float32),
        lambda: torch.full((10**5, 10**5), 1.0),
    ],
)
def test_oversized_buffer_raises(table: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(ConfigurationError, match="needs a table of"), limited_build(0):
        table()


def test_check_limits_lists_all_problems() -> None:
    with pytest.raises(NRLModelsError, match=r"(?s)2 problems.*a\.num_layers.*vocab_size"):
        check_limits({"a": {"num_layers": 10**6}, "vision": {"hidden_size": 8}, "vocab_size": 1e20}, "x")
