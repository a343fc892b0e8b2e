"""Planted faults without an external engine: the verdict names the wrong side, its computation and the location."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import new_model
from small_cell import SETTINGS
from transformers import DeepseekV3Config, Gemma2Config, LlamaConfig, MistralConfig, PreTrainedConfig

from nrl_models import AutoModelForCausalLM
from nrl_models.common.upstream import config_value
from nrl_models.consistency import matrix, references
from nrl_models.consistency.capsule.decision import Case, Decision
from nrl_models.consistency.capsule.observations import Observations
from nrl_models.consistency.cells import THRESHOLD
from nrl_models.consistency.hypotheses import alternatives
from nrl_models.consistency.matrix import run_matrix
from nrl_models.consistency.measure import Meter
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.references import References
from nrl_models.consistency.refit import RefitChecker
from nrl_models.consistency.store import Store
from nrl_models.consistency.verdict import CauseKind, Opinion, Party, Verdict, Vote
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import EngineError
from nrl_models.logprobs import Sampling
from nrl_models.quirks import Pattern, VerdictKind
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.tiny import tiny_config

Judge = Callable[..., Verdict | None]


@pytest.fixture
def judge(tmp_path: Path, prompts: Prompts) -> Judge:
    """Return a function that runs an engine and a trainer, possibly with faults, and returns the verdict."""

    def judge(
        config: PreTrainedConfig,
        engine_config: dict[str, Any] | None = None,
        change: Callable[[HFEngine, HFEngine], None] = lambda engine, trainer: None,
        random_weights: bool = False,
        witness: str = "",
        second_config: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Verdict | None:
        model = new_model(config)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(2.0)
        path = tmp_path / "checkpoint"
        model.save_pretrained(path)
        wrong = AutoModelForCausalLM.from_pretrained(path, combine=False, dtype=torch.float32, **(engine_config or {}))
        engine = HFEngine(wrong, "engine")
        trainer = HFEngine(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), "trainer")
        change(engine, trainer)
        store = Store(tmp_path / "store", {}, fresh=True)
        cell_settings = replace(SETTINGS, **settings)
        second = None
        if second_config is not None:
            other = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **second_config)
            second = HFEngine(other, "megatron")
        meter = Meter(engine, trainer, prompts, cell_settings, store, second=second)
        report = run_matrix(str(path), meter, References(path, witness=witness), random_weights=random_weights)
        return report.results[0].verdict

    return judge


def test_equal_models_have_no_verdict(judge: Judge) -> None:
    assert judge(tiny_config(LlamaConfig)) is None


@pytest.mark.long
@pytest.mark.parametrize(
    ("config_class", "overrides", "wrong", "cause"),
    [
        (
            LlamaConfig,
            {},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
            "'rope_theta': 500000",
        ),
        (Gemma2Config, {"final_logit_softcapping": 3.0}, {"final_logit_softcapping": None}, "soft cap of the logits"),
        (MistralConfig, {"sliding_window": 8}, {"sliding_window": None}, "`sliding_window` were None and not 8"),
        (MistralConfig, {"sliding_window": 8}, {"sliding_window": 9}, "`sliding_window` were 9 and not 8"),
        (LlamaConfig, {"rms_norm_eps": 0.1}, {"rms_norm_eps": 1e-6}, "`rms_norm_eps` were 1e-06 and not 0.1"),
    ],
    ids=["rope", "softcap", "no-window", "window-off-by-one", "eps"],
)
def test_verdict_names_ignored_config_key(
    judge: Judge, config_class: type[PreTrainedConfig], overrides: dict[str, Any], wrong: dict[str, Any], cause: str
) -> None:
    verdict = judge(tiny_config(config_class, overrides), wrong, threshold=1.00001)
    assert verdict is not None
    assert verdict.kind == VerdictKind.ENGINE
    assert verdict.cause.kind in (CauseKind.CONFIG, CauseKind.HEAD)
    assert cause in verdict.cause.message


def test_verdict_names_wrong_trainer(judge: Judge) -> None:
    def swap(engine: HFEngine, trainer: HFEngine) -> None:
        mlp = trainer.model.model.layers[1].mlp
        with torch.no_grad():
            gate = mlp.gate_proj.weight.clone()
            mlp.gate_proj.weight.copy_(mlp.up_proj.weight)
            mlp.up_proj.weight.copy_(gate)

    verdict = judge(tiny_config(LlamaConfig), change=swap)
    assert verdict.kind == VerdictKind.TRAINER
    assert "model.layers.1.mlp.gate_proj.weight" in verdict.divergence.weights
    assert (
        "model.layers.1.mlp.gate_proj.weight holds what belongs in model.layers.1.mlp.up_proj.weight"
        in verdict.divergence.detail
    )


def test_configuration_keys_have_alternatives(family_case: FamilyCase) -> None:
    """Newer versions of transformers raise an error if a key is read that has a value for each layer."""
    config = family_case.config.get_text_config()
    found = list(alternatives(config))
    assert all(isinstance(key, str) and config_value(config, key, None) != value for key, value in found)


def test_correct_second_trainer_has_no_verdict(judge: Judge) -> None:
    assert judge(tiny_config(MistralConfig, WINDOW), second_config={}) is None


def test_verdict_names_wrong_second_trainer(judge: Judge) -> None:
    verdict = judge(tiny_config(MistralConfig, WINDOW), second_config={"sliding_window": None}, threshold=1.00001)
    assert verdict.kind == VerdictKind.SECOND_TRAINER
    assert verdict.at_fault == ("second trainer",)
    assert "`sliding_window` were None and not 8" in verdict.cause.message
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict


def test_verdict_names_engine_with_second_trainer(judge: Judge) -> None:
    wrong = {"sliding_window": None}
    verdict = judge(tiny_config(MistralConfig, WINDOW), wrong, second_config={}, threshold=1.00001)
    assert verdict.kind == VerdictKind.ENGINE
    verdict = judge(tiny_config(MistralConfig, WINDOW), wrong, second_config=wrong, threshold=1.00001)
    assert verdict.kind == VerdictKind.ENGINE
    assert verdict.at_fault == ("engine decode", "engine prefill", "second trainer")


def test_verdict_names_trainer_and_engine(judge: Judge) -> None:
    def spoil(engine: HFEngine, trainer: HFEngine) -> None:
        with torch.no_grad():
            engine.model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
            trainer.model.model.layers[1].mlp.down_proj.weight.mul_(0.5)

    verdict = judge(tiny_config(LlamaConfig), change=spoil)
    assert verdict.kind == VerdictKind.BOTH
    assert verdict.at_fault == ("trainer", "engine decode", "engine prefill")


def test_lower_precision_verdict(judge: Judge) -> None:
    def half(engine: HFEngine, trainer: HFEngine) -> None:
        engine.model.to(torch.bfloat16)

    verdict = judge(tiny_config(LlamaConfig), change=half)
    assert verdict.kind == VerdictKind.PRECISION
    assert "The difference is explained by precision. Engine: bfloat16; trainer: float32." in verdict.summary


def test_rounding_verdict(judge: Judge) -> None:
    """In bf16, eager attention rounds differently than SDPA."""

    def both_half(engine: HFEngine, trainer: HFEngine) -> None:
        engine.model.to(torch.bfloat16)
        trainer.model.to(torch.bfloat16)

    eager = {"attn_implementation": "eager"}
    verdict = judge(tiny_config(LlamaConfig), eager, change=both_half, threshold=1.00001, noise_factor=0.0)
    assert verdict.kind == VerdictKind.ROUNDING
    assert verdict.at_fault == ()
    assert "explained by rounding" in verdict.summary
    assert "Engine: bfloat16; trainer: bfloat16." in verdict.summary


@pytest.mark.parametrize(("kind", "judged"), [(VerdictKind.ROUNDING, 5), (VerdictKind.PRECISION, matrix.MAX_VERDICTS)])
def test_cells_with_rounding_do_not_count(
    kind: VerdictKind, judged: int, checkpoint: Path, prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell that rounding explains does not use up the verdicts of the others, which might show a fault."""
    monkeypatch.setattr(matrix, "_verdict", lambda *args: Verdict(kind, (), {}))
    engine = HFEngine.start(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        engine.model.model.layers[0].mlp.down_proj.weight.mul_(4.0)
    trainer = HFEngine(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), "trainer")
    settings = replace(SETTINGS, threshold=THRESHOLD, batches=(2, 3, 4, 5, 6), sampling=Sampling(0.8))
    report = run_matrix(
        str(checkpoint),
        Meter(engine, trainer, prompts, settings, Store(tmp_path / "store", {}, fresh=True)),
        References(checkpoint),
    )
    assert [result.passed for result in report.results] == [False] * 5
    assert sum(result.verdict is not None for result in report.results) == judged


