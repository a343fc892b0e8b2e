"""Engine quirks: the symptom, the workaround, and whether the installed engine still has the bug."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import quirk_probes as probes
import torch
import transformers
from inside import SETTINGS, changed, clear_prefix_cache, model_of
from quirk_tripwires import tripwire
from safetensors.torch import load_file
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig

from nrl_models import AutoModelForCausalLM
from nrl_models.common.switches import quirks_off
from nrl_models.consistency.measure import Meter
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.refit import RefitChecker, RefitStep
from nrl_models.engines import start_engine
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.transfer.reload import Unwritten, WeightReload
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.errors import EngineError
from nrl_models.quirks import CATALOG

QUIRKS = {quirk.name: quirk for quirk in CATALOG}


@pytest.fixture(scope="session")
def tied(make_checkpoint: Callable[..., Path]) -> Path:
    """A model with tied embeddings."""
    return make_checkpoint(LlamaConfig, LlamaForCausalLM, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def with_constant(make_checkpoint: Callable[..., Path]) -> Path:
    """A model that scales its embeddings by a constant."""
    return make_checkpoint(Gemma2Config, Gemma2ForCausalLM)


@pytest.fixture(scope="session")
def with_experts(make_checkpoint: Callable[..., Path]) -> Path:
    """A mixture of experts."""
    from transformers import MixtralForCausalLM

    return make_checkpoint(MixtralConfig, MixtralForCausalLM)


def refit(path: Path, engine: VLLMEngine, times: int = 1) -> RefitStep:
    """Refit an engine that started with random weights, and compare."""
    clear_prefix_cache(engine)
    trainer = HFEngine(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), "trainer")
    settings = replace(SETTINGS, threshold=1.0005)
    prompts = Prompts(None, trainer.capabilities().vocabulary or 0)
    checker = RefitChecker(str(path), Meter(engine, trainer, prompts, settings))
    for _ in range(times - 1):
        checker.refit("before")
        checker.train()
    return checker.refit("after")


def dummy(vllm: Any, path: Path) -> VLLMEngine:
    """Start an engine with random weights."""
    vllm.stop()
    with quirks_off("engine-dummy-buffers"):
        return vllm(path, load_format="dummy", seed=3)


def names(step: RefitStep) -> list[str]:
    """Return the quirks that a step's verdict names."""
    return list(step.result.verdict.quirks)


def persistent(model: nn.Module) -> None:
    """Make a model's constant persistent, as in vLLM before 0.9.2."""
    model.model._non_persistent_buffers_set.discard("normalizer")


def test_symptom_of_engine_dummy_buffers(with_constant: Path, vllm: Any) -> None:
    engine = dummy(vllm, with_constant)
    model = model_of(engine)
    original = model.model.normalizer.clone()
    persistent(model)
    assert probes.dummy_loading_touches_buffers(model)
    assert not torch.equal(model.model.normalizer, original)
    model.model.normalizer.fill_(2.0)  # large enough to be visible: the dummy loader's value is almost zero
    step = refit(with_constant, engine)
    assert any("buffers of the engine were not written: model.normalizer" in problem for problem in step.problems)
    assert "engine-dummy-buffers" in names(step)
    vllm.stop()


def test_cure_of_engine_dummy_buffers(with_constant: Path, vllm: Any) -> None:
    """With the flag, the engine reads the checkpoint. The installed engine does not change constants."""
    vllm.stop()
    engine = vllm(with_constant, load_format="dummy", seed=3)
    assert model_of(engine).model.normalizer == 16
    norm = load_file(with_constant / "model.safetensors")["model.norm.weight"]
    assert torch.equal(model_of(engine).model.norm.weight, norm)
    step = refit(with_constant, engine)
    assert step.passed, step.problems
    model = model_of(dummy(vllm, with_constant))
    tripwire(QUIRKS["engine-dummy-buffers"], probes.dummy_loading_touches_buffers(model), "vLLM")
    vllm.stop()


def test_symptom_of_engine_reload_buffers(with_constant: Path, vllm: Any) -> None:
    """The verdict names a constant that a refit leaves uninitialized."""
    engine = dummy(vllm, with_constant)
    assert refit(with_constant, engine).passed
    normalizer = model_of(engine).model.normalizer
    with changed(normalizer, torch.ones_like(normalizer)):
        step = refit(with_constant, engine)
    assert not step.passed
    assert "engine-reload-buffers" in names(step)


def test_cure_of_engine_reload_buffers(with_constant: Path, vllm: Any) -> None:
    engine = dummy(vllm, with_constant)
    before = copy.deepcopy(dict(model_of(engine).named_buffers()))
    assert refit(with_constant, engine, times=2).passed
    after = dict(model_of(engine).named_buffers())
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_symptom_of_engine_tied_head(tied: Path, vllm: Any) -> None:
    engine = dummy(vllm, tied)
    with quirks_off("engine-tied-head"):
        missed = not refit(tied, engine).passed
    vllm.stop()
    tripwire(QUIRKS["engine-tied-head"], missed, "vLLM")
    assert missed


def test_cure_of_engine_tied_head(tied: Path, vllm: Any) -> None:
    assert refit(tied, dummy(vllm, tied), times=2).passed


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tests vLLM's kernels for CPUs")


