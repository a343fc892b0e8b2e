"""Concatenating tensors by mapping pages."""

from __future__ import annotations

import ctypes
import gc
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nrl_models.common.checkpoint import page_maps
from nrl_models.common.checkpoint.page_maps import HUGE, MAX_RUNS, PAGE, ByteRange, joined, map_runs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages of files are mapped on Linux only")

SIZE = 64 * PAGE + 123
"""Size of each file, not a multiple of the page size."""


@pytest.fixture
def contents(tmp_path: Path) -> list[bytes]:
    contents = [random.Random(seed).randbytes(SIZE) for seed in (0, 1)]
    for index, content in enumerate(contents):
        (tmp_path / f"pages-{index}").write_bytes(content)
    return contents


@pytest.fixture
def files(contents: list[bytes], tmp_path: Path) -> Iterator[list[int]]:
    with open(tmp_path / "pages-0", "rb") as first, open(tmp_path / "pages-1", "rb") as second:
        yield [first.fileno(), second.fileno()]


def read(runs: list[tuple[int, int, int]], files: list[int]) -> bytes | None:
    """Return the bytes mapped for runs of (file, start, size), or None if nothing is mapped."""
    mapped = map_runs([ByteRange(files[file], start, size) for file, start, size in runs])
    if mapped is None:
        return None
    memory, offset = mapped
    return memory[offset : offset + sum(size for _, _, size in runs)]


def expected(runs: list[tuple[int, int, int]], contents: list[bytes]) -> bytes:
    return b"".join(contents[file][start : start + size] for file, start, size in runs)


