"""vLLM with transformers' classes in a subprocess, next to vLLM with its own classes: votes and advice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from inside import SETTINGS, changed, clear_prefix_cache, model_of
from transformers import LlamaConfig, LlamaForCausalLM

from nrl_models import AutoModelForCausalLM
from nrl_models.common.trust.servers import TRANSFORMERS_BACKEND
from nrl_models.consistency.matrix import run_matrix
from nrl_models.consistency.measure import Meter
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.references import References
from nrl_models.consistency.store import Store
from nrl_models.consistency.verdict import Advice, Opinion, Vote
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.start import start_engine
from nrl_models.logprobs import Sampling
from nrl_models.quirks import VerdictKind
from tests.engine.families import tiny_model
from tests.engine.one_engine import OneEngine

SAMPLINGS = (Sampling(), Sampling(0.7, top_p=0.9), Sampling(1.3, top_k=20))


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(LlamaConfig, LlamaForCausalLM)


def max_difference(first: list[list[float]], second: list[list[float]]) -> float:
    """Return the largest difference. Tokens that both sides exclude do not count."""
    one, other = torch.tensor(first)[:, 1:], torch.tensor(second)[:, 1:]
    return torch.where(one == other, 0.0, (one - other).abs()).max().item()


def test_transformers_backend_scores_and_refits(vllm: OneEngine, checkpoint: Path, tmp_path: Path) -> None:
    """vLLM has no native class for Phi. Its output embedding has a bias, which a refit may send before the weight."""
    native, tokens = vllm(checkpoint), [list(range(50, 90)), list(range(60, 100))]
    native_scores = native.score(tokens, Sampling())
    model = tiny_model("PhiForCausalLM")
    model.save_pretrained(tmp_path)
    trainer = HFEngine(model, "trainer")
    with start_engine("vllm", tmp_path, dtype=torch.float32, max_length=64, load_format="dummy") as engine:
        assert engine.describe()["model_impl"] == "transformers"
        assert not engine.capabilities().modules  # the model is in another process
        assert not engine.capabilities().transformers_classes
        weights = dict(model.state_dict_adapter.iter_export(model))
        for factor in (1.0, 1.2):  # in the second refit the engine has a bias
            refitted = [(name, factor * weights[name]) for name in reversed(weights)]
            trainer.refit(refitted)
            assert max_difference(engine.score(tokens, Sampling()), trainer.score(tokens, Sampling())) > 1e-2
            assert not engine.refit(refitted, bucket_bytes=1).unwritten
            for sampling in SAMPLINGS:
                assert max_difference(engine.score(tokens, sampling), trainer.score(tokens, sampling)) < 1e-4
    assert native.capabilities().transformers_classes
    clear_prefix_cache(native)
    assert native.score(tokens, Sampling()) == native_scores  # the engine is unaffected by the end of the other one


def test_transformers_backend_is_advised(vllm: OneEngine, checkpoint: Path, tmp_path: Path) -> None:
    trainer = HFEngine(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), "trainer")
    native = vllm(checkpoint)
    meter = Meter(native, trainer, Prompts(None, 200), SETTINGS, Store(tmp_path, {}))
    references = References(checkpoint, witness=TRANSFORMERS_BACKEND, witness_options={"max_length": 128})
    weight = model_of(native).model.layers[0].post_attention_layernorm.weight
    with changed(weight, 2 * weight):
        result = run_matrix(str(checkpoint), meter, references).results[0]
    clear_prefix_cache(native)
    verdict = result.verdict
    assert verdict is not None
    assert verdict.kind == VerdictKind.ENGINE
    assert verdict.divergence.module.startswith("model.layers.0")
    assert verdict.witness == Opinion(TRANSFORMERS_BACKEND, Vote.REFERENCE, decodes=True)
    assert verdict.advice is Advice.TRANSFORMERS_BACKEND
