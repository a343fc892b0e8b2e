"""A checkpoint's safetensors files: their contents, checked before any tensor is read."""

from __future__ import annotations

import mmap
import os
import stat
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import BinaryIO, ClassVar

import torch

from nrl_models.common.checkpoint.generations import (
    LINK_ADVICE,
    Identity,
    current,
    identity,
    link_outside,
    require_links_inside,
    was_replaced,
)
from nrl_models.common.checkpoint.json_reading import MOST_BYTES, parse_object
from nrl_models.common.checkpoint.local_path import CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME, is_pickle
from nrl_models.common.checkpoint.named_weights import (
    KEY,
    checked_index,
    conversion_advice,
    is_index,
    name_inside,
    named_weights,
    only_pickles,
    pickles_in,
    problem_of,
    without_weights,
)
from nrl_models.common.checkpoint.page_maps import ByteRange, joined, map_file, map_runs
from nrl_models.common.checkpoint.stored_tensors import StoredTensor, damage_of, stored_tensors
from nrl_models.common.dtypes import dtype_name
from nrl_models.common.process_state import no_collections
from nrl_models.common.upstream import with_variant
from nrl_models.errors import CheckpointError, Problem, ProblemKind

SAVE_AGAIN = "download or save the checkpoint again"


class CheckpointFiles:
    """The tensors of a checkpoint by key, without reading their values.

    Each file is opened once, so that header, size check and values are of the same file, even if another process
    replaces it. Such replacements are detected by comparing `seen` with the current files (`FileWatch`).

    Args:
        folder: Directory with `model.safetensors`, with `model.safetensors.index.json` and its shards, or with the
            weights that `transformers_weights` in its `config.json` names.
        variant: Variant of the files: "fp16" reads `model.fp16.safetensors` or `model.safetensors.index.fp16.json`.

    Attributes:
        folder: The directory. If a save is being moved into place, the location of its files.
        tensors: All tensors by key.
        seen: State of each file that was read, by file name; None for files that do not exist.
        dequantized: Keys of tensors that `stored_parts` computes when they are read; empty in this class.
        is_private: Whether nothing else writes to the memory that `read` returns, so that a model may keep it.

    Raises:
        CheckpointError: If there are no safetensors weights, a file is damaged or missing, the index is wrong or
            leaves the directory, or a tensor is in two files or in another file than in the index. Lists all problems.
    """

    dequantized: frozenset[str] = frozenset()
    is_private: ClassVar[bool] = True

    @no_collections()
    def __init__(self, folder: str | Path, variant: str | None = None, *, _by_index: bool = False) -> None:
        self.folder = current(Path(folder))
        self.seen: dict[str, Identity | None] = {}
        self._maps: dict[str, tuple[mmap.mmap, int]] = {}
        self._handles: dict[str, BinaryIO] = {}
        self._opening = threading.Lock()
        self._at_exit = weakref.finalize(self, _close, self._handles)
        self.weights_name, self.index_name = (with_variant(name, variant) for name in (WEIGHTS_NAME, INDEX_NAME))
        self._named = None if _by_index else named_weights(self.folder)  # otherwise the index is read
        if self._named is not None and is_index(self._named):
            self.index_name = self._named
        elif isinstance(self._named, str):
            self.weights_name = self._named
        self.tensors: dict[str, StoredTensor] = {}
        self._index_dtype: torch.dtype | None = None
        self._is_by_index = _by_index
        problems: list[Problem] = []
        files = self._files(problems, variant)
        for file, expected in files.items():
            self._read_header(file, expected, problems)
        if not problems and self._named is None and self.weights_name in files:
            problems += self._differs_from_index(variant)
        if problems:
            self.close()
            raise CheckpointError(f"cannot load {self.folder}", problems, _advice(problems))

    @cached_property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype | None:
        """Default dtype if the configuration has none: the index's, or that of the first tensor by file and name.

        As in transformers. The order within a file is ignored: safetensors writes wide dtypes first, so a single fp32
        tensor would decide. None if no tensor is floating point, wider than 8 bits and not dequantized.
        """
        stored = (tensor for key, tensor in self.tensors.items() if key not in self.dequantized)
        in_order = sorted(stored, key=lambda tensor: (tensor.file, tensor.key))
        dtypes = (tensor.dtype for tensor in in_order if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1)
        return self._index_dtype or next(dtypes, None)

    def stored_as(self, tensor: StoredTensor) -> str:
        """Return the name of the dtype in which a tensor is stored."""
        return dtype_name(tensor.dtype)

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """Return the tensor's values: computed again in each call if it is `dequantized`, else as in `read_stored`."""
        if tensor.key not in self.dequantized:
            return self.read_stored(tensor)
        stored, compute = self.stored_parts(tensor)
        return stored[0] if compute is None else compute(*stored)

    def read_stored(self, tensor: StoredTensor) -> torch.Tensor:
        """Return the tensor's stored values as a private (copy-on-write) memory-mapped view, without a copy."""
        if tensor.numel == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        pages, first = self._mapped(tensor.file)
        flat = torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel, offset=first + tensor.start)
        return flat.view(tensor.shape)

    def _mapped(self, file: str) -> tuple[mmap.mmap, int]:
        """Return the memory map of a complete file, and the file's offset in it."""
        with self._opening:  # several threads read; map each file only once
            if file not in self._maps:
                self._maps[file] = map_file(self._descriptor(file))
        return self._maps[file]

    def stored_parts(self, tensor: StoredTensor) -> tuple[tuple[torch.Tensor, ...], Callable[..., torch.Tensor] | None]:
        """Return the inputs of `read`, valid after the files are closed, and the function that computes the values."""
        return (self.read(tensor),), None

    def read_joined(self, tensors: Sequence[StoredTensor], shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return a memory-mapped tensor of `shape` with the concatenated elements of `tensors`.

        None if that would need a copy, see `map_runs`, or if a tensor is `dequantized`.
        """
        if not self.dequantized.isdisjoint(tensor.key for tensor in tensors):
            return None
        parts = [tensor for tensor in tensors if tensor.numel]
        runs = joined([ByteRange(self._descriptor(part.file), part.start, part.nbytes) for part in parts])
        mapped = None
        try:
            if len(runs) == 1:  # one map of the file serves all tensors
                memory, first = self._mapped(parts[0].file)
                mapped = memory, first + runs[0].start
            elif runs:
                mapped = map_runs(runs)
        except EOFError as error:
            raise was_replaced(self.folder, sorted({tensor.file for tensor in tensors})) from error
        if mapped is None:
            return None
        memory, offset = mapped
        dtype, count = tensors[0].dtype, torch.Size(shape).numel()
        if offset % dtype.itemsize:  # the file's header has an odd length
            return None
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)

    def close(self) -> None:
        """Close the files. Tensors that `read` returned keep the pages they show."""
        _close(self._handles)
        self._maps.clear()

    def _descriptor(self, file: str) -> int:
        """Return the open file. Raises if it changed since its header was read: pages past its end cannot be read."""
        descriptor = self._handles[file].fileno()
        if identity(os.fstat(descriptor)) != self.seen[file]:
            raise was_replaced(self.folder, [file])
        return descriptor

    def _open(self, file: str) -> BinaryIO | None:
        """Open a file and record its identity. None if it does not exist or is a device.

        Raises:
            OSError: If it cannot be opened, or is a link to a file outside of the checkpoint.
        """
        if outside := link_outside(self.folder, file):
            raise OSError(f"{outside}; {LINK_ADVICE}")
        try:  # without blocking on a pipe that has no writer
            descriptor = os.open(self.folder / file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            self.seen[file] = None
            return None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            return None
        self.seen[file] = identity(status)
        return open(descriptor, "rb")

    def _files(self, problems: list[Problem], variant: str | None) -> dict[str, set[str] | None]:
        """Return the files to read, and the keys that each must have according to the index, if there is one."""
        if self._named is None:
            is_by_index = self._is_by_index or not (self.folder / self.weights_name).is_file()
        elif (problem := problem_of(self._named)) is not None:
            problems.append(problem)
            return {}
        else:
            is_by_index = is_index(self._named)
        if not is_by_index:
            return {self.weights_name: None}
        if self._named is None:
            self.seen[self.weights_name] = None
        try:
            index = self._open(self.index_name)
        except OSError as error:
            problems.append(Problem(ProblemKind.FILE, self.index_name, f"cannot be opened: {error}"))
            return {}
        if index is not None:
            self._handles[self.index_name] = index
            return self._indexed_files(index, problems, variant)
        if self._named is not None:
            problems.append(Problem(ProblemKind.FILE, self._named, f"is missing, and {KEY} in {CONFIG_NAME} names it"))
            return {}
        if pickles := pickles_in(self.folder):
            problems.append(only_pickles(self.folder, pickles, variant))
        else:
            problems.append(without_weights(self.folder, self.weights_name, self.index_name))
        return {}

    def _differs_from_index(self, variant: str | None) -> list[Problem]:
        """Find differences between a single file and an index with shards: one of them is stale."""
        if not (self.folder / self.index_name).is_file():
            return []
        try:
            indexed = CheckpointFiles(self.folder, variant, _by_index=True)
        except CheckpointError:  # the shards are gone, and only their index is left
            return []
        self.seen |= {name: seen for name, seen in indexed.seen.items() if name != self.weights_name}
        different = sorted(self.tensors.keys() ^ indexed.tensors.keys()) or (
            key for key, tensor in self.tensors.items() if not _are_same(self, tensor, indexed, indexed.tensors[key])
        )
        first = next(iter(different), None)
        indexed.close()
        if first is None:
            return []
        detail = f"is not the same in {self.weights_name} and in the shards of {self.index_name}; one of them is stale"
        advice = f"remove {self.weights_name}, or {self.index_name} and its shards"
        return [Problem(ProblemKind.DUPLICATED, first, detail, self.weights_name, advice)]

    def _indexed_files(
        self, index: BinaryIO, problems: list[Problem], variant: str | None
    ) -> dict[str, set[str] | None]:
        try:
            content = parse_object(index.read(MOST_BYTES + 1), self.index_name, self.folder, ProblemKind.INDEX)
            weight_map, metadata = checked_index(content, self.index_name)
        except CheckpointError as error:
            problems += error.problems
            return {}
        stated = metadata.get("dtype")
        dtype = getattr(torch, stated, None) if isinstance(stated, str) else None
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1:
            self._index_dtype = dtype
        keys_in: dict[str, set[str]] = defaultdict(set)
        for key, file in weight_map.items():
            keys_in[str(file)].add(key)
        files: dict[str, set[str] | None] = {}
        for file, keys in keys_in.items():
            name = name_inside(self.folder, file)
            if name is None:
                detail = f"points to {file!r}, outside the checkpoint"
                problems += [Problem(ProblemKind.INDEX, key, detail, self.index_name) for key in sorted(keys)]
            elif PurePosixPath(name).suffix != ".safetensors":
                detail = f"points to {file!r}, which is not safetensors"
                advice = conversion_advice(self.folder, variant) if is_pickle(file) else SAVE_AGAIN
                problems += [Problem(ProblemKind.FORMAT, key, detail, self.index_name, advice) for key in sorted(keys)]
            else:
                files[name] = keys | (files.get(name) or set())
        return files

    def _read_header(self, file: str, expected: set[str] | None, problems: list[Problem]) -> None:
        try:
            handle = self._open(file)
        except OSError as error:
            problems.append(Problem(ProblemKind.FILE, file, f"cannot be opened: {error}"))
            return
        if handle is None:
            count = len(expected or ())
            keys = f"; it should hold {count} tensor{'s' if count > 1 else ''}" if count else ""
            problems.append(Problem(ProblemKind.FILE, file, f"is missing{keys}"))
            return
        self._handles[file] = handle
        if (problem := damage_of(handle, file)) is not None:
            problems.append(problem)
            return
        stored_keys = set()
        for tensor in stored_tensors(handle, file, problems):
            stored_keys.add(tensor.key)
            if tensor.key in self.tensors:
                other = self.tensors[tensor.key].file
                problems.append(Problem(ProblemKind.DUPLICATED, tensor.key, f"is in {other} and in {file}"))
            self.tensors[tensor.key] = tensor
        for key in sorted((expected or set()) - stored_keys):
            problems.append(
                Problem(ProblemKind.INDEX, key, f"is not in {file}, although {self.index_name} lists it there", file)
            )


def _are_same(files: CheckpointFiles, tensor: StoredTensor, others: CheckpointFiles, other: StoredTensor) -> bool:
    """Return True if two stored tensors are bitwise equal."""
    if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
        return False
    first, second = files.read(tensor).reshape(-1), others.read(other).reshape(-1)
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def require_readable(folder: Path) -> dict[str, Identity | None]:
    """Check a checkpoint's files before transformers opens them, and return their state (`CheckpointFiles.seen`).

    transformers follows an index to pickles, which can run code, and to files outside the directory.

    Raises:
        CheckpointError: See `CheckpointFiles` and `require_links_inside`.
    """
    require_links_inside(folder)
    files = CheckpointFiles(folder)
    files.close()
    return files.seen


def _close(handles: dict[str, BinaryIO]) -> None:
    for handle in handles.values():
        handle.close()
    handles.clear()


def _advice(problems: list[Problem]) -> list[str]:
    disagree = "do not trust this directory: its index and its files disagree; save or download it again"
    advice = {ProblemKind.FILE: SAVE_AGAIN, ProblemKind.INDEX: disagree, ProblemKind.DUPLICATED: disagree}
    kinds = {problem.kind for problem in problems if not problem.advice}
    return list(dict.fromkeys(text for kind, text in advice.items() if kind in kinds))
