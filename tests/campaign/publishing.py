"""A model checker of publishing: writers are killed at any call that changes a folder, or overlap with a reader.

The generations of a checkpoint differ in all its files: configuration, generation configuration, weights, number of
files, index, tokenizer. A reader must find exactly one complete generation, or raise a typed error.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import os
import random
import re
import shutil
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel
from transformers import LlamaForCausalLM as HFLlama

from nrl_models import AutoModelForCausalLM
from nrl_models.common.checkpoint.generations import PUBLISHED
from nrl_models.common.checkpoint.local_path import CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME
from nrl_models.common.checkpoint.publication.publishing import TOKENIZER_NAMES
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.checkpoint.writing import staged
from nrl_models.errors import NRLModelsError
from nrl_models.families.llama.model import LlamaForCausalLM

OTHERS = {"optimizer.pt": "state", "logs/model.txt": "log"}
"""Unrelated files in a checkpoint's folder."""

KILLED = 17


class WrongError(AssertionError):
    """A reader found no generation or a mixture of several, or unexpected files remain."""


@dataclass(frozen=True)
class Generation:
    """One state of a checkpoint, in a separate folder."""

    number: int
    folder: Path
    tensors: dict[str, torch.Tensor]

    @property
    def files(self) -> set[str]:
        """The names of its files."""
        return files_of(self.folder)


def make_generations(root: Path) -> list[Generation]:
    """Create generations with one file, with several, with more, and with one again."""
    tokenizers = (
        ("tokenizer.json", "tokenizer_config.json", "vocab.json"),
        ("tokenizer.json", "tokenizer_config.json"),
        ("tokenizer_config.json", "vocab.json", "merges.txt"),
        ("tokenizer.json",),
    )
    result = []
    for number, (size, names) in enumerate(zip(("5GB", "9KB", "5KB", "5GB"), tokenizers, strict=True)):
        torch.manual_seed(number)
        config = LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=32,
            rms_norm_eps=_epsilon(number),
            tie_word_embeddings=False,
        )
        model = LlamaForCausalLM.from_config(config)
        model.generation_config.max_new_tokens = number + 1
        folder = root / str(number)
        model.save_pretrained(folder, max_shard_size=size)
        for name in names:
            (folder / name).write_text(f"{name} {number}")
        tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        result.append(Generation(number, folder, tensors))
    counts = [len(list(generation.folder.glob("*.safetensors"))) for generation in result]
    assert counts == [1, 2, 4, 1], counts
    return result


def _epsilon(number: int) -> float:
    return 1e-3 * (number + 1)


