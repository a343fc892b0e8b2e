"""The contents of the wheel, and its use outside of the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def run(*command: str | Path, cwd: Path) -> str:
    """Return the standard output of a command that cannot import from the checkout."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env=variables | {"NRL_MODELS_CACHE": str(cwd / "cache"), "COLUMNS": "120"},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wheel")


@pytest.fixture(scope="module")
def wheel(folder: Path) -> Path:
    """The wheel, built by pip in a separate environment with hatchling from the package index."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def environment(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel. Other packages are imported from the environment of the tests."""
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    # Directories in a .pth file are appended, and their own .pth files are not read: no editable install is active.
    (Path(packages) / "packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return environment


def test_wheel_contains_only_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = (file for file in (ROOT / "nrl_models").rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    assert names == {file.relative_to(ROOT).as_posix() for file in files}
    assert {name.partition("/")[0] for name in names} == {"nrl_models"}


def test_wheel_contains_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"nrl_models/py.typed", "nrl_models/__init__.pyi"} <= names
    for suffix in (".yaml", ".jinja", ".json"):
        assert any(name.startswith("nrl_models/") and name.endswith(suffix) for name in names), suffix


def test_wheel_has_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
        licenses = [name for name in archive.namelist() if name.endswith("/LICENSE")]
    assert "Requires-Python: >=3.11" in text
    assert "Requires-Dist: torch>=2.9" in text
    assert licenses


def test_package_is_imported_from_the_wheel(environment: Path, folder: Path) -> None:
    code = (
        "import nrl_models, torch\nfrom nrl_models import AutoModelForCausalLM\n"
        "print(nrl_models.__version__, nrl_models.__file__)"
    )
    version, file = run(environment / "bin" / "python", "-c", code, cwd=folder).split()
    assert version in next(folder.glob("*.whl")).name
    assert Path(file).is_relative_to(environment)


@pytest.mark.parametrize("command", [(), ("train",), ("diagnose", "embeddings")], ids=" ".join)
def test_installed_command_help(command: tuple[str, ...], environment: Path, folder: Path) -> None:
    assert "Usage: nrl-models" in run(environment / "bin" / "nrl-models", *command, "--help", cwd=folder)


def test_installed_command_inspects_a_checkpoint(environment: Path, folder: Path, llama_checkpoint: Path) -> None:
    printed = run(environment / "bin" / "nrl-models", "inspect", llama_checkpoint, "--json", "-", cwd=folder)
    assert json.loads(printed)["architecture"] == "LlamaForCausalLM"


def test_installed_package_finds_its_data(environment: Path, folder: Path, wheel: Path) -> None:
    """Recipes, templates of reports, and the table of configuration keys."""
    with zipfile.ZipFile(wheel) as archive:
        recipes = [name for name in archive.namelist() if name.endswith(".yaml")]
    listed = run(environment / "bin" / "nrl-models", "train", "--list", cwd=folder)
    rows = [line.split("│")[1] for line in listed.splitlines() if line.startswith("│")]
    assert len([row for row in rows if "/" in row]) == len(recipes)
    code = (
        "import jinja2\n"
        "from nrl_models.common.config.recorded_keys import FILE\n"
        "for package in ('nrl_models.consistency', 'nrl_models.certify'):\n"
        "    print(jinja2.PackageLoader(package, '.').list_templates())\n"
        "print(FILE.stat().st_size)"
    )
    *templates, size = run(environment / "bin" / "python", "-c", code, cwd=folder).splitlines()
    assert all("report.html.jinja" in names for names in templates)
    assert int(size) > 1000


def test_no_module_outside_the_package_is_installed(environment: Path, folder: Path) -> None:
    code = "import importlib.util\nprint([name for name in ('tools', 'tests') if importlib.util.find_spec(name)])"
    assert run(environment / "bin" / "python", "-I", "-c", code, cwd=folder).strip() == "[]"