class Rounded:
    """References whose log-probabilities are off by noise in bf16, and by `single` in fp32."""

    def __init__(self, exact: torch.Tensor, noise: torch.Tensor, single: float = 0.0) -> None:
        self.references = {torch.float64: exact, torch.float32: exact + single, torch.bfloat16: exact + noise}

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        return self.references[dtype]


@pytest.mark.parametrize(
    ("nats", "kind"), [(0.0, VerdictKind.ROUNDING), (-3.0, VerdictKind.PRECISION), (-9999.0, VerdictKind.PRECISION)]
)
def test_rounding_does_not_explain_one_wrong_token(nats: float, kind: VerdictKind) -> None:
    """A token counts at most 10 nats in the mean error, so that the mean may stay close to that of rounding."""
    generator = torch.Generator().manual_seed(0)
    ours, theirs, usual = 0.04 * torch.randn(3, 2, 256, generator=generator, dtype=torch.float64)
    exact = torch.full((2, 256), -2.0, dtype=torch.float64)
    decode = exact + theirs
    decode[0, -1] += nats
    case = Case(
        tokens=torch.zeros(2, 300, dtype=torch.long),
        generated=256,
        sampling=Sampling(0.0),
        parties={Party.TRAINER: exact + ours, Party.DECODE: decode},
        dtypes=dict.fromkeys((Party.TRAINER, Party.DECODE), torch.bfloat16),
        threshold=THRESHOLD,
    )
    measures: Any = Rounded(exact, usual)
    assert Decision(case, Observations(), measures).verdict().kind == kind


