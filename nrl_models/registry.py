"""The registry of architectures: a class for each architecture, and entry points of families in other packages."""

from __future__ import annotations

import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from types import FrameType

from packaging.requirements import Requirement

from nrl_models import families
from nrl_models.errors import (
    FamilyImportError,
    RegistrationError,
    UnmetRequirementError,
    one_line,
)
from nrl_models.families.facts import Family
from nrl_models.families.table import TABLE


def _split(target: str) -> tuple[str, str]:
    module, _, attribute = target.partition(":")
    return module.strip(), attribute.strip()


_FAMILIES: dict[str, Family] = dict(
    sorted((families.folders() | {name: row.family for name, row in TABLE.items() if row.architectures}).items())
)

FAMILIES: dict[str, tuple[str, ...]] = {name: family.architectures for name, family in _FAMILIES.items()}
"""Architectures of each family in this repository."""

ALIASES: dict[str, str] = {alias: name for family in _FAMILIES.values() for alias, name in family.aliases.items()}
"""Other names of architectures in configurations."""

MODEL_ARCH_MAPPING: OrderedDict[str, tuple[str, str]] = OrderedDict(
    (architecture, (families.module_of(family), architecture))
    for family, architectures in FAMILIES.items()
    for architecture in architectures
)
MODEL_ARCH_MAPPING.update((alias, MODEL_ARCH_MAPPING[name]) for alias, name in ALIASES.items())
"""Module and class for each architecture (`config.architectures`), imported on first use.

A base model (`LlamaModel`) is added on its first use.
"""

_BASE_MODELS = f"{families.__name__}.base_models"

_CUSTOM_CONFIG_REGISTRATIONS: dict[str, tuple[str, str]] = {
    model_type: _split(f"{families.__name__}.{name}.{where}")
    for name, family in _FAMILIES.items()
    for model_type, where in family.configs.items()
}
"""Module and configuration class for each `model_type` that transformers lacks."""

_REQUIREMENTS: dict[str, tuple[str, ...]] = {
    name: requirements for family in _FAMILIES.values() for name, requirements in family.requires.items()
}
"""Additional requirements by architecture, e.g. `transformers>=5.18`."""

ENTRY_POINTS = "nrl_models.families"
"""Entry-point group through which installed packages add families: `Architecture = "package.module:Class"`."""

CONFIG_ENTRY_POINTS = "nrl_models.configs"
"""Entry-point group for configurations that transformers lacks: `model_type = "package.module:ConfigClass"`."""

ENTRY_POINTS_VARIABLE = "NRL_MODELS_ENTRY_POINTS"
"""Environment variable that disables the entry points of installed packages if it is `0`."""

_shadowing: dict[str, str] = {}  # entry points for architectures that are already registered
_entry_points_read = False


