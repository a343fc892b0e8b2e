"""Metrics, rules without an engine, draft layers, logs, and invalid arguments."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from checkpoints import edit_weights
from training_loop import PROMPTS, Loop

from nrl_models import AutoModelForCausalLM, export_adapter, registry
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import DriftError, UnknownArgumentError
from nrl_models.logprobs import Sampling, rollout_logprobs
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.mtp_weights import mtp_tensors
from nrl_models.watch import Bars, Cause, Severity, Watch, step_metrics
from nrl_models.watch.allowance import Allowance

ROWS, LENGTH = 8, 64


def logprobs(seed: int = 0) -> torch.Tensor:
    return -torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def noise(size: float, seed: int = 1) -> torch.Tensor:
    return size * torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


ALL = torch.ones(ROWS, LENGTH, dtype=torch.bool)


def watched(*differences: torch.Tensor, attention_mask: torch.Tensor | None = None, syncs: bool = True) -> Watch:
    """Return a watch that has received one step for each difference."""
    watch = Watch()
    for step, difference in enumerate(differences):
        if syncs or step == 0:
            watch.after_sync()
        watch.before_update(
            trainer=logprobs(step), engine=logprobs(step) + difference, mask=ALL, attention_mask=attention_mask
        )
    return watch


def cause_of(*differences: torch.Tensor, **options: object) -> Cause:
    with pytest.raises(DriftError) as caught:
        watched(*differences, **options)
    return caught.value.findings[0].cause


def test_step_metrics_formulas() -> None:
    trainer, engine = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.5, -2.0, -9.0]])
    metrics = step_metrics(trainer, engine, torch.tensor([[True, True, False]]))
    assert metrics.tokens == 2
    assert metrics.token_mult_prob_error == pytest.approx((math.exp(0.5) + 1) / 2)
    assert metrics.kl == pytest.approx((math.exp(0.5) - 1 - 0.5) / 2)
    assert metrics.mean_difference == pytest.approx(0.25)
    assert metrics.max_difference == pytest.approx(0.5)
    assert len(metrics.above(Bars())) == 3


def test_bf16_noise_is_a_warning() -> None:
    watch = watched(*(noise(0.03, seed) for seed in range(20)))
    assert {finding.level for finding in watch.findings} == {Severity.WARNING}
    assert {finding.cause for finding in watch.findings} == {Cause.PRECISION}


def test_jump_at_sync_is_missing_weights() -> None:
    assert cause_of(*[noise(0.01)] * 4, noise(0.2)) is Cause.MISSING_WEIGHTS


def test_growth_between_syncs_is_engine_cause() -> None:
    assert cause_of(*[noise(0.01)] * 4, noise(0.2), syncs=False) is Cause.ENGINE


def test_growth_with_position_is_cache_cause() -> None:
    slope = torch.linspace(0, 1, LENGTH, dtype=torch.float64) ** 2
    assert cause_of(noise(0.3) * slope) is Cause.CACHE


def test_error_only_in_padded_rows_is_padding_cause() -> None:
    attention = torch.ones(ROWS, LENGTH + 5, dtype=torch.bool)
    attention[ROWS // 2 :, :3] = False
    difference = noise(0.001)
    difference[ROWS // 2 :] += 0.2
    assert cause_of(difference, attention_mask=attention) is Cause.PADDING


def test_slow_growth_does_not_raise_bound() -> None:
    assert cause_of(*(noise(0.01 * 1.3**step) for step in range(20))) is Cause.MISSING_WEIGHTS


def test_non_finite_values_fail() -> None:
    difference = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
    difference[3, 4] = math.nan
    assert cause_of(difference) is Cause.NOT_FINITE


def test_step_without_compared_tokens_does_not_pass() -> None:
    report = Watch().before_update(trainer=logprobs(), engine=logprobs(), mask=~ALL)
    assert not report.passed
    assert report.findings[0].cause is Cause.NOTHING_COMPARED
    report = Watch().before_update([], torch.zeros(0, 0))
    assert not report.passed


def test_step_of_lagging_rows_is_a_warning() -> None:
    watch = Watch(max_staleness=1)
    values = {"trainer": logprobs(), "engine": logprobs(), "mask": ALL}
    for _ in range(2):
        watch.after_sync()
    report = watch.before_update(**values, versions=[1] * ROWS)
    (finding,) = report.findings
    assert (finding.cause, finding.level, report.passed) == (Cause.LAGGING, Severity.WARNING, False)
    assert "every row was sampled by earlier weights" in str(finding)
    with pytest.raises(DriftError, match=r"versions \[0\], expected 1 to 2") as caught:
        watch.before_update(**values, versions=[0] * ROWS)
    assert [finding.cause for finding in caught.value.findings] == [Cause.STALE_WEIGHTS]
    report = watch.before_update(**{**values, "mask": ~ALL}, versions=[1] * (ROWS - 1) + [2])
    assert [finding.cause for finding in report.findings] == [Cause.NOTHING_COMPARED]


def test_tensor_missing_from_later_sync_raises() -> None:
    watch = Watch()
    watch.after_sync({"a": "1", "b": "1"})
    with pytest.raises(DriftError, match="were sent before, and not in this sync") as caught:
        watch.after_sync({"a": "2"})
    assert caught.value.findings[0].names == ("b",)


def test_engine_with_unchanged_version_is_stale() -> None:
    watch = Watch()
    watch.after_sync(version=1)
    with pytest.raises(DriftError, match="stale weights"):
        watch.after_sync(version=1)


def test_frozen_draft_layers_are_a_warning(tmp_path: Path) -> None:
    reference = FamilyCase(registry.model_class("Glm4MoeForCausalLM")).reference(torch.float32)
    reference.save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda tensors: tensors.update(mtp_tensors(reference)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    watch = Watch(model, HFEngine(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)))
    for _ in range(5):
        watch.refit()
        with torch.no_grad():
            model.model.norm.weight.add_(0.1)
    (finding,) = watch.findings
    assert (finding.cause, finding.level) == (Cause.FROZEN_DRAFT, Severity.WARNING)
    assert len(finding.names) == len(mtp_tensors(reference))


def test_every_event_is_logged(tmp_path: Path) -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    file = tmp_path / "logs" / "watch.jsonl"
    loop = Loop(log=[file, lambda values, step: seen.append((step, values))], fail=False)
    loop.versions = [0] * len(PROMPTS)
    loop.step()
    loop.versions = None
    loop.engine.keeps = lambda name: "mlp" in name
    loop.step()
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert [event["event"] for event in events] == ["step", "sync", "step", "sync"]
    assert events[0]["rows_by_version"] == {"0": 3}
    assert events[0]["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    assert events[1]["probe_error"] == pytest.approx(1.0, abs=1e-4)
    (finding,) = events[3]["findings"]
    assert finding["cause"] == "missing weights"
    assert finding["names"]
    assert [step for step, _ in seen] == [1, 1, 2, 2]
    assert seen[3][1]["watch/failures"] == 1.0


def test_engine_with_restarted_version_is_stale() -> None:
    loop = Loop()
    loop.watch.fail = False
    for version in [*range(1, 11), 1]:
        loop.watch.after_sync(version=version)
    assert "the engine reports version 1 after this sync, and 10 before it" in str(loop.watch.findings)


def test_probe_every() -> None:
    loop = Loop(probe_every=3)
    scored: list[int] = []
    score = loop.engine.score
    loop.engine.score = lambda *args, **options: scored.append(loop.watch.version) or score(*args, **options)
    for _ in range(6):
        loop.step()
    assert scored == [1, 3, 6]


def test_watch_continues_engine_version() -> None:
    loop = Loop()
    for _ in range(2):
        loop.engine.refit(export_adapter(loop.model).iter_export(loop.model))
    loop.watch = Watch(loop.model, loop.engine, probe_every=4)
    loop.versions = [2] * len(PROMPTS)
    loop.watch.fail = False
    for size in (0.0, 1.0):  # not a jump at a sync, because there was none
        zeros = torch.zeros(1, 2, dtype=torch.float64)
        loop.watch.before_update(trainer=zeros, engine=zeros + size, mask=zeros == 0)
    assert loop.watch.findings.pop().cause is Cause.UNKNOWN
    loop.watch.fail = True
    assert loop.step().findings == ()
    assert (loop.watch.version, loop.watch._agreed_at) == (3, 3)  # the first sync is probed
    with pytest.raises(DriftError, match=r"2\], expected 3 to 3"):
        loop.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probe_every": -1}, "probe_every=-1"),
        ({"probes": [[20, 21], [20]]}, r"probes have \[1, 2\] tokens"),
        ({"fail": "no"}, "fail='no': expected True or False"),
        ({"max_staleness": "2"}, "max_staleness='2': expected a number of syncs"),
        ({"max_staleness": -1}, "max_staleness=-1: expected a number of syncs"),
        ({"max_staleness": 1.5}, "max_staleness=1.5: expected a number of syncs"),
        ({"capsule": 5}, "capsule=5: expected a path"),
        ({"capsule": "x", "capsule_limits": 3}, "capsule_limits=3: expected Limits"),
        ({"capsule": "~nobody-of-that-name/x"}, "capsule='~nobody.*' is not a path to write to: "),
        ({"log": 5}, "log=5: 5 is not a log; expected a file"),
        ({"log": None}, "log=None: None is not a log"),
        ({"log": [5]}, r"log=\[5\]: 5 is not a log"),
        ({"tokenizer": "path"}, "tokenizer is 'path', expected a tokenizer"),
        ({"probes": torch.tensor([[1.5, 2.0]])}, "probes have the token 1.5: expected rows of token IDs"),
        ({"probes": [[20, -1]]}, "probes have the token -1"),
        ({"probes": [20, 21]}, "probes have the row 20"),
        ({"probes": 5}, "probes=5: expected rows"),
        ({"compute": "bf16"}, "compute='bf16': expected a floating-point torch.dtype"),
        ({"compute": torch.int8}, "compute=torch.int8: expected a floating-point torch.dtype"),
    ],
)
def test_wrong_options_raise(options: dict[str, object], message: str) -> None:
    with pytest.raises(UnknownArgumentError, match=message):
        Watch(**options)


def test_arguments_of_other_types_raise() -> None:
    model, engine = torch.nn.Linear(2, 2), HFEngine.__new__(HFEngine)
    for options, message in (
        ({"model": engine, "engine": model}, "model is a HFEngine, expected the trainer's model"),
        ({"model": torch.nn.Linear}, "model is <class .*>, expected the trainer's model"),
        ({"engine": "hf-generate"}, r"engine is 'hf-generate', expected an engine: call start_engine\("),
        ({"engine": model}, "engine is a Linear, expected an engine"),
        ({"sampling": 0.7}, r"sampling is 0\.7, expected a Sampling"),
        ({"bars": {}}, "bars is a dict, expected Bars"),
    ):
        with pytest.raises(UnknownArgumentError, match=message):
            Watch(**options)


def test_probes_outside_vocabulary_raise() -> None:
    loop = Loop()
    size = loop.model.config.vocab_size
    with pytest.raises(UnknownArgumentError, match=rf"probes have the token {size}: the model has {size} tokens"):
        Watch(loop.model, loop.engine, probes=[[20, size]])


def test_probes_may_be_tensors() -> None:
    loop = Loop()
    probes = torch.tensor([[20, 21, 22], [23, 24, 25]])
    for value in (probes, list(probes)):
        watch = Watch(loop.model, loop.engine, probes=value)
        assert watch._probes is not None
        assert torch.equal(watch._probes.tokens, probes)


def test_swapped_arguments_of_before_update_and_after_sync_raise() -> None:
    loop = Loop()
    samples = loop.sample()
    result = rollout_logprobs(loop.model, [sample.sequence for sample in samples])
    with pytest.raises(UnknownArgumentError, match=r"samples has a TokenLogprobs, .*\(samples, trainer\)"):
        loop.watch.before_update(result, samples)
    with pytest.raises(UnknownArgumentError, match="samples has a Tensor"):
        loop.watch.before_update(result.logprobs, samples)
    with pytest.raises(UnknownArgumentError, match="sent=5: expected a digest"):
        loop.watch.after_sync(5)
    with pytest.raises(UnknownArgumentError, match="report=5: expected the RefitReport"):
        loop.watch.after_sync({}, 5)


def test_log_and_capsule_expand_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    loop = Loop(log="~/logs/w.jsonl", capsule="~/capsules")
    loop.watch.fail = False
    samples = loop.sample()
    result = rollout_logprobs(loop.model, [sample.sequence for sample in samples])
    loop.watch.before_update(samples, result.logprobs - 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert {path.name for path in (tmp_path / "home").iterdir()} == {"logs", "capsules"}


def test_missing_arguments_raise() -> None:
    watch = Watch()
    with pytest.raises(UnknownArgumentError, match="no engine"):
        watch.refit()
    with pytest.raises(UnknownArgumentError, match="trainer="):
        watch.before_update(engine=logprobs(), mask=ALL)
    with pytest.raises(UnknownArgumentError, match="samples="):
        watch.before_update(trainer=logprobs())
    with pytest.raises(ValueError, match="shape"):
        watch.before_update(trainer=logprobs(), engine=logprobs()[:, :3], mask=ALL)
    loop = Loop()
    with pytest.raises(ValueError, match="columns"):
        loop.watch.before_update(loop.sample(), torch.zeros(3, 2))


@pytest.mark.parametrize("floor", [math.nan, math.inf])
def test_non_finite_floor_does_not_raise_bound(floor: float) -> None:
    assert Allowance(floor, 1.05).bound(Sampling()) == 1.05


def test_bound_follows_mean_of_enough_tokens() -> None:
    allowance = Allowance(None, 1.05)
    allowance.learn(1.001, 6)
    assert allowance.bound(Sampling()) == 1.05
    allowance.learn(1.003, 10)
    few = 4 * (0.001 * 6 + 0.003 * 10) / 16
    assert allowance.bound(Sampling()) == pytest.approx(1 + few * math.sqrt(128 / 16))
    allowance.learn(1.01, 500)
    assert allowance.bound(Sampling()) == pytest.approx(1.04)


def test_bound_widening_for_few_tokens_is_limited_to_bar() -> None:
    for error, bound in ((1.01, 1.05), (1.02, 1.08)):
        allowance = Allowance(None, 1.05)
        allowance.learn(error, 16)
        assert allowance.bound(Sampling()) == pytest.approx(bound)


def test_first_step_with_few_tokens_sets_no_bound() -> None:
    watch = Watch()
    few = ALL.clone()
    few[1:] = False
    few[0, 4:] = False
    for mask, size in ((few, 0.002), (ALL, 0.01)):
        watch.after_sync()
        watch.before_update(trainer=logprobs(), engine=logprobs() + noise(size), mask=mask)
    assert watch.findings == []
