"""The recipes that come with families: `recipes/` in a family's folder, or in `table/recipes/` under a row's name."""

from __future__ import annotations

from pathlib import Path

from nrl_models import families
from nrl_models.errors import Problem, ProblemKind, RecipeError, did_you_mean

_FAMILIES = Path(families.__file__).parent


def recipes() -> dict[str, Path]:
    """The files, by name: `gemma4/dapo_e2b`, say, a family and what is done with it."""
    own = {f"{file.parent.parent.name}/{file.stem}": file for file in _FAMILIES.glob("*/recipes/*.yaml")}
    rows = {f"{file.parent.name}/{file.stem}": file for file in _FAMILIES.glob("table/recipes/*/*.yaml")}
    return dict(sorted((own | rows).items()))


def recipe_file(name: str) -> Path:
    """The file of a recipe: a path, or a name in `recipes`.

    Raises:
        RecipeError: there is none; it has the nearest names.
    """
    file = Path(name).expanduser()
    if file.is_file():
        return file
    known = recipes()
    if name in known:
        return known[name]
    hint = did_you_mean(name, known, count=3)
    problem = Problem(ProblemKind.FILE, name, f"is neither a file nor a recipe that comes along{hint}")
    raise RecipeError("no such recipe", [problem], ["`nrl-models train --list` has those that come along"])


def summary(file: Path) -> str:
    """What a recipe is, in a line: its first comment."""
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()
