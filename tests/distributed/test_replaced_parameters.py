"""Errors for parameters that are replaced after sharding: FSDP would restore the sharded ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from jobs import replaced_parameters
from world import World

FSDP, TP = {"fsdp": 2}, {"tp": 2}


@pytest.mark.parametrize(
    ("change", "parameter", "sizes"),
    [
        ("norm", "model.norm.weight", FSDP),
        ("norm", "model.norm.weight", TP),
        ("untied", "lm_head.weight", FSDP),
        ("head after forward", "lm_head.weight", FSDP),
        ("frozen", "model.layers.0.input_layernorm.weight", FSDP),
        ("removed", "model.norm.weight", FSDP),
        ("bias", "lm_head.bias", FSDP),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_replaced_parameter_raises(
    two: World, tmp_path: Path, change: str, parameter: str, sizes: dict[str, int]
) -> None:
    job = partial(replaced_parameters.later_uses_raise, **sizes)
    for named in two.run(job, str(tmp_path / "saved"), change):
        assert set(named) == {(parameter,)}
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("sizes", [FSDP, TP], ids=["fsdp", "tp"])
def test_optimizer_from_before_sharding_raises(two: World, sizes: dict[str, int]) -> None:
    assert two.run(partial(replaced_parameters.old_optimizer_raises, **sizes)) == [True] * 2


def test_cached_decoding_is_not_checked(two: World) -> None:
    assert two.run(replaced_parameters.checks_of_decoding) == [(1, 0)] * 2


CHANGES = ["to", "load", "load assign", "load after forward", "load assign after forward", "optimizer", "adopted"]


@pytest.mark.parametrize("change", [*CHANGES, "unsharded", "offload"])
def test_same_parameters_do_not_raise(two: World, change: str) -> None:
    for loss, expected in two.run(partial(replaced_parameters.permitted_changes, fsdp=2), change):
        assert loss == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("change", [*CHANGES, "copy"])
def test_same_parameters_do_not_raise_under_tensor_parallelism(two: World, change: str) -> None:
    for loss, expected in two.run(partial(replaced_parameters.permitted_changes, tp=2), change):
        assert loss == pytest.approx(expected, abs=1e-5)
