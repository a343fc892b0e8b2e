"""Capsules of planted drifts replay to the same findings in a process that has neither the model nor the engine."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from printed import json_printed
from training_loop import Loop
from transformers import LlamaConfig, MixtralConfig
from typer.testing import CliRunner

from nrl_models import Sampling, export_adapter
from nrl_models.cli import app
from nrl_models.common.model_components.routers import routers_of
from nrl_models.consistency.capsule.capsule_file import Contents
from nrl_models.errors import DriftError
from nrl_models.testing.tiny import tiny_config
from nrl_models.watch import Bars, Cause, Watch
from nrl_models.watch.drift_capsule import replay_watch

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("drift-capsules")]  # the tests share the capsules below

ROOT = Path(__file__).parents[3]

Plant = Callable[[Loop], None]


def layer_not_written(loop: Loop) -> None:
    loop.engine.keeps = lambda name: "layers.1.mlp.down_proj" in name


def refits_ignored(loop: Loop) -> None:
    loop.engine.keeps = lambda name: True


def router_in_bf16(loop: Loop) -> None:
    for router in routers_of(loop.engine.model, loop.engine.model.get_decoder()):
        forward = router.forward
        router.forward = lambda states, *rest, forward=forward: forward(states.bfloat16().float(), *rest)


def temperature(loop: Loop) -> None:
    loop.engine.sampling = Sampling(temperature=0.7)


def lost_weights(loop: Loop) -> None:
    def wake() -> None:
        with torch.no_grad():
            loop.engine.model.model.layers[1].self_attn.o_proj.weight.zero_()

    loop.engine.before_generate = wake


def norm_epsilon(loop: Loop) -> None:
    loop.engine.model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def old_version(loop: Loop) -> None:
    loop.versions = [loop.watch.version, 0, loop.watch.version]


def bf16(loop: Loop) -> None:
    loop.engine.model.to(torch.bfloat16)
    loop.watch.bars = Bars(token_mult_prob_error=1.0)  # above the bars, a lower precision is a failure


def tensor_not_sent(loop: Loop) -> None:
    def tensors() -> list[tuple[str, torch.Tensor]]:
        exported = export_adapter(loop.model).iter_export(loop.model)
        return [(name, tensor.clone()) for name, tensor in exported if "layers.0.self_attn.v_proj" not in name]

    loop.tensors = tensors
    refit = loop.engine.refit
    loop.engine.refit = lambda sent, **options: refit(sent, **options | {"partial": True})


def without_adapters(loop: Loop) -> None:
    def base() -> list[tuple[str, torch.Tensor]]:
        with loop.model.disable_adapter():
            return [(name, tensor.clone()) for name, tensor in export_adapter(loop.model).iter_export(loop.model)]

    loop.tensors = base


def merged_twice(loop: Loop) -> None:
    def doubled() -> list[tuple[str, torch.Tensor]]:
        merged = {name: tensor.clone() for name, tensor in export_adapter(loop.model).iter_export(loop.model)}
        with loop.model.disable_adapter():
            base = {name: tensor.clone() for name, tensor in export_adapter(loop.model).iter_export(loop.model)}
        return [(name, 2 * tensor - base[name]) for name, tensor in merged.items()]

    loop.tensors = doubled


def shifted(loop: Loop) -> None:
    loop.engine.change_samples = lambda samples: [
        replace(sample, logprobs=sample.logprobs[-1:] + sample.logprobs[:-1]) for sample in samples
    ]


def lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


DRIFTS: dict[str, tuple[Plant, Cause]] = {
    "layer-not-written": (layer_not_written, Cause.MISSING_WEIGHTS),
    "refits-ignored": (refits_ignored, Cause.STALE_WEIGHTS),
    "router-in-bf16": (router_in_bf16, Cause.ROUTING),
    "temperature": (temperature, Cause.SAMPLING),
    "lost-weights": (lost_weights, Cause.LOST_WEIGHTS),
    "norm-epsilon": (norm_epsilon, Cause.LOST_WEIGHTS),
    "old-version": (old_version, Cause.STALE_WEIGHTS),
    "bf16": (bf16, Cause.PRECISION),
    "tensor-not-sent": (tensor_not_sent, Cause.MISSING_WEIGHTS),
    "without-adapters": (without_adapters, Cause.UNMERGED_ADAPTER),
    "merged-twice": (merged_twice, Cause.ADAPTER_SCALE),
    "shifted": (shifted, Cause.SHIFTED),
}


def drifted(name: str, file: Path) -> DriftError:
    """Run a loop until the planted drift is found."""
    config = tiny_config(MixtralConfig if name == "router-in-bf16" else LlamaConfig)
    if name in ("without-adapters", "merged-twice"):
        pytest.importorskip("peft")
        loop = Loop(config, wrap=lora, capsule=file)
        loop.watch.refit()
    else:
        loop = Loop(config, capsule=file)
    for _ in range(2):
        assert loop.step().passed
    assert not file.exists()
    DRIFTS[name][0](loop)
    for _ in range(3):
        try:
            loop.step()
        except DriftError as error:
            return error
    pytest.fail("the planted drift was not found")


@pytest.fixture(scope="module")
def capsules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, DriftError]]:
    """A capsule of each drift, with the watch's error."""
    folder = tmp_path_factory.mktemp("capsules")
    files = {name: folder / f"{name}.safetensors" for name in DRIFTS}
    return {name: (file, drifted(name, file)) for name, file in files.items()}


