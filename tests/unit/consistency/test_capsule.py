"""Capsules of planted faults replay to the same verdict in a process that has neither the model nor the engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoints import new_model
from printed import json_printed
from safetensors import safe_open
from small_cell import SETTINGS
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig
from typer.testing import CliRunner

from nrl_models import AutoModelForCausalLM
from nrl_models.cli import app
from nrl_models.common.model_components.routers import routers_of
from nrl_models.consistency.capsule.capsule_file import CapsuleKind, Contents, Limits
from nrl_models.consistency.capsule.consistency_capsule import replay_consistency
from nrl_models.consistency.capsule.diverging_block import RecordedBlock
from nrl_models.consistency.capsule.redaction import redacted
from nrl_models.consistency.matrix import check_consistency, run_matrix
from nrl_models.consistency.measure import Meter
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.references import References
from nrl_models.consistency.store import Store
from nrl_models.consistency.verdict import CauseKind, Verdict
from nrl_models.engines.engine_types import Capabilities
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import CapsuleError, EngineError
from nrl_models.logprobs.sampling import Sampling
from nrl_models.quirks import Pattern, VerdictKind
from nrl_models.testing.tiny import tiny_config

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("capsules")]  # the tests share the capsules below

ROOT = Path(__file__).parents[3]


class Server(HFEngine):
    """An engine that records no modules and reports no dtype, as a server."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), modules=False, dtype=None)

    def module_calls(self, tokens: Any, *, decode_last: bool = False) -> Any:
        raise EngineError(f"the modules of {self.name} cannot be recorded")

    def describe(self) -> dict[str, Any]:
        return {"engine": self.name, "address": "http://user:hunter22@gpu.example.com:8000", "note": str(Path.home())}


class AtTemperatureOne(HFEngine):
    """An engine that ignores the temperature."""

    def _generate(self, prompts: Any, sampling: Any, **options: Any) -> Any:
        return super()._generate(prompts, Sampling(), **options)

    def _score(self, sequences: Any, sampling: Any, **options: Any) -> Any:
        return super()._score(sequences, Sampling(), **options)


def norm_epsilon(engine: HFEngine, trainer: HFEngine) -> None:
    engine.model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def trainer_norm_epsilon(engine: HFEngine, trainer: HFEngine) -> None:
    trainer.model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def swapped_weights(engine: HFEngine, trainer: HFEngine) -> None:
    mlp = trainer.model.model.layers[1].mlp
    with torch.no_grad():
        gate = mlp.gate_proj.weight.clone()
        mlp.gate_proj.weight.copy_(mlp.up_proj.weight)
        mlp.up_proj.weight.copy_(gate)


def router_in_bf16(engine: HFEngine, trainer: HFEngine) -> None:
    for router in routers_of(engine.model, engine.model.get_decoder()):
        forward = router.forward
        router.forward = lambda states, *rest, forward=forward: forward(states.bfloat16().float(), *rest)


def bf16(engine: HFEngine, trainer: HFEngine) -> None:
    engine.model.to(torch.bfloat16)


def not_finite(engine: HFEngine, trainer: HFEngine) -> None:
    score = engine.score
    engine.score = lambda *args, **options: [[float("nan")] * len(row) for row in score(*args, **options)]  # type: ignore[method-assign]


def unchanged(engine: HFEngine, trainer: HFEngine) -> None:
    pass


def stale_layer(engine: HFEngine, trainer: HFEngine) -> None:
    with torch.no_grad():
        engine.model.model.layers[1].mlp.down_proj.weight.copy_(_old_weight(engine))


def _old_weight(engine: HFEngine) -> torch.Tensor:
    return engine.model.model.layers[1].mlp.down_proj.weight * 0.3 + 0.01


@dataclass(frozen=True)
class Fault:
    """A planted fault, and its verdict."""

    kind: VerdictKind
    change: Callable[[HFEngine, HFEngine], None] = unchanged
    config: type[PreTrainedConfig] = LlamaConfig
    engine_class: type[HFEngine] = HFEngine
    engine_config: tuple[tuple[str, Any], ...] = ()
    threshold: float = 1.0001
    has_previous: bool = False


