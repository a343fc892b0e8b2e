"""Tiny configurations that satisfy the validators of a configuration class."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from versions import since

from nrl_models.testing.constraints import ConstraintKind, constraints_of, satisfy, sections_of
from nrl_models.testing.kept_layers import KeptLayers
from nrl_models.testing.tiny import tiny_config


@strict
class TowerConfig(PreTrainedConfig):
    """A nested configuration."""

    codebook_size: int = 1000
    ratios: tuple[int, ...] = (2, 4)

    @property
    def hop_length(self) -> int:
        """A value derived from others."""
        return self.ratios[0] * self.ratios[1]


@strict
class CheckedConfig(PreTrainedConfig):
    """A configuration with each kind of comparison that validators make."""

    sub_configs = {"tower_config": TowerConfig}

    tower_config: TowerConfig | None = None
    vocab_size: int = 3000
    image_offset: int = 1000
    audio_offset: int = 2000
    chunk_size: int = 800
    block: int = 6
    loop_start: int = 12
    num_hidden_layers: int = 12
    first_layers: int = 3
    middle_layers: int = 7
    last_layers: int = 2
    is_wide: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.tower_config = self.tower_config or TowerConfig()
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Called by transformers when a configuration is created."""
        assert self.tower_config is not None
        end = self.audio_offset + self.tower_config.codebook_size
        if self.image_offset + self.tower_config.codebook_size != self.audio_offset:
            raise ValueError("image codes end where audio codes begin")
        if end > self.vocab_size:
            raise ValueError(f"audio codes end at {end}")
        hop = self.tower_config.hop_length
        hop = hop or 1
        if self.chunk_size % self.tower_config.hop_length != 0:
            raise ValueError(f"chunk_size: {hop}")
        if hop > self.vocab_size:
            raise ValueError("hop")
        if self.loop_start % self.block != 0:
            raise ValueError("loop_start")
        if self.is_wide is not False:
            raise ValueError("is_wide")

    def validate_layers(self) -> None:
        """A second validator."""
        if self.first_layers + self.middle_layers + self.last_layers != self.num_hidden_layers:
            raise ValueError("layers")


def satisfied(**values: Any) -> dict[str, Any]:
    """Return a configuration's values after changes that satisfy its constraints, and the unsatisfied constraints."""
    default = {**vars(CheckedConfig()), **values}
    return default | satisfy(CheckedConfig, default, {})


def test_constraints_are_read_from_validators() -> None:
    constraints = {(constraint.kind, constraint.paths) for constraint in constraints_of(CheckedConfig)}
    codes = ("tower_config", "codebook_size")
    assert (ConstraintKind.EQUAL, (("audio_offset",), ("image_offset",), codes)) in constraints
    assert (ConstraintKind.AT_MOST, (("audio_offset",), codes, ("vocab_size",))) in constraints
    assert (ConstraintKind.MULTIPLE, (("block",), ("loop_start",))) in constraints
    assert (ConstraintKind.EQUAL, (("is_wide",),)) in constraints
    assert constraints_of(TowerConfig) == ()


@pytest.mark.parametrize(
    ("shrunk", "expected"),
    [
        pytest.param(
            {"vocab_size": 512, "tower_config": TowerConfig(codebook_size=64)},
            {"audio_offset": 448, "image_offset": 384},
            id="code ranges in small vocabulary",
        ),
        pytest.param({"chunk_size": 21}, {"chunk_size": 16}, id="multiple of nested property"),
        pytest.param({"loop_start": 4}, {"loop_start": 4, "block": 2}, id="divisor"),
        pytest.param({"is_wide": True}, {"is_wide": False}, id="fixed flag"),
        pytest.param({"num_hidden_layers": 10}, {"num_hidden_layers": 12}, id="sum"),
    ],
)
def test_satisfy_changes_values_to_meet_constraints(shrunk: dict[str, Any], expected: dict[str, Any]) -> None:
    values = satisfied(**shrunk)
    assert expected.items() <= values.items()
    fields = {key: values[key] for key in CheckedConfig.__annotations__}
    CheckedConfig(**fields)  # raises if a constraint is not satisfied


def test_satisfy_keeps_requested_values() -> None:
    values = vars(CheckedConfig()) | {"vocab_size": 2990}
    assert "vocab_size" not in satisfy(CheckedConfig, values, {"vocab_size": 2990})
    values = vars(CheckedConfig())
    assert satisfy(CheckedConfig, values, {}) == {}


def test_unsolvable_constraint_changes_nothing() -> None:
    values = vars(CheckedConfig()) | {"is_wide": True}
    assert satisfy(CheckedConfig, values, {"is_wide": True}) == {}


def test_layer_sections_keep_every_layer_type() -> None:
    sections = sections_of(CheckedConfig, "num_hidden_layers")
    assert sections == ("first_layers", "middle_layers", "last_layers")
    values = vars(CheckedConfig()) | {"layer_types": ["local", "local", "full"] * 4}
    layers = KeptLayers(values, None, sections)
    assert layers.indices == [0, 2, 3, 10]
    assert [layers.value(key, values[key]) for key in (*sections, "num_hidden_layers")] == [2, 1, 1, 4]


@pytest.mark.parametrize(
    "architecture",
    ["Apertus1p5ForConditionalGeneration", "DoryForCausalLM", "Inkling2LoopForCausalLM"],
)
@since("5.24")
def test_new_architectures_have_tiny_configurations(architecture: str) -> None:
    model_class = getattr(transformers, architecture)
    config = tiny_config(model_class.config_class, None, model_class)
    text = config.get_text_config()
    assert text.num_hidden_layers <= 5
    if architecture == "Inkling2LoopForCausalLM":  # layers before, in and after the loop
        assert 0 < text.loop_layer_index_start < text.loop_layer_index_end < text.num_hidden_layers
