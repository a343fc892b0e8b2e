"""Recipes: YAML files with model, data, loss, training settings and acceptance gates; see docs/recipes.md."""

from nrl_models.recipes.included import recipe_file, recipes
from nrl_models.recipes.reading import read_recipe
from nrl_models.recipes.recipe_run import Run, train

__all__ = ["Run", "read_recipe", "recipe_file", "recipes", "train"]
