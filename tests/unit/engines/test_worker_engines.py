"""Real engines in a subprocess: MLX, on a CPU without an Apple GPU, and Megatron-Core."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import new_model
from transformers import PreTrainedModel

from nrl_models import AutoModelForCausalLM
from nrl_models.engines import start_engine
from nrl_models.engines.base import Engine
from nrl_models.engines.digests import tensor_digest
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.processes.worker_engine import WorkerEngine
from nrl_models.errors import EngineError, MixedWeightsError
from nrl_models.logprobs import Sampling
from nrl_models.testing.tiny import tiny_config

pytestmark = pytest.mark.integrations

SAMPLINGS = [Sampling(), Sampling(0.0), Sampling(0.7, top_k=40, top_p=0.9)]


PACKAGES = {"mlx": "mlx_lm", "megatron": "megatron.core"}


def require(engine: str) -> str:
    """Skip if the engine is not installed."""
    pytest.importorskip(PACKAGES[engine], reason=f"needs the extra `{engine}`")
    return engine


@pytest.fixture(params=PACKAGES)
def engine_name(request: pytest.FixtureRequest) -> str:
    """The name of the engine."""
    return require(request.param)


RUNS = [
    ("mlx", "LlamaConfig"),
    ("mlx", "Qwen3MoeConfig"),
    ("mlx", "DeepseekV3Config"),
    ("megatron", "DeepseekV3Config"),
]
"""Engines and the models they run. tests/distributed runs more with Megatron-Core, which starts slowly."""


@pytest.fixture(
    scope="module",
    # The tests of one engine belong on one worker: starting it takes most of their time.
    params=[pytest.param(run, id="-".join(run), marks=pytest.mark.xdist_group("-".join(run))) for run in RUNS],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A checkpoint saved by transformers 5, with an engine for it. Its rotary base is not a default value."""
    engine, config_class = request.param
    require(engine)
    folder = tmp_path_factory.mktemp("worker")
    rope = {"rope_type": "default", "rope_theta": 100.0}
    config = tiny_config(getattr(transformers, config_class), {"rope_parameters": rope})
    model = new_model(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2.0)
    model.save_pretrained(folder)
    return engine, folder


@pytest.fixture(scope="module")
def folder(run: tuple[str, Path]) -> Path:
    """The checkpoint's folder."""
    return run[1]


@pytest.fixture(scope="module")
def running(run: tuple[str, Path]) -> Iterator[WorkerEngine]:
    """The running engine. Shared: use `refitted` to change its weights."""
    with start_engine(*run, dtype=torch.float32) as engine:
        assert isinstance(engine, WorkerEngine)
        yield engine


@pytest.fixture
def refitted(running: Engine, folder: Path) -> Iterator[Engine]:
    """The running engine. The checkpoint's weights are restored afterwards."""
    yield running
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    running.refit(model.state_dict_adapter.iter_export(model))