def test_tight_threshold_does_not_make_a_model_unstable() -> None:
    """transformers in fp32 is above the threshold, but much closer to fp64 than the engine in bf16."""
    exact = torch.full((2, 64), -2.0, dtype=torch.float64)
    usual = 0.01 * torch.randn(2, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    case = Case(
        tokens=torch.zeros(2, 100, dtype=torch.long),
        generated=64,
        sampling=Sampling(0.0),
        parties={Party.TRAINER: exact, Party.DECODE: exact + usual},
        dtypes={Party.TRAINER: torch.float32, Party.DECODE: torch.bfloat16},
        threshold=1.0000001,
    )
    measures: Any = Rounded(exact, usual, single=4e-7)
    assert Decision(case, Observations(), measures).verdict().kind == VerdictKind.PRECISION


def test_rounding_does_not_hide_fault(judge: Judge) -> None:
    def spoil(engine: HFEngine, trainer: HFEngine) -> None:
        engine.model.to(torch.bfloat16)
        trainer.model.to(torch.bfloat16)
        with torch.no_grad():
            engine.model.model.layers[0].mlp.down_proj.weight.mul_(1.5)

    assert judge(tiny_config(LlamaConfig), change=spoil).kind == VerdictKind.ENGINE


# Quirks


def _scale_embeddings(engine: HFEngine, trainer: HFEngine) -> None:
    """Set the embedding scale, a derived constant, to its value in an engine with random weights."""
    engine.model.model.embed_tokens.embed_scale.fill_(1.0)


def test_verdict_names_quirk_of_stale_constant(judge: Judge) -> None:
    verdict = judge(tiny_config(Gemma2Config), change=_scale_embeddings, random_weights=True)
    assert verdict.kind == VerdictKind.ENGINE
    assert verdict.divergence.pattern == Pattern.SCALED
    assert "the expected one times 0.0625" in verdict.divergence.detail
    assert verdict.quirks == ("engine-dummy-buffers", "engine-reload-buffers")
    assert "Known quirk: engine-dummy-buffers: An engine that starts with random weights" in verdict.summary


def test_verdict_omits_unrelated_quirks(judge: Judge) -> None:
    assert judge(tiny_config(Gemma2Config), change=_scale_embeddings).quirks == ()  # the engine has read its weights

    def scale(engine: HFEngine, trainer: HFEngine) -> None:
        with torch.no_grad():
            engine.model.model.embed_tokens.weight.mul_(0.5)

    quirks = judge(tiny_config(LlamaConfig), change=scale, random_weights=True).quirks
    assert "engine-dummy-buffers" not in quirks  # no family declares this quirk for the model


# Refits


def checker(path: Path, engine: HFEngine, prompts: Prompts) -> RefitChecker:
    trainer = HFEngine(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), "trainer")
    settings = replace(SETTINGS, threshold=1.0001)
    return RefitChecker(str(path), Meter(engine, trainer, prompts, settings))


