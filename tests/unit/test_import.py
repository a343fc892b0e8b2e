"""Imports: lazy imports, public names, and the import order of packages."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import nrl_models
from nrl_models import families, registry
from nrl_models.families.table import TABLE

ROOT = Path(nrl_models.__file__).parent
PYPROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())

FAMILY_PACKAGES = [ROOT / "families" / name for name in families.folders()]
"""Packages that declare a family in `FAMILY` and export nothing."""

HEAVY = ("torch", "transformers", "accelerate", "safetensors", "numpy", "tokenizers")


def run_python(code: str) -> str:
    """Return the output of `code` in a new Python process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Lazy imports


@pytest.mark.parametrize(
    "statement",
    [
        "import nrl_models",
        "from nrl_models import CheckpointError",
        "from nrl_models import register_architecture, MODEL_ARCH_MAPPING",
        "import nrl_models.cli",
        "import nrl_models.testing.plugin",
    ],
)
def test_import_loads_no_heavy_module(statement: str) -> None:
    output = run_python(f"import sys\n{statement}\nprint([name for name in {HEAVY} if name in sys.modules])")
    assert output.strip() == "[]"


def test_help_loads_no_heavy_module() -> None:
    code = f"""
import json, sys
import typer
from typer.testing import CliRunner
from nrl_models.cli import app

found = {{}}
for command in (None, *typer.main.get_command(app).commands):
    result = CliRunner().invoke(app, [*([command] if command else []), "--help"])
    assert result.exit_code == 0 and "Usage" in result.output, result.output
    found[command or "nrl-models"] = [name for name in {HEAVY} if name in sys.modules]
print(json.dumps(found))
"""
    commands = {
        "nrl-models",
        "demo",
        "inspect",
        "parity",
        "convert",
        "consistency",
        "refit-check",
        "diagnose",
    }
    found = json.loads(run_python(code))
    assert commands <= found.keys()
    assert {command: names for command, names in found.items() if names} == {}


def test_python_m_help_loads_no_heavy_module() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "nrl_models", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT.parent, check=True)
    assert "Load Hugging Face models" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "nrl_models.cli" in imported
    assert not imported & set(HEAVY)


# Public names


def test_every_public_name_resolves() -> None:
    assert len(set(nrl_models.__all__)) == len(nrl_models.__all__)
    for name in nrl_models.__all__:
        assert getattr(nrl_models, name) is not None
    assert set(dir(nrl_models)) >= set(nrl_models.__all__)
    everything: dict[str, object] = {}
    exec("from nrl_models import *", everything)
    assert set(nrl_models.__all__) <= everything.keys()


PACKAGES = [file.parent for file in ROOT.rglob("__init__.py") if file.parent not in (ROOT, *FAMILY_PACKAGES)]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: str(package.relative_to(ROOT)))
def test_packages_with_exports_define_all(package: Path) -> None:
    module = importlib.import_module(".".join(package.relative_to(ROOT.parent).parts))
    code = ast.parse((package / "__init__.py").read_text()).body
    defines = [node for node in code if not isinstance(node, ast.Expr) and getattr(node, "module", "") != "__future__"]
    assert hasattr(module, "__all__") is bool(defines)
    names = getattr(module, "__all__", [])
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(module, name)] == []


def test_attribute_error_suggests_similar_name() -> None:
    with pytest.raises(AttributeError, match=r"'token_logprob' \(did you mean token_logprobs\?\)"):
        nrl_models.token_logprob  # noqa: B018


def test_main_functions_are_exported() -> None:
    names = "start_engine token_logprobs rollout_logprobs consistency_metrics check_parity check_consistency"
    assert {*names.split(), "parallelize", "export_adapter"} <= set(nrl_models.__all__)


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'nrl_models' has no attribute 'AutoModelForNothing'"):
        nrl_models.AutoModelForNothing  # noqa: B018


NEED_VLLM = {"nrl_models.engines.transfer.vllm_engines"}
"""Modules with classes derived from vLLM's."""

NEED_VERL = {"nrl_models.adapters.verl"}
"""verl imports this module by name, for its side effects."""

NEED_MLX = {"nrl_models.engines.processes.mlx_worker"}
"""Modules that run only in the engine's process."""

NEED_MEGATRON = {"nrl_models.megatron.latent_attention"}
"""Modules with classes derived from Megatron-Core's."""


def test_every_module_imports_and_defines_all_names() -> None:
    unmet = {
        registry.MODEL_ARCH_MAPPING[name][0] for name in registry.architectures() if registry.unmet_requirement(name)
    }
    if importlib.util.find_spec("vllm") is None:
        unmet |= NEED_VLLM
    if importlib.util.find_spec("verl") is None:
        unmet |= NEED_VERL
    if importlib.util.find_spec("mlx_lm") is None:
        unmet |= NEED_MLX
    if importlib.util.find_spec("megatron") is None:
        unmet |= NEED_MEGATRON
    names = [package.name for package in pkgutil.walk_packages([str(ROOT)], "nrl_models.")]
    assert len(names) > 50
    for name in names:
        if name in unmet or name == "nrl_models.__main__":  # importing it runs the command
            continue
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            assert hasattr(module, public), f"{name}.{public}"


