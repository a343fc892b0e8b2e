"""Training loop controls: learning rate 0 changes no weights, and later syncs arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_config
from typer.testing import CliRunner
from versions import case_of

from nrl_models.certify import CheckResult, Status, certify, in_loop
from nrl_models.certify.certified import CheckpointUnderTest, Options
from nrl_models.cli import app
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import UnknownArgumentError

Plant = Callable[[pytest.MonkeyPatch, Path], object]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    case_of("LlamaForCausalLM").reference().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def controls(tiny: Path, **options: Any) -> list[CheckResult]:
    options = {"dtype": torch.float32, "in_loop": {}} | options
    return list(in_loop.controls(CheckpointUnderTest(tiny, Options(None, **options), tiny.parent)))


def test_correct_loop_passes(tiny: Path) -> None:
    zero, second = controls(tiny)
    assert zero.status is second.status is Status.PASSED, (zero, second)
    assert zero.compared == 4 * 47
    assert "4 syncs arrived" in second.summary


def dropout(patch: pytest.MonkeyPatch, tiny: Path) -> None:
    edit_config(tiny, attention_dropout=0.3)


def decay(patch: pytest.MonkeyPatch, tiny: Path) -> None:
    """Change weights in each step, even at learning rate 0."""

    class Decaying(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.99)
            super().step(closure)

    patch.setattr(torch.optim, "AdamW", Decaying)


def frozen(patch: pytest.MonkeyPatch, tiny: Path) -> None:
    patch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)


def stale(patch: pytest.MonkeyPatch, tiny: Path) -> None:
    """Ignore all refits except the first."""
    original = HFEngine._refit

    def refit(self: HFEngine, sent: Any, digests: bool) -> Any:
        previous_state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        report = original(self, sent, digests)
        if self.version:
            self.model.load_state_dict(previous_state)
        return report

    patch.setattr(HFEngine, "_refit", refit)


def drops_a_tensor(patch: pytest.MonkeyPatch, tiny: Path) -> None:
    original = StateDictAdapter.iter_export

    def exported(self: Any, model: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, tensor) for name, tensor in original(self, model, **options) if "up_proj" not in name)

    patch.setattr(StateDictAdapter, "iter_export", exported)


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "failed", "text"),
    [
        (dropout, in_loop.ZERO, "differ from 1 by up to"),
        (decay, in_loop.ZERO, "exported tensors changed"),
        (frozen, in_loop.SECOND, "no exported tensor changed after a step"),
        (stale, in_loop.SECOND, "sync 4: token_mult_prob_error"),
        (drops_a_tensor, in_loop.SECOND, "sync 1: other tensors were sent than planned"),
    ],
)
def test_planted_faults_fail(plant: Plant, failed: str, text: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, tiny)
    results = {result.name: result for result in controls(tiny)}
    assert results[failed].status is Status.FAILED, results
    assert text in results[failed].summary


@pytest.mark.long
@pytest.mark.parametrize("mesh", [{"fsdp": 2}, {"tp": 2}])
def test_loop_over_two_processes(mesh: dict[str, int], tiny: Path) -> None:
    zero, second = controls(tiny, in_loop=mesh)
    assert zero.status is second.status is Status.PASSED, (zero, second)
    (dimension,) = mesh
    assert zero.summary.endswith(f"over {dimension}=2")


@pytest.mark.long
def test_rank_error_leaves_check_undecided(tiny: Path) -> None:
    certificate = certify(tiny, out=tiny.parent / "out", only=(in_loop.ZERO,), loop_mesh={"ep": 2})
    zero = next(result for result in certificate.results if result.name == in_loop.ZERO)
    assert zero.status is Status.NOT_DECIDED
    assert zero.summary.startswith("ShardingError: ")
    assert "experts" in zero.summary


def test_unsupported_loop_raises_before_checks(tiny: Path) -> None:
    for mesh, only, text in [({"pp": 2}, (), "pp=2"), (None, (in_loop.ZERO,), "needs a training loop")]:
        with pytest.raises(UnknownArgumentError, match=text):
            certify(tiny, out=tiny.parent / "out", only=only, loop_mesh=mesh)
    assert not (tiny.parent / "out").exists()


def test_loop_runs_only_on_request(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.parent)
    certificate = certify(tiny, out=tiny.parent / "out", only=("files",))
    assert in_loop.ZERO not in {result.name for result in certificate.results}
    arguments = ["certify", str(tiny), "--only", "files", "--only", in_loop.ZERO, "--in-loop", "none"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 3, result.output
    assert f"passed          {in_loop.ZERO}: " in result.stdout
    result = CliRunner().invoke(app, ["certify", str(tiny), "--in-loop", "fdsp=2"])
    assert result.exit_code == 2
