"""Resume checkpoints restore the types of optimizer states, and compare progress and configurations."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from jobs import resume_values
from test_loading import errors_on_every_rank
from world import World


def test_0_dimensional_parameter_resumes(two: World, tmp_path: Path) -> None:
    for values in two.run(partial(resume_values.resumes_a_scale, tp=2), str(tmp_path)):
        for before, resumed in values:
            assert resumed == before != 1.0


def test_different_progress_per_rank_raises(two: World, tmp_path: Path) -> None:
    for kind, text in errors_on_every_rank(
        two, partial(resume_values.saves_progress_of_each_rank, fsdp=2), str(tmp_path / "c")
    ):
        assert kind == "ShardingError"
        assert "progress.rng of rank 1: is [1], but rank 0 has [0]" in text
        assert "step" not in text
    assert not (tmp_path / "c").exists()


def test_checkpoint_of_another_config_raises(two: World, tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    two.run(partial(resume_values.saves_configuration, fsdp=2), folder, {"rms_norm_eps": 0.5})
    two.run(partial(resume_values.loads_configuration, tp=2), folder, {"rms_norm_eps": 0.5, "attention_dropout": 0.1})
    two.run(partial(resume_values.loads_configuration, tp=2), folder, {}, "rms_norm_eps")
    for kind, text in errors_on_every_rank(two, partial(resume_values.loads_configuration, tp=2), folder, {}):
        assert kind == "CheckpointError"
        assert "config: rms_norm_eps: is 0.5 in the checkpoint, 1e-06 in the model" in text
        assert "ignore_config_keys=('rms_norm_eps',)" in text