def test_two_consecutive_refits(checkpoint: Path, prompts: Prompts) -> None:
    engine = HFEngine.start(checkpoint, dtype=torch.float32, load_format="dummy", seed=3)
    check = checker(checkpoint, engine, prompts)
    assert check.refit("first").passed
    assert check.train() > 1.01
    step = check.refit("second")
    assert step.passed
    assert step.before > 1.01


def test_second_refit_with_unchanged_weights_fails(checkpoint: Path, prompts: Prompts) -> None:
    check = checker(checkpoint, HFEngine.start(checkpoint, dtype=torch.float32), prompts)
    check.refit("first")
    step = check.refit("second")
    assert step.problems == ("the same weights were sent as last time: the training step changed nothing",)


def test_refit_names_missing_tensors(checkpoint: Path, prompts: Prompts) -> None:
    check = checker(checkpoint, HFEngine.start(checkpoint, dtype=torch.float32), prompts)
    lost = "model.layers.1.self_attn.v_proj.weight"

    def lose(tensors: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor in tensors if name != lost)

    problems = "; ".join(check.refit("first", change=lose).problems)
    assert f"tensors did not arrive: {lost}" in problems
    assert f"parameters of the engine were not written: {lost}" in problems


def test_refit_names_missing_persistent_buffer(tmp_path: Path, prompts: Prompts) -> None:
    new_model(tiny_config(DeepseekV3Config, {"num_key_value_heads": 8, "head_dim": 16})).save_pretrained(tmp_path)
    engine = HFEngine.start(tmp_path, dtype=torch.float32)
    check = checker(tmp_path, engine, prompts)

    def lose(tensors: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor in tensors if "e_score_correction_bias" not in name)

    problems = "; ".join(check.refit("first", change=lose).problems)
    assert "buffers of the engine were not written: model.layers.1.mlp.gate.e_score_correction_bias" in problems


# A third implementation

WINDOW = {"sliding_window": 8}


@pytest.mark.parametrize("wrong_witness", [False, True])
def test_witness_verdict_names_agreeing_side(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, wrong_witness: bool
) -> None:
    def start(name: str, path: Path, dtype: torch.dtype) -> HFEngine:
        changes = {"sliding_window": None} if wrong_witness else {}
        return HFEngine(AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **changes), name)

    monkeypatch.setattr(references, "start_engine", start)
    config = tiny_config(MistralConfig, WINDOW)
    verdict = judge(config, {"sliding_window": None}, witness="mlx", threshold=1.00001)
    assert verdict.kind == VerdictKind.ENGINE
    assert verdict.witness == Opinion("mlx", Vote.AT_FAULT if wrong_witness else Vote.REFERENCE)
    assert Verdict.from_json(verdict.to_json()) == verdict
    expected_summary = (
        "agrees with engine decode and engine prefill and not with transformers, whose class may be wrong"
    )
    assert (expected_summary if wrong_witness else "mlx agrees with transformers.") in verdict.summary


def test_witness_agreeing_with_neither_side(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(name: str, path: Path, dtype: torch.dtype) -> HFEngine:
        return HFEngine(AutoModelForCausalLM.from_pretrained(path, dtype=dtype, rms_norm_eps=0.1), name)

    monkeypatch.setattr(references, "start_engine", start)
    verdict = judge(tiny_config(MistralConfig, WINDOW), {"sliding_window": None}, witness="mlx", threshold=1.00001)
    assert verdict.witness == Opinion("mlx", Vote.NEITHER)


def test_witness_start_error_is_reported(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> HFEngine:
        raise EngineError("mlx-lm is not installed")

    monkeypatch.setattr(references, "start_engine", start)
    verdict = judge(tiny_config(MistralConfig, WINDOW), {"sliding_window": None}, witness="mlx", threshold=1.00001)
    assert verdict.witness.vote is None
    assert (
        "mlx, used as a witness, returned no log-probabilities: EngineError: mlx-lm is not installed."
        in verdict.summary
    )
    assert Verdict.from_json(verdict.to_json()) == verdict


@pytest.mark.long
@pytest.mark.integrations
def test_mlx_ignores_mistral_sliding_window(judge: Judge) -> None:
    pytest.importorskip("mlx_lm", reason="needs mlx-lm: install the extra `mlx`")
    config = tiny_config(MistralConfig, WINDOW)
    verdict = judge(config, {"sliding_window": None}, witness="mlx", threshold=1.00001)
    assert verdict.witness == Opinion("mlx", Vote.AT_FAULT)
