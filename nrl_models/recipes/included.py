"""Bundled recipes: `recipes/` in a family's folder, `table/recipes/` under a row's name, and those of the demo."""

from __future__ import annotations

from pathlib import Path

from nrl_models import families
from nrl_models.common.checkpoint.local_path import as_path
from nrl_models.errors import CheckpointError, Problem, ProblemKind, RecipeError, did_you_mean

_FAMILIES = Path(families.__file__).parent


def recipes() -> dict[str, Path]:
    """Return the files by name, such as `gemma4/dapo_e2b`: family and training task. `demo/` has two for a CPU."""
    family_recipes = {f"{file.parent.parent.name}/{file.stem}": file for file in _FAMILIES.glob("*/recipes/*.yaml")}
    rows = {f"{file.parent.name}/{file.stem}": file for file in _FAMILIES.glob("table/recipes/*/*.yaml")}
    demo = {f"demo/{file.stem}": file for file in Path(__file__).parent.glob("demo/*.yaml")}
    return dict(sorted((demo | family_recipes | rows).items()))


def recipe_file(name: str) -> Path:
    """Return the file of a recipe, from a path or a name in `recipes`.

    Raises:
        RecipeError: If there is none, or no file can have that path. The message has the most similar names.
    """
    try:
        file = as_path(name)
    except CheckpointError as error:
        raise RecipeError("no such recipe", error.problems, ["correct the path"]) from error
    if file.is_file():
        return file
    known = recipes()
    if name in known:
        return known[name]
    hint = did_you_mean(name, known, count=3)
    detail = "is a directory, expected a YAML file" if file.is_dir() else "is neither a file nor a bundled recipe"
    problem = Problem(ProblemKind.FILE, name, f"{detail}{hint}")
    raise RecipeError("no such recipe", [problem], ["`nrl-models train --list` shows the bundled recipes"])


def summary(file: Path) -> str:
    """Return a recipe's one-line description: its first comment."""
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()