@on_cpu
def test_symptom_of_engine_experts_on_cpu(with_experts: Path, vllm: Any) -> None:
    engine = dummy(vllm, with_experts)
    with quirks_off("engine-experts-on-cpu"):
        missed = not refit(with_experts, engine).passed
    vllm.stop()
    tripwire(QUIRKS["engine-experts-on-cpu"], missed, "vLLM")
    assert missed


@on_cpu
def test_cure_of_engine_experts_on_cpu(with_experts: Path, vllm: Any) -> None:
    assert refit(with_experts, dummy(vllm, with_experts), times=2).passed


class BatchNorms(nn.Sequential):
    """A model of vLLM with one batch norm."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(4))
        self.requires_grad_(False)

    def load_weights(self, weights: Any) -> set[str]:
        """Load weights as most models of vLLM do."""
        from vllm.model_executor.models.utils import AutoWeightsLoader

        return AutoWeightsLoader(self).load_weights(weights)


def reloaded(engine: VLLMEngine, *left_out: str) -> tuple[Unwritten, list[str], int]:
    """Reload a batch norm. Returns what was not written, tensors without their new values, and the number of tensors.

    Args:
        engine: Any engine. Its configuration is used.
        left_out: Names of tensors that are not sent.
    """
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    model = BatchNorms()
    record_metadata_for_reloading(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sent = {name: torch.full_like(tensor, 7) for name, tensor in before.items()}
    reload = WeightReload(model, engine.llm.llm_engine.vllm_config)
    reload.load((name, tensor) for name, tensor in sent.items() if name not in left_out)
    left = reload.finish()
    after = model.state_dict()
    assert not model[0]._state_dict_hooks
    if left_out:  # vLLM writes a bias at once, without waiting for the other tensors of its module
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name != "0.bias")
    return left, [name for name, tensor in after.items() if not torch.equal(tensor, sent[name])], len(sent)


def test_symptom_of_engine_batch_norms(tied: Path, vllm: Any) -> None:
    engine = vllm(tied)
    with quirks_off("engine-batch-norms"):
        left, lost, _ = reloaded(engine)
    tripwire(QUIRKS["engine-batch-norms"], bool(lost), "vLLM")
    assert left == Unwritten((), ())  # nothing tells
    assert lost == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]


def test_cure_of_engine_batch_norms(tied: Path, vllm: Any) -> None:
    assert reloaded(vllm(tied)) == (Unwritten((), ()), [], 5)


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "0.running_mean", "0.running_var"])
def test_batch_norm_without_one_tensor_keeps_its_values(tied: Path, vllm: Any, name: str) -> None:
    left, _, count = reloaded(vllm(tied), name)
    assert name in (*left.parameters, *left.buffers)
    assert len({*left.parameters, *left.buffers}) == count


@pytest.fixture
def vllm_arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Record the arguments for vLLM, without starting it."""
    import vllm

    keywords: dict[str, Any] = {}

    def record(*args: Any, **options: Any) -> Any:
        keywords.update(options)
        raise RuntimeError("not in this test")

    monkeypatch.setattr(vllm, "LLM", record)
    return keywords


@pytest.fixture(params=["Gemma3", "Emu3"])
def with_images(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The configuration of a vision-language model: images pass through a tower, or become tokens."""
    config = getattr(transformers, f"{request.param}Config")
    config(architectures=[f"{request.param}ForConditionalGeneration"]).save_pretrained(tmp_path)
    return tmp_path


def test_symptom_of_engine_tokenizer(with_images: Path, vllm_arguments: dict[str, Any]) -> None:
    assert probes.processors_need_a_tokenizer()
    with quirks_off("engine-tokenizer"), pytest.raises(EngineError, match="not in this test"):
        start_engine("vllm", with_images)
    assert vllm_arguments["skip_tokenizer_init"] is True


def test_cure_of_engine_tokenizer(with_images: Path, tied: Path, vllm_arguments: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="not in this test"):
        start_engine("vllm", with_images)
    assert vllm_arguments["skip_tokenizer_init"] is False
    with pytest.raises(EngineError, match="not in this test"):
        start_engine("vllm", tied)
    assert vllm_arguments["skip_tokenizer_init"] is True  # text only


def test_symptom_of_engine_v0_runtime(
    tied: Path, vllm_arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NRL_VLLM_USE_V1", "0")
    with quirks_off("engine-v0-runtime"), pytest.raises(EngineError, match="not in this test"):
        start_engine("vllm", tied)  # would start another engine


def test_cure_of_engine_v0_runtime(tied: Path, vllm_arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_VLLM_USE_V1", "0")
    with pytest.raises(EngineError, match="NRL_VLLM_USE_V1=0 selects vLLM's first runtime"):
        start_engine("vllm", tied)
    assert not vllm_arguments
    monkeypatch.setenv("NRL_VLLM_USE_V1", "1")
    with pytest.raises(EngineError, match="not in this test"):
        start_engine("vllm", tied)


@pytest.mark.parametrize("name", [*probes.OF_VLLM, *probes.OF_RUNNING_VLLM])
def test_vllm_quirk_still_exists(name: str) -> None:
    """Quirks that a function can check. The tests above check those that require a running engine."""
    tripwire(QUIRKS[name], probes.OF_VLLM[name]() if name in probes.OF_VLLM else None, "vLLM")