def count_mappings(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


CASES = {
    "whole pages": [(0, PAGE, 3 * PAGE)],
    "inside one page": [(0, 5, 100)],
    "from the middle of a page": [(0, 1000, 5 * PAGE)],
    "to the end of the file": [(0, 10 * PAGE + 24, SIZE - 10 * PAGE - 24)],
    "aligned runs": [(0, 24, 3 * PAGE - 24), (0, 10 * PAGE, 2 * PAGE), (0, 20 * PAGE, PAGE)],
    "aligned runs that share pages": [(0, 24, 3 * PAGE), (0, 9 * PAGE + 24, PAGE + 7), (0, 20 * PAGE + 31, 3 * PAGE)],
    "two files": [(0, 100, 4 * PAGE), (1, 100, 4 * PAGE), (0, 30 * PAGE + 100, PAGE)],
    "one unaligned run": [(0, 0, 8 * PAGE), (0, 20 * PAGE + 1, 2 * PAGE), (0, 40 * PAGE, 8 * PAGE)],
    "first run unaligned": [(0, 17, 2 * PAGE), (1, PAGE, 9 * PAGE), (1, 30 * PAGE, 9 * PAGE)],
    "many small runs": [(0, 2 * start, 64) for start in range(0, 64 * 300, 64)],
    "empty runs between": [(0, 8, 0), (0, 0, 2 * PAGE), (1, 77, 0), (0, 4 * PAGE, 2 * PAGE), (0, 5, 0)],
    "repeated run": [(0, PAGE, 2 * PAGE), (0, PAGE, 2 * PAGE)],
}


@pytest.mark.parametrize("runs", CASES.values(), ids=CASES)
def test_mapped_runs_are_concatenated(
    runs: list[tuple[int, int, int]], files: list[int], contents: list[bytes]
) -> None:
    actual = read(runs, files)
    if runs is CASES["many small runs"]:  # no run covers a page, so almost nothing can be mapped
        assert actual is None
    else:
        assert actual == expected(runs, contents)


def test_random_runs_match_file_contents(files: list[int], contents: list[bytes]) -> None:
    numbers = random.Random(7)
    mapped = 0
    for _ in range(300):
        grain = numbers.choice([1, 8, PAGE, PAGE, PAGE])
        runs = []
        for _ in range(numbers.randint(1, 6)):
            size = numbers.choice([0, numbers.randint(1, 99), grain * numbers.randint(1, 6 * PAGE // grain)])
            start = numbers.randint(0, (SIZE - size) // grain) * grain
            runs.append((numbers.randint(0, 1), start, size))
        actual = read(runs, files) if sum(size for _, _, size in runs) else None
        mapped += actual is not None
        assert actual in (None, expected(runs, contents))
    assert mapped > 100


def test_unaligned_runs_are_not_mapped(files: list[int]) -> None:
    assert read([(0, 0, 3 * PAGE), (0, 10 * PAGE + 1, 3 * PAGE), (0, 20 * PAGE + 2, 3 * PAGE)], files) is None


def test_too_many_runs_are_not_mapped(files: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [(0, 2 * index * PAGE, PAGE) for index in range(20)]
    assert read(runs, files) is not None
    monkeypatch.setattr(page_maps, "MAX_RUNS", 19)
    assert read(runs, files) is None
    assert MAX_RUNS < 65_530  # the limit of mappings per process


def test_other_platforms_do_not_map(files: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert read([(0, 0, 3 * PAGE)], files) is None


def test_adjacent_runs_are_merged() -> None:
    runs = [ByteRange(3, 0, 10), ByteRange(3, 10, 5), ByteRange(3, 16, 4), ByteRange(4, 20, 4), ByteRange(4, 24, 1)]
    assert joined(runs) == [ByteRange(3, 0, 15), ByteRange(3, 16, 4), ByteRange(4, 20, 5)]


def test_writes_change_only_one_mapping(files: list[int], contents: list[bytes], tmp_path: Path) -> None:
    runs = [ByteRange(files[0], 24, 3 * PAGE), ByteRange(files[0], 10 * PAGE + 24, 3 * PAGE)]
    (first, offset), (second, _) = map_runs(runs), map_runs(runs)
    tensor = torch.frombuffer(first, dtype=torch.uint8, count=6 * PAGE, offset=offset)
    tensor.fill_(0)
    assert not any(first[offset : offset + 6 * PAGE])
    assert second[offset : offset + 6 * PAGE] == expected([(0, 24, 3 * PAGE), (0, 10 * PAGE + 24, 3 * PAGE)], contents)
    assert [(tmp_path / f"pages-{index}").read_bytes() for index in (0, 1)] == contents


@pytest.mark.long
def test_pages_are_unmapped_with_last_view(files: list[int], tmp_path: Path) -> None:
    path = tmp_path / "pages-0"
    assert count_mappings(path) == 0
    memory, offset = map_runs([ByteRange(files[0], 24, 3 * PAGE), ByteRange(files[0], 10 * PAGE + 24, 3 * PAGE)])
    tensor = torch.frombuffer(memory, dtype=torch.uint8, count=6 * PAGE, offset=offset)
    view = tensor[5:]
    assert count_mappings(path) == 2
    del memory, tensor
    gc.collect()
    assert count_mappings(path) == 2
    del view
    gc.collect()
    assert count_mappings(path) == 0


def test_truncation_after_open_raises(files: list[int], tmp_path: Path) -> None:
    with open(tmp_path / "pages-0", "r+b") as file:
        file.truncate(12 * PAGE)
    with pytest.raises(EOFError, match=r"the file ended at byte 49152, 24 bytes early: it was truncated since"):
        map_runs([ByteRange(files[0], 0, 3 * PAGE), ByteRange(files[0], 11 * PAGE, PAGE + 24)])


def test_large_runs_keep_huge_page_alignment(tmp_path: Path) -> None:
    # At the same offset modulo HUGE, for the longest of the runs.
    path = tmp_path / "large"
    data = random.Random(0).randbytes(3 * HUGE)
    path.write_bytes(data)
    short, long = (2 * HUGE + 3 * PAGE, PAGE), (5 * PAGE, HUGE + 2 * PAGE + 10)
    with path.open("rb") as file:
        memory, begin = map_runs([ByteRange(file.fileno(), *short), ByteRange(file.fileno(), *long)])
    wanted = data[short[0] : sum(short)] + data[long[0] : sum(long)]
    assert memory[begin : begin + len(wanted)] == wanted
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert (address + begin + short[1] - long[0]) % HUGE == 0
