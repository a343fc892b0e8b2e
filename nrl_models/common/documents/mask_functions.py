"""The parts of transformers' mask functions, which are closures of its module `masking_utils`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from transformers import masking_utils

from nrl_models.common.switches import is_off

MaskFunction = Callable[..., Any]

_REMAPPED = "remap_positions_for_packed_sequence"


def mask_parts(mask_function: MaskFunction) -> dict[str, dict[str, Any]]:
    """Return the parts of a mask function by name, with their values. A key is visible if it is in all parts.

    The name of a part is the function of `transformers.masking_utils` that created it (`sliding_window_overlay`). Parts
    from other modules, and combinations such as `or_masks`, keep their function's name, which is not interpreted.
    """
    name, held = _made_by(mask_function)
    if name == "and_masks":
        return {name: held for part in held["mask_functions"] for name, held in mask_parts(part).items()}
    if name == _REMAPPED:
        return mask_parts(held["mask_function"])
    return {name: held}


def at_columns(mask_function: MaskFunction) -> MaskFunction:
    """Return a mask function of a packed batch that reads all parts at the columns of tokens.

    transformers reads them at positions, which restart with each document, because the chunks of a document start with
    it. A mask of images (`blockwise_overlay`) is then read at the wrong tokens. Windows are the same at columns: they
    only need differences. Masks with chunks are returned unchanged.
    """
    if is_off("image-masks-in-packed-rows") or "chunked_overlay" in _names(mask_function):
        return mask_function
    name, held = _made_by(mask_function)
    if name == "and_masks":
        return masking_utils.and_masks(*map(at_columns, held["mask_functions"]))
    return held["mask_function"] if name == _REMAPPED else mask_function


def _made_by(mask_function: MaskFunction) -> tuple[str, dict[str, Any]]:
    """Return the name of the function that created a mask function, and the values that it holds."""
    if not hasattr(mask_function, "__code__"):
        return type(mask_function).__qualname__, {}
    cells = mask_function.__closure__ or ()
    held = dict(zip(mask_function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    name = f"{mask_function.__module__}.{mask_function.__qualname__.partition('.')[0]}"
    return name.removeprefix("transformers.masking_utils."), held


def _names(mask_function: MaskFunction) -> Iterator[str]:
    """Yield the names of a mask function and of all that it holds."""
    name, held = _made_by(mask_function)
    yield name
    for value in held.values():
        for part in value if isinstance(value, tuple) else (value,):
            if hasattr(part, "__code__"):
                yield from _names(part)
