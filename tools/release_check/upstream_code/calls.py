"""Compare calls of upstream functions in our code with the signatures of the installed version."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from functools import reduce
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

from nrl_models.errors import one_line
from tools.release_check.findings import Finding, Kind, Phase
from tools.release_check.upstream_code.our_code import ImportedCall, imported_calls
from tools.release_check.upstream_code.sources import Sources

UPSTREAM = "transformers"
MODULES = (UPSTREAM, "nrl_models.common.upstream", "nrl_models.common.upstream_conversions")
"""Modules from which nrl_models imports upstream functions."""


def changed_calls(checkout: Path, baseline: Sources) -> Iterator[Finding]:
    """Find calls that no longer fit a function, or whose positional arguments are now other parameters."""
    for call in imported_calls(checkout, MODULES):
        function = upstream_function(call)
        if function is None:
            continue
        name = f"{function.__module__}:{function.__qualname__}"
        try:
            signature = inspect.signature(function)
        except ValueError:  # a builtin
            continue
        for detail, problem in _problems(call.node, signature, _earlier_parameters(function, baseline)):
            yield Finding(
                Phase.SIGNATURES,
                Kind.CHANGED_CALL,
                name,
                detail,
                functions=(name,),
                item=f"{call.place} {name} {detail}",
                message=f"{call.place} calls {name}: {problem}",
            )


def upstream_function(call: ImportedCall) -> Callable[..., Any] | None:
    """Return the called function or class if upstream defines it."""
    try:
        found: Any = reduce(getattr, call.names, import_module(call.module))
    except (ImportError, AttributeError):  # reported by `names.py`
        return None
    is_named = inspect.isroutine(found) or inspect.isclass(found)
    return found if is_named and (found.__module__ or "").partition(".")[0] == UPSTREAM else None


def _earlier_parameters(function: Callable[..., Any], baseline: Sources) -> list[str]:
    """Return the names of positional parameters in the baseline, as `inspect.signature` lists them."""
    owner, _, name = function.__qualname__.rpartition(".")
    if inspect.isclass(function):
        known = baseline.method(function.__module__, function.__qualname__, "__init__")
    elif owner:
        known = baseline.method(function.__module__, owner, name)
    else:
        known = baseline.node(function.__module__, name)
    if not isinstance(known, ast.FunctionDef):
        return []
    names = [argument.arg for argument in (*known.args.posonlyargs, *known.args.args)]
    return names[inspect.isclass(function) or inspect.ismethod(function) :]


def _problems(node: ast.Call, signature: inspect.Signature, earlier: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the parameter and a description of each argument that the signature takes otherwise."""
    positional = [*takewhile(lambda argument: not isinstance(argument, ast.Starred), node.args)]
    is_whole = len(positional) == len(node.args) and all(keyword.arg for keyword in node.keywords)
    keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
    try:
        (signature.bind if is_whole else signature.bind_partial)(*positional, **keywords)
    except TypeError as error:
        yield "arguments", one_line(error)
        return
    now = [parameter.name for parameter in signature.parameters.values() if parameter.kind in _POSITIONAL]
    for before, after in zip(earlier[: len(positional)], now, strict=False):
        if before != after:
            yield before, f"the argument by position for {before} is now {after}"


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
