"""Reading sources from a wheel: names, methods, and differences between two versions."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from packaging.version import Version

from tests.unit.release_check.wheels import sources, wheel
from tools.checkout import ROOT
from tools.release_check.upstream_code.names import TORCH_LIST, missing_names, missing_torch_attributes
from tools.release_check.upstream_code.sources import Sources, changed_functions, function_diff, sources_of

OLD = {
    "upstream/__init__.py": "from .models import *\n",
    "upstream/models/__init__.py": "from .base import *\n",
    "upstream/models/base.py": "class Base:\n    def step(self, past):\n        return past\n",
    "upstream/models/one.py": (
        "from .base import Base\n\nclass One(Base):\n    def forward(self, x):\n        '''Old words.'''\n"
        "        return x\n"
    ),
}
NEW = OLD | {
    "upstream/models/one.py": (
        "from .base import Base\n\nclass One(Base):\n    def forward(self, x):\n        '''New words.'''\n"
        "        return x + 1  # one more\n\n    def added(self): ...\n"
    ),
    "upstream/models/two.py": "",
    "upstream/more/deep/file.py": "",
}


@pytest.fixture
def old(tmp_path: Path) -> Sources:
    return sources(tmp_path, "1.0", OLD)


@pytest.fixture
def new(tmp_path: Path) -> Sources:
    return sources(tmp_path, "2.0", NEW)


def test_function_diff(old: Sources, new: Sources) -> None:
    diff = function_diff(old, new, "upstream.models.one", "One.forward")
    assert "-        return x" in diff
    assert "+        return x + 1  # one more" in diff
    assert "upstream 2.0" in diff
    assert not function_diff(old, new, "upstream.models.base", "Base.step")


def test_changed_functions_ignore_comments_and_docstrings(tmp_path: Path, old: Sources, new: Sources) -> None:
    assert changed_functions(old, new, "upstream.models.one") == ("One.added", "One.forward")
    words = {name: text.replace("Old words", "Other words") + "# note\n" for name, text in OLD.items()}
    assert not changed_functions(old, sources(tmp_path, "1.1", words), "upstream.models.one")


def test_has_name_follows_star_imports(old: Sources) -> None:
    assert old.has_name("upstream", "Base")
    assert old.has_name("upstream", "models")
    assert not old.has_name("upstream", "One")


def test_inherited_method(old: Sources) -> None:
    node = old.method("upstream.models.one", "One", "step")
    assert node is not None
    assert node.name == "step"


def test_new_folders(old: Sources, new: Sources) -> None:
    assert new.folders("upstream") - old.folders("upstream") == {"more"}


def checkout_with(folder: Path, text: str) -> Path:
    package = folder / "checkout" / "nrl_models"
    (package / "common").mkdir(parents=True)
    (package / "module.py").write_text(text)
    (package / "common" / "upstream_torch.py").write_text(
        "PRIVATE_ATTRIBUTES = (\n"
        "    PrivateAttribute('upstream.models.base', 'Base', 'step'),\n"
        "    PrivateAttribute('upstream.models.base', 'Base', '_gone'),\n)\n"
    )
    attributes = folder / "checkout" / TORCH_LIST
    attributes.parent.mkdir(parents=True)
    attributes.write_text("PRIVATE_ATTRIBUTES = {('upstream.models.base', 'Base'): ('step', '_left')}\n")
    return folder / "checkout"


def test_missing_names(tmp_path: Path, old: Sources) -> None:
    text = (
        "from upstream.models.base import Base, _gone\n"
        "import upstream.nowhere\n"
        "try:\n    from upstream import optional\nexcept ImportError:\n    optional = None\n"
    )
    findings = missing_names(checkout_with(tmp_path, text), "upstream", old)
    assert [finding.detail for finding in findings] == ["_gone", ""]


def test_missing_attributes(tmp_path: Path, old: Sources) -> None:
    findings = missing_torch_attributes(checkout_with(tmp_path, ""), old)
    assert [finding.detail for finding in findings] == ["Base._gone", "Base._left"]


def test_stored_wheel_is_read_without_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    wheel(tmp_path, "3.0", OLD)
    assert sources_of("upstream", Version("3.0"), tmp_path).has_name("upstream", "Base")


OLDEST_API = {
    "nrl_models": {"registry"},
    "nrl_models.auto": {"auto_class_for"},
    "nrl_models.errors": {"NRLModelsError", "did_you_mean", "one_line"},
    "nrl_models.inputs.audio": {"AUDIO", "takes_audio"},
    "nrl_models.inputs.images": {"PIXELS", "ImageInputsError", "takes_images"},
    "nrl_models.inputs.model_inputs": {"inputs_for"},
    "nrl_models.logprobs": {"token_logprobs"},
    "nrl_models.onboarding.new": {"new_family"},
    "nrl_models.testing.case": {"FamilyCase", "randomize"},
    "nrl_models.testing.tiny": {"tiny_config"},
}
"""Names that commit 7d8db461 has, the oldest checkout that `--checkout` accepts."""

MAY_IMPORT_MORE = {"write_cases.py", "variants.py"}
"""The first runs with this checkout only. The second works without what it imports."""


def test_tools_import_names_of_oldest_checkout() -> None:
    files = [file for file in (ROOT / "tools" / "release_check").rglob("*.py") if file.name not in MAY_IMPORT_MORE]
    imported = {
        (node.module, alias.name)
        for file in files
        if file.name not in MAY_IMPORT_MORE
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "nrl_models"
        for alias in node.names
    }
    assert ("nrl_models", "registry") in imported
    assert {pair for pair in imported if pair[1] not in OLDEST_API.get(pair[0], ())} == set()
