"""Compare signatures that our classes assume with those of the installed transformers.

    python -m tools.release_check.upstream_code.signatures --checkout PATH --baseline 5.23.0 --wheels FOLDER --out FILE

Only a parameter that the baseline's function has and the installed one lacks is a finding, because an override may add
parameters.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any

import transformers
from packaging.version import Version
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.utils import ModelOutput

from nrl_models import registry
from nrl_models.errors import one_line
from tools.release_check.failing_function import failing_function
from tools.release_check.findings import Finding, Kind, Phase
from tools.release_check.upstream_code.calls import changed_calls
from tools.release_check.upstream_code.our_code import constructions, keyword_calls
from tools.release_check.upstream_code.sources import Sources, sources_of

UPSTREAM = "transformers"
DEPRECATION = "deprecate_kwarg"
"""transformers' decorator for a renamed parameter: `@deprecate_kwarg(old, removed_in, new_name=new)`."""

Classes = Mapping[type, list[str]]
"""Our classes, each with the architectures that use it."""


def main(arguments: list[str] | None = None) -> int:
    """Write every finding to a file. Returns 1 if there are findings."""
    parser = argparse.ArgumentParser(description="Compare signatures with those of the installed transformers.")
    parser.add_argument("--checkout", type=Path, required=True, help="repository that has nrl_models")
    parser.add_argument("--baseline", type=Version, required=True, help="tested version of transformers")
    parser.add_argument("--wheels", type=Path, required=True, help="folder of downloaded wheels")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines file")
    options = parser.parse_args(arguments)
    package = Path(transformers.__path__[0])
    installed = Sources(f"{UPSTREAM} {version(UPSTREAM)}", package.parent, package.name)
    baseline = sources_of(UPSTREAM, options.baseline, options.wheels)
    findings = list(all_findings(options.checkout, baseline, installed))
    options.out.write_text("".join(f"{json.dumps(finding.to_json())}\n" for finding in findings))
    return 1 if findings else 0


def all_findings(checkout: Path, baseline: Sources, installed: Sources) -> Iterator[Finding]:
    """Return findings about overrides, calls, output classes and keywords."""
    classes, errors = our_classes()
    yield from errors
    yield from changed_parameters(classes, baseline)
    yield from changed_calls(checkout, baseline)
    yield from missing_fields(checkout, classes)
    yield from swallowed_keywords(checkout, installed)


def our_classes() -> tuple[Classes, list[Finding]]:
    """Return every registered class and rewritten layer, and a finding for each class that cannot be imported."""
    classes: dict[type, list[str]] = defaultdict(list)
    errors = []
    for architecture in registry.architectures(aliases=False):
        if registry.unmet_requirement(architecture):
            continue
        try:
            model_class: Any = registry.model_class(architecture)
        except Exception as error:
            function = failing_function(error)
            errors.append(
                Finding(
                    Phase.SIGNATURES,
                    Kind.EXCEPTION,
                    function or architecture,
                    type(error).__name__,
                    functions=(function,) if function else (),
                    architectures=(architecture,),
                    item=f"import {architecture}",
                    message=one_line(error),
                )
            )
            continue
        for found in {model_class, *rewritten_layers(model_class)}:
            classes[found].append(architecture)
    return classes, errors


def rewritten_layers(model_class: Any) -> set[type]:
    """Return the classes that replace layers in the modules that define a model's classes."""
    modules = {base.__module__ for base in model_class.__mro__ if base.__module__.startswith(f"{UPSTREAM}.models.")}
    layers = (
        layer
        for module in modules
        for layer in vars(import_module(module)).values()
        if isinstance(layer, type) and issubclass(layer, nn.Module)
    )
    return {by for layer in layers if (by := model_class.rewrite_of(layer)) is not None}


# Overrides


def changed_parameters(classes: Classes, baseline: Sources) -> Iterator[Finding]:
    """Find overrides whose parameters upstream renamed, removed or moved since the baseline."""
    found: dict[tuple[str, str, Kind, str], set[str]] = defaultdict(set)
    for ours, upstream_class, name in overrides(classes):
        function, upstream = _plain(vars(ours[0])[name]), _plain(vars(upstream_class)[name])
        if function is None or upstream is None or not function.__module__.startswith("nrl_models."):
            continue
        known = baseline.method(upstream_class.__module__, upstream_class.__qualname__, name)
        if not isinstance(known, ast.FunctionDef):
            continue
        for kind, parameter in _changes(function, upstream, known):
            found[_name(function), _name(upstream), kind, parameter].update(ours[1])
    for (subject, upstream_name, kind, parameter), architectures in sorted(found.items()):
        change = "no longer has" if kind is Kind.RENAMED_PARAMETER else "moved"
        yield Finding(
            Phase.SIGNATURES,
            kind,
            subject,
            parameter,
            functions=(upstream_name,),
            architectures=tuple(sorted(architectures)),
            item=f"{subject} {upstream_name} {parameter}",
            message=f"{subject} names {parameter}, which {upstream_name} {change}",
        )


