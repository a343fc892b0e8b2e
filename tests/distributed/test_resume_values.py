"""Resume checkpoints restore the types of optimizer states, and compare progress and configurations."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from jobs import resume_values
from world import World


def test_a_0_dimensional_parameter_resumes(two: World, tmp_path: Path) -> None:
    for values in two.run(partial(resume_values.resumes_a_scale, tp=2), str(tmp_path)):
        for before, resumed in values:
            assert resumed == before != 1.0