def files_of(folder: Path) -> set[str]:
    """List the files below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or path.is_file()}


def prepare(folder: Path, generation: Generation | None) -> Path:
    """Create a folder `checkpoint` with a generation and unrelated files. Without a generation, create no folder."""
    target = folder / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if generation is not None:
        shutil.copytree(generation.folder, target)
        for name, text in OTHERS.items():
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_text(text)
    return target


# Reading


def identify(model: PreTrainedModel, generations: Sequence[Generation]) -> int:
    """Return the generation that a model comes from. All its parts must agree."""
    number = round(model.config.rms_norm_eps / 1e-3) - 1
    if not 0 <= number < len(generations):
        raise WrongError(f"a configuration of no generation: {model.config}")
    if model.generation_config.max_new_tokens != number + 1:
        raise WrongError(
            f"configuration {number}, generation configuration {model.generation_config.max_new_tokens - 1}"
        )
    expected = generations[number].tensors
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor, expected[name]):
            raise WrongError(f"configuration {number}, and another {name}")
    return number


def read(target: Path, generations: Sequence[Generation]) -> int | None:
    """Return the generation that `from_pretrained` loads, or None for a typed error."""
    try:
        model = AutoModelForCausalLM.from_pretrained(target)
    except NRLModelsError:
        return None
    return identify(model, generations)


def read_by_name(target: Path, generations: Sequence[Generation]) -> int | None:
    """Return the generation that transformers loads, or None for any error."""
    if not (target / CONFIG_NAME).exists():  # otherwise its class would use the default configuration, a model of 27 GB
        if weights := [name for name in (WEIGHTS_NAME, INDEX_NAME) if (target / name).exists()]:
            raise WrongError(f"{weights}, and no configuration")
        return None
    try:
        model = HFLlama.from_pretrained(target)
    except Exception:  # transformers raises any exception for missing files
        return None
    return identify(model, generations)


def check_tokenizer(target: Path, generation: Generation) -> None:
    """Check that our readers find the tokenizer files of a generation."""
    folder = resolve_folder(target)
    actual = {name: (folder / name).read_text() for name in TOKENIZER_NAMES if (folder / name).exists()}
    expected = {name: (generation.folder / name).read_text() for name in generation.files & TOKENIZER_NAMES}
    if actual != expected:
        raise WrongError(f"generation {generation.number}, and a tokenizer of {actual}")


def check_saved(target: Path, generation: Generation, others: set[str]) -> None:
    """Check that a complete save left this generation, the unrelated files, and nothing else."""
    actual, expected = files_of(target.parent), {f"checkpoint/{name}" for name in generation.files | others}
    # If the previous generation had no tokenizer, the new one's tokenizer is still there.
    if actual != expected:
        raise WrongError(f"unexpected {sorted(actual - expected)}, missing {sorted(expected - actual)}")
    for name in generation.files:
        if (target / name).read_bytes() != (generation.folder / name).read_bytes():
            raise WrongError(f"{name} differs")


# Calls


READING = ("stat", "lstat", "fstat", "listdir", "scandir")
WRITING = ("mkdir", "rename", "replace", "link", "symlink", "unlink", "remove", "rmdir")


@contextmanager
def calls(before: Callable[[str, bool], None], seed: int = 0) -> Iterator[None]:
    """Call `before(name, whether it writes)` before every file operation. Folders are listed in random order."""
    shuffle = random.Random(seed).shuffle

    def wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            before(name, _writes(name, args, options))
            result = original(*args, **options)
            if name == "listdir":
                shuffle(result)
            return _Shuffled(result, shuffle) if name == "scandir" else result

        return call

    patched: list[tuple[Any, str]] = [(os, name) for name in ("open", *READING, *WRITING)]
    patched += [(builtins, "open"), (io, "open")]
    originals = [getattr(*module_and_name) for module_and_name in patched]
    for (module, name), original in zip(patched, originals, strict=True):
        setattr(module, name, wrapped(name, original))
    try:
        yield
    finally:
        for (module, name), original in zip(patched, originals, strict=True):
            setattr(module, name, original)


def _writes(name: str, args: Sequence[Any], options: dict[str, Any]) -> bool:
    if name != "open":
        return name in WRITING
    mode = args[1] if len(args) > 1 else options.get("mode", "r")
    return bool(mode & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)) if isinstance(mode, int) else mode.strip("bt") != "r"


class _Shuffled:
    """An `os.scandir` iterator in random order."""

    def __init__(self, entries: Any, shuffle: Callable[[list[Any]], None]) -> None:
        with entries:
            self._entries = list(entries)
        shuffle(self._entries)

    def __enter__(self) -> _Shuffled:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> _Shuffled:
        return self

    def __next__(self) -> Any:
        if not self._entries:
            raise StopIteration
        return self._entries.pop()


class Writer:
    """Save a generation. Calls `before` for its write operations, except while it fills the temporary folder."""

    def __init__(self, generation: Generation, target: Path, before: Callable[[], None]) -> None:
        self._generation, self._target, self._before = generation, target, before
        self.filling = False

    def __call__(self, name: str, writes: bool) -> None:
        if writes and not self.filling:
            self._before()

    def save(self) -> None:
        with staged(self._target) as stage:
            self.filling = True
            for path in self._generation.folder.iterdir():
                shutil.copyfile(path, stage / path.name)
            self.filling = False


# Killed writers


def save_and_be_killed(generation: Generation, target: Path, at: int, seed: int = 0) -> bool:
    """Save in a process that is killed before its `at`-th change of a folder. Returns False if it has fewer changes."""
    child = os.fork()
    if child == 0:
        left = at

        def count() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os._exit(KILLED)

        status = 1
        try:
            writer = Writer(generation, target, count)
            with calls(writer, seed):
                writer.save()
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, KILLED):
        raise WrongError(f"the save failed with {code}, to be killed at {at}")
    return code == KILLED


def after_kills(
    root: Path, generations: Sequence[Generation], old: int | None, writers: Sequence[tuple[int, int]], following: int
) -> tuple[int | None, bool]:
    """Check a folder after killed saves, and after a complete save that follows.

    Args:
        root: A folder to work in.
        generations: All generations.
        old: The initial generation.
        writers: The generations to save, and the call at which each save is killed.
        following: The generation to save at the end.

    Returns:
        The generation found, and whether every save was killed.
    """
    target = prepare(root, None if old is None else generations[old])
    killed = [save_and_be_killed(generations[new], target, at, seed=at) for new, at in writers]
    before = _digest(root)
    found = read(target, generations)
    allowed = {old, *(new for new, _ in writers)}
    if found not in allowed:
        raise WrongError(f"found {found}, expected one of {allowed}")
    if found is not None:
        check_tokenizer(target, generations[found])
    by_name = read_by_name(target, generations)
    if by_name not in {*allowed, None}:
        raise WrongError(f"transformers found {by_name}, expected one of {allowed}, or an error")
    if _digest(root) != before:
        raise WrongError("reading changed the folder")
    Writer(generations[following], target, lambda: None).save()
    check_saved(target, generations[following], set() if old is None else set(OTHERS))
    if read(target, generations) != following:
        raise WrongError("the reader does not find the generation of the next save")
    return found, all(killed)


def kill_at_every_call(root: Path, generations: Sequence[Generation], old: int | None, new: int, following: int) -> int:
    """Run `after_kills` for every call of one writer. Once a reader finds the new generation, it always must.

    Returns:
        The number of calls.
    """
    generations_read, at = [], 0
    while True:
        at += 1
        generation_read, killed = after_kills(root, generations, old, [(new, at)], following)
        generations_read.append(generation_read)
        if not killed:
            break
    order = [old, new]
    if (
        generations_read[0] != old
        or generations_read[-1] != new
        or sorted(generations_read, key=order.index) != generations_read
    ):
        raise WrongError(f"read generations {generations_read} in turn")
    return at


def _digest(folder: Path) -> dict[str, str]:
    result = {}
    for path in sorted(folder.rglob("*")):
        name = re.sub(r"[0-9a-f]{8}", "*", str(path.relative_to(folder)))
        if path.is_symlink():
            result[name] = os.readlink(path)
        elif path.is_file():
            result[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return result


# Overlapping readers


class Overlap:
    """A save in a thread that advances only on request."""

    def __init__(self, generation: Generation, target: Path) -> None:
        self._writer = Writer(generation, target, self._wait)
        self._allowed, self._arrived = threading.Semaphore(0), threading.Semaphore(0)
        self.done = False
        self.calls = 0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._save)

    def _wait(self) -> None:
        self._arrived.release()
        self._allowed.acquire()

    def _save(self) -> None:
        try:
            self._writer.save()
        except BaseException as error:
            self.error = error
        self.done = True
        self._arrived.release()

    def count_call(self, name: str, writes: bool) -> bool:
        """Count a file operation. Returns False if it is not from the save's thread."""
        if threading.current_thread() is not self._thread:
            return False
        self._writer(name, writes)
        return True

    def start(self) -> None:
        """Start, and stop before the first call."""
        self._thread.start()
        self._arrived.acquire()

    def advance(self, count: int) -> None:
        """Allow this many calls, or fewer if the save ends."""
        for _ in range(count):
            if self.done:
                return
            self.calls += 1
            self._allowed.release()
            self._arrived.acquire()

    def finish(self) -> None:
        """Run the save to its end."""
        while not self.done:
            self.advance(1)
        self._thread.join()
        if self.error is not None:
            raise self.error


