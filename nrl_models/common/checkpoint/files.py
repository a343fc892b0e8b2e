"""A checkpoint's safetensors files: their contents, checked before any tensor is read."""

from __future__ import annotations

import glob
import json
import math
import mmap
import os
import stat
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, ClassVar, NoReturn

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open

from nrl_models.common.checkpoint.generations import (
    LINK_ADVICE,
    PUBLISHED,
    Identity,
    Watch,
    current,
    identity,
    link_outside,
    require_links_inside,
    was_replaced,
)
from nrl_models.common.checkpoint.json_reading import MOST_BYTES, parse_object, read_object
from nrl_models.common.checkpoint.local_path import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    INDEX_NAME,
    WEIGHTS_NAME,
    as_path,
    find_gguf,
    is_gguf,
    is_local,
)
from nrl_models.common.checkpoint.named_weights import KEY, is_index, leaves, named_weights, problem_of
from nrl_models.common.checkpoint.page_maps import Run, joined, map_file, map_runs
from nrl_models.common.garbage import no_collections
from nrl_models.common.upstream import str_to_torch_dtype, with_variant
from nrl_models.errors import CheckpointError, Problem, ProblemKind, one_line

DTYPES: dict[str, torch.dtype] = str_to_torch_dtype | {"F8_E8M0": torch.float8_e8m0fnu}
"""safetensors' names of dtypes."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, without its values.

    Args:
        key: Name of the tensor in the file.
        file: Name of the file in the checkpoint.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        start: Offset of its first byte in the file.
    """

    key: str
    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def problem(self, kind: ProblemKind, detail: str) -> Problem:
        """A problem with this tensor."""
        return Problem(kind, self.key, detail, self.file)