@pytest.fixture
def model(folder: Path) -> PreTrainedModel:
    """Our model of the checkpoint."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def assert_close(actual: list[list[float]], expected: list[list[float]]) -> None:
    for first, second in zip(actual, expected, strict=True):
        torch.testing.assert_close(torch.tensor(first), torch.tensor(second), rtol=0, atol=5e-5, equal_nan=True)


@pytest.mark.long
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_samples_and_scores_match_trainer(
    running: Engine, model: PreTrainedModel, prompts: list[list[int]], sampling: Sampling
) -> None:
    trainer = HFEngine(model, "trainer")
    samples = running.generate(prompts, sampling, max_new_tokens=8, seed=3)
    assert [sample.prompt for sample in samples] == [tuple(prompt) for prompt in prompts]
    expected = trainer.score([sample.sequence for sample in samples], sampling)
    assert_close([list(sample.logprobs) for sample in samples], [row[-8:] for row in expected])
    assert_close(running.score([sample.sequence for sample in samples], sampling), expected)
    last = running.score(prompts, sampling, last=3)
    assert_close([row[-3:] for row in last], [row[-3:] for row in trainer.score(prompts, sampling)])
    assert torch.tensor(last[0][:-3]).isnan().all()
    again = running.generate(prompts, sampling, max_new_tokens=8, seed=3)
    assert [sample.tokens for sample in again] == [sample.tokens for sample in samples]


def test_generation_stops_at_eos_token(running: WorkerEngine, prompts: list[list[int]]) -> None:
    (unstopped,) = running.generate(prompts[:1], Sampling(0.0), max_new_tokens=6)
    before, running.ends = running.ends, [unstopped.tokens[2]]
    try:
        (stopped,) = running.generate(prompts[:1], Sampling(0.0), max_new_tokens=6, ignore_end=False)
    finally:
        running.ends = before
    assert stopped.tokens == unstopped.tokens[: unstopped.tokens.index(unstopped.tokens[2]) + 1]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_refit_writes_every_weight(
    refitted: Engine, model: PreTrainedModel, prompts: list[list[int]], dtype: torch.dtype
) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    exported = {name: tensor.to(dtype) for name, tensor in model.state_dict_adapter.iter_export(model)}
    report = refitted.refit(exported.items(), bucket_bytes=100_000)
    assert report.buckets > 1
    assert report.digests == {name: tensor_digest(tensor) for name, tensor in exported.items()}
    trainer = HFEngine(model, "trainer")
    trainer.refit(exported.items())
    assert_close(refitted.score(prompts, Sampling()), trainer.score(prompts, Sampling()))


def test_invalid_refit_raises_and_changes_nothing(
    running: Engine, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    before = running.score(prompts, Sampling())
    exported = dict(model.state_dict_adapter.iter_export(model))
    name = "model.norm.weight"
    for wrong in ({"model.nonsense.weight": torch.ones(2)}, {name: exported[name][:-1]}):
        with pytest.raises(EngineError, match=next(iter(wrong)).replace(".", r"\.")):
            running.refit((exported | wrong).items())
        assert running.score(prompts, Sampling()) == before


def test_refit_with_wrong_kind_of_dtype_changes_nothing(
    running: Engine, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    before = running.score(prompts, Sampling())
    exported = dict(model.state_dict_adapter.iter_export(model))
    name = "model.layers.0.self_attn.o_proj.weight"
    for dtype in (torch.int32, torch.float8_e4m3fn):
        with pytest.raises(EngineError, match=r"o_proj\.weight was sent as \w+, and the engine holds float32"):
            running.refit((exported | {name: (100 * exported[name]).to(dtype)}).items())
        assert running.score(prompts, Sampling()) == before


@pytest.mark.long
def test_refit_of_tied_head_must_equal_embeddings(engine_name: str, tmp_path: Path, prompts: list[list[int]]) -> None:
    new_model(tiny_config(transformers.LlamaConfig, {"tie_word_embeddings": True})).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    weights = dict(model.state_dict_adapter.iter_export(model))
    head = weights["model.embed_tokens.weight"].clone()
    with start_engine(engine_name, tmp_path, dtype=torch.float32) as engine:
        before = engine.score(prompts, Sampling())
        with pytest.raises(EngineError, match=r"lm_head\.weight differs from .*tie_word_embeddings"):
            engine.refit((weights | {"lm_head.weight": head * 2}).items())
        assert engine.score(prompts, Sampling()) == before
        engine.refit((weights | {"lm_head.weight": head}).items())
        assert_close(engine.score(prompts, Sampling()), before)


def test_incomplete_refit_raises(refitted: Engine, model: PreTrainedModel) -> None:
    exported = dict(model.state_dict_adapter.iter_export(model))
    del exported["model.norm.weight"]
    with pytest.raises(MixedWeightsError, match=r"left 1 tensors unwritten: model\.norm\.weight"):
        refitted.refit(exported.items())
    with pytest.raises(MixedWeightsError):
        refitted.score([[5, 6]], Sampling())


def test_refit_without_any_kind_of_tensor_raises(refitted: Engine, model: PreTrainedModel) -> None:
    before = refitted.score([[5, 6, 7]], Sampling())
    exported = dict(model.state_dict_adapter.iter_export(model))
    kinds = {re.sub(r"\d+", "N", name): name for name in exported}
    assert len(kinds) >= 12
    for missing in kinds.values():
        changed = {name: tensor * 1.01 for name, tensor in exported.items() if name != missing}
        with pytest.raises(EngineError) as caught:
            refitted.refit(changed.items())
        assert isinstance(caught.value, MixedWeightsError) or missing in str(caught.value), caught.value
    refitted.refit(exported.items())
    assert refitted.score([[5, 6, 7]], Sampling()) == before


UNSUPPORTED = {
    "mlx": "MLX failed: .*biogpt not supported",
    "megatron": "Megatron-Core failed: .*has no place in Megatron",
}


@pytest.mark.long
def test_unsupported_model_and_option_raise(tmp_path: Path, engine_name: str) -> None:
    new_model(tiny_config(transformers.BioGptConfig)).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=UNSUPPORTED[engine_name]):
        start_engine(engine_name, tmp_path)
    with pytest.raises(EngineError, match=rf"{engine_name} has no option python: expected dtype, load_format"):
        start_engine(engine_name, tmp_path, python="x")


@pytest.mark.long
def test_dummy_weights_depend_on_seed_only(checkpoint: Path, prompts: list[list[int]], engine_name: str) -> None:
    loaded_scores = HFEngine.start(checkpoint, dtype=torch.float32).score(prompts, Sampling())
    scores = []
    for _ in range(2):
        with start_engine(engine_name, checkpoint, load_format="dummy", seed=1) as engine:
            assert isinstance(engine, WorkerEngine)
            scores.append(engine.score(prompts, Sampling()))
            engine.worker.process.kill()
            with pytest.raises(EngineError, match=f"{engine.engine_name} died"):
                engine.score(prompts, Sampling())
    assert scores[0] == scores[1] != loaded_scores
