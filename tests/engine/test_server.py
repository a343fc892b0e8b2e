"""The engine over HTTP with a real `vllm serve` on this machine, which has the backend of nrl_models for refits.

Tests of the loaded weights come first, then refits. The last test kills the server.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from typer.testing import CliRunner

from nrl_models import AutoModelForCausalLM
from nrl_models.cli import app
from nrl_models.consistency.cells import Settings
from nrl_models.consistency.consistency_report import ConsistencyReport
from nrl_models.consistency.matrix import check_consistency
from nrl_models.engines import start_engine
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.http import HTTPEngine
from nrl_models.errors import EngineError, MixedWeightsError
from nrl_models.logprobs import Sampling
from tests.engine.one_engine import OneEngine
from tests.engine.one_server import Server, serving

TOKENS = [list(range(50, 90)), list(range(300, 330))]
BACKEND = ("--weight-transfer-config", json.dumps({"backend": "nrl_models"}))


@pytest.fixture(scope="module")
def server(demo: Path, vllm: OneEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the demo's checkpoint."""
    vllm.stop()
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(demo, log, *BACKEND, settings={"VLLM_SERVER_DEV_MODE": "1"}) as running:
        yield running


@pytest.fixture
def model(demo: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)


@torch.no_grad()
def train(model: PreTrainedModel, share: float = 0.01) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        mask = torch.rand(parameter.shape, generator=generator) < share
        parameter[mask] += 5 * parameter.std() * torch.randn(int(mask.sum()), generator=generator)


def max_difference(engine: HTTPEngine, model: PreTrainedModel) -> float:
    """Return the largest difference between the server's log-probabilities and the trainer's."""
    ours, theirs = HFEngine(model, "trainer").score(TOKENS, Sampling()), engine.score(TOKENS, Sampling())
    pairs = zip(ours, theirs, strict=True)
    return max(abs(a - b) for one, other in pairs for a, b in zip(one[1:], other[1:], strict=True))


