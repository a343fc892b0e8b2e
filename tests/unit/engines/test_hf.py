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
from nrl_models.errors import CheckpointError, EngineError
from nrl_models.logprobs import Sampling

SAMPLINGS = [Sampling(0.0), Sampling(), Sampling(0.7, top_p=0.9), Sampling(1.3, top_k=20)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_sampled_logprobs_are_those_of_a_prefill(
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


def test_a_model_in_training_mode_answers_as_in_evaluation_mode(engine: HFEngine, prompts: list[list[int]]) -> None:
    """Dropout is off, and a cache works with activation checkpointing. Afterwards each module has its previous mode."""
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


def test_greedy_takes_the_likeliest_token_whatever_the_checkpoint_says(
    engine: HFEngine, prompts: list[list[int]]
) -> None:
    engine.model.generation_config = GenerationConfig(do_sample=True, temperature=9.0, repetition_penalty=5.0)
    sample = engine.generate(prompts[:1], Sampling(0.0), max_new_tokens=4)[0]
    with torch.no_grad():
        logits = engine.model(input_ids=torch.tensor([sample.sequence])).logits[0]
    assert tuple(logits.argmax(-1)[len(prompts[0]) - 1 : -1].tolist()) == sample.tokens


def test_seeds_decide(engine: HFEngine, prompts: list[list[int]]) -> None:
    first = engine.generate(prompts, Sampling(), max_new_tokens=12, seed=1)
    assert engine.generate(prompts, Sampling(), max_new_tokens=12, seed=1) == first
    assert engine.generate(prompts, Sampling(), max_new_tokens=12, seed=2) != first


class Restless(HFEngine):
    """An engine that seeds and draws random numbers in every call, as some engines do."""

    @classmethod
    def start(cls, *args: Any, **options: Any) -> HFEngine:
        disturb()
        return super().start(*args, **options)

    def _generate(self, *args: Any, **options: Any) -> list[Sample]:
        disturb()
        return super()._generate(*args, **options)

    def _score(self, *args: Any, **options: Any) -> list[list[float]]:
        disturb()
        return super()._score(*args, **options)

    def _refit(self, *args: Any, **options: Any) -> dict[str, Any]:
        disturb()
        return super()._refit(*args, **options)

    def module_calls(self, *args: Any, **options: Any) -> dict[str, ModuleCall]:
        disturb()
        return super().module_calls(*args, **options)

    def close(self) -> None:
        disturb()


def disturb() -> None:
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(random.getrandbits(16))


@pytest.mark.parametrize("engine_class", [HFEngine, Restless])
def test_an_engine_moves_no_random_states(
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
        assert states() == before, "a refit that fails"
    assert states() == before, "close"


def test_the_end_of_text_ends_a_sequence_unless_ignored(engine: HFEngine, prompts: list[list[int]]) -> None:
    free = engine.generate(prompts[:1], Sampling(0.0), max_new_tokens=8)[0]
    engine.model.generation_config.eos_token_id = free.tokens[3]
    place = free.tokens.index(free.tokens[3])
    ended = engine.generate(prompts[:1], Sampling(0.0), max_new_tokens=8, ignore_end=False)[0]
    assert ended.tokens == free.tokens[: place + 1]
    assert ended.finish_reason == "stop"
    assert len(ended.logprobs) == len(ended.tokens)
    assert engine.generate(prompts[:1], Sampling(0.0), max_new_tokens=8)[0] == free


def test_tokens_outside_the_support_are_minus_infinity(engine: HFEngine, prompts: list[list[int]]) -> None:
    sample = engine.generate(prompts[:1], Sampling(), max_new_tokens=30, seed=0)[0]
    scores = engine.score([sample.sequence], Sampling(top_k=2))[0]
    assert -math.inf in scores
    assert all(score > -50 for score in scores[1:] if score != -math.inf)


def test_what_does_not_fit_is_refused_with_all_reasons(checkpoint: Path, engine: HFEngine) -> None:
    with pytest.raises(EngineError) as caught:
        engine.generate([[5, 6], list(range(250)), [], [700], [-1]], Sampling(), max_new_tokens=10)
    message = str(caught.value)
    assert "sequence 1 has 250 tokens and 10 more are requested, and the engine's limit is 256" in message
    assert "sequence 2 is empty" in message
    assert "sequence 3 has token 700, and the vocabulary has 512" in message
    assert "sequence 4 has token -1" in message


def test_iterators_are_refused(engine: HFEngine, prompts: list[list[int]]) -> None:
    for given in (iter(prompts), map(list, prompts), {tuple(prompt) for prompt in prompts}):
        with pytest.raises(EngineError, match="expects a list of token id lists"):
            engine.generate(given, Sampling(), max_new_tokens=2)
        with pytest.raises(EngineError, match="expects a list of token id lists"):
            engine.score(given, Sampling())


@pytest.mark.parametrize("name", ["model_inputs", "images"])
def test_inputs_of_another_number_than_prompts(name: str, engine: HFEngine, prompts: list[list[int]]) -> None:
    for entries in ([{}], [{}] * (len(prompts) + 1)):
        message = f"{name} has {len(entries)} entries: expected a list of one for each of {len(prompts)}"
        with pytest.raises(EngineError, match=message):
            engine.generate(prompts, Sampling(), max_new_tokens=2, **{name: entries})
        with pytest.raises(EngineError, match=message):
            engine.score(prompts, Sampling(), **{name: entries})


def test_inputs_in_a_column_that_creates_new_objects(engine: HFEngine) -> None:
    """As the columns of `datasets` do."""

    class Column(Sequence[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: Any) -> Any:
            if not 0 <= index < 3:
                raise IndexError(index)
            return {"pixel_values": torch.full((1,), float(index))}

    found = media_inputs(engine, [[1, 2]] * 3, Column())
    assert [inputs["pixel_values"].item() for inputs in found] == [0.0, 1.0, 2.0]


def test_closed_engines_refuse_calls(checkpoint: Path, prompts: list[list[int]]) -> None:
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


def test_refit_names_what_was_not_written(engine: HFEngine, trainer: HFEngine) -> None:
    left_out = {"model.layers.1.mlp.up_proj.weight", "model.norm.weight"}
    exported = trainer.model.state_dict_adapter.iter_export(trainer.model)
    report = engine.refit(((name, tensor) for name, tensor in exported if name not in left_out), partial=True)
    assert set(report.unwritten) == left_out


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [("model.nothing.weight", (2, 2), "no such tensor"), ("model.norm.weight", (3,), r"expected of shape \(256,\)")],
)
def test_refit_refuses_what_does_not_fit(engine: HFEngine, name: str, shape: tuple[int, ...], reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        engine.refit([(name, torch.zeros(shape))])


def test_modules_show_what_they_compute(engine: HFEngine, prompts: list[list[int]]) -> None:
    tokens = prompts[1]
    whole, step = engine.module_calls(tokens), engine.module_calls(tokens, decode_last=True)
    assert next(iter(whole)) == "model.embed_tokens"
    assert list(whole)[-1] == "logits"
    assert torch.equal(whole["logits"].inputs[0], whole["model.norm"].outputs[0])
    norm = whole["model.norm"]
    assert norm.class_name == "LlamaRMSNorm"
    assert torch.equal(engine.model.model.norm(norm.inputs[0]), norm.outputs[0])
    for name, call in step.items():
        for output, other in zip(call.outputs, whole[name].outputs, strict=True):
            assert output.shape[1] == 1
            torch.testing.assert_close(output, other[:, -1:], rtol=0, atol=1e-4)


def test_decoding_the_last_token_needs_one_before_it(engine: HFEngine) -> None:
    assert engine.module_calls([5])
    assert engine.module_calls([5, 6], decode_last=True)
    with pytest.raises(EngineError, match="decode_last expects at least two tokens"):
        engine.module_calls([5], decode_last=True)
    with pytest.raises(EngineError, match="sequence 0 is empty"):
        engine.module_calls([], decode_last=True)


def test_unknown_options_are_refused(checkpoint: Path) -> None:
    with pytest.raises(EngineError, match="enforce_eager, load_format=fast"):
        start_engine("hf-generate", checkpoint, load_format="fast", enforce_eager=True)


def test_a_damaged_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "damaged")
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"x" * 4096)
    with pytest.raises(CheckpointError, match=r"model.*\.safetensors: is damaged or cut off \(4096 bytes on disk\)"):
        start_engine("hf-generate", folder)


def test_an_unknown_engine_is_refused(checkpoint: Path) -> None:
    expected = "expected one of vllm, vllm-transformers, mlx, megatron, hf-generate, http"
    with pytest.raises(EngineError, match=f"unknown engine 'tgi': {expected}"):
        start_engine("tgi", checkpoint)


def test_a_missing_engine_says_how_to_get_it(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(EngineError, match=r"pip install vllm.*make engine"):
        start_engine("vllm", checkpoint)


def test_digests_see_values_dtype_and_shape_but_not_strides() -> None:
    tensor = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    digest = tensor_digest(tensor)
    assert tensor_digest(tensor.t().contiguous().t()) == digest
    others = [tensor + 1e-7, tensor.reshape(6, 4), tensor.view(torch.int32), tensor.flip(0)]
    assert digest not in {tensor_digest(other) for other in others}
    assert tensor_digest(torch.zeros(0)) != tensor_digest(torch.zeros(0, 3))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_final_scores(count: int, engine: HFEngine) -> None:
    assert final_scores(engine, torch.tensor([[1, 2, 3]]), count, Sampling()).shape == (1, count)
