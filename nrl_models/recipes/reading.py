"""Read a recipe: parse YAML and overrides into frozen dataclasses, or raise one error that lists every problem.

OmegaConf reads the YAML and merges overrides. Its interpolation is disabled, because `${...}` can read environment
variables, and nested interpolations can expand a short file into a very long one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from nrl_models.common.backend import BackendConfig
from nrl_models.common.config.spelling import misspellings_of
from nrl_models.common.model_components.freezing import COMPONENTS, SHORT_NAMES
from nrl_models.common.trust.hub_kernels import refuse_hub_kernels
from nrl_models.common.value_checks import is_integer
from nrl_models.errors import (
    EngineError,
    NRLModelsError,
    Problem,
    ProblemKind,
    RecipeError,
    did_you_mean,
    one_line,
    shown,
    suggestion,
)
from nrl_models.loading.options import KEYWORDS
from nrl_models.losses.named import LOSSES, PolicyLoss, PreferenceLoss, RankingLoss
from nrl_models.recipes.gates import Gate
from nrl_models.recipes.parsing.value_types import NOTHING, converted, members_of, mismatch, nested_keys
from nrl_models.recipes.parsing.yaml_trees import leave_out_null, leaves_by_key, nearest_keys, why_unreadable
from nrl_models.recipes.recipe import (
    PAIR_METRICS,
    POLICY_METRICS,
    SUPERVISED_METRICS,
    PolicyRecipe,
    Recipe,
    SupervisedRecipe,
    Target,
)
from nrl_models.recipes.targets import (
    CLASSIFIER,
    ENGINE_OPTIONS_OF_A_RUN,
    SAFE_ENGINE,
    SAFE_LOADING,
    SLOTS,
    listed_arguments,
    problems_of_arguments,
    problems_of_values,
    resolved,
)

MOST_BYTES = 2**16
"""Size of the largest recipe that is read."""

LARGEST_SEED = 2**32 - 1
"""Largest random seed, as in NumPy, which vLLM also seeds."""

PATH_KEY = "pretrained_model_name_or_path"
"""The key of a part `model` with the checkpoint."""

PATH_SPELLINGS = ("path", "name", "model", "checkpoint", "pretrained", "path_or_id", "model_path", "model_name")
"""Keys that are meant as `PATH_KEY`, and are in no configuration."""

OF_A_DATA_SET = ("name", "split", "revision")
"""Keys of a part `data` that a `.jsonl` file on the command line removes."""


def read_recipe(file: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe.

    Args:
        file: YAML file.
        overrides: Strings `key=value` with a dotted key and a YAML value (`training.steps=10`). `key=null` removes a
            key. Overrides may set targets that are not allowed in a file, see `nrl_models.recipes.targets`.

    Raises:
        RecipeError: Lists every problem.
        EngineError: If OmegaConf is not installed.
    """
    reader = _Reader(Path(file).name)
    tree = reader.tree(Path(file), overrides)
    recipe = reader.recipe(tree) if tree is not None else None
    if reader.problems or recipe is None:
        raise RecipeError(f"cannot use the recipe {file}", reader.problems)
    return recipe


