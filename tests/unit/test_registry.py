"""Mapping architectures to classes, and registering external families."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
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


def test_every_built_in_architecture_imports_and_is_a_class_of_that_name() -> None:
    for architecture in registry.architectures():
        if registry.unmet_requirement(architecture):
            continue
        found = registry.model_class(architecture)
        assert found.__name__ == registry.ALIASES.get(architecture, architecture)
        assert found.__module__ == MODEL_ARCH_MAPPING[architecture][0]


def test_full_class_names_stand_in_the_declarations() -> None:
    root = Path(families.__file__).parent
    words = {word for file in root.rglob("*.py") for word in re.findall(r"\w+", file.read_text())}
    layers = {name.rpartition(".")[2] for row in TABLE.values() for name in {**row.mixins, **row.layers}}
    for family in families.folders():
        for value in vars(import_module(families.module_of(family))).values():
            layers |= {layer.__name__ for layer in getattr(value, "rewrites", {})}
    assert len(layers) > 300
    assert sorted({*registry.architectures(), *layers} - words) == []


def test_every_family_names_a_default_class() -> None:
    for family, facts in families.folders().items():
        module = import_module(f"nrl_models.families.{family}.model")
        assert module.ModelClass.__name__ in facts.architectures


def test_an_unknown_architecture_is_none() -> None:
    assert registry.model_class("NobodyForCausalLM") is None


def test_nothing_is_unmet_that_requires_nothing() -> None:
    assert registry.unmet_requirement("LlamaForCausalLM") is None


# Registering


@pytest.mark.usefixtures("outside")
def test_a_class_by_name_is_imported_on_first_use() -> None:
    register_architecture("OutsideForCausalLM", "outside.model:OutsideForCausalLM")
    assert "outside.model" not in sys.modules
    assert registry.model_class("OutsideForCausalLM").__name__ == "OutsideForCausalLM"
    assert "outside.model" in sys.modules
    assert "OutsideForCausalLM" in registry.architectures()


@pytest.mark.usefixtures("sandbox")
def test_a_class_itself() -> None:
    register_architecture("AtTheTopForCausalLM", AtTheTop)
    assert registry.model_class("AtTheTopForCausalLM") is AtTheTop


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("by_name", [True, False])
def test_with_its_configuration(by_name: bool) -> None:
    from outside import model

    config = "outside.model:OutsideConfig" if by_name else model.OutsideConfig
    register_architecture("OutsideForCausalLM", "outside.model:OutsideForCausalLM", config={"outside": config})
    assert AutoConfig.for_model("outside").__class__ is model.OutsideConfig


@pytest.mark.usefixtures("sandbox")
def test_a_built_in_is_shadowed_only_on_request() -> None:
    with pytest.raises(
        RegistrationError, match=r"already registered: LlamaForCausalLM \(nrl_models\.families.*exist_ok=True"
    ):
        register_architecture("LlamaForCausalLM", AtTheTop)
    assert registry.model_class("LlamaForCausalLM") is LlamaForCausalLM
    register_architecture("LlamaForCausalLM", AtTheTop, exist_ok=True)
    assert registry.model_class("LlamaForCausalLM") is AtTheTop


@pytest.mark.usefixtures("outside")
def test_a_configuration_of_transformers_is_shadowed_only_on_request(outside: Path) -> None:
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
def test_a_malformed_target_is_refused(target: str | type) -> None:
    before = registered()
    with pytest.raises(RegistrationError, match="NewForCausalLM is registered with"):
        register_architecture("NewForCausalLM", target)
    assert registered() == before


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    ("config", "error", "says"),
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
def test_a_malformed_configuration_is_refused(config: dict[str, str], error: type, says: str) -> None:
    before = registered()
    with pytest.raises(error, match=says.replace("(", r"\(")):
        register_architecture("OutsideForCausalLM", "outside.model:OutsideForCausalLM", config=config)
    assert registered() == before


# Requirements


@pytest.mark.usefixtures("outside")
def test_a_requirement_is_checked_before_the_import(outside: Path) -> None:
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
    found = registry.unmet_requirement("OutsideForCausalLM")
    assert found is None if unmet is None else found.startswith(unmet)


@pytest.mark.usefixtures("sandbox")
def test_a_malformed_requirement_is_refused() -> None:
    before = registered()
    with pytest.raises(RegistrationError, match="'transformers >> 5' is not a requirement"):
        register_architecture("NewForCausalLM", AtTheTop, requires="transformers >> 5")
    assert registered() == before


@pytest.mark.usefixtures("sandbox")
def test_registering_again_forgets_the_old_requirement() -> None:
    register_architecture("NewForCausalLM", AtTheTop, requires="transformers>=99")
    register_architecture("NewForCausalLM", AtTheTop, exist_ok=True)
    assert registry.model_class("NewForCausalLM") is AtTheTop


# Families that fail to import


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("from transformers import NoSuchModel", "ImportError"),
        ("x = 1", "AttributeError"),
        ("def broken(:", "SyntaxError"),
        ("raise RuntimeError('needs a GPU')", "RuntimeError: needs a GPU"),
        ("undefined", "NameError"),
    ],
)
def test_a_family_that_does_not_import_is_named(outside: Path, code: str, says: str) -> None:
    (outside / "model.py").write_text(code)
    register_architecture("OutsideForCausalLM", "outside.model:OutsideForCausalLM")
    with pytest.raises(FamilyImportError) as caught:
        registry.model_class("OutsideForCausalLM")
    message = str(caught.value)
    assert "OutsideForCausalLM is served by outside.model:OutsideForCausalLM, which does not import" in message
    assert says in message
    assert f"torch {torch.__version__}" in message
    assert caught.value.__cause__ is not None


@pytest.mark.usefixtures("sandbox")
def test_a_configuration_that_does_not_import_does_not_stop_other_models() -> None:
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


def test_families_of_installed_packages(outside: Path) -> None:
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


def test_families_of_installed_packages_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
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