def any_schedule(choose: random.Random, often: Sequence[float]) -> Callable[[int], int]:
    """Return a random schedule for `overlapped`, for any number of calls of the reader.

    Args:
        choose: Source of randomness.
        often: Shares of the reader's calls before which the writer continues. One of them is chosen.
    """
    share, most = choose.choice(often), choose.choice([1, 3, 20])
    start = choose.randrange(60) if choose.random() < 0.5 else 0
    draws = random.Random(choose.random())

    def calls_before(step: int) -> int:
        if step == 0:
            return start
        return draws.randint(1, most) if draws.random() < share else 0

    return calls_before


def overlapped(
    root: Path,
    generations: Sequence[Generation],
    pair: tuple[int, int],
    schedule: Callable[[int], int],
    seed: int = 0,
) -> tuple[int | None, int, int]:
    """Read while another thread saves.

    Args:
        root: A folder to work in.
        generations: All generations.
        pair: The existing generation, and the one to save.
        schedule: Number of writer calls before the reader's call with this number. 0 is before the reader starts.
        seed: Seed for the order of folder entries.

    Returns:
        The generation found (None for a typed error), and the numbers of calls of reader and writer.
    """
    old, new = pair
    target = prepare(root, generations[old])
    overlap = Overlap(generations[new], target)
    reader, step = threading.current_thread(), 0

    def before(name: str, writes: bool) -> None:
        nonlocal step, reading
        if overlap.count_call(name, writes) or not reading or threading.current_thread() is not reader:
            return
        step += 1
        reading = False  # calls inside `advance` do not belong to the reader
        overlap.advance(schedule(step))
        reading = True

    reading = False
    with calls(before, seed):
        overlap.start()
        try:
            overlap.advance(schedule(0))
            published = overlap.done or (target / PUBLISHED).exists()
            reading = True
            found = read(target, generations)
            reading = False
            unpublished = not overlap.done and not (target / PUBLISHED).exists() and overlap.calls == 0
        finally:
            reading = False
            overlap.finish()
    if found is not None and (found not in pair or (published and found != new) or (unpublished and found != old)):
        raise WrongError(f"found {found} of {pair}, published before: {published}")
    check_saved(target, generations[new], set(OTHERS))
    return found, step, overlap.calls