def test_entry_points_resolve_and_version_matches() -> None:
    project = PYPROJECT["project"]
    assert project["version"] == nrl_models.__version__
    registered = [where for group in project["entry-points"].values() for where in group.values()]
    for where in (*project["scripts"].values(), *registered):
        module, _, attribute = where.partition(":")
        imported = importlib.import_module(module)
        assert callable(getattr(imported, attribute)) if attribute else imported


# Import order

LAYERS = (
    {"__main__"},
    {"cli"},
    {"certify"},
    {"onboarding", "diagnostics", "recipes", "adapters"},
    {"watch"},
    {"consistency"},
    {"engines"},
    {"megatron"},
    {"quirks"},
    {"testing"},
    {"parity"},
    {"auto"},
    {"registry"},
    {"families"},
    {"family"},
    {"loading"},
    {"distributed"},
    {"inputs", "logprobs", "losses"},
    {"common"},
    {"errors", "deprecation"},
)
"""Packages from top to bottom, as in CONTRIBUTING.md. A package imports its own files and packages further down."""

INSIDE_COMMON = (
    "model_components",
    "config",
    "forward",
    "state_dict",
    "views",
    "projections",
    "trust",
    "gguf",
    "compressed",
    "checkpoint",
)
"""Packages inside `common` in the same order. Files directly in `common` are below all of these."""

MAX_FILES = 15
"""Maximum number of files in a package."""

MAX_LINES = 350
"""Maximum number of lines in a file."""


@dataclass(frozen=True)
class Import:
    """One import within this package: at the top of a file, in a function, or only for annotations.

    Args:
        module: Full name of the importing module.
        line: Its line.
        target: Full name of the imported module.
    """

    module: str
    line: int
    target: str


def sources() -> Iterator[tuple[str, str]]:
    """Yield every file of the package, relative to its root, with its content."""
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path.read_text()


def module_name(file: str) -> str:
    return f"nrl_models/{file}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_name(file): text for file, text in sources()}


