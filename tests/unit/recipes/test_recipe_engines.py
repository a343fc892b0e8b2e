"""Engines of all recipes: the coverage records say whether refits write all weights of these engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipes.test_recipe_memory import configuration

from nrl_models.common.trust.servers import TRANSFORMERS_BACKEND, VLLMS
from nrl_models.recipes import read_recipe, recipes
from nrl_models.recipes.recipe import PolicyRecipe
from tools.coverage_pages.results import Kind, read_records

PAGES = Path(__file__).parents[3] / "docs/model-coverage"


def recipes_with_vllm() -> list[str]:
    read = {name: read_recipe(file) for name, file in recipes().items()}
    return [name for name, recipe in read.items() if isinstance(recipe, PolicyRecipe) and recipe.engine.name in VLLMS]


@pytest.mark.parametrize("name", recipes_with_vllm())
def test_engine_of_recipe_agrees_after_refits(name: str) -> None:
    recipe = read_recipe(recipes()[name])
    assert isinstance(recipe, PolicyRecipe)
    (architecture,) = configuration(recipe.model.arguments["pretrained_model_name_or_path"])["architectures"]
    outcome = read_records(PAGES)[Kind.ENGINE][architecture].outcome
    if recipe.engine.name == TRANSFORMERS_BACKEND:
        outcome = outcome["transformers"]
    assert outcome["status"] in ("agrees", "not decided")
    assert outcome["stepped"] is not None, "without the second refit"
