"""`nrl_models.watch` under FSDP2: silent while all ranks agree, and all ranks stop if one differs."""

from __future__ import annotations

from pathlib import Path

from jobs import watch_ranks
from world import World

from nrl_models.consistency.capsule.capsule_file import Contents
from nrl_models.watch.drift_capsule import replay_watch

STEPS = 4


def test_no_findings_while_ranks_agree(two: World) -> None:
    for rank in two.run(watch_ranks.watched, STEPS, None):
        assert rank["error"] == ""
        assert rank["findings"] == []
        assert rank["updates"] == STEPS
        assert max(rank["errors"]) < 1.0001


def test_drift_on_one_rank_stops_all_before_update(two: World) -> None:
    """The engine of rank 1 does not write a tensor, but reports that it did."""
    first, second = two.run(watch_ranks.watched, STEPS, 1)
    assert first["updates"] == second["updates"] == 1
    assert first["findings"] == []
    assert "another rank" in first["error"]
    assert second["errors"][0] < 1.0001
    assert second["errors"][-1] > 1.01
    assert second["findings"]
    assert "at step 2, version 1 of the weights" in second["error"]


def test_failed_sync_on_one_rank_stops_all(two: World) -> None:
    """Digests show the fault of rank 1 right after the sync. No rank waits for another."""
    first, second = two.run(watch_ranks.watched, STEPS, 1, True, patience=60)
    assert first["updates"] == second["updates"] == 1
    assert first["findings"] == []
    assert "another rank" in first["error"]
    assert set(second["findings"]) == {"missing weights"}
    assert second["names"] == (watch_ranks.NOT_WRITTEN,)
    assert "1 tensors arrived changed" in second["error"]


def test_capsule_on_one_rank_does_not_hang(two: World, tmp_path: Path) -> None:
    first, second = two.run(watch_ranks.failing_on_one_rank, tmp_path, 1, patience=40)
    assert "another rank" in first["error"]
    assert "at step 1, version 1 of the weights" in second["error"]
    (file,) = tmp_path.iterdir()
    assert file.name == "step-1-version-1-1-rank-1.safetensors"
    assert replay_watch(Contents.read(file)).passed
