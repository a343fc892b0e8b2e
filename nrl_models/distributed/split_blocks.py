"""Check that modules which exchange shares of activations under `tp` are split together, or not at all.

Example: `gate_proj` and `up_proj` return shares of their features, which `down_proj` reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from transformers import PreTrainedModel

from nrl_models.common.modules import own_parameters
from nrl_models.distributed.parallel_plan import declared_tensor_plan, styles_by_name
from nrl_models.distributed.tensor.styles import TENSOR_STYLES, Colwise, Rowwise, Style
from nrl_models.errors import Problem, ProblemKind, listed

_LINEARS = (Colwise, Rowwise)


def split_problems(model: PreTrainedModel, styles: Mapping[str, Style]) -> Iterator[Problem]:
    """Yield rules that split a part of a block, or split a part in another way than the declared plan.

    A block is the smallest module with both kinds of linears: `colwise`, which return shares, and `rowwise`, which
    read them.

    Args:
        model: A model with values or on meta.
        styles: Style of each module and parameter that the checked plan names.
    """
    parameters = {name for name, _ in own_parameters(model, duplicates=True)}
    rules = {name: style for name, style in declared_tensor_plan(model).items() if style in TENSOR_STYLES}
    all_declared = {name: TENSOR_STYLES[style] for name, style in styles_by_name(model, rules).items()}
    declared, split = (
        {name: style for name, style in plan.items() if style.has_shares(is_parameter=name in parameters)}
        for plan in (all_declared, styles)
    )
    for block, names in _blocks(split | declared).items():
        differing = [name for name in names if name in declared and split.get(name) != declared[name]]
        same = [name for name in names if name in split and name not in differing]
        if not any(name in declared for name in names):
            yield from _unpaired(block, {name: split[name] for name in names})
        elif differing and any(split[name].compute in _LINEARS for name in names if name in split):
            for name in differing:
                has = f"has the style {styles[name].name!r}" if name in styles else "has no rule"
                others = _within(block, same or [other for other in differing if other != name])
                detail = f"{has}, expected {declared[name].name!r}, because tp splits {others}"
                advice = f"use the declared styles of {_within(block, names)}, or 'replicate' for all of them"
                yield Problem(ProblemKind.PLAN, name, detail, advice=advice)
        elif differing:
            for name in same:
                detail = f"has the style {split[name].name!r}, but tp does not split {_within(block, differing)}"
                yield Problem(ProblemKind.PLAN, name, detail, advice=f"add the rule {name!r}: 'replicate'")


def _unpaired(block: str, split: Mapping[str, Style]) -> Iterator[Problem]:
    """Yield rules of an undeclared block that split only outputs or only inputs of its linears."""
    computes = {style.compute for style in split.values()} & set(_LINEARS)
    if len(computes) != 1:
        return
    detail = "but no rule splits the input" if Colwise in computes else "but no rule splits the output"
    for name, style in split.items():
        why = f"has the style {style.name!r}, {detail} of another linear in {block or 'the model'}"
        advice = "add rules for all linears of the block: 'colwise' for the first, 'rowwise' for the last"
        yield Problem(ProblemKind.PLAN, name, why, advice=advice)


def _blocks(styles: Mapping[str, Style]) -> dict[str, list[str]]:
    """Return the blocks of a model, with the names of the modules and parameters that have a style in `styles`."""
    computes: dict[str, set[type]] = defaultdict(set)
    for name, style in styles.items():
        if style.compute is not None and style.compute in _LINEARS:
            for parent in _parents(name):
                computes[parent].add(style.compute)
    blocks: dict[str, list[str]] = defaultdict(list)
    for name in styles:
        candidates = [name, *_parents(name)]
        blocks[next((parent for parent in candidates if len(computes[parent]) == 2), "")].append(name)
    return blocks


def _parents(name: str) -> list[str]:
    """Return the names of the modules that contain `name`, from the smallest to the model (an empty string)."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in reversed(range(len(parts)))]


def _within(block: str, names: Iterable[str]) -> str:
    """List names without the block's prefix, so that the same problem of several layers reads the same."""
    return listed([name.removeprefix(f"{block}.") if name != block else name.rpartition(".")[2] for name in names], 8)