def imports_of(module: str, text: str) -> Iterator[Import]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in MODULES:
                    yield Import(module, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                full_name = f"{node.module}.{alias.name}"
                target = full_name if full_name in MODULES else node.module
                if target in MODULES:
                    yield Import(module, node.lineno, str(target))


IMPORTS = [edge for module, text in MODULES.items() for edge in imports_of(module, text)]


def top_level_name(module: str) -> str:
    """Return the package or file directly below the root."""
    return [*module.split("."), ""][1]


def rank(unit: str) -> int:
    levels = [number for number, layer in enumerate(LAYERS) if unit in layer]
    assert levels, f"{unit} is in no layer: add it to LAYERS and to CONTRIBUTING.md"
    return levels[0]


def test_imports_follow_layer_order() -> None:
    assert len(IMPORTS) > 400
    wrong = [
        f"{edge.module}:{edge.line} imports {edge.target}"
        for edge in IMPORTS
        if top_level_name(edge.module) != top_level_name(edge.target)
        and top_level_name(edge.module)
        and top_level_name(edge.target)
        if rank(top_level_name(edge.target)) <= rank(top_level_name(edge.module))
    ]
    assert not wrong


def test_imports_inside_common_follow_layer_order() -> None:
    order = {name: number for number, name in enumerate(INSIDE_COMMON)}

    def position(module: str) -> int:
        return order.get(module.split(".")[2], len(order))

    inside = [
        edge
        for edge in IMPORTS
        if top_level_name(edge.module) == top_level_name(edge.target) == "common"
        and edge.module.count(".") > 1 < edge.target.count(".")
    ]
    assert len(inside) > 40
    wrong = [
        f"{edge.module}:{edge.line} imports {edge.target}"
        for edge in inside
        if position(edge.target) < position(edge.module)
    ]
    assert not wrong


def test_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for edge in IMPORTS:
        if edge.module != edge.target:
            graph.setdefault(edge.module, set()).add(edge.target)
    graph.pop("nrl_models", None)  # its names are imported on first use
    TopologicalSorter(graph).prepare()  # raises for a cycle, and names it


def test_module_names_are_unique() -> None:
    """Names of files and packages are unique, except for the files of families, which are in separate folders."""
    files = {}
    for module in MODULES:
        if "families." not in module.replace("families.table", "") and not module.endswith(("__main__", "__init__")):
            files.setdefault(module.rpartition(".")[2], []).append(module)
    doubled = {name: modules for name, modules in files.items() if len(modules) > 1}
    assert not doubled


def test_no_package_has_too_many_files() -> None:
    packages = {path.parent for path in ROOT.rglob("*.py")}
    large = {str(path): count for path in packages if (count := len(list(path.glob("*.py")))) > MAX_FILES}
    assert not large


def test_no_file_has_too_many_lines() -> None:
    large = {file: lines for file, text in sources() if (lines := len(text.splitlines())) > MAX_LINES}
    assert not large


PRIVATE_MODULES = {
    "transformers.conversion_mapping", "transformers.core_model_loading", "transformers.initialization",
    "transformers.modeling_gguf_pytorch_utils",
}  # fmt: skip
PRIVATE_ATTRIBUTES = {"_get_dtype_plan", "_is_hf_initialized", "_weight_conversions", "_original_source_patterns"}


OF_TRANSFORMERS = ("common/upstream.py", "common/upstream_conversions.py")


def test_transformers_private_names_are_used_in_two_modules() -> None:
    """A new transformers version then changes only these. Declarations of model classes are not private."""
    matches = []
    for file, text in sources():
        if file in OF_TRANSFORMERS:
            continue
        for node in ast.walk(ast.parse(text)):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.partition(".")[0] == "transformers":
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                matches += [f"{file}: {module}"] if module in PRIVATE_MODULES or private else []
            if isinstance(node, ast.Attribute) and node.attr in PRIVATE_ATTRIBUTES:
                matches.append(f"{file}: {node.attr}")
            if isinstance(node, ast.Constant) and node.value in PRIVATE_ATTRIBUTES:
                matches.append(f"{file}: {node.value}")
    assert not matches


SHARED_BY_FAMILIES = ("facts", "limits", "published", "table")


def test_families_import_common_and_transformers_only() -> None:
    for file, text in sources():
        if not file.startswith("families/"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            family = "nrl_models." + file.rpartition("/")[0].replace("/", ".")
            for name in names:
                root = name.partition(".")[0]
                # transformers' configurations use a decorator of huggingface_hub.
                allowed = name == "huggingface_hub.dataclasses" or root in {"torch", "transformers", "einops"}
                allowed = allowed or root in sys.stdlib_module_names
                shared = ("nrl_models.common.", *(f"nrl_models.families.{file}" for file in SHARED_BY_FAMILIES))
                inside = name in ("nrl_models.family", "nrl_models.families") or name.startswith((*shared, family))
                assert allowed or inside, f"{file} imports {name}"


def test_transformers_integrations_is_not_imported() -> None:
    """These modules move between supported versions, so only modules of upstream's names may import them."""
    allowed = {"common/upstream.py", "common/model_components/upstream_peft.py"}
    for file, text in sources():
        is_allowed = file in allowed
        assert is_allowed or not re.search(r"^\s*(from|import) transformers\.integrations", text, re.MULTILINE), file


# Model names in code

STEMS = {re.split(r"[\d_]", family)[0] for family in families.folders()}
MODEL_NAMES = {family.replace("_", "") for family in families.folders()} | {
    stem for stem in STEMS if len(stem) > 4 or stem == "qwen"
}
"""Family names as one word (`qwen3moe`), and their first parts, unless these may be ordinary words."""

SERVED = (
    family.replace("_", "")
    for family, entry in TABLE.items()
    if entry.architectures and family != "git"  # also the program, whose folder is excluded
)
ROWS = re.compile(f"({'|'.join(SERVED)})(for|config|model|$)")
"""Prefixes of words that name a family of the table. Some occur in ordinary words (`opt`, `git`)."""


def words_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield identifiers and strings of a file, without docstrings, with their lines."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.alias)):
            yield getattr(node, "lineno", 0), node.name
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr


NAMED = ("families/", "registry.py", "cli/demo.py", "onboarding/real_weights.py")
"""The table of families, the demo, and the packages that contain published weights."""

TOOLS = re.compile(r"llama\.cpp|llama-quantize|llama-gguf-split|^llama3$")
"""Programs, and a RoPE scaling method, that are named after a model."""


@pytest.mark.parametrize("file", [file for file, _ in sources() if not file.startswith(NAMED)])
def test_model_names_appear_only_in_families(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    named = [
        f"{file}:{line}: {word}"
        for line, word in words_of(tree)
        for plain in [re.sub(r"[\W_]", "", TOOLS.sub("", word)).lower()]
        if any(name in plain for name in MODEL_NAMES) or ROWS.match(plain)
    ]
    assert not named


def test_no_comparison_with_model_type() -> None:
    """No `config.model_type == "..."` or `in ("...", "...")` outside of families."""
    for file, text in sources():
        if file.startswith("families/"):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            has_model_type = any("model_type" in ast.unparse(side) for side in sides)
            assert not (has_model_type and any(is_text(side) for side in sides)), f"{file}:{node.lineno}"


def is_text(node: ast.AST) -> bool:
    """Return True for a string literal, or a collection of string literals."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(map(is_text, node.elts))
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_unit_test_files_have_unique_names() -> None:
    """pytest collects nothing at all if two files outside a package have the same name."""
    files = [path for path in Path(__file__).parent.rglob("test_*.py") if not (path.parent / "__init__.py").is_file()]
    names = Counter(path.name for path in files)
    assert len(names) > 100
    assert [name for name, count in names.items() if count > 1] == []