FAULTS = {
    "norm-epsilon": Fault(VerdictKind.ENGINE, norm_epsilon),
    "trainer-norm-epsilon": Fault(VerdictKind.TRAINER, trainer_norm_epsilon),
    "swapped-weights": Fault(VerdictKind.TRAINER, swapped_weights),
    "router-in-bf16": Fault(VerdictKind.ENGINE, router_in_bf16, MixtralConfig, threshold=1.00001),
    "temperature": Fault(VerdictKind.ENGINE, engine_class=AtTemperatureOne),
    "stale-layer": Fault(VerdictKind.ENGINE, stale_layer, has_previous=True),
    "rope": Fault(
        VerdictKind.ENGINE,
        engine_config=(("rope_parameters", {"rope_type": "default", "rope_theta": 500_000.0}),),
    ),
    "bf16": Fault(VerdictKind.PRECISION, bf16),
    "not-finite": Fault(VerdictKind.NOT_FINITE, not_finite),
    "server": Fault(VerdictKind.ENGINE, norm_epsilon, engine_class=Server),
}


def write(folder: Path, fault: Fault, limits: Limits | None = None) -> tuple[Path | None, Verdict | None]:
    """Plant a fault, and return the capsule and the verdict. The checkpoint is deleted."""
    path, file = folder / "checkpoint", folder / "capsule.safetensors"
    model = new_model(tiny_config(fault.config))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2.0)
    model.save_pretrained(path)
    wrong = AutoModelForCausalLM.from_pretrained(path, combine=False, dtype=torch.float32, **dict(fault.engine_config))
    engine = fault.engine_class(wrong, "engine")
    trainer = HFEngine(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), "trainer")

    def previous() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in trainer.model.state_dict_adapter.iter_export(trainer.model):
            yield name, old if old is not None and "layers.1.mlp.down_proj" in name else tensor

    old = _old_weight(engine) if fault.has_previous else None
    fault.change(engine, trainer)
    store = Store(folder / "store", {}, fresh=True)
    meter = Meter(engine, trainer, Prompts(None, 512), replace(SETTINGS, threshold=fault.threshold), store)
    references = References(path, previous=previous if fault.has_previous else None)
    report = run_matrix(str(path), meter, references, capsule=file, capsule_limits=limits)
    shutil.rmtree(path)
    shutil.rmtree(folder / "store")
    return report.capsule, report.results[0].verdict


@pytest.fixture(scope="module")
def capsules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Verdict]]:
    """A capsule of each fault, with the verdict of the live check."""
    files_and_verdicts = {}
    for name, fault in FAULTS.items():
        file, verdict = write(tmp_path_factory.mktemp(name), fault)
        assert file is not None, name
        assert verdict is not None, name
        files_and_verdicts[name] = file, verdict
    return files_and_verdicts


@pytest.fixture(scope="module")
def replays(capsules: dict[str, tuple[Path, Verdict]]) -> dict[str, dict[str, Any]]:
    """The replay of each capsule, in a new process that has only the files."""
    code = """
import json, sys, time
from pathlib import Path
from nrl_models.consistency.capsule.capsule_file import Contents
from nrl_models.consistency.capsule.consistency_capsule import replay_consistency
replays = []
for file in sys.argv[1:]:
    start = time.process_time()
    replay = replay_consistency(Contents.read(Path(file))).to_json()
    replays.append(replay | {"seconds": time.process_time() - start})
print(json.dumps(replays))
"""
    return dict(zip(capsules, json_printed(code, *(str(file) for file, _ in capsules.values())), strict=True))


@pytest.mark.parametrize("name", FAULTS)
def test_capsule_replays_to_the_same_verdict(
    name: str, capsules: dict[str, tuple[Path, Verdict]], replays: dict[str, dict[str, Any]]
) -> None:
    _, verdict = capsules[name]
    assert verdict.kind is FAULTS[name].kind
    assert replays[name]["reproduced"], replays[name]["checks"]
    numbers = [(check["value"], check["bound"], check["unit"]) for check in replays[name]["checks"]]
    assert set(numbers) <= {(0, 0, "count"), (None, None, None)}
    assert (0, 0, "count") in numbers
    assert Verdict.from_json(replays[name]["verdict"]).kind is verdict.kind
    assert replays[name]["verdict"] == json.loads(json.dumps(verdict.to_json()))
    assert replays[name]["summary"] == verdict.summary
    assert replays[name]["seconds"] < 5.0  # CPU time; importing torch and transformers takes a few seconds more


