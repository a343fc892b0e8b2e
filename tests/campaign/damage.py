"""Hypothesis strategies that damage valid JSON, safetensors and GGUF files, by structure and by bytes."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]

DEEP = "@deep@"
"""Placeholder for deeply nested arrays, which Python cannot write."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 7, -1, -(2**31), 2**31, 10**6, 10**9, 10**12, 2**63, 10**30),
    *(0.0, -0.5, 0.5, 1e-30, 1e300, float("nan"), float("inf"), -float("inf")),
    *(
        "",
        "1",
        "4.7",
        "10000.0",
        "none",
        "silu",
        "yarn",
        "default",
        "bfloat16",
        "float8_e4m3fn",
        "int8",
        "llama",
        "gpt2",
    ),
    *("\x1b[2J\x1b[31mx", "a\nb: fine", "\u202eab", "\ud800", "\x00", "x" * 5_000, "../../etc/passwd", "/dev/zero"),
    *(
        [],
        [None],
        [1, 2, 3],
        [-1],
        ["a"],
        [[]],
        [10**9] * 3,
        {},
        {"a": 1},
        {"": None},
        {"rope_type": "yarn"},
        DEEP,
        DEEP,
        DEEP,
    ),
)
"""Values that replace other values."""

KEYS = (
    *("architectures", "model_type", "auto_map", "dtype", "torch_dtype", "quantization_config", "rope_parameters"),
    *(
        "rope_scaling",
        "rope_theta",
        "layer_types",
        "text_config",
        "vision_config",
        "id2label",
        "num_labels",
        "attn_implementation",
    ),
    *("_attn_implementation", "per_layer_config", "pruned_heads", "head_dim", "tie_word_embeddings", "pad_token_id"),
    *(
        "to_dict",
        "__class__",
        "from_dict",
        "attribute_map",
        "num_hidden_layers",
        "hidden_size",
        "sliding_window",
        "max_length",
    ),
    *("", "\x1b[2J", "a\nb", "\ud800", "x" * 2_000, "a.b", "__metadata__", "weight_map", "metadata"),
)
"""Keys to add."""


def json_bytes(draw: Draw, content: Any, within: tuple[str, ...] = ()) -> bytes:
    """Return a valid document with one to three edits. One in eight also has damaged text.

    Args:
        draw: Hypothesis' `draw`.
        content: The document.
        within: Path of the part to edit.
    """
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        content = _edited(draw, content, within)
    text = json.dumps(content)
    if not within and draw(st.integers(0, 15)) == 0 and isinstance(content, dict) and content:  # a duplicate key
        again = f"{json.dumps(draw(st.sampled_from([*content])))}: {json.dumps(draw(st.sampled_from(VALUES)))}"
        text = f"{text[:-1]}, {again}}}" if draw(st.booleans()) else f"{{{again}, {text[1:]}"
    levels = draw(st.sampled_from([3, 100, 900, 100_000])) if DEEP in text else 0
    data = text.replace(json.dumps(DEEP), "[" * levels + "]" * levels).encode()
    return some_bytes(draw, data) if draw(st.integers(0, 7)) == 0 and not within else data