@pytest.fixture(scope="module")
def replays(capsules: dict[str, tuple[Path, DriftError]]) -> dict[str, dict[str, Any]]:
    """The replay of each capsule, in a new process that has only the files."""
    code = """
import json, sys
from pathlib import Path
from nrl_models.consistency.capsule.capsule_file import Contents
from nrl_models.watch.drift_capsule import replay_watch
print(json.dumps([replay_watch(Contents.read(Path(file))).to_json() for file in sys.argv[1:]]))
"""
    return dict(zip(capsules, json_printed(code, *(str(file) for file, _ in capsules.values())), strict=True))


@pytest.mark.parametrize("name", DRIFTS)
def test_capsule_replays_to_the_same_findings(
    name: str, capsules: dict[str, tuple[Path, DriftError]], replays: dict[str, dict[str, Any]]
) -> None:
    error = capsules[name][1]
    assert error.findings[0].cause is DRIFTS[name][1]
    assert replays[name]["reproduced"], replays[name]["checks"]
    failures = [finding for finding in replays[name]["verdict"]["findings"] if finding["level"] == "failure"]
    assert failures == json.loads(json.dumps([finding.to_json() for finding in error.findings]))


def checks(replay: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["detail"] for check in replay["checks"]}


def test_replay_recomputes_module_and_block(replays: dict[str, dict[str, Any]]) -> None:
    details = checks(replays["norm-epsilon"])
    assert (
        "model.layers.1 of the trainer, rebuilt from configuration and weights, is off by 0.0e+00" in details["block"]
    )
    assert "modules" in details
    assert replays["norm-epsilon"]["verdict"]["findings"][0]["names"] == ["model.layers.1.input_layernorm"]
    assert "other experts for" in checks(replays["router-in-bf16"])["routes"]


def test_replay_recomputes_step_metrics(replays: dict[str, dict[str, Any]]) -> None:
    assert "of 3 of 3 rows" in checks(replays["temperature"])["metrics"]


@pytest.mark.parametrize("tensor", ["rows/trainer", "replies/engine"])
def test_replay_of_modified_capsule_fails(capsules: dict[str, tuple[Path, DriftError]], tensor: str) -> None:
    contents = Contents.read(capsules["temperature"][0])
    contents.tensors[tensor] = contents.tensors[tensor] * 1.5
    assert not replay_watch(contents).passed


def change_value(finding: dict[str, Any], name: str, value: float) -> None:
    finding["values"][name] = value


@pytest.mark.parametrize(
    ("drift", "change", "different"),
    [
        ("temperature", lambda finding: finding.update(message="the engine samples with temperature 0.70001"), None),
        ("temperature", lambda finding: finding["values"].pop("temperature"), None),  # an earlier version wrote it
        ("temperature", lambda finding: change_value(finding, "temperature", 0.8), "values.temperature"),
        ("temperature", lambda finding: change_value(finding, "top_k", 5), "values.top_k"),
        ("norm-epsilon", lambda finding: finding.update(names=["model.layers.1.00001.input_layernorm"]), "names"),
        ("norm-epsilon", lambda finding: change_value(finding, "module_error", 0.9), "values.module_error"),
    ],
)
def test_replay_compares_fields_of_findings(
    drift: str,
    change: Callable[[dict[str, Any]], Any],
    different: str | None,
    capsules: dict[str, tuple[Path, DriftError]],
) -> None:
    contents = Contents.read(capsules[drift][0])
    change(contents.values["findings"][0])
    (check,) = (check for check in replay_watch(contents).checks if check.name == "findings")
    assert check.passed is (different is None)
    assert different is None or check.detail.startswith(f"{different} was ")