def checks(replay: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["detail"] for check in replay["checks"]}


def test_replay_names_module_and_runs_block(replays: dict[str, dict[str, Any]]) -> None:
    assert replays["norm-epsilon"]["verdict"]["divergence"]["module"] == "model.layers.1.input_layernorm"
    details = checks(replays["norm-epsilon"])
    assert {"metrics", "modules", "block", "verdict"} == details.keys()
    assert (
        "model.layers.1 of the trainer, rebuilt from configuration and weights, is off by 0.0e+00" in details["block"]
    )


def test_rebuilt_block_detects_wrong_trainer_epsilon(replays: dict[str, dict[str, Any]]) -> None:
    details = checks(replays["trainer-norm-epsilon"])["block"]
    assert "the trainer's module does not compute what its configuration says" in details


def test_replay_recomputes_cause_and_pattern(replays: dict[str, dict[str, Any]]) -> None:
    assert replays["temperature"]["verdict"]["cause"]["kind"] == CauseKind.SAMPLING
    assert "rope_theta" in replays["rope"]["verdict"]["cause"]["message"]
    assert replays["stale-layer"]["verdict"]["divergence"]["pattern"] == Pattern.STALE_WEIGHTS
    assert "holds what belongs in" in replays["swapped-weights"]["verdict"]["divergence"]["detail"]


def test_router_capsule_has_routes(replays: dict[str, dict[str, Any]]) -> None:
    assert replays["router-in-bf16"]["verdict"]["divergence"]["module"] == "model.layers.0.mlp.gate"
    assert "other experts for" in checks(replays["router-in-bf16"])["routes"]


def test_server_capsule_has_no_block(replays: dict[str, dict[str, Any]]) -> None:
    assert "block" not in checks(replays["server"])
    assert any("no diverging module is known" in line for line in replays["server"]["left_out"])
    assert "cannot be recorded" in replays["server"]["verdict"]["note"]


