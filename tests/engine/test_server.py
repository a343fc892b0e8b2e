"""The engine over HTTP with a real `vllm serve` on this machine. The last test kills the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nrl_models.cli import app
from nrl_models.consistency.cells import Settings
from nrl_models.consistency.consistency_report import ConsistencyReport
from nrl_models.consistency.matrix import check_consistency
from nrl_models.engines import start_engine
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import EngineError
from nrl_models.logprobs import Sampling
from tests.engine.one_engine import OneEngine
from tests.engine.one_server import Server, serving


@pytest.fixture(scope="module")
def server(demo: Path, vllm: OneEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """vLLM's server with the demo's checkpoint."""
    vllm.stop()
    with serving(demo, tmp_path_factory.mktemp("server") / "log") as running:
        yield running


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
        engine.timeout = 0.05
        with pytest.raises(EngineError, match=r"did not answer within 0.05 s"):
            engine.generate([[20] * 30], Sampling(), max_new_tokens=200)


def test_measurements_survive_server_crash(demo: Path, server: Server, tmp_path: Path) -> None:
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