@pytest.mark.timeout(900)
def test_server_logprobs_match_trainer(demo: Path, server: Server, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    arguments = ["--engine", server.address, "--trainer-dtype", "float32", "--threshold", "1.0001"]
    arguments += ["--length", "100", "--batch", "4", "--new-tokens", "24", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["consistency", str(demo), *arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    cells = json.loads(file.read_text())["cells"]
    assert len(cells) == 4
    for cell in cells:
        assert cell["token_mult_prob_error"] <= 1.0001
        assert (cell["repeats"][0]["prefill"] is not None) == (cell["mode"] == "greedy")  # at temperature 1


def test_server_scores(demo: Path, server: Server, demo_trainer: HFEngine) -> None:
    tokens = [list(range(50, 90)), list(range(300, 320))]
    with start_engine(server.address, demo) as engine:
        assert engine.capabilities().max_length == 256
        for scores, expected in zip(
            engine.score(tokens, Sampling()), demo_trainer.score(tokens, Sampling()), strict=True
        ):
            torch.testing.assert_close(torch.tensor(scores[1:]), torch.tensor(expected[1:]), atol=1e-4, rtol=0)
        with pytest.raises(
            EngineError, match=r"has 250 tokens and 10 more are requested, and the engine's limit is 256"
        ):
            engine.generate([[20] * 250], Sampling(), max_new_tokens=10)


def test_server_timeout_raises(demo: Path, server: Server) -> None:
    with start_engine(server.address, demo) as engine:
        engine._connection.timeout = 0.05
        with pytest.raises(EngineError, match=r"did not answer within 0.05 s"):
            engine.generate([[20] * 30], Sampling(), max_new_tokens=200)


# Refits


@pytest.mark.timeout(300)
def test_refit_with_incomplete_fused_tensor_raises(server: Server, model: PreTrainedModel) -> None:
    """Test the first update, when no earlier version defines the list of tensors, and a later one."""
    engine = HTTPEngine(server.address)
    for part in ("v_proj", "up_proj"):
        train(model)
        weights = dict(model.state_dict_adapter.iter_export(model))
        missing = [name for name in weights if "layers.1." in name and part in name]
        assert len(missing) == 1
        with pytest.raises(EngineError, match=rf"layers\.1\..*{part}") as raised:
            HTTPEngine(server.address).refit((name, weights[name]) for name in weights if name not in missing)
        # The later update raises before anything is written.
        assert isinstance(raised.value, MixedWeightsError) is (part == "v_proj")
        engine.refit(weights.items())
        assert max_difference(engine, model) < 1e-4


@pytest.mark.timeout(900)
def test_refit_sends_changes_after_first_update(server: Server, model: PreTrainedModel) -> None:
    engine = HTTPEngine(server.address)
    train(model, 0.1)
    assert max_difference(engine, model) > 0.1
    report = engine.refit(model.state_dict_adapter.iter_export(model))
    assert (report.unwritten, report.version) == ((), 1)
    assert list(report.digests) == [name for name, _, _ in model.state_dict_adapter.export_plan()]
    assert max_difference(engine, model) < 1e-4
    for number in (2, 3):
        train(model)
        assert max_difference(engine, model) > 0.01  # also for prompts it has computed before
        engine.refit(model.state_dict_adapter.iter_export(model))
        assert engine._sender.last_version == engine._client.weight_version()
        assert engine._client.weight_version().startswith(f"{number}-")
        assert max_difference(engine, model) < 1e-4
    # Another trainer, whose first update contains all weights.
    other = HTTPEngine(server.address, deltas=False)
    train(model)
    other.refit(model.state_dict_adapter.iter_export(model))
    assert max_difference(other, model) < 1e-4
    train(model)
    engine.refit(model.state_dict_adapter.iter_export(model))  # the sender detects it and sends all weights
    assert max_difference(engine, model) < 1e-4


@pytest.mark.timeout(300)
def test_unknown_tensor_raises_and_server_keeps_working(server: Server, model: PreTrainedModel) -> None:
    engine = HTTPEngine(server.address)
    engine.refit(model.state_dict_adapter.iter_export(model))
    weights = dict(model.state_dict_adapter.iter_export(model))
    train(model)
    renamed = {name.replace("layers.1.input_layernorm", "layers.1.inputlayernorm"): t for name, t in weights.items()}
    with pytest.raises(EngineError, match=r"model\.layers\.1\.inputlayernorm\.weight is not one of them") as caught:
        HTTPEngine(server.address).refit(renamed.items())
    assert not isinstance(caught.value, MixedWeightsError)
    assert engine.generate(TOKENS, Sampling(), max_new_tokens=4)
    train(model)
    engine.refit(model.state_dict_adapter.iter_export(model))
    assert max_difference(engine, model) < 1e-4


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_trainers_leave_consistent_weights(server: Server, demo: Path) -> None:
    """Send SIGKILL before and after each request of a refit, for dense refits and for deltas."""
    script = Path(__file__).with_name("killed_trainers.py")
    completed = subprocess.run(
        [sys.executable, str(script), server.address, str(demo)], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    outcomes = [json.loads(line) for line in completed.stdout.splitlines() if line.startswith("{")]
    assert len(outcomes) == 22
    for outcome in outcomes:
        assert outcome["signal"] == 9, (outcome, completed.stderr[-3000:])
        assert outcome["found"] == outcome["expected"], outcome
        assert outcome["next"] == "new", outcome


# A crash


def test_measurements_survive_server_crash(demo: Path, server: Server, model: PreTrainedModel, tmp_path: Path) -> None:
    HTTPEngine(server.address).refit(model.state_dict_adapter.iter_export(model))

    def kill(report: ConsistencyReport) -> None:
        if len(report.results) == 1:
            server.kill()

    settings = Settings(lengths=(64,), data=("dummy",), batches=(1, 2), modes=("greedy",), new_tokens=8)
    report = check_consistency(
        demo,
        engine=server.address,
        settings=settings,
        out=tmp_path / "out",
        trainer_dtype=torch.float32,
        progress=kill,
    )
    assert f"{server.address} cannot be reached, or has died" in report.error
    saved_report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [cell["batch"] for cell in saved_report["cells"]] == [1]
    assert saved_report["verdict"] == "incomplete"