def test_replay_command_without_model(capsules: dict[str, tuple[Path, Verdict]], tmp_path: Path) -> None:
    file = shutil.copy(capsules["norm-epsilon"][0], tmp_path)
    environment = {key: value for key, value in os.environ.items() if key in ("PATH", "OMP_NUM_THREADS")}
    completed = subprocess.run(
        [sys.executable, "-m", "nrl_models", "replay", file],
        capture_output=True, text=True, cwd=ROOT, check=False, timeout=120,
        env=environment | {"HOME": str(tmp_path)},
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith(
        "REPRODUCED: length 24, dummy, sampling, batch 2: trainer (float32) against engine"
    )
    assert "First divergence: in model.layers.1.input_layernorm" in completed.stdout


# Modified capsules


def changed(contents: Contents, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Contents:
    """Return the capsule with another tensor; equal tensors stay shared."""
    contents.tensors[name] = change(contents.tensors[name])
    return contents


@pytest.mark.parametrize(
    ("tensor", "part"),
    [
        ("logprobs/engine decode", "metrics"),
        ("block/weights/mlp.down_proj.weight", "block"),
        ("block/inputs/0", "block"),
        ("modules.engine.24/actual/model.layers.1.input_layernorm/outputs/0", "modules"),
        ("observed/reference.float64", "verdict"),
    ],
)
def test_replay_of_modified_tensor_fails(capsules: dict[str, tuple[Path, Verdict]], tensor: str, part: str) -> None:
    contents = changed(Contents.read(capsules["norm-epsilon"][0]), tensor, lambda values: values * 1.5 + 0.1)
    replay = replay_consistency(contents)
    assert not replay.passed
    assert part in {check.name for check in replay.checks if not check.passed}


def with_verdict(capsule: Path, change: Callable[[dict[str, Any]], None]) -> Contents:
    """Return the capsule with another recorded verdict."""
    contents = Contents.read(capsule)
    change(contents.values["verdict"])
    return contents


def nudge_numbers_in_text(verdict: dict[str, Any]) -> None:
    verdict["summary"] = verdict["summary"].replace("First divergence", "The first divergence")
    verdict["divergence"]["detail"] = "its output is the expected one times 1.00002"


def nudge_error(verdict: dict[str, Any]) -> None:
    verdict["divergence"]["error"] *= 1 + 1e-5


def change_error(verdict: dict[str, Any]) -> None:
    verdict["divergence"]["error"] *= 1 + 1e-3


def rename_module(verdict: dict[str, Any]) -> None:
    verdict["divergence"]["module"] = "model.layers.1.00001.input_layernorm"


def rename_weight(verdict: dict[str, Any]) -> None:
    verdict["divergence"]["after"] = verdict["divergence"]["after"].replace("layers.0", "layers.0e0")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (nudge_numbers_in_text, None),
        (nudge_error, None),
        (change_error, "divergence.error"),
        (rename_module, "divergence.module"),
        (rename_weight, "divergence.after"),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_replay_compares_fields_and_not_sentences(
    change: Callable[[dict[str, Any]], None], field: str | None, capsules: dict[str, tuple[Path, Verdict]]
) -> None:
    """Sentences have rounded numbers, whose last digit may differ on another processor. Names are compared exactly."""
    (check,) = (
        check
        for check in replay_consistency(with_verdict(capsules["norm-epsilon"][0], change)).checks
        if check.name == "verdict"
    )
    assert check.passed is (field is None)
    assert field is None or check.detail.startswith(f"{field} was ")


def test_replay_verdict_follows_modified_tensor(capsules: dict[str, tuple[Path, Verdict]]) -> None:
    contents = Contents.read(capsules["not-finite"][0])
    contents.tensors["logprobs/engine prefill"] = contents.tensors["logprobs/engine decode"]
    assert replay_consistency(contents).verdict["kind"] == VerdictKind.PRECISION


def test_replay_without_required_measurement_raises(capsules: dict[str, tuple[Path, Verdict]]) -> None:
    contents = changed(Contents.read(capsules["bf16"][0]), "logprobs/trainer", lambda values: values - 1.0)
    with pytest.raises(CapsuleError, match="lacks a measurement"):
        replay_consistency(contents)


# Files


def test_healthy_run_writes_no_capsule(tmp_path: Path) -> None:
    file, verdict = write(tmp_path, Fault(VerdictKind.PRECISION))
    assert (file, verdict) == (None, None)
    assert not (tmp_path / "capsule.safetensors").exists()


def test_command_reports_that_no_capsule_was_written(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "capsule.safetensors"
    options = ["--engine", "hf-generate", "--length", "24", "--data", "dummy", "--mode", "sampling", "--batch", "2"]
    arguments = ["consistency", str(checkpoint), *options, "--out", str(tmp_path / "out"), "--capsule", str(file)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "capsule: not written, because no cell failed" in result.output
    assert not file.exists()


def test_capsule_contains_worst_cell(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nrl_models.consistency import matrix

    def start(name: str, path: Path, **options: Any) -> HFEngine:
        engine = HFEngine.start(path, dtype=torch.float32)
        engine.model.model.layers[1].input_layernorm.variance_epsilon = 0.5
        return engine

    monkeypatch.setattr(matrix, "start_engine", start)
    file = tmp_path / "capsule.safetensors"
    settings = replace(SETTINGS, lengths=(12, 24, 40), threshold=1.0001)
    report = check_consistency(checkpoint, engine="hf-generate", settings=settings, out=tmp_path / "out", capsule=file)
    worst = max(report.results, key=lambda result: result.worst[1])
    replay = replay_consistency(Contents.read(file))
    assert replay.passed
    assert replay.title.startswith(str(worst.cell))


def test_size_limit_omits_weights_first(tmp_path: Path) -> None:
    file, verdict = write(tmp_path, Fault(VerdictKind.ENGINE, norm_epsilon), Limits(megabytes=0.6))
    assert file is not None
    assert file.stat().st_size < 0.7e6
    replay = replay_consistency(Contents.read(file))
    assert replay.passed
    assert any("weights of model.layers.1, because they are too large" in line for line in replay.left_out)
    assert "modules" in {check.name for check in replay.checks}
    assert replay.verdict["divergence"]["module"] == verdict.divergence.module


def test_token_limit_omits_activations(tmp_path: Path) -> None:
    file, verdict = write(tmp_path, Fault(VerdictKind.ENGINE, norm_epsilon), Limits(tokens=8))
    replay = replay_consistency(Contents.read(file))
    assert replay.passed
    assert any("activations of 24 tokens, more than the limit of 8" in line for line in replay.left_out)
    assert replay.summary == verdict.summary


def test_file_has_no_pickle_paths_or_credentials(capsules: dict[str, tuple[Path, Verdict]]) -> None:
    for file, _ in capsules.values():
        data = file.read_bytes()
        for secret in (str(file.parent), str(Path.home()) + "/", "hunter22", "gpu.example.com", "_name_or_path"):
            assert secret.encode() not in data, (file, secret)
        safetensors.torch.load(data)


def test_redaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    values = {
        "path": "/home/jane/models/secret-project: no such file",
        "windows": r"C:\Users\jane\model",
        "home": "~/model and /root/x/y",
        "url": "cannot reach http://jane:pw@host:8000/v1",
        "error": "token hf_abcdefgh was rejected",
        "api_key": "sk-123",
        "key": "rope_theta",
        "unchanged": "model.layers.0.mlp and 3/4 and transformers.models:Class",
        "nested": [{"_name_or_path": "/x/y"}],
    }
    assert redacted(values) == {
        "path": "[path]/secret-project: no such file",
        "windows": "[path]/model",
        "home": "[path]/model and [path]/y",
        "url": "cannot reach [address]",
        "error": "token ... was rejected",
        "key": "rope_theta",
        "unchanged": "model.layers.0.mlp and 3/4 and transformers.models:Class",
        "nested": [{}],
    }


def with_metadata(file: Path, **changes: str) -> None:
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata() | changes
    safetensors.torch.save_file(safetensors.torch.load_file(file), file, metadata)


def test_unknown_format_error_names_required_version(capsules: dict[str, tuple[Path, Verdict]], tmp_path: Path) -> None:
    file = Path(shutil.copy(capsules["bf16"][0], tmp_path))
    with_metadata(file, format="7", written_by="3.2.1")
    result = CliRunner().invoke(app, ["replay", str(file)])
    assert result.exit_code == 2
    line = "has capsule format 7, which nrl_models 3.2.1 reads; the installed nrl_models"
    assert len([text for text in result.output.splitlines() if line in text]) == 1


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.9, 0.999])
def test_single_byte_change_raises(share: float, capsules: dict[str, tuple[Path, Verdict]], tmp_path: Path) -> None:
    data = bytearray(capsules["bf16"][0].read_bytes())
    data[int(share * len(data))] ^= 1
    (file := tmp_path / "capsule.safetensors").write_bytes(data)
    with pytest.raises(CapsuleError):
        Contents.read(file)


def test_damaged_files_raise(capsules: dict[str, tuple[Path, Verdict]], tmp_path: Path) -> None:
    complete = capsules["bf16"][0].read_bytes()
    file = tmp_path / "capsule.safetensors"
    for data in (b"", b"not a capsule", complete[: len(complete) // 2], complete[:-1]):
        file.write_bytes(data)
        with pytest.raises(CapsuleError):
            Contents.read(file)
    safetensors.torch.save_file({"tokens": torch.zeros(2)}, file)
    with pytest.raises(CapsuleError, match="is not a capsule"):
        Contents.read(file)


def test_missing_values_raise_capsule_error(tmp_path: Path) -> None:
    file = tmp_path / "capsule.safetensors"
    contents = Contents(CapsuleKind.CONSISTENCY)
    contents.values = {"case": {}}
    contents.write(file)
    result = CliRunner().invoke(app, ["replay", str(file)])
    assert result.exit_code == 2
    assert "CapsuleError" in result.output


def test_invalid_limits_raise() -> None:
    with pytest.raises(CapsuleError, match=r"megabytes=0\.0: expected more than 0"):
        Limits(megabytes=0.0)


def test_block_with_unexpected_weights_raises(capsules: dict[str, tuple[Path, Verdict]]) -> None:
    contents = Contents.read(capsules["norm-epsilon"][0])
    block = RecordedBlock.from_json(contents.values["block"], contents.tensors)
    other = replace(block, weights={**block.weights, "extra.weight": torch.zeros(1)})
    with pytest.raises(CapsuleError, match=r"with other weights: extra.weight"):
        other.rebuilt()