def overrides(classes: Classes) -> Iterator[tuple[tuple[type, list[str]], type, str]]:
    """Find our methods that override an upstream method.

    Yields:
        Our class with its architectures, the upstream class that has the method, and the method's name.
    """
    for model_class, architectures in classes.items():
        order = model_class.__mro__
        for position, ours in enumerate(order):
            if not ours.__module__.startswith("nrl_models."):
                continue
            for name in vars(ours):
                upstream = next((base for base in order[position + 1 :] if name in vars(base)), None)
                while upstream is not None and upstream.__module__.startswith("nrl_models."):
                    later = order[order.index(upstream) + 1 :]
                    upstream = next((base for base in later if name in vars(base)), None)
                if upstream is not None and upstream.__module__.startswith(f"{UPSTREAM}."):
                    yield (ours, architectures), upstream, name


def _changes(ours: FunctionType, upstream: FunctionType, known: ast.FunctionDef) -> Iterator[tuple[Kind, str]]:
    positional = [argument.arg for argument in (*known.args.posonlyargs, *known.args.args)]
    before = {*positional, *(argument.arg for argument in known.args.kwonlyargs)}
    now = inspect.signature(upstream).parameters
    order = [name for name, parameter in now.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    for position, (name, parameter) in enumerate(inspect.signature(ours).parameters.items()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name not in before:
            continue
        if name not in now:
            yield Kind.RENAMED_PARAMETER, name
        elif (
            parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            and positional[position : position + 1] == [name]
            and order[position : position + 1] != [name]
        ):
            yield Kind.MOVED_PARAMETER, name


def _plain(attribute: Any) -> FunctionType | None:
    function = inspect.unwrap(getattr(attribute, "__func__", attribute)) if callable(attribute) else None
    if isinstance(attribute, (classmethod, staticmethod)):
        function = inspect.unwrap(attribute.__func__)
    return function if isinstance(function, FunctionType) else None


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


# Output classes


def missing_fields(checkout: Path, classes: Classes) -> Iterator[Finding]:
    """Find fields that our code passes to an output class without such a field."""
    served: dict[str, set[str]] = defaultdict(set)
    for model_class, architectures in classes.items():
        for base in model_class.__mro__:
            served[base.__module__].update(architectures if base.__module__.startswith("nrl_models.families") else ())
    for call in constructions(checkout, UPSTREAM):
        try:
            output_class = getattr(import_module(call.module), call.name, None)
        except ImportError:  # reported by `names.py`
            continue
        if not (isinstance(output_class, type) and issubclass(output_class, ModelOutput)):
            continue
        for keyword in call.keywords:
            if not _takes(output_class, keyword):
                module = call.file.removesuffix(".py").replace("/", ".")
                yield Finding(
                    Phase.SIGNATURES,
                    Kind.MISSING_FIELD,
                    f"{call.module}:{call.name}",
                    keyword,
                    functions=(f"{call.module}:{call.name}",),
                    architectures=tuple(sorted(served[module])),
                    item=f"{call.place} {keyword}",
                    message=f"{call.place} constructs {call.name} with {keyword}, which it lacks",
                )


def _takes(output_class: type[ModelOutput], keyword: str) -> bool:
    """Return True if an output class has a field, or still accepts its old name."""
    fields: Any = output_class
    if keyword in {field.name for field in dataclasses.fields(fields)}:
        return True
    try:
        output_class(**{keyword: None})
    except TypeError:
        return False
    return True


# Keywords that calls pass


def swallowed_keywords(checkout: Path, installed: Sources) -> Iterator[Finding]:
    """Find classes that silently ignore a keyword which our code passes under its name before a rename."""
    calls = keyword_calls(checkout)
    forwards = {name: _plain(getattr(transformers, name).forward) for name in _generating_classes()}
    renamed = {name: _renames(installed, forward) for name, forward in forwards.items() if forward is not None}
    everywhere = {(old, new) for renames in renamed.values() for old, new in renames.items()}
    for name, forward in forwards.items():
        if forward is None:
            continue
        parameters = inspect.signature(forward).parameters
        takes_anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for old, new in sorted(everywhere):
            if old in calls and takes_anything and new in parameters and old not in {*parameters, *renamed[name]}:
                yield Finding(
                    Phase.SIGNATURES,
                    Kind.SWALLOWED_KEYWORD,
                    old,
                    new,
                    functions=(_name(forward),),
                    architectures=(name,),
                    item=f"{name} {old}",
                    message=f"{name} takes {new}, and drops {old}, which is passed in {', '.join(calls[old])}",
                )


def _generating_classes() -> list[str]:
    """Return transformers classes that generate text from text, images or audio."""
    names: set[str] = set()
    for mapping in _GENERATING:
        for served in getattr(modeling_auto, mapping, {}).values():
            names.update((served,) if isinstance(served, str) else served)
    return sorted(name for name in names if hasattr(transformers, name))


_GENERATING = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)
"""transformers' mappings from model types to classes that generate. Some versions do not have all."""


def _renames(installed: Sources, forward: FunctionType) -> dict[str, str]:
    """Return old names that a function still accepts, with their new names."""
    node = installed.node(forward.__module__, forward.__qualname__)
    found: dict[str, str] = {}
    for decorator in node.decorator_list if node else ():
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == DEPRECATION:
            names = [argument.value for argument in decorator.args if isinstance(argument, ast.Constant)]
            new = next((word.value for word in decorator.keywords if word.arg == "new_name"), None)
            if names and isinstance(new, ast.Constant):
                found[str(names[0])] = str(new.value)
    return found


if __name__ == "__main__":
    sys.exit(main())
