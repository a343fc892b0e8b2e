"""Prompts with images: engine and trainer agree, and the source of a disagreement is found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from nrl_models.cli import app
from nrl_models.consistency.vision.image_check import ImageFault, check_images, compare_images
from nrl_models.engines.engine_types import NamedTensor
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.errors import EngineError
from nrl_models.logprobs import Sampling
from tests.engine import image_sweep
from tests.engine.families import AGREES, DISAGREES, NOT_RUN, spreading_temperature, tiny_model
from tests.engine.image_families import CAUSES, compare_image_architecture
from tests.engine.image_processors import save_processor
from tests.engine.image_tokens import image_prompts, noise
from tests.engine.one_engine import OneEngine
from tests.engine.published import BOUND
from tools.checkout import PAGES
from tools.coverage_pages.results import Kind, read_records

Plant = Callable[[VLLMEngine, Any], None]


@pytest.mark.parametrize("name", ["Qwen2VL", "InternVL", "Llava", "Gemma4"])
def test_engine_logprobs_match_trainer_with_images(name: str, vllm: OneEngine, tmp_path: Path) -> None:
    outcome = compare_image_architecture(f"{name}ForConditionalGeneration", vllm, tmp_path)
    assert outcome.status == AGREES, (outcome.faults, outcome.reason)
    assert outcome.refitted is not None
    assert outcome.refitted <= BOUND
    assert len(outcome.prompts) == 4


def test_check_images(vllm: OneEngine, tmp_path: Path) -> None:
    model = tiny_model("Qwen2VLForConditionalGeneration")
    model.save_pretrained(tmp_path)
    prompts = image_prompts(model.config, save_processor(model.config, tmp_path))
    vllm.stop()  # the check starts its own engine
    sampling = Sampling(spreading_temperature(model))
    comparisons = check_images(tmp_path, prompts, sampling=sampling, engine_options={"max_length": 256})
    assert [one.fault for one in comparisons] == [None] * len(prompts)
    assert all(one.passed for one in comparisons)


def test_consistency_command_with_image_files(vllm: OneEngine, tmp_path: Path) -> None:
    folder, report = tmp_path / "checkpoint", tmp_path / "report.json"
    model = tiny_model("Qwen2VLForConditionalGeneration")
    model.save_pretrained(folder)
    save_processor(model.config, folder)
    arguments = ["--temperature", str(spreading_temperature(model)), "--top-p", "1", "--new-tokens", "8"]
    for size in ((56, 56), (112, 56)):
        noise(*size).save(tmp_path / f"{size[0]}.png")
        arguments += ["--images", str(tmp_path / f"{size[0]}.png")]
    vllm.stop()
    options = ["--engine-option", "max_length=256", "--json", str(report)]
    result = CliRunner().invoke(app, ["consistency", str(folder), *arguments, *options])
    assert result.exit_code == 0, result.output
    images = json.loads(report.read_text())["images"]
    assert [image["sizes"] for image in images] == [[[56, 56]], [[112, 56]]]
    assert all(image["new_tokens"] and image["decode"] < 1.001 for image in images)


def test_page_matches_recorded_results() -> None:
    published = read_records(PAGES)[Kind.IMAGES]
    assert published
    for path, text in image_sweep.pages(published, image_sweep.image_architectures()).items():
        assert path.read_text() == text


def _refit(engine: VLLMEngine, model: Any, part: str) -> None:
    """Refit the engine with one weight that differs from the model's."""

    def changed() -> Iterator[NamedTensor]:
        left = True
        for name, tensor in model.state_dict_adapter.iter_export(model):
            yield name, tensor * -1.5 if left and part in name else tensor
            left = left and part not in name
        assert not left

    engine.refit(changed())


def _shift_positions(engine: VLLMEngine, model: Any) -> None:
    served = engine.llm.collective_rpc("nrl_model")[0]
    original = served.get_mrope_input_positions

    def shifted(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, int]:
        positions, delta = original(*args, **kwargs)
        positions[1:, 5:] += 3
        return positions, delta

    served.__dict__["get_mrope_input_positions"] = shifted


def _change_pixel_mean(folder: Path) -> None:
    """Change the pixel mean of the engine's processor, which is read at startup."""
    file = folder / "processor_config.json"
    content = json.loads(file.read_text())
    content["image_processor"]["image_mean"] = [0.1, 0.2, 0.3]
    file.write_text(json.dumps(content))


FAULTS: dict[ImageFault, Plant | None] = {
    ImageFault.PROCESSOR: None,
    ImageFault.POSITIONS: _shift_positions,
    ImageFault.TOWER: lambda engine, model: _refit(engine, model, "visual.blocks.0.attn.proj.weight"),
    ImageFault.TEXT: lambda engine, model: _refit(engine, model, "layers.0.self_attn.v_proj.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_first_difference_is_located(fault: ImageFault, vllm: OneEngine, tmp_path: Path) -> None:
    model = tiny_model("Qwen2VLForConditionalGeneration")
    model.save_pretrained(tmp_path)
    processor = save_processor(model.config, tmp_path)
    if (plant := FAULTS[fault]) is None:
        _change_pixel_mean(tmp_path)
    engine = vllm(tmp_path, language_model_only=False)
    if plant is not None:
        plant(engine, model)
    prompts, sampling = image_prompts(model.config, processor), Sampling(spreading_temperature(model))
    comparisons = compare_images(engine, HFEngine(model, "trainer"), processor, prompts, sampling, threshold=BOUND)
    assert [one.fault for one in comparisons] == [fault] * len(prompts)
    assert not any(one.passed for one in comparisons)


def test_missing_bidirectional_mask_is_located(vllm: OneEngine, tmp_path: Path) -> None:
    outcome = compare_image_architecture("Gemma3ForConditionalGeneration", vllm, tmp_path)
    assert outcome.status == DISAGREES, outcome.reason
    assert set(outcome.faults) == {ImageFault.ATTENTION}


def test_processor_appending_token_is_not_run(vllm: OneEngine, tmp_path: Path) -> None:
    outcome = compare_image_architecture("PaliGemmaForConditionalGeneration", vllm, tmp_path)
    assert outcome.status == NOT_RUN
    assert "appends token" in outcome.reason


def test_known_causes_refer_to_disagreements() -> None:
    published = read_records(PAGES)[Kind.IMAGES]
    assert {name for name in CAUSES if published[name].outcome["status"] != DISAGREES} == set()


def test_images_without_vision_tower_raise(vllm: OneEngine, tmp_path: Path) -> None:
    model = tiny_model("Qwen2VLForConditionalGeneration")
    model.save_pretrained(tmp_path)
    prompt = image_prompts(model.config, save_processor(model.config, tmp_path))[0]
    engine = vllm(tmp_path)
    assert not engine.capabilities().raw_images
    with pytest.raises(EngineError, match="accepts no raw images here, and 1 of 1 prompts have some"):
        engine.generate([[20, 21]], Sampling(), max_new_tokens=2, images=[prompt.images])