def _edited(draw: Draw, content: Any, within: tuple[str, ...]) -> Any:
    inner = content
    for key in within:
        inner = inner.get(key) if isinstance(inner, dict) else None
    containers_and_keys = list(_containers_and_keys(inner))
    if not containers_and_keys:
        return content if within else draw(st.sampled_from(VALUES))
    container, key = draw(st.sampled_from(containers_and_keys))
    edit = draw(st.sampled_from(["replace", "replace", "replace", "near", "delete", "add", "move", "rename"]))
    if edit == "replace":
        container[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
    elif edit == "near":
        container[key] = _near(draw, container[key])
    elif edit == "delete":
        del container[key]
    elif edit == "move":
        other, other_key = draw(st.sampled_from(containers_and_keys))
        container[key] = copy.deepcopy(other[other_key])
    elif isinstance(container, dict):
        others = [draw(st.sampled_from(KEYS)), draw(st.sampled_from([*container])), f"{key}\x1b[1m\n"]
        name = draw(st.sampled_from(others))
        container[name] = container.pop(key) if edit == "rename" else copy.deepcopy(draw(st.sampled_from(VALUES)))
    return content


def _near(draw: Draw, value: Any) -> Any:
    """Return a similar value: slightly changed, of another type, or repeated."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return draw(st.sampled_from([value + 1, value - 1, -value, value * 2, str(value), float(value), [value]]))
    if isinstance(value, str):
        return draw(st.sampled_from([value + "x", value[:-1], value.upper(), [value], f"{value}\n", f"{value}\x1b[1m"]))
    if isinstance(value, list):
        return draw(
            st.sampled_from([value * 2, value[:-1], value[::-1], [value], {str(i): v for i, v in enumerate(value)}])
        )
    return [value]


def _containers_and_keys(content: Any) -> Iterator[tuple[Any, Any]]:
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(entries):
        yield content, key
        yield from _containers_and_keys(value)


def some_bytes(draw: Draw, data: bytes, limit: int | None = None) -> bytes:
    """Return `data` with some of its first `limit` bytes changed, removed or inserted."""
    limit = min(limit or len(data), len(data))
    if limit == 0:
        return b"\x00"
    for _ in range(draw(st.integers(1, 3))):
        position = draw(st.integers(0, limit - 1))
        edit = draw(st.sampled_from(["flip", "flip", "set", "insert", "cut", "end"]))
        if edit == "flip":
            data = (
                data[:position]
                + bytes([data[position % len(data)] ^ (1 << draw(st.integers(0, 7)))])
                + data[position + 1 :]
            )
        elif edit == "set":
            data = (
                data[:position]
                + draw(st.sampled_from([b"\x00", b"\xff", b'"', b"{", b"[", b"\x1b"]))
                + data[position + 1 :]
            )
        elif edit == "insert":
            data = data[:position] + draw(st.binary(min_size=1, max_size=9)) + data[position:]
        elif edit == "cut":
            data = data[:position] + data[position + draw(st.integers(1, 9)) :]
        else:
            return data[:position] or b"\x00"
        limit = min(limit, len(data))
        if limit == 0:
            return b"\x00"
    return data


def safetensors_bytes(draw: Draw, data: bytes) -> bytes:
    """Return a safetensors file with a damaged header. Its data do not change, but may be truncated or extended."""
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    if draw(st.integers(0, 2)):
        header = json_bytes(draw, json.loads(header))
        declared_length = draw(st.sampled_from([len(header)] * 6 + [0, 1, len(header) + 8, 2**40, 2**63, 2**64 - 1]))
        rest = draw(st.sampled_from([rest] * 4 + [rest[:-1], rest + b"\x00" * 8, b""]))
        return declared_length.to_bytes(8, "little") + header + rest
    return some_bytes(draw, data[: 8 + length]) + rest


NUMBERS: dict[str, tuple[Any, ...]] = {
    "I": (0, 1, 2, 3, 8, 9, 31, 255, 2**31 - 1, 2**31, 2**32 - 1),
    "Q": (0, 1, 2, 7, 31, 2**16, 2**31, 2**40, 2**60, 2**63, 2**64 - 1),
    "f": (0.0, -1.0, 1e-30, 3e38, float("nan"), float("inf")),
}
"""Replacements for numbers in a GGUF header. Other types are replaced by arbitrary bytes."""


def gguf_bytes(draw: Draw, data: bytes) -> bytes:
    """Return a GGUF file with a damaged header and unchanged data."""
    fields = list(gguf_fields(data))
    end = fields[-1][0] + 8
    if draw(st.integers(0, 3)) == 0:
        return some_bytes(draw, data[:end]) + data[end:]
    for _ in range(draw(st.integers(1, 2))):
        position, code, size = draw(st.sampled_from(fields))
        if code in NUMBERS:
            new = struct.pack(f"<{code}", draw(st.sampled_from(NUMBERS[code])))
        else:
            new = draw(st.one_of(st.binary(min_size=size, max_size=size), st.just((b"\x1b[2J\n" * size)[:size])))
        data = data[:position] + new + data[position + size :]
    return data


def gguf_fields(data: bytes) -> Iterator[tuple[int, str, int]]:
    """Return the position, format (`s` for a string) and length of each number and string in a GGUF header."""
    position = 4
    sizes = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

    def number(code: str) -> tuple[tuple[int, str, int], Any]:
        nonlocal position
        (value,) = struct.unpack_from(f"<{code}", data, position)
        field = position, code, struct.calcsize(code)
        position += struct.calcsize(code)
        return field, value

    def string() -> Iterator[tuple[int, str, int]]:
        nonlocal position
        field, length = number("Q")
        yield field
        if length:
            yield position, "s", length
        position += length

    def value(kind: int) -> Iterator[tuple[int, str, int]]:
        if kind == 8:
            yield from string()
        elif kind == 9:
            field, element = number("I")
            yield field
            field, count = number("Q")
            yield field
            for _ in range(count):
                yield from value(element)
        else:
            yield number(sizes[kind])[0]

    field, _ = number("I")
    yield field
    field, tensors = number("Q")
    yield field
    field, values = number("Q")
    yield field
    for _ in range(values):
        yield from string()
        field, kind = number("I")
        yield field
        yield from value(kind)
    for _ in range(tensors):
        yield from string()
        field, dimensions = number("I")
        yield field
        for _ in range(dimensions):
            yield number("Q")[0]
        yield number("I")[0]
        yield number("Q")[0]