class _Reader:
    """Reads a recipe, and collects problems.

    Attributes:
        problems: Problems so far.
        override_keys: Dotted keys that were set on the command line.
        metrics: Metrics that the run measures.
        keys: Dotted keys to suggest for unknown ones: those of the recipe's types, and those it has.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.problems: list[Problem] = []
        self.override_keys: set[str] = set()
        self.metrics: Sequence[str] = ()
        self.keys: set[str] = set()

    def wrong(self, kind: ProblemKind, key: str, detail: str, advice: str = "") -> None:
        self.problems.append(Problem(kind, key, detail, self.name, advice))

    # The file

    def tree(self, file: Path, overrides: Sequence[str]) -> dict[str, Any] | None:
        """Return the contents of the file merged with the overrides; None if it cannot be read."""
        try:
            import yaml
            from omegaconf import OmegaConf
        except ImportError as error:
            raise EngineError("recipes need the extra `train` (package omegaconf): pip install '.[train]'") from error
        try:
            with file.open("rb") as handle:
                data = handle.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                self.wrong(ProblemKind.FILE, file.name, f"has more than {MOST_BYTES:,} bytes")
                return None
            text = data.decode()
            if problem := why_unreadable(yaml.scan(text)):
                self.wrong(ProblemKind.FORMAT, file.name, problem)
                return None
            content = OmegaConf.create(text)
            if not OmegaConf.is_dict(content):
                self.wrong(ProblemKind.FORMAT, file.name, "is not a mapping of keys to values")
                return None
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            self.wrong(ProblemKind.FILE, file.name, f"cannot be read: {one_line(error)}")
            return None
        for override in overrides:
            key, equals, _ = override.partition("=")
            if not (key.strip() and equals):
                self.wrong(ProblemKind.FORMAT, shown(override), "expected KEY=VALUE, e.g. training.steps=10")
                continue
            try:
                override_config = OmegaConf.from_dotlist([override])
                merged: Any = OmegaConf.merge(content, override_config)
                content = merged
            except Exception as error:  # OmegaConf's own, and YAML's
                self.wrong(ProblemKind.FORMAT, key, f"cannot be set: {one_line(error)}")
                continue
            self.override_keys |= set(leaves_by_key(OmegaConf.to_container(override_config, resolve=False)))
        tree: Any = OmegaConf.to_container(content, resolve=False)
        for key in self.override_keys:
            leave_out_null(tree, key.split("."))
        for key, value in leaves_by_key(tree).items():
            if isinstance(value, str) and "${" in value:
                self.wrong(ProblemKind.FORMAT, key, "interpolation (${...}) is not supported: write the value itself")
        return tree

    # The parts

    def recipe(self, tree: Mapping[str, Any]) -> Recipe | None:
        """Build the recipe from a tree; None if its loss is missing or unknown."""
        loss = tree.get("loss")
        name: Any = loss.get("name") if isinstance(loss, Mapping) else None
        if not isinstance(name, str) or name not in LOSSES:
            problem = "is missing" if name is None else f"{name!r} is not a loss"
            hint = did_you_mean(name, LOSSES)
            self.wrong(ProblemKind.CONFIG, "loss.name", f"{problem}{hint}: expected one of {', '.join(LOSSES)}")
            known = {field.name for kind in (PolicyRecipe, SupervisedRecipe) for field in fields(kind)}
            self.unknown(tree, sorted(known), "")
            return None
        settings = LOSSES[name]
        is_policy = isinstance(settings, PolicyLoss)
        pairs = isinstance(settings, (PreferenceLoss, RankingLoss))
        self.metrics = POLICY_METRICS if is_policy else PAIR_METRICS if pairs else SUPERVISED_METRICS
        kind = PolicyRecipe if is_policy else SupervisedRecipe
        parts = {part: node for part, node in tree.items() if isinstance(node, Mapping)}
        self.keys = {key for key in nested_keys(kind) if key.partition(".")[0] not in SLOTS}
        self.keys |= {f"{part}.{name}" for part, node in parts.items() for name in node} | {*listed_arguments(tree)}
        recipe: Recipe | None = self.section(kind, tree, "")
        scores = isinstance(settings, RankingLoss)
        listed = recipe is not None and recipe.model.name in SLOTS["model"].listed
        if recipe is not None and listed and scores != (recipe.model.name == CLASSIFIER):
            wanted = f"a model that {'scores' if scores else 'writes'} text"
            self.wrong(ProblemKind.CONFIG, "model._target_", f"the loss {name} needs {wanted}, unlike this")
        return recipe

    def section(self, kind: type, node: Any, path: str, start: Any = None) -> Any:
        """Convert a mapping to a dataclass; None if there is a problem."""
        if not isinstance(node, Mapping):
            self.wrong(ProblemKind.CONFIG, path, f"is {node!r}: expected keys and values")
            return None
        before = len(self.problems)
        hints, values = get_type_hints(kind), {}
        self.unknown(node, [field.name for field in fields(kind)], path)
        for field in fields(kind):
            key = f"{path}.{field.name}" if path else field.name
            if field.name in node:
                values[field.name] = self.value(hints[field.name], node[field.name], key)
            elif start is None and field.default is MISSING and field.default_factory is MISSING:
                self.wrong(ProblemKind.MISSING, key, "is missing")
        if len(self.problems) > before:
            return None
        try:
            return kind(**values) if start is None else replace(start, **values)
        except (NRLModelsError, ValueError) as error:
            self.wrong(ProblemKind.CONFIG, path or self.name, str(error))
            return None

    def unknown(self, node: Mapping[str, Any], known: Sequence[str], path: str) -> None:
        for name in node:
            if name not in known:
                elsewhere = sorted(key for key in self.keys if key.rpartition(".")[0] != path)
                hint = suggestion(nearest_keys(name, known, elsewhere))
                key = f"{path}.{name}" if path else str(name)
                self.wrong(ProblemKind.UNKNOWN, key, f"nothing reads it{hint}; expected some of {', '.join(known)}")

    def value(self, hint: Any, node: Any, key: str) -> Any:
        """Convert a value to a type. Records a problem if it has another type."""
        if key == "loss":
            loss_node = {name: value for name, value in node.items() if name != "name"}
            return self.section(type(LOSSES[node["name"]]), loss_node, key, LOSSES[node["name"]])
        if key == "gates":
            return self.gates(node)
        if hint is Target:
            return self.target(node, key)
        members = members_of(hint)
        if node is None and type(None) in members:
            return None
        for member in members:
            if is_dataclass(member) and isinstance(member, type):
                return self.section(member, node, key)
        converted_value = converted(hint, node)
        if converted_value is NOTHING:
            self.wrong(ProblemKind.CONFIG, key, mismatch(hint, node))
            return None
        check: dict[str, Any] = {
            "backend": self.backend,
            "freeze_config": self.freezing,
            "engine.options": self.engine_options,
            "seed": self.seed,
        }
        if key in check:
            check[key](converted_value)
        return converted_value

    def gates(self, node: Any) -> Any:
        if not isinstance(node, list) or not all(isinstance(text, str) for text in node):
            self.wrong(ProblemKind.CONFIG, "gates", "expected a list such as ['median(loss) < 2']")
            return None
        gates = []
        for text in node:
            try:
                gates.append(Gate.parse(text, self.metrics))
            except NRLModelsError as error:
                self.wrong(ProblemKind.CONFIG, "gates", str(error))
        return tuple(gates)

    # Keys that are not allowed in a file

    def allowed(self, key: str) -> bool:
        """Return True if a key, or one nested in it, was set on the command line."""
        return any(override_key == key or override_key.startswith(f"{key}.") for override_key in self.override_keys)

    def refused(self, key: str, why: str) -> None:
        advice = f"if you trust it, give it on the command line: {key}=..."
        self.wrong(ProblemKind.UNSUPPORTED, key, f"{why}, so a file may not have it", advice)

    def target(self, node: Any, key: str) -> Target | None:
        slot = SLOTS[key]
        if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
            self.wrong(ProblemKind.MISSING, f"{key}._target_", f"expected one of {', '.join(slot.listed)}")
            return None
        name, arguments = node["_target_"], {name: value for name, value in node.items() if name != "_target_"}
        if key == "data" and "data.path" in self.override_keys and str(arguments.get("path")).endswith(".jsonl"):
            unset = {name for name in OF_A_DATA_SET if f"data.{name}" not in self.override_keys}
            arguments = {name: value for name, value in arguments.items() if name not in unset}
        before = len(self.problems)
        for path, _ in leaves_by_key(arguments).items():
            if path.rpartition(".")[2] == "_target_" and not self.allowed(f"{key}.{path}"):
                self.wrong(ProblemKind.UNKNOWN, f"{key}.{path}", "only the first level of a part has a _target_")
        if name not in slot.listed and not self.allowed(f"{key}._target_"):
            advice = f"if you trust that code, give it on the command line: {key}._target_={name}"
            detail = f"{name} is code from elsewhere, which a file may not name; expected {' or '.join(slot.listed)}"
            self.wrong(ProblemKind.UNSUPPORTED, f"{key}._target_", detail, advice)
            return None
        try:
            function = resolved(name)
            problems = list(problems_of_arguments(function, arguments, slot))
        except (ImportError, TypeError, ValueError) as error:
            self.wrong(ProblemKind.CONFIG, f"{key}._target_", f"{name} cannot be used: {one_line(error)}")
            return None
        for argument, detail in problems:
            self.wrong(ProblemKind.UNKNOWN, f"{key}.{argument}", detail)
        if key == "model":
            self.loading(arguments)
        elif name in slot.listed and not problems:
            for argument, detail in problems_of_values(function, arguments):
                self.wrong(ProblemKind.CONFIG, f"{key}.{argument}", detail)
        return Target(name, function, arguments) if len(self.problems) == before else None

    def loading(self, arguments: Mapping[str, Any]) -> None:
        if not isinstance(arguments.get(PATH_KEY), str):
            self.wrong(ProblemKind.MISSING, f"model.{PATH_KEY}", "expected a directory or a hub repository")
        for name in ("revision", "subfolder"):
            if not isinstance(arguments.get(name), str | None):
                self.wrong(ProblemKind.CONFIG, f"model.{name}", mismatch(str, arguments[name]))
        known = (*KEYWORDS, PATH_KEY)
        for name in arguments:
            close = [PATH_KEY] if name in PATH_SPELLINGS else misspellings_of(name, known)
            if name not in known and close:
                self.wrong(ProblemKind.UNKNOWN, f"model.{name}", f"nothing reads it{suggestion(close)}")
            elif name in KEYWORDS and name not in SAFE_LOADING and not self.allowed(f"model.{name}"):
                self.refused(f"model.{name}", "it can run code, name a secret or write files")
        file_arguments = {name: value for name, value in arguments.items() if not self.allowed(f"model.{name}")}
        self.kernels(file_arguments, "model")

    def kernels(self, values: Mapping[str, Any], key: str) -> None:
        try:
            refuse_hub_kernels(values, key)
        except NRLModelsError:
            self.refused(key, "it names a kernel of the hub, whose code would be downloaded and run")

    def backend(self, values: Mapping[str, Any]) -> None:
        try:
            BackendConfig(**values)
        except (NRLModelsError, TypeError) as error:
            known = ", ".join(BackendConfig.__dataclass_fields__)
            self.wrong(ProblemKind.CONFIG, "backend", f"{error}; expected some of {known}")
        kernels = {f"{key}_implementation": impl for key, impl in values.items() if not self.allowed(f"backend.{key}")}
        self.kernels(kernels, "backend")

    def freezing(self, values: Mapping[str, Any]) -> None:
        self.unknown(values, [*COMPONENTS, *SHORT_NAMES], "freeze_config")
        for name, value in values.items():
            if not isinstance(value, bool):
                self.wrong(ProblemKind.CONFIG, f"freeze_config.{name}", f"is {value!r}: expected true or false")

    def seed(self, value: int) -> None:
        if not is_integer(value, 0, LARGEST_SEED):
            self.wrong(ProblemKind.CONFIG, "seed", f"is {value}: expected a whole number from 0 to {LARGEST_SEED}")

    def engine_options(self, values: Mapping[str, Any]) -> None:
        for name in values:
            if name in ENGINE_OPTIONS_OF_A_RUN:
                key = ENGINE_OPTIONS_OF_A_RUN[name]
                self.wrong(ProblemKind.CONFIG, f"engine.options.{name}", f"the run sets it itself: use {key}")
            elif name not in SAFE_ENGINE and not self.allowed(f"engine.options.{name}"):
                self.refused(f"engine.options.{name}", "engines have options that name code to run")
