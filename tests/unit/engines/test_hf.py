from __future__ import annotations

import math
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import GenerationConfig

from nrl_models.engines import ModuleCall, Sample, start_engine, tensor_digest
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.input_checks import media_inputs
from nrl_models.engines.scores import final_scores
from nrl_models.errors import CheckpointError, DeviceError, EngineError
from nrl_models.logprobs import Sampling

SAMPLINGS = [Sampling(0.0), Sampling(), Sampling(0.7, top_p=0.9), Sampling(1.3, top_k=20)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_sampled_logprobs_match_prefill(
    engine: HFEngine, trainer: HFEngine, prompts: list[list[int]], sampling: Sampling
) -> None:
    samples = engine.generate(prompts, sampling, max_new_tokens=12, seed=3)
    assert [sample.prompt for sample in samples] == [tuple(prompt) for prompt in prompts]
    assert {len(sample.tokens) for sample in samples} == {12}
    for scorer in (engine, trainer):
        scores = scorer.score([sample.sequence for sample in samples], sampling)
        for sample, score in zip(samples, scores, strict=True):
            assert math.isnan(score[0])
            assert score[len(sample.prompt) :] == pytest.approx(sample.logprobs, abs=1e-4)


def test_training_mode_matches_eval_mode(engine: HFEngine, prompts: list[list[int]]) -> None:
    """Dropout is off, and the cache works with gradient checkpointing. Each call restores the mode of each module."""
    samples, scores = engine.generate(prompts, Sampling(), max_new_tokens=6), engine.score(prompts, Sampling())
    engine.model.gradient_checkpointing_enable()
    engine.model.train()
    engine.model.lm_head.eval()
    for module in engine.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    assert engine.generate(prompts, Sampling(), max_new_tokens=6) == samples
    assert [row[1:] for row in engine.score(prompts, Sampling())] == [row[1:] for row in scores]
    assert engine.model.training
    assert not engine.model.lm_head.training


def test_greedy_ignores_checkpoint_generation_config(engine: HFEngine, prompts: list[list[int]]) -> None:
    engine.model.generation_config = GenerationConfig(do_sample=True, temperature=9.0, repetition_penalty=5.0)
    sample = engine.generate(prompts[:1], Sampling(0.0), max_new_tokens=4)[0]
    with torch.no_grad():
        logits = engine.model(input_ids=torch.tensor([sample.sequence])).logits[0]
    assert tuple(logits.argmax(-1)[len(prompts[0]) - 1 : -1].tolist()) == sample.tokens


def test_seed_determines_samples(engine: HFEngine, prompts: list[list[int]]) -> None:
    first = engine.generate(prompts, Sampling(), max_new_tokens=12, seed=1)
    assert engine.generate(prompts, Sampling(), max_new_tokens=12, seed=1) == first
    assert engine.generate(prompts, Sampling(), max_new_tokens=12, seed=2) != first


def test_samples_are_independent_of_other_random_numbers(engine: HFEngine, prompts: list[list[int]]) -> None:
    """Another thread may draw from torch's global generator during a step, for example another engine."""
    expected = engine.generate(prompts, Sampling(), max_new_tokens=12, seed=1)
    hook = engine.model.register_forward_hook(lambda *_: change_random_states())
    try:
        assert engine.generate(prompts, Sampling(), max_new_tokens=12, seed=1) == expected
    finally:
        hook.remove()


class RandomStateChangingEngine(HFEngine):
    """An engine that changes the global random states in every call, as some engines do."""

    @classmethod
    def start(cls, *args: Any, **options: Any) -> HFEngine:
        change_random_states()
        return super().start(*args, **options)

    def _generate(self, *args: Any, **options: Any) -> list[Sample]:
        change_random_states()
        return super()._generate(*args, **options)

    def _score(self, *args: Any, **options: Any) -> list[list[float]]:
        change_random_states()
        return super()._score(*args, **options)

    def _refit(self, *args: Any, **options: Any) -> dict[str, Any]:
        change_random_states()
        return super()._refit(*args, **options)

    def module_calls(self, *args: Any, **options: Any) -> dict[str, ModuleCall]:
        change_random_states()
        return super().module_calls(*args, **options)

    def close(self) -> None:
        change_random_states()


def change_random_states() -> None:
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(random.getrandbits(16))


@pytest.mark.parametrize("engine_class", [HFEngine, RandomStateChangingEngine])
def test_engine_preserves_random_states(
    engine_class: type[HFEngine], checkpoint: Path, trainer: HFEngine, prompts: list[list[int]]
) -> None:
    def states() -> list[str]:
        return [str(random.getstate()), str(numpy.random.get_state()), str(torch.get_rng_state().tolist())]

    before = states()
    with engine_class.start(checkpoint, dtype=torch.float32, load_format="dummy") as engine:
        assert states() == before, "start"
        engine.generate(prompts, Sampling(), max_new_tokens=3, seed=1)
        assert states() == before, "generate"
        engine.score(prompts, Sampling())
        assert states() == before, "score"
        engine.refit(trainer.model.state_dict_adapter.iter_export(trainer.model))
        assert states() == before, "refit"
        engine.module_calls(prompts[0])
        assert states() == before, "module_calls"
        with pytest.raises(EngineError, match="nothing"):
            engine.refit([("nothing", torch.ones(1))])
        assert states() == before, "failed refit"
    assert states() == before, "close"


class Interruption(BaseException):
    """An exception such as Ctrl-C."""


@pytest.mark.long
@pytest.mark.parametrize("error", [RuntimeError, Interruption, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["embed_tokens", "layers.1.mlp", "norm"])
@pytest.mark.parametrize("name", ["generate", "score", "module_calls"])
def test_call_after_exception_inside_model(
    name: str, place: str, error: type[BaseException], checkpoint: Path, prompts: list[list[int]]
) -> None:
    engine = HFEngine.start(checkpoint, dtype=torch.float32)
    calls: dict[str, Any] = {
        "generate": lambda: engine.generate(prompts, Sampling(0.8, top_k=40), max_new_tokens=4, seed=1),
        "score": lambda: [row[1:] for row in engine.score(prompts, Sampling())],
        "module_calls": lambda: {
            key: [tensor.tolist() for tensor in call.outputs] for key, call in engine.module_calls(prompts[0]).items()
        },
    }
    engine.model.train()

    def hooks() -> list[tuple[str, int, bool, bool]]:
        return [
            (key, len(part._forward_hooks) + len(part._forward_pre_hooks), "forward" in vars(part), part.training)
            for key, part in engine.model.named_modules()
        ]

    before, counted = hooks(), 0
    expected = {key: call() for key, call in calls.items()}

    def fail(*_: Any) -> None:
        nonlocal counted
        counted += 1
        if counted == (3 if name == "generate" else 1):  # after steps with a cache
            raise error

    handle = engine.model.model.get_submodule(place).register_forward_hook(fail)
    with pytest.raises(error):
        calls[name]()
    handle.remove()
    assert hooks() == before
    assert {key: call() for key, call in calls.items()} == expected


def test_eos_token_stops_unless_ignored(engine: HFEngine, prompts: list[list[int]]) -> None:
    free = engine.generate(prompts[:1], Sampling(0.0), max_new_tokens=8)[0]
    engine.model.generation_config.eos_token_id = free.tokens[3]
    position = free.tokens.index(free.tokens[3])
    ended = engine.generate(prompts[:1], Sampling(0.0), max_new_tokens=8, ignore_end=False)[0]
    assert ended.tokens == free.tokens[: position + 1]
    assert ended.finish_reason == "stop"
    assert len(ended.logprobs) == len(ended.tokens)
    assert engine.generate(prompts[:1], Sampling(0.0), max_new_tokens=8)[0] == free


def test_tokens_outside_top_k_score_negative_infinity(engine: HFEngine, prompts: list[list[int]]) -> None:
    sample = engine.generate(prompts[:1], Sampling(), max_new_tokens=30, seed=0)[0]
    scores = engine.score([sample.sequence], Sampling(top_k=2))[0]
    assert -math.inf in scores
    assert all(score > -50 for score in scores[1:] if score != -math.inf)


def test_generate_error_lists_all_problems(checkpoint: Path, engine: HFEngine) -> None:
    with pytest.raises(EngineError) as caught:
        engine.generate([[5, 6], list(range(250)), [], [700], [-1]], Sampling(), max_new_tokens=10)
    message = str(caught.value)
    assert "sequence 1 has 250 tokens and 10 more are requested, and the engine's limit is 256" in message
    assert "sequence 2 is empty" in message
    assert "sequence 3 has token 700, and the vocabulary has 512" in message
    assert "sequence 4 has token -1" in message


def test_iterators_as_prompts_raise(engine: HFEngine, prompts: list[list[int]]) -> None:
    for invalid_prompts in (iter(prompts), map(list, prompts), {tuple(prompt) for prompt in prompts}):
        with pytest.raises(EngineError, match="expects a list of token id lists"):
            engine.generate(invalid_prompts, Sampling(), max_new_tokens=2)
        with pytest.raises(EngineError, match="expects a list of token id lists"):
            engine.score(invalid_prompts, Sampling())


@pytest.mark.parametrize("name", ["model_inputs", "images"])
def test_wrong_number_of_model_inputs_raises(name: str, engine: HFEngine, prompts: list[list[int]]) -> None:
    for entries in ([{}], [{}] * (len(prompts) + 1)):
        message = f"{name} has {len(entries)} entries: expected a list of one for each of {len(prompts)}"
        with pytest.raises(EngineError, match=message):
            engine.generate(prompts, Sampling(), max_new_tokens=2, **{name: entries})
        with pytest.raises(EngineError, match=message):
            engine.score(prompts, Sampling(), **{name: entries})


def test_model_inputs_from_lazy_column(engine: HFEngine) -> None:
    """Columns of `datasets` create a new object at each access."""

    class Column(Sequence[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: Any) -> Any:
            if not 0 <= index < 3:
                raise IndexError(index)
            return {"pixel_values": torch.full((1,), float(index))}

    inputs_per_prompt = media_inputs(engine, [[1, 2]] * 3, Column())
    assert [inputs["pixel_values"].item() for inputs in inputs_per_prompt] == [0.0, 1.0, 2.0]


def test_closed_engine_raises(checkpoint: Path, prompts: list[list[int]]) -> None:
    with HFEngine.start(checkpoint) as closed:
        closed.score(prompts, Sampling())
    for call in (
        lambda: closed.score(prompts, Sampling()),
        lambda: closed.generate(prompts, Sampling(), max_new_tokens=1),
        lambda: closed.refit([]),
        lambda: closed.module_calls([1, 2]),
    ):
        with pytest.raises(EngineError, match="hf-generate is closed: start another engine"):
            call()
    closed.close()


def test_refit_replaces_every_weight(checkpoint: Path, trainer: HFEngine, prompts: list[list[int]]) -> None:
    engine = start_engine("hf-generate", checkpoint, dtype=torch.float32, load_format="dummy", seed=7)
    expected = trainer.score(prompts, Sampling())
    assert engine.score(prompts, Sampling())[0][1:] != pytest.approx(expected[0][1:], abs=0.1)
    exported = dict(trainer.model.state_dict_adapter.iter_export(trainer.model))
    for _ in range(2):
        report = engine.refit(exported.items(), bucket_bytes=2**19)
        assert report.unwritten == ()
        assert report.tensors == len(exported)
        assert report.nbytes == sum(tensor.nbytes for tensor in exported.values())
        assert report.largest_bucket <= max(2**19, *(tensor.nbytes for tensor in exported.values()))
        assert report.buckets > 2
        assert report.digests == {name: tensor_digest(tensor) for name, tensor in exported.items()}
        for score, wanted in zip(engine.score(prompts, Sampling()), expected, strict=True):
            assert score[1:] == pytest.approx(wanted[1:], abs=1e-4)


def test_refit_reports_unwritten_parameters(engine: HFEngine, trainer: HFEngine) -> None:
    left_out = {"model.layers.1.mlp.up_proj.weight", "model.norm.weight"}
    exported = trainer.model.state_dict_adapter.iter_export(trainer.model)
    report = engine.refit(((name, tensor) for name, tensor in exported if name not in left_out), partial=True)
    assert set(report.unwritten) == left_out


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        (
            "model.norms.weight",
            (2, 2),
            r"has no such tensor \(did you mean model\.norm\.weight\?\)\. Send the tensors of",
        ),
        ("model.norm.weight", (3,), r"of shape \(3,\): expected shape \(256,\)$"),
    ],
)
def test_refit_with_unknown_name_or_shape_raises(
    engine: HFEngine, name: str, shape: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(EngineError, match=reason):
        engine.refit([(name, torch.zeros(shape))])


@pytest.mark.parametrize("folder", ["adapter", None])
def test_adapter_on_engine_without_adapters_raises(engine: HFEngine, folder: str | None) -> None:
    with pytest.raises(EngineError, match="does not serve adapters here: expected vllm or vllm-transformers in this"):
        engine.use_adapter(folder)


def test_module_calls_record_inputs_and_outputs(engine: HFEngine, prompts: list[list[int]]) -> None:
    tokens = prompts[1]
    prefill, step = engine.module_calls(tokens), engine.module_calls(tokens, decode_last=True)
    assert next(iter(prefill)) == "model.embed_tokens"
    assert list(prefill)[-1] == "logits"
    assert torch.equal(prefill["logits"].inputs[0], prefill["model.norm"].outputs[0])
    norm = prefill["model.norm"]
    assert norm.class_name == "LlamaRMSNorm"
    assert torch.equal(engine.model.model.norm(norm.inputs[0]), norm.outputs[0])
    for name, call in step.items():
        for output, other in zip(call.outputs, prefill[name].outputs, strict=True):
            assert output.shape[1] == 1
            torch.testing.assert_close(output, other[:, -1:], rtol=0, atol=1e-4)


def test_decode_last_requires_two_tokens(engine: HFEngine) -> None:
    assert engine.module_calls([5])
    assert engine.module_calls([5, 6], decode_last=True)
    with pytest.raises(EngineError, match="decode_last expects at least two tokens"):
        engine.module_calls([5], decode_last=True)
    with pytest.raises(EngineError, match="sequence 0 is empty"):
        engine.module_calls([], decode_last=True)


def test_unknown_options_raise(checkpoint: Path) -> None:
    match = r"has no option enforce_eager: expected device, .*; load_format='fast': expected auto or dummy"
    with pytest.raises(EngineError, match=match):
        start_engine("hf-generate", checkpoint, load_format="fast", enforce_eager=True)


def test_misspelled_option_gets_suggestion(checkpoint: Path) -> None:
    expected = "device, dtype, load_format, max_length, seed$"
    with pytest.raises(EngineError, match=rf"has no option dtyp \(did you mean dtype\?\): expected {expected}"):
        start_engine("hf-generate", checkpoint, dtyp="float32")


@pytest.mark.parametrize("seed", ["x", 2**70, -(2**64), 1.5, True, None])
def test_invalid_seed_raises(checkpoint: Path, seed: Any) -> None:
    with pytest.raises(EngineError, match=r"seed=.*: expected a whole number from -2\*\*63"):
        start_engine("hf-generate", checkpoint, load_format="dummy", seed=seed)


@pytest.mark.parametrize("device", ["meta", torch.device("meta"), "meta:0"])
def test_meta_device_raises(checkpoint: Path, device: str | torch.device) -> None:
    with pytest.raises(DeviceError, match=rf"device='{device}' cannot hold weights: start the engine on cpu"):
        start_engine("hf-generate", checkpoint, device=device)


def test_damaged_checkpoint_raises(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "damaged")
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"x" * 4096)
    with pytest.raises(CheckpointError, match=r"model.*\.safetensors: is damaged or cut off \(4096 bytes on disk\)"):
        start_engine("hf-generate", folder)


def test_unknown_engine_raises(checkpoint: Path) -> None:
    expected = "expected one of vllm, vllm-transformers, mlx, megatron, hf-generate, http"
    with pytest.raises(EngineError, match=f"unknown engine 'tgi': {expected}"):
        start_engine("tgi", checkpoint)


def test_missing_engine_error_suggests_installation(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(EngineError, match=r"pip install vllm.*make engine"):
        start_engine("vllm", checkpoint)


def test_tensor_digest_ignores_strides() -> None:
    tensor = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    digest = tensor_digest(tensor)
    assert tensor_digest(tensor.t().contiguous().t()) == digest
    others = [tensor + 1e-7, tensor.reshape(6, 4), tensor.view(torch.int32), tensor.flip(0)]
    assert digest not in {tensor_digest(other) for other in others}
    assert tensor_digest(torch.zeros(0)) != tensor_digest(torch.zeros(0, 3))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_final_scores(count: int, engine: HFEngine) -> None:
    assert final_scores(engine, torch.tensor([[1, 2, 3]]), count, Sampling()).shape == (1, count)