def test_replay_command(capsules: dict[str, tuple[Path, DriftError]]) -> None:
    result = CliRunner().invoke(app, ["replay", str(capsules["temperature"][0])])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("REPRODUCED: step 3, version 2")
    assert "the engine samples with temperature 0.7, the trainer computes temperature 1" in result.output


def test_capsule_with_logprobs_only(tmp_path: Path) -> None:
    file = tmp_path / "capsule.safetensors"
    watch = Watch(capsule=file)
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(4, 32, dtype=torch.bool)
    trainer, noise = -torch.rand(4, 32, generator=generator), torch.randn(4, 32, generator=generator)
    for _ in range(3):
        watch.after_sync()
        watch.before_update(trainer=trainer, engine=trainer + 0.01 * noise, mask=mask)
    watch.after_sync()
    with pytest.raises(DriftError) as caught:
        watch.before_update(trainer=trainer, engine=trainer + 0.5 * noise, mask=mask)
    replay = replay_watch(Contents.read(file))
    assert replay.passed
    assert replay.verdict["findings"][0]["cause"] == caught.value.findings[0].cause


def test_capsule_of_non_finite_values(tmp_path: Path) -> None:
    file = tmp_path / "capsule.safetensors"
    trainer, mask = -torch.ones(2, 8), torch.ones(2, 8, dtype=torch.bool)
    engine = trainer.clone()
    engine[1, 3] = math.nan
    with pytest.raises(DriftError):
        Watch(capsule=file).before_update(trainer=trainer, engine=engine, mask=mask)
    replay = replay_watch(Contents.read(file))
    assert replay.passed
    assert replay.verdict["findings"][0]["cause"] == Cause.NOT_FINITE


def test_capsule_with_unlimited_staleness(tmp_path: Path) -> None:
    file = tmp_path / "capsule.safetensors"
    trainer, mask = -torch.ones(2, 8), torch.ones(2, 8, dtype=torch.bool)
    engine = trainer.clone()
    engine[1, 3] = math.nan
    watch = Watch(max_staleness=math.inf, capsule=file)
    with pytest.raises(DriftError):
        watch.before_update(trainer=trainer, engine=engine, mask=mask, versions=[0, 0])
    replay = replay_watch(Contents.read(file))
    assert replay.passed
    assert replay.verdict["findings"][0]["cause"] == Cause.NOT_FINITE


def test_capsule_of_token_mismatch(tmp_path: Path) -> None:
    loop = Loop(capsule=tmp_path / "capsule.safetensors")
    samples = loop.sample()
    tokens = [list(sample.sequence) for sample in samples]
    tokens[1][-1] += 1
    with pytest.raises(DriftError):
        loop.watch.before_update(samples, loop.logprobs(samples).logprobs, tokens=tokens)
    replay = replay_watch(Contents.read(tmp_path / "capsule.safetensors"))
    assert replay.passed
    assert replay.verdict["findings"][0]["names"] == ["row 1"]


def test_healthy_run_writes_no_capsule(tmp_path: Path) -> None:
    loop = Loop(capsule=tmp_path / "capsules")
    for _ in range(3):
        assert loop.step().passed
    assert list(tmp_path.iterdir()) == []


def test_directory_receives_one_capsule_per_failure(tmp_path: Path) -> None:
    loop = Loop(fail=False, capsule=tmp_path / "capsules")
    loop.step()
    norm_epsilon(loop)
    for _ in range(6):
        loop.step()
    files = sorted((tmp_path / "capsules").iterdir())
    assert len(files) == 8
    assert all(replay_watch(Contents.read(file)).passed for file in files)


def test_file_receives_the_first_failure(tmp_path: Path) -> None:
    file = tmp_path / "capsule.safetensors"
    loop = Loop(fail=False, capsule=file)
    loop.step()
    norm_epsilon(loop)
    loop.step()
    first = file.read_bytes()
    loop.step()
    assert file.read_bytes() == first