def register_architecture(
    architecture: str,
    target: str | type,
    *,
    config: Mapping[str, str | type] | None = None,
    requires: str | None = None,
    exist_ok: bool = False,
) -> None:
    """Register a class from outside this repository.

    Args:
        architecture: Name as in `config.architectures`.
        target: The class, or `"package.module:Class"` to import it on first use.
        config: Configuration classes by `model_type` that transformers lacks, in either form.
        requires: Requirement to check before the import, such as `"transformers>=5.20"`.
        exist_ok: Whether to replace an existing registration.

    Raises:
        RegistrationError: If the target or requirement is malformed, or the name is taken.
        FamilyImportError: If a configuration cannot be imported. In both cases, nothing is registered.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    _read_entry_points()
    entry = _entry(architecture, target)
    if requires is not None:
        _requirement(requires)
    taken = [architecture] if architecture in MODEL_ARCH_MAPPING else []
    configs = {model_type: _entry(model_type, where) for model_type, where in (config or {}).items()}
    for model_type, where in configs.items():
        _config_class(model_type, where)
        taken += [model_type] if model_type in CONFIG_MAPPING else []
    if taken and not exist_ok:
        served = ", ".join(f"{name} ({_where(name)})" for name in taken)
        raise RegistrationError(f"already registered: {served}. Pass exist_ok=True to replace it.")
    MODEL_ARCH_MAPPING[architecture] = entry
    _shadowing.pop(architecture, None)
    _REQUIREMENTS.pop(architecture, None)
    if requires is not None:
        _REQUIREMENTS[architecture] = (requires,)
    _CUSTOM_CONFIG_REGISTRATIONS.update(configs)
    for model_type in configs:
        _register_config(model_type)


def model_class(architecture: str) -> type | None:
    """Import and return the class for `architecture`; None if it is not registered.

    Raises:
        FamilyImportError: If the family cannot be imported.
        UnmetRequirementError: If a package is missing, or does not have a version that the family needs.
        RegistrationError: If two families claim the architecture.
    """
    _read_entry_points()
    if architecture in _shadowing:
        raise RegistrationError(
            f"{architecture} is served by {_where(architecture)}, and an installed package claims it too, with "
            f"{_shadowing[architecture]}. Uninstall that package, or choose one of them with "
            "register_architecture(..., exist_ok=True)."
        )
    if architecture not in MODEL_ARCH_MAPPING:
        from nrl_models.families import base_models

        if not base_models.is_served(architecture):
            return None
        MODEL_ARCH_MAPPING[architecture] = _BASE_MODELS, architecture
    if unmet := unmet_requirement(architecture):
        raise UnmetRequirementError(f"{architecture} is served by {_where(architecture)}, which needs {unmet}.")
    return _imported(MODEL_ARCH_MAPPING[architecture], f"{architecture} is served by")


def unmet_requirement(architecture: str) -> str | None:
    """Return text about unmet requirements of `architecture`, or None if the environment meets all."""
    stated = _REQUIREMENTS.get(architecture) or _REQUIREMENTS.get(ALIASES.get(architecture, ""), ())
    return ", ".join(filter(None, (unmet(_requirement(requirement)) for requirement in stated))) or None


def unmet(requirement: Requirement) -> str | None:
    """Return text with the required and the installed version; None if the requirement is met."""
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement}, which is not installed"
    if requirement.specifier.contains(installed, prereleases=True):
        return None
    return f"{requirement}; {installed} is installed"


def architectures(*, aliases: bool = True) -> list[str]:
    """Return all registered architectures, including those of installed packages, and optionally aliases.

    Base models (`LlamaModel`) are not included, because they follow from the heads of their families.
    """
    _read_entry_points()
    heads = [name for name, (module, _) in MODEL_ARCH_MAPPING.items() if module != _BASE_MODELS]
    return [name for name in heads if aliases or name not in ALIASES]


def register_custom_configs() -> None:
    """Register the families' configurations with AutoConfig. Later calls cost little.

    A configuration that does not import causes one warning: other models still load.
    """
    _read_entry_points()
    for model_type in _CUSTOM_CONFIG_REGISTRATIONS:
        try:
            _register_config(model_type)
        except (FamilyImportError, RegistrationError) as error:
            if model_type not in _warned:
                _warned.add(model_type)
                warnings.warn(f"models of type {model_type} will not load: {error}", stacklevel=3)


def _register_config(model_type: str) -> None:
    from transformers import AutoConfig

    AutoConfig.register(model_type, _config_class(model_type, _CUSTOM_CONFIG_REGISTRATIONS[model_type]), exist_ok=True)


def _config_class(model_type: str, where: tuple[str, str]) -> type:
    config_class = _imported(where, f"the configuration of {model_type} is")
    declared_type = getattr(config_class, "model_type", None)
    if declared_type != model_type:
        raise RegistrationError(
            f"{':'.join(where)} is registered for model_type {model_type!r}, but its own is {declared_type!r}"
        )
    return config_class


def _imported(where: tuple[str, str], subject: str) -> type:
    module, name = where
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # a family's code may raise anything
        raise FamilyImportError(
            f"{subject} {module}:{name}, which does not import: {one_line(error)}. "
            f"Installed: transformers {version('transformers')}, torch {version('torch')}."
        ) from error


def _read_entry_points() -> None:
    global _entry_points_read
    if _entry_points_read:
        return
    asked = os.environ.get(ENTRY_POINTS_VARIABLE, "1")
    if asked not in ("0", "1"):
        raise RegistrationError(
            f"{ENTRY_POINTS_VARIABLE}={asked!r}: expected 0, which leaves the families of installed packages out, or 1"
        )
    _entry_points_read = True
    if asked == "0":
        return
    # Declarations are checked on use: a broken package must not stop other models.
    for point in entry_points(group=CONFIG_ENTRY_POINTS):
        _CUSTOM_CONFIG_REGISTRATIONS.setdefault(point.name, _split(point.value))
    for point in entry_points(group=ENTRY_POINTS):
        if point.name in MODEL_ARCH_MAPPING:
            _shadowing[point.name] = point.value
        else:
            MODEL_ARCH_MAPPING[point.name] = _split(point.value)


def _entry(name: str, target: str | type) -> tuple[str, str]:
    if isinstance(target, type):
        if "." in target.__qualname__:
            raise RegistrationError(
                f"{name} is registered with {target.__qualname__}, which cannot be imported by name: "
                "define the class at module level"
            )
        return target.__module__, target.__qualname__
    module, attribute = _split(target)
    if not (module and attribute.isidentifier()):
        raise RegistrationError(f"{name} is registered with {target!r}: expected 'package.module:Class'")
    return module, attribute


def _where(name: str) -> str:
    entry = MODEL_ARCH_MAPPING.get(name) or _CUSTOM_CONFIG_REGISTRATIONS.get(name)
    return ":".join(entry) if entry else "transformers"


def _requirement(text: str) -> Requirement:
    try:
        return Requirement(text)
    except ValueError as error:
        raise RegistrationError(
            f"{text!r} is not a requirement (expected the form 'transformers>=5.18'): {error}"
        ) from error


def warn_unregistered(architecture: str) -> None:
    """Warn once that an architecture loads as transformers' own class."""
    if architecture not in _warned:
        _warned.add(architecture)
        warnings.warn(
            f"{architecture} is not registered: it loads as transformers' own class. For transformers' decoders, "
            "docs/onboarding-reach.md lists the reason. `nrl-models new` tells whether a family would fuse its "
            "projections (docs/add-a-family.md).",
            stacklevel=_frames_of_this_package() + 1,
        )


def _frames_of_this_package() -> int:
    """Count the stack frames of this package above this function. The next frame belongs to the user."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        frame, count = frame.f_back, count + 1
    return count


_warned: set[str] = set()
