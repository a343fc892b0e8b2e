"""LoRA adapters between combined projections and the Hugging Face linears they are made of.

A LoRA update of a linear is `B A` with `A` `(r, in)` and `B` `(out, r)`. PEFT adapters are trained on
Hugging Face's linears and need nothing from here. These two functions are for adapters that were
trained on a combined linear's name by another trainer, and for trainers that want one such adapter.
Both preserve the update `B A` exactly, so `lora_alpha / r` must stay what it was: when the rank
grows, `lora_alpha` grows with it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nrl_models.common.combined import CombinedLinear
from nrl_models.errors import Problem, StateDictError

CombinedRows = dict[str, dict[str, tuple[int, int]]]
"""For each combined module's name: its parts' names and their `(start, length)` in its rows."""

# `base_model.model.` is PEFT's wrapping; a name of an adapter may stand between `lora_A` and `weight`.
_KEY = re.compile(r"^(?P<wrap>(?:base_model\.model\.)?)(?P<module>.+?)\.lora_(?P<what>.+)$")
_MATRIX = re.compile(r"^(?P<side>[AB])(?P<rest>(?:\.[^.]+)?\.weight)$")


def to_hf(state_dict: Mapping[str, torch.Tensor], combined: CombinedRows) -> dict[str, torch.Tensor]:
    """Adapters of combined linears as adapters of their parts: `A` is repeated, `B` is cut by rows.

    Args:
        state_dict: LoRA tensors by name, with or without PEFT's `base_model.model.` prefix. Names of
            other linears pass through.
        combined: the model's combined linears.

    Raises:
        StateDictError: a `lora_B` whose rows are not the combined linear's, an adapter both of a combined
            linear and of a part of it, or tensors of a combined linear that are neither `lora_A` nor `lora_B`.
    """
    result: dict[str, torch.Tensor] = {}
    problems = []
    for key, tensor in state_dict.items():
        found = _KEY.match(key)
        rows = combined.get(found["module"]) if found else None
        if found is None or rows is None:
            result[key] = tensor
            continue
        matrix = _MATRIX.match(found["what"])
        if matrix is None:
            problems.append(_not_a_matrix(key))
            continue
        total = sum(length for _, length in rows.values())
        if matrix["side"] == "B" and tensor.shape[0] != total:
            problems.append(Problem("shape", key, f"has {tensor.shape[0]} rows, {found['module']} has {total}"))
            continue
        for part, (start, length) in rows.items():
            name = f"{found['wrap']}{part}.lora_{matrix[0]}"
            if name in state_dict:
                problems.append(Problem("duplicated", name, f"is a part of {key}, which is given too"))
            result[name] = tensor if matrix["side"] == "A" else tensor.narrow(0, start, length)
    if problems:
        raise StateDictError("LoRA tensors do not fit the model", problems)
    return result


def from_hf(state_dict: Mapping[str, torch.Tensor], combined: CombinedRows) -> dict[str, torch.Tensor]:
    """Adapters of Hugging Face linears as adapters of combined linears.

    Parts that share one `A` keep it and its rank; otherwise the `A`s are stacked in the order of the
    rows (the ranks add up) and `B` is block-diagonal. A part without an adapter gets rows of zeros.

    Args:
        state_dict: LoRA tensors by name, with or without PEFT's `base_model.model.` prefix.
        combined: the model's combined linears.

    Raises:
        StateDictError: a `lora_A` without its `lora_B`, the reverse, shapes that do not fit, an adapter both
            of a combined linear and of a part of it, or tensors of a part that are neither `lora_A` nor `lora_B`.
    """
    owner = {part: name for name, rows in combined.items() for part in rows}
    groups: dict[tuple[str, str, str], dict[str, dict[str, torch.Tensor]]] = defaultdict(lambda: defaultdict(dict))
    result: dict[str, torch.Tensor] = {}
    problems = []
    for key, tensor in state_dict.items():
        found = _KEY.match(key)
        if found is None or found["module"] not in owner:
            result[key] = tensor
            continue
        part, matrix = found["module"], _MATRIX.match(found["what"])
        if matrix is None:
            problems.append(_not_a_matrix(key))
            continue
        name = owner[part]
        if (whole := f"{found['wrap']}{name}.lora_{matrix[0]}") in state_dict:
            problems.append(Problem("duplicated", key, f"is a part of {whole}, which is given too"))
        groups[found["wrap"], name, matrix["rest"]][part][matrix["side"]] = tensor
    for (_, name, _), parts in groups.items():
        problems += _misfits(parts, combined[name])
    if problems:
        raise StateDictError("LoRA tensors do not fit the model", problems)
    for (wrap, name, rest), parts in groups.items():
        a, b = _combine(parts, combined[name])
        result[f"{wrap}{name}.lora_A{rest}"] = a
        result[f"{wrap}{name}.lora_B{rest}"] = b
    return result


def _not_a_matrix(key: str) -> Problem:
    return Problem("unexpected", key, "is neither lora_A nor lora_B: only these are known between parts and combined")


def _misfits(parts: dict[str, dict[str, torch.Tensor]], rows: dict[str, tuple[int, int]]) -> Iterator[Problem]:
    """What is wrong with the adapters of the parts of one combined linear."""
    inputs = {sides["A"].shape[1] for sides in parts.values() if "A" in sides}
    if len(inputs) > 1:
        yield Problem("shape", ", ".join(parts), f"lora_A read inputs of different sizes: {sorted(inputs)}")
    for part, sides in parts.items():
        if set(sides) != {"A", "B"}:
            yield Problem("partial", part, f"has lora_{''.join(sides)} only")
        elif sides["A"].shape[0] != sides["B"].shape[1]:
            detail = f"lora_A has rank {sides['A'].shape[0]}, lora_B has rank {sides['B'].shape[1]}"
            yield Problem("shape", part, detail)
        if "B" in sides and sides["B"].shape[0] != rows[part][1]:
            yield Problem("shape", part, f"lora_B has {sides['B'].shape[0]} rows, the linear has {rows[part][1]}")


def check_biases(model: nn.Module, configs: Mapping[str, Any]) -> None:
    """Refuse adapters that train biases while some of these are combined.

    PEFT trains and saves a bias by its own name in the model, and for a combined one that is a name no other
    program knows: the adapter would load elsewhere without it, and without a word.

    Args:
        model: the model the adapters are in.
        configs: PEFT's configurations by adapter name.

    Raises:
        ValueError: naming the adapters and the biases.
    """
    bias = {name: getattr(config, "bias", "none") for name, config in configs.items()}
    training = [f"{name} (bias={value!r})" for name, value in bias.items() if value != "none"]
    combined = [name for name, module in model.named_modules() if isinstance(module, CombinedLinear)]
    biases = [f"{name}.bias" for name in combined if model.get_submodule(name).bias is not None]
    if training and biases:
        raise ValueError(
            f"adapter {', '.join(training)} trains biases, and {len(biases)} of these are combined ({biases[0]}, ...): "
            "PEFT would save them under names that only this model has. "
            "Load the model again with combine=False, or train with bias='none'."
        )


def _combine(
    parts: dict[str, dict[str, torch.Tensor]], rows: dict[str, tuple[int, int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    ordered = sorted(rows, key=rows.__getitem__)
    sides = [parts[part] for part in ordered if part in parts]
    shared = all(side["A"].shape == sides[0]["A"].shape and torch.equal(side["A"], sides[0]["A"]) for side in sides)
    columns = sides[0]["B"].shape[1] if shared else 0  # of a part without an adapter
    blocks = [
        parts[part]["B"] if part in parts else sides[0]["B"].new_zeros(rows[part][1], columns) for part in ordered
    ]
    if shared:
        return sides[0]["A"], torch.cat(blocks)
    return torch.cat([side["A"] for side in sides]), torch.block_diag(*blocks)