class CheckpointFiles:
    """The tensors of a checkpoint by key, without reading their values.

    Each file is opened once, so that header, size check and values are of the same file, even if another process
    replaces it. Such replacements are detected by comparing `seen` with the current files (`Watch`).

    Args:
        folder: Directory with `model.safetensors`, with `model.safetensors.index.json` and its shards, or with the
            weights that `transformers_weights` in its `config.json` names.
        variant: Variant of the files: "fp16" reads `model.fp16.safetensors` or `model.safetensors.index.fp16.json`.

    Attributes:
        folder: The directory. If a save is being moved into place, the location of its files.
        tensors: All tensors by key.
        seen: State of each file that was read, by file name; None for files that do not exist.
        dequantized: Keys of tensors that are computed when they are read; empty in this class.
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
        files = self._files(problems)
        for file, expected in files.items():
            self._read_header(file, expected, problems)
        if not problems and self._named is None and self.weights_name in files:
            problems += self._differs_from_index(variant)
        if problems:
            self.close()
            raise CheckpointError(f"cannot load {self.folder}", problems, _advice(problems, self.folder))

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
        found = (tensor.dtype for tensor in in_order if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1)
        return self._index_dtype or next(found, None)

    def stored_as(self, tensor: StoredTensor) -> str:
        """Return the name of the dtype in which a tensor is stored."""
        return str(tensor.dtype).removeprefix("torch.")

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """Return the tensor's values as a private (copy-on-write) memory-mapped view, without a copy."""
        if tensor.numel == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        pages, first = self._mapped(tensor.file)
        flat = torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel, offset=first + tensor.start)
        return flat.view(tensor.shape)

    def _mapped(self, file: str) -> tuple[mmap.mmap, int]:
        """Return the memory map of a complete file, and the file's offset in it."""
        with self._opening:  # several threads read, and a file is to be mapped once
            if file not in self._maps:
                self._maps[file] = map_file(self._descriptor(file))
        return self._maps[file]

    def stored_parts(self, tensor: StoredTensor) -> tuple[tuple[torch.Tensor, ...], Callable[..., torch.Tensor] | None]:
        """Return the inputs of `read`, valid after the files are closed, and the function that computes the values."""
        return (self.read(tensor),), None

    def read_joined(self, tensors: Sequence[StoredTensor], shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return a memory-mapped tensor of `shape` with the concatenated elements of `tensors`.

        None if that would need a copy, see `map_runs`.
        """
        parts = [tensor for tensor in tensors if tensor.numel]
        runs = joined([Run(self._descriptor(part.file), part.start, part.nbytes) for part in parts])
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

    def _share(self, opened: CheckpointFiles) -> None:
        """Use the files that another instance has open, instead of opening them."""
        vars(self).update(vars(opened))
        self.tensors = dict(opened.tensors)
        self._opened = opened  # which closes them when it is deleted

    def close(self) -> None:
        """Close the files. Tensors that `read` returned keep the pages they show."""
        _close(self._handles)
        self._maps.clear()

    def _descriptor(self, file: str) -> int:
        """The open file, which must be as it was when its header was read: pages past its end cannot be read."""
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

    def _files(self, problems: list[Problem]) -> dict[str, set[str] | None]:
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
            return self._indexed_files(index, problems)
        if self._named is not None:
            problems.append(Problem(ProblemKind.FILE, self._named, f"is missing, and {KEY} in {CONFIG_NAME} names it"))
            return {}
        found = sorted(path.name for path in self.folder.glob("*") if path.suffix in (".bin", ".pt", ".pth"))
        if found:
            detail = f"only {', '.join(found)} found, and only safetensors are read: other formats can run code"
            problems.append(Problem(ProblemKind.FORMAT, str(self.folder), detail))
        else:
            detail = f"has neither {self.weights_name} nor {self.index_name}"
            problems.append(Problem(ProblemKind.FILE, str(self.folder), detail))
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

    def _indexed_files(self, index: BinaryIO, problems: list[Problem]) -> dict[str, set[str] | None]:
        try:
            content = parse_object(index.read(MOST_BYTES + 1), self.index_name, self.folder, ProblemKind.INDEX)
            entries = list(content["weight_map"].items())
            stated = (content.get("metadata") or {}).get("dtype")
            dtype = getattr(torch, stated, None) if isinstance(stated, str) else None
            if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1:
                self._index_dtype = dtype
        except CheckpointError as error:
            problems += error.problems
            return {}
        except (KeyError, AttributeError) as error:
            detail = f"is not an index with a weight_map: {type(error).__name__}: {error}"
            problems.append(Problem(ProblemKind.INDEX, self.index_name, detail))
            return {}
        keys_in: dict[str, set[str]] = defaultdict(set)
        for key, file in entries:
            keys_in[str(file)].add(key)
        files: dict[str, set[str] | None] = {}
        for file, keys in keys_in.items():
            if leaves(file):
                detail = f"points to {file!r}, outside the checkpoint"
                problems += [Problem(ProblemKind.INDEX, key, detail, self.index_name) for key in sorted(keys)]
            elif PurePosixPath(file).suffix != ".safetensors":
                detail = f"points to {file!r}, which is not safetensors"
                problems += [Problem(ProblemKind.FORMAT, key, detail, self.index_name) for key in sorted(keys)]
            else:
                files[file] = keys
        return files

    def _read_header(self, file: str, expected: set[str] | None, problems: list[Problem]) -> None:
        try:
            handle = self._open(file)
        except OSError as error:
            problems.append(Problem(ProblemKind.FILE, file, f"cannot be opened: {error}"))
            return
        if handle is None:
            count = len(expected or ())
            keys = f", which should hold {count} tensor{'s' if count > 1 else ''}" if count else ""
            problems.append(Problem(ProblemKind.FILE, file, f"is missing{keys}"))
            return
        self._handles[file] = handle
        try:  # check header and size of the open file, which may have been replaced since
            with safe_open(f"/dev/fd/{handle.fileno()}", framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            detail = f"is damaged or cut off ({os.fstat(handle.fileno()).st_size} bytes on disk): {error}"
            problems.append(Problem(ProblemKind.FILE, file, detail))
            return
        found = set()
        for tensor in _stored_tensors(handle, file, problems):
            found.add(tensor.key)
            if tensor.key in self.tensors:
                other = self.tensors[tensor.key].file
                problems.append(Problem(ProblemKind.DUPLICATED, tensor.key, f"is in {other} and in {file}"))
            self.tensors[tensor.key] = tensor
        for key in sorted((expected or set()) - found):
            problems.append(
                Problem(ProblemKind.INDEX, key, f"is not in {file}, although {self.index_name} lists it there", file)
            )


def _are_same(files: CheckpointFiles, tensor: StoredTensor, others: CheckpointFiles, other: StoredTensor) -> bool:
    """Return True if two stored tensors are bitwise equal."""
    if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
        return False
    first, second = (
        source.read(each).reshape(-1).view(torch.uint8) for source, each in ((files, tensor), (others, other))
    )
    return torch.equal(first, second)


def require_readable(folder: Path, variant: str | None = None) -> None:
    """Check a checkpoint's files before transformers opens them.

    transformers follows an index to pickles, which can run code, and to files outside the directory.

    Raises:
        CheckpointError: See `CheckpointFiles` and `require_links_inside`.
    """
    require_links_inside(folder)
    CheckpointFiles(folder, variant).close()


def _close(handles: dict[str, BinaryIO]) -> None:
    for handle in handles.values():
        handle.close()
    handles.clear()


def _stored_tensors(handle: BinaryIO, file: str, problems: list[Problem]) -> Iterator[StoredTensor]:
    """The tensors of a safetensors file, from its header (https://huggingface.co/docs/safetensors#format)."""
    length = int.from_bytes(handle.read(8), "little")
    header: dict[str, Any] = json.loads(handle.read(length))
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            known = ", ".join(DTYPES)
            problems.append(Problem(ProblemKind.DTYPE, key, f"has dtype {entry['dtype']}; readable are {known}", file))
            continue
        start = 8 + length + entry["data_offsets"][0]
        yield StoredTensor(key, file, tuple(entry["shape"]), DTYPES[entry["dtype"]], start)


def _advice(problems: list[Problem], folder: Path) -> list[str]:
    code = "from transformers import AutoModelForCausalLM as M; "
    code += f"M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')"
    disagree = "do not trust this directory: its index and its files disagree; save or download it again"
    advice = {
        ProblemKind.FORMAT: f'convert the checkpoint once with transformers: python -c "{code}"',
        ProblemKind.FILE: "download or save the checkpoint again",
        ProblemKind.INDEX: disagree,
        ProblemKind.DUPLICATED: disagree,
    }
    kinds = {problem.kind for problem in problems}
    return list(dict.fromkeys(text for kind, text in advice.items() if kind in kinds))


def require_repository(path_or_id: str | Path, *, subfolder: str = "", revision: str | None = None) -> None:
    """Download the configuration of a hub repository. Does nothing for a local path.

    Raises:
        CheckpointError: If the repository cannot be fetched.
    """
    if not is_local(path_or_id):
        name = f"{subfolder.strip('/')}/{CONFIG_NAME}".strip("/")
        _downloaded(path_or_id, {"revision": revision, "allow_patterns": [name]})


def _downloaded(path_or_id: str | Path, options: Mapping[str, Any]) -> Path:
    try:
        return Path(snapshot_download(str(path_or_id), **options))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        detail = f"is not a directory, and cannot be fetched as a hub repository: {one_line(error)}"
        problem = Problem(ProblemKind.FILE, str(path_or_id), detail)
        advice = ["check the path; for a hub repository check its name, your token and the network"]
        raise CheckpointError(f"cannot load {path_or_id}", [problem], advice) from error


def resolve_folder(
    path_or_id: str | Path,
    *,
    subfolder: str = "",
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    gguf_file: str | None = None,
    local_files_only: bool = False,
) -> Path:
    """Return the local directory of a checkpoint: `path_or_id` itself, or the downloaded hub repository.

    Downloads only configuration, code, `model*.safetensors` and the shards of an index, or only the GGUF file. If the
    checkpoint is a GGUF file, returns that file: `path_or_id` itself, `gguf_file`, or the only one in a directory
    without safetensors.

    Raises:
        CheckpointError: If the directory does not exist, has no `config.json`, or has a PEFT adapter. Also if the GGUF
            file does not exist, or there are several.
    """
    folder = as_path(path_or_id)
    if is_gguf(folder) and folder.is_file():
        return folder
    if not folder.is_dir():
        if is_local(path_or_id):
            detail = "is a file, expected a directory" if folder.is_file() else "no such directory"
            problem = Problem(ProblemKind.FILE, str(path_or_id), detail)
            advice = ["check the path, or pass the name of a hub repository (owner/name)"]
            raise CheckpointError(f"cannot load {path_or_id}", [problem], advice)
        prefix = f"{subfolder.strip('/')}/" if subfolder else ""
        names = ("*.json", "*.py", "model*.safetensors") if gguf_file is None else (gguf_file,)
        patterns = [prefix + name for name in names]
        options: Any = {"revision": revision, "token": token, "cache_dir": cache_dir, "allow_patterns": patterns}
        options |= {"ignore_patterns": [f"*{PUBLISHED}/*"], "local_files_only": local_files_only}
        folder = _downloaded(path_or_id, options)
        if shards := _other_shards(folder / subfolder):
            _downloaded(path_or_id, options | {"allow_patterns": [prefix + glob.escape(name) for name in shards]})
    while True:
        with Watch(folder / subfolder) as watch:
            try:
                return _usable(watch.location, gguf_file)
            except CheckpointError:
                if not watch.changed():
                    raise


def _other_shards(folder: Path) -> list[str]:
    """Return the safetensors files that an index in a downloaded folder names and that are not called `model*`."""
    found = {named} if (named := named_weights(folder)) is not None and problem_of(named) is None else set()
    for index in sorted(folder.glob("*.safetensors.index*.json")):
        try:
            found |= set(map(str, read_object(index)["weight_map"].values()))
        except (CheckpointError, KeyError, AttributeError):  # reported with all other problems when the index is read
            continue
    return sorted(name for name in found if name.endswith(".safetensors") and not (folder / name).is_file())


def _usable(folder: Path, gguf_file: str | None) -> Path:
    """Return a directory, or the GGUF file in it, if it has a checkpoint."""
    may_be_gguf = gguf_file is not None or (any(map(is_gguf, folder.glob("*"))) and not _has_safetensors(folder))
    if may_be_gguf and (file := find_gguf(folder, gguf_file)) is not None:
        return file
    if (folder / ADAPTER_CONFIG_NAME).is_file():
        _refuse_adapter(folder)
    if not (folder / CONFIG_NAME).is_file():
        raise CheckpointError(
            f"cannot load {folder}",
            [Problem(ProblemKind.FILE, CONFIG_NAME, "is missing")],
            ["pass the directory with config.json and the weights (see `subfolder`)"],
        )
    return folder


def _has_safetensors(folder: Path) -> bool:
    has_file = (folder / WEIGHTS_NAME).is_file() or (folder / INDEX_NAME).is_file()
    return has_file or named_weights(folder) is not None


def _refuse_adapter(folder: Path) -> NoReturn:
    """Raise for a directory with a PEFT adapter. Unlike in transformers, model and adapter are loaded separately."""
    then = "then the adapter with peft.PeftModel.from_pretrained(model, folder) or model.load_adapter(folder)"
    if (folder / CONFIG_NAME).is_file():
        detail = "is that of a PEFT adapter in the same directory as the model's files, and would be ignored"
        advice = f"move the adapter's files to a separate directory; load the model, {then}"
    else:
        detail = "is that of a PEFT adapter, and the model's files are elsewhere"
        advice = f"load the model it names as base_model_name_or_path, {then}"
    raise CheckpointError(f"cannot load {folder}", [Problem(ProblemKind.FORMAT, ADAPTER_CONFIG_NAME, detail)], [advice])
