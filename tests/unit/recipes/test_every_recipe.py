"""Every included recipe, with a tiny model and three steps, to test that its keys take effect."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from config.published_configs import published, shrunk
from recipe_inputs import rows_with_images, save_with_tokenizer
from transformers import AutoConfig, PreTrainedModel

import nrl_models
from nrl_models import registry
from nrl_models.common.model_components.freezing import SHORT_NAMES, components_of
from nrl_models.recipes import read_recipe, recipes, train
from nrl_models.recipes.recipe import PolicyRecipe, Recipe
from nrl_models.recipes.targets import CLASSIFIER
from nrl_models.testing.case import FamilyCase, randomize

QUICK = ("demo/grpo", "demo/sft", "llama/grpo", "llama/sft", "qwen3/reward", "gemma4/dapo_e2b", "gemma4/vlm_grpo_e4b")
"""Recipes that run in `make test`. `make test-all` runs the others."""

ALIASES = {
    "google/gemma-2-2b-it": "google/gemma-2-2b",
    "google/gemma-4-26B-A4B-it": "google/gemma-4-26B-A4B",
    "moonshotai/Moonlight-16B-A3B-Instruct": "moonshotai/Moonlight-16B-A3B",
}
"""Repositories whose configuration equals one recorded under another name."""


def reward(row: object, completion: str, ended: bool) -> float:
    """A reward that differs between the completions of a tiny model."""
    return sum(map(ord, completion)) % 5 / 4


def tiny_model(name: str, recipe: Recipe) -> PreTrainedModel:
    """Build the recipe's model at small size, from its published configuration or its family's."""
    folder = name.partition("/")[0]
    family, loader = "llama" if folder == "demo" else folder, getattr(nrl_models, recipe.model.name.split(".")[1])
    (architecture, *_) = [known for known in registry.FAMILIES[family] if loader.serves(known)]
    if unmet := registry.unmet_requirement(architecture):
        pytest.skip(f"{architecture} needs {unmet}")
    repository = recipe.model.arguments["pretrained_model_name_or_path"]
    entry = published().get(ALIASES.get(repository, repository))
    scores = {"num_labels": 1} if recipe.model.name == CLASSIFIER else {}
    case = FamilyCase(registry.model_class(architecture), tiny=scores)
    if entry is None or entry.config["architectures"] != [architecture]:
        return case.reference()
    values = {key: value for key, value in entry.config.items() if key != "model_type"}
    kind = entry.config["model_type"]
    tiny = shrunk(entry, AutoConfig.for_model(kind, **values))
    small = AutoConfig.for_model(kind, **{key: value for key, value in tiny.items() if key != "model_type"})
    torch.manual_seed(0)
    model = case.reference_class._from_config(small, dtype=torch.float32)
    randomize(model)
    return model.eval()


def small(recipe: Recipe, checkpoint: Path, rows: Path) -> Iterator[str]:
    """Return overrides that make a recipe small without changing the rest."""
    yield f"model.pretrained_model_name_or_path={checkpoint}"
    if "path" in recipe.data.arguments:
        yield f"data.path={rows}"
        yield from ("data.name=null", "data.split=null")
    yield from ("training.steps=3", "training.warmup=0", "training.compute=float32")
    yield "optimizer.lr=1e-3"
    if not isinstance(recipe, PolicyRecipe):
        yield from ("training.batch=4", "training.max_length=48", "training.micro_batch=2")
        return
    group = 3 if "images" in recipe.data.arguments else 4  # completions with images are trained one by one
    yield from ("training.questions=2", f"training.group={group}", "training.new_tokens=6")
    yield f"training.updates={min(2, recipe.training.updates)}"
    yield from ("engine.name=hf-generate", "engine.dtype=float32")
    yield from (f"engine.options.{option}=null" for option in recipe.engine.options)
    yield from (f"reward.{argument}=null" for argument in recipe.reward.arguments)
    yield f"reward._target_={__name__}.reward"
    yield f"loss.overlong_buffer={min(2, recipe.loss.overlong_buffer)}"


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in recipes()]
)
def test_three_training_steps(name: str, rows_file: Path, tmp_path: Path) -> None:
    file = recipes()[name]
    full_recipe = read_recipe(file)
    model = tiny_model(name, full_recipe)
    images = "images" in full_recipe.data.arguments
    checkpoint = save_with_tokenizer(model, tmp_path / "checkpoint", images=images)
    rows = rows_with_images(tmp_path) if images else rows_file
    recipe = read_recipe(file, list(small(full_recipe, checkpoint, rows)))
    messages: list[str] = []
    run = train(recipe, out=tmp_path / "out", note=messages.append)

    assert len(run.steps) == 3
    assert sum(line.startswith("step ") for line in messages) == 3
    assert all(math.isfinite(value) for step in run.steps for value in step.values())
    assert {gate.metric for gate in recipe.gates} <= set(run.steps[0])
    assert len(run.verdicts) == len(recipe.gates) > 0
    for gate, found in zip(recipe.gates, run.to_json()["gates"], strict=True):
        assert (found["bound"], found["relation"], found["unit"]) == (gate.bound, gate.relation, gate.metric)
    assert all(step["gradient_norm"] > 0 for step in run.steps)
    if isinstance(recipe, PolicyRecipe):
        # In fp32, engine and trainer are the same model, before and after each refit.
        assert run.passed, run.to_json()["gates"]
        assert max(step["token_mult_prob_error"] for step in run.steps) < 1.0001
    elif recipe.model.name != CLASSIFIER:
        assert run.steps[-1]["loss"] < run.steps[0]["loss"]
    trained = recipe.model.function(tmp_path / "out", dtype=torch.float32)
    moved = {key for key, value in trained.named_parameters() if not torch.equal(value, model.get_parameter(key))}
    assert moved
    assert any("vision_tower" in name for name in moved) == images
    if frozen := {SHORT_NAMES[key] for key, value in recipe.freeze_config.items() if value}:
        kept = {name for key, own in components_of(trained).items() if key in frozen for name in own}
        assert kept
        assert moved.isdisjoint(kept)
