"""Mapping architectures to classes, and registering external families."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from transformers import AutoConfig, LlamaConfig

from nrl_models import (
    MODEL_ARCH_MAPPING,
    FamilyImportError,
    RegistrationError,
    families,
    register_architecture,
    registry,
)
from nrl_models.families.llama.model import LlamaForCausalLM
from nrl_models.families.table import TABLE

FAMILY = """
from transformers.models.llama import modeling_llama as hf
from nrl_models.common.projections import CombinedGateUp, CombinedQKV
from nrl_models.family import FamilyModel

class OutsideConfig(hf.LlamaConfig):
    model_type = "outside"

class LlamaAttention(CombinedQKV, hf.LlamaAttention):
    pass

class LlamaMLP(CombinedGateUp, hf.LlamaMLP):
    pass

class OutsideForCausalLM(FamilyModel, hf.LlamaForCausalLM):
    config_class = OutsideConfig
    rewrites = {hf.LlamaAttention: LlamaAttention, hf.LlamaMLP: LlamaMLP}
"""


@pytest.fixture
def outside(sandbox: Path) -> Path:
    """A package `outside` that is not registered."""
    package = sandbox / "outside"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text(FAMILY)
    return package


class AtTheTop(LlamaForCausalLM):
    """A class that can be imported by name."""


def registered() -> tuple[object, ...]:
    tables = registry.MODEL_ARCH_MAPPING, registry._CUSTOM_CONFIG_REGISTRATIONS, registry._REQUIREMENTS
    return tuple(dict(table) for table in tables)


# Included families


def test_built_in_architectures_import_with_matching_name() -> None:
    for architecture in registry.architectures():
        if registry.unmet_requirement(architecture):
            continue
        loaded_class = registry.model_class(architecture)
        assert loaded_class.__name__ == registry.ALIASES.get(architecture, architecture)
        assert loaded_class.__module__ == MODEL_ARCH_MAPPING[architecture][0]


def test_class_names_are_searchable_in_declarations() -> None:
    root = Path(families.__file__).parent
    words = {word for file in root.rglob("*.py") for word in re.findall(r"\w+", file.read_text())}
    layers = {name.rpartition(".")[2] for row in TABLE.values() for name in {**row.mixins, **row.layers}}
    for family in families.folders():
        for value in vars(import_module(families.module_of(family))).values():
            layers |= {layer.__name__ for layer in getattr(value, "rewrites", {})}
    assert len(layers) > 300
    assert sorted({*registry.architectures(), *layers} - words) == []


def test_every_family_has_default_class() -> None:
    for family, facts in families.folders().items():
        module = import_module(f"nrl_models.families.{family}.model")
        assert module.ModelClass.__name__ in facts.architectures


def test_unknown_architecture_returns_none() -> None:
    assert registry.model_class("NobodyForCausalLM") is None


def test_no_requirements_means_none_unmet() -> None:
    assert registry.unmet_requirement("LlamaForCausalLM") is None


# Registering


@pytest.mark.usefixtures("outside")
def test_class_path_is_imported_on_first_use() -> None:
    register_architecture("OutsideForCausalLM", "outside.model:OutsideForCausalLM")
    assert "outside.model" not in sys.modules
    assert registry.model_class("OutsideForCausalLM").__name__ == "OutsideForCausalLM"
    assert "outside.model" in sys.modules
    assert "OutsideForCausalLM" in registry.architectures()


@pytest.mark.usefixtures("sandbox")
def test_register_class_object() -> None:
    register_architecture("AtTheTopForCausalLM", AtTheTop)
    assert registry.model_class("AtTheTopForCausalLM") is AtTheTop


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("by_name", [True, False])
def test_register_with_config(by_name: bool) -> None:
    from outside import model

    config = "outside.model:OutsideConfig" if by_name else model.OutsideConfig
    register_architecture("OutsideForCausalLM", "outside.model:OutsideForCausalLM", config={"outside": config})
    assert AutoConfig.for_model("outside").__class__ is model.OutsideConfig


@pytest.mark.usefixtures("sandbox")
def test_shadowing_built_in_requires_exist_ok() -> None:
    with pytest.raises(
        RegistrationError, match=r"already registered: LlamaForCausalLM \(nrl_models\.families.*exist_ok=True"
    ):
        register_architecture("LlamaForCausalLM", AtTheTop)
    assert registry.model_class("LlamaForCausalLM") is LlamaForCausalLM
    register_architecture("LlamaForCausalLM", AtTheTop, exist_ok=True)
    assert registry.model_class("LlamaForCausalLM") is AtTheTop


@pytest.mark.usefixtures("outside")
def test_shadowing_transformers_config_requires_exist_ok(outside: Path) -> None:
    (outside / "model.py").write_text(FAMILY.replace('"outside"', '"llama"'))
    before = registered()
    options = {"target": "outside.model:OutsideForCausalLM", "config": {"llama": "outside.model:OutsideConfig"}}
    with pytest.raises(RegistrationError, match=r"already registered: llama \(transformers\)"):
        register_architecture("OutsideForCausalLM", **options)
    assert registered() == before
    register_architecture("OutsideForCausalLM", **options, exist_ok=True)
    assert AutoConfig.for_model("llama").__class__.__name__ == "OutsideConfig"


class Nested:
    class ForCausalLM(LlamaForCausalLM):
        pass


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(
    "target", ["outside.model", "outside.model:", ":Class", "a:b:c", "a:not a name", "", Nested.ForCausalLM]
)
def test_malformed_target_raises(target: str | type) -> None:
    before = registered()
    with pytest.raises(RegistrationError, match="NewForCausalLM is registered with"):
        register_architecture("NewForCausalLM", target)
    assert registered() == before


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"outside": "outside.model"}, RegistrationError, "expected 'package.module:Class'"),
        ({"other": "outside.model:OutsideConfig"}, RegistrationError, "its own is 'outside'"),
        (
            {"outside": "outside.model:Missing"},
            FamilyImportError,
            "outside.model:Missing, which does not import: AttributeError",
        ),
        ({"outside": "outside.nowhere:Config"}, FamilyImportError, "does not import: ModuleNotFoundError"),
    ],
)
def test_malformed_config_raises(config: dict[str, str], error: type, message: str) -> None:
    before = registered()
    with pytest.raises(error, match=message.replace("(", r"\(")):
        register_architecture("OutsideForCausalLM", "outside.model:OutsideForCausalLM", config=config)
    assert registered() == before


# Requirements


@pytest.mark.usefixtures("outside")
def test_requirement_is_checked_before_import(outside: Path) -> None:
    (outside / "model.py").write_text("raise AssertionError('imported')")
    register_architecture("OutsideForCausalLM", "outside.model:OutsideForCausalLM", requires="transformers>=99.1")
    with pytest.raises(
        FamilyImportError,
        match=r"outside\.model:OutsideForCausalLM, which needs transformers>=99\.1; \d.* is installed",
    ):
        registry.model_class("OutsideForCausalLM")
    assert registry.unmet_requirement("OutsideForCausalLM").startswith("transformers>=99.1; ")


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    ("requires", "unmet"),
    [
        ("transformers>=5.5", None),
        ("torch", None),
        ("no-such-package>=1", "no-such-package>=1, which is not installed"),
        ("transformers<5", "transformers<5; "),
    ],
)
def test_requirements(requires: str, unmet: str | None) -> None:
    register_architecture("OutsideForCausalLM", "outside.model:OutsideForCausalLM", requires=requires)
    reason = registry.unmet_requirement("OutsideForCausalLM")
    assert reason is None if unmet is None else reason.startswith(unmet)


@pytest.mark.usefixtures("sandbox")
def test_malformed_requirement_raises() -> None:
    before = registered()
    with pytest.raises(RegistrationError, match="'transformers >> 5' is not a requirement"):
        register_architecture("NewForCausalLM", AtTheTop, requires="transformers >> 5")
    assert registered() == before


@pytest.mark.usefixtures("sandbox")
def test_reregistering_drops_requirement() -> None:
    register_architecture("NewForCausalLM", AtTheTop, requires="transformers>=99")
    register_architecture("NewForCausalLM", AtTheTop, exist_ok=True)
    assert registry.model_class("NewForCausalLM") is AtTheTop


# Families that fail to import


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("from transformers import NoSuchModel", "ImportError"),
        ("x = 1", "AttributeError"),
        ("def broken(:", "SyntaxError"),
        ("raise RuntimeError('needs a GPU')", "RuntimeError: needs a GPU"),
        ("undefined", "NameError"),
    ],
)
def test_family_import_error_names_class_and_cause(outside: Path, code: str, expected: str) -> None:
    (outside / "model.py").write_text(code)
    register_architecture("OutsideForCausalLM", "outside.model:OutsideForCausalLM")
    with pytest.raises(FamilyImportError) as caught:
        registry.model_class("OutsideForCausalLM")
    message = str(caught.value)
    assert "OutsideForCausalLM is served by outside.model:OutsideForCausalLM, which does not import" in message
    assert expected in message
    assert f"torch {version('torch')}" in message  # without the suffix of CUDA builds
    assert caught.value.__cause__ is not None


@pytest.mark.usefixtures("sandbox")
def test_broken_config_warns_and_other_models_load() -> None:
    registry._CUSTOM_CONFIG_REGISTRATIONS["broken"] = ("outside.nowhere", "Config")  # as an entry point declares it
    with pytest.warns(UserWarning, match=r"models of type broken will not load: .*outside\.nowhere:Config"):
        registry.register_custom_configs()
    registry.register_custom_configs()  # warns only once
    assert isinstance(AutoConfig.for_model("llama"), LlamaConfig)


# Entry points


SCRIPT = """
import json, sys, warnings
from nrl_models import families, registry
from nrl_models.errors import NRLModelsError

def attempt(function, *args, **options):
    try:
        return str(function(*args, **options))
    except NRLModelsError as error:
        return f"{type(error).__name__}: {error}"

result = {
    "torch": "torch" in sys.modules,
    "listed": "OutsideForCausalLM" in registry.architectures(),
    "outside": attempt(registry.model_class, "OutsideForCausalLM"),
    "malformed": attempt(registry.model_class, "MalformedForCausalLM"),
    "shadowing": attempt(registry.model_class, "LlamaForCausalLM"),
    "other": attempt(registry.model_class, "MistralForCausalLM"),
    "register": attempt(registry.register_architecture, "OutsideForCausalLM", "outside.model:Other"),
}
registry.register_architecture("LlamaForCausalLM", "outside.model:OutsideForCausalLM", exist_ok=True)
result["chosen"] = attempt(registry.model_class, "LlamaForCausalLM")
registry.register_custom_configs()
from transformers import AutoConfig
result["config"] = type(AutoConfig.for_model("outside")).__module__
print(json.dumps(result))
"""


@pytest.mark.long
def test_families_from_entry_points(outside: Path) -> None:
    info = outside.parent / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[nrl_models.families]\n"
        "OutsideForCausalLM = outside.model:OutsideForCausalLM\n"
        "LlamaForCausalLM = outside.model:OutsideForCausalLM\n"
        "MalformedForCausalLM = outside.model\n"
        "[nrl_models.configs]\n"
        "outside = outside.model:OutsideConfig\n"
    )
    path = [str(outside.parent), *(entry for entry in sys.path if entry)]
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{SCRIPT}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result["torch"] is False
    assert result["listed"] is True
    assert result["outside"] == result["chosen"] == "<class 'outside.model.OutsideForCausalLM'>"
    assert result["malformed"].startswith("FamilyImportError: MalformedForCausalLM is served by outside.model:,")
    assert result["shadowing"].startswith("RegistrationError: LlamaForCausalLM is served by nrl_models.families.llama")
    assert "outside.model:OutsideForCausalLM" in result["shadowing"]
    assert "exist_ok=True" in result["shadowing"]
    assert result["other"] == "<class 'nrl_models.families.mistral.model.MistralForCausalLM'>"
    assert result["register"].startswith("RegistrationError: already registered: OutsideForCausalLM")
    assert result["config"] == "outside.model"


def test_entry_points_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(**_: object) -> list[object]:
        raise AssertionError("was read")

    monkeypatch.setattr(registry, "_entry_points_read", False)
    monkeypatch.setattr(registry, "entry_points", installed)
    monkeypatch.setenv("NRL_MODELS_ENTRY_POINTS", "no")
    with pytest.raises(RegistrationError, match=r"NRL_MODELS_ENTRY_POINTS='no': expected 0,.* or 1"):
        registry.architectures()
    monkeypatch.setenv("NRL_MODELS_ENTRY_POINTS", "0")
    assert registry.model_class("LlamaForCausalLM") is LlamaForCausalLM
    monkeypatch.setattr(registry, "_entry_points_read", False)
    monkeypatch.setenv("NRL_MODELS_ENTRY_POINTS", "1")
    with pytest.raises(AssertionError, match="was read"):
        registry.architectures()
