"""The matrix: combinations of length, data, sampling and batch size to check."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product

from nrl_models.common.value_checks import is_integer, is_number
from nrl_models.consistency import Data, Mode
from nrl_models.errors import ConsistencyError
from nrl_models.logprobs.sampling import Sampling

LENGTHS = (100, 1_000)
DATA = tuple(Data)
MODES = tuple(Mode)
BATCHES = (8,)
"""Default batch sizes. The default matrix has 8 cells."""

GUIDE_LENGTHS = (100, 1_000, 10_000)
GUIDE_BATCHES = (1, 8, 32)
"""Batch sizes in NeMo RL's guide, whose matrix has 36 cells."""

THRESHOLD = 1.05
"""The guide's bound on `token_mult_prob_error`, for equal precision."""

NOISE_FACTOR = 1.5
"""Multiple of the noise floor's distance from 1 by which `token_mult_prob_error` may differ from 1, if that exceeds the
threshold. Two correct implementations round differently, and the floor is only measured on a few sequences."""


def largest_error(threshold: float, noise_factor: float, noise: float) -> float:
    """Return the largest `token_mult_prob_error` that passes: the threshold, or more if noise explains more."""
    explained = 1.0 + noise_factor * (noise - 1.0)
    return max(threshold, explained) if math.isfinite(explained) else threshold


def is_conclusive(error: float) -> bool:
    """Return True if an error within its bound shows that two sides agree.

    A bound above `THRESHOLD` follows from the noise floor. An error that only such a bound allows may also be a bug.
    """
    return error <= THRESHOLD


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of settings.

    Args:
        length: Number of tokens of prompt plus continuation.
        data: A member of `Data` or its value: real text or dummy numbers.
        mode: A member of `Mode` or its value.
        batch: Batch size of the generation.
    """

    length: int
    data: str
    mode: str
    batch: int

    @property
    def key(self) -> str:
        """Name in file names."""
        return f"{self.length}-{self.data}-{self.mode}-{self.batch}"

    def __str__(self) -> str:
        return f"length {self.length:,}, {self.data}, {self.mode}, batch {self.batch}"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a consistency check.

    Args:
        lengths, data, modes, batches: Values whose combinations are the matrix.
        repeats: Number of measurements of each cell, with different prompts and seeds.
        sampling: Sampling parameters of cells with mode `sampling`.
        new_tokens: Maximum number of generated tokens, and at most half of a sequence.
        strict: Whether the trainer also samples and the engine scores. Detects tokens that the engine never samples.
        threshold: Bound of `token_mult_prob_error`, unless the noise floor allows more.
        noise_factor: Allowed distance from 1 as a multiple of the noise floor's distance; 0 uses only the threshold.
        seed: Random seed of prompts and sampling.

    Raises:
        ConsistencyError: If values are out of range. Lists all of them.
    """

    lengths: tuple[int, ...] = LENGTHS
    data: tuple[str, ...] = DATA
    modes: tuple[str, ...] = MODES
    batches: tuple[int, ...] = BATCHES
    repeats: int = 1
    sampling: Sampling = field(default_factory=lambda: Sampling(0.8, top_p=0.95))
    new_tokens: int = 128
    strict: bool = False
    threshold: float = THRESHOLD
    noise_factor: float = NOISE_FACTOR
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [f"length {length}: expected at least 8" for length in self.lengths if not is_integer(length, 8)]
        problems += [f"batch {batch}: expected at least 1" for batch in self.batches if not is_integer(batch, 1)]
        for setting, values, known in (("data", self.data, DATA), ("mode", self.modes, MODES)):
            problems += [
                f"{setting} {value!r}: expected one of {', '.join(known)}" for value in values if value not in known
            ]
        for name, value in (("repeats", self.repeats), ("new_tokens", self.new_tokens)):
            problems += [] if is_integer(value, 1) else [f"{name} {value}: expected at least 1"]
        is_bound = is_number(self.threshold, 1.0, math.inf) and self.threshold > 1.0
        problems += [] if is_bound else [f"threshold {self.threshold}: expected more than 1"]
        is_factor = is_number(self.noise_factor, 0.0, math.inf)
        problems += [] if is_factor else [f"noise_factor {self.noise_factor}: expected at least 0"]
        if not (self.lengths and self.data and self.modes and self.batches):
            problems.append("nothing to check: each of length, data, mode and batch needs a value")
        if self.sampling.greedy:
            problems.append("sampling at temperature 0 is greedy: choose mode greedy instead")
        if problems:
            raise ConsistencyError("cannot check this:", *(f"  - {problem}" for problem in problems))

    def cells(self) -> list[Cell]:
        """Return the cells of the matrix, short sequences first."""
        data, modes = dict.fromkeys(self.data), dict.fromkeys(self.modes)
        return [Cell(*values) for values in product(sorted(set(self.lengths)), data, modes, sorted(set(self.batches)))]

    def sampling_of(self, cell: Cell) -> Sampling:
        """Return the sampling parameters of a cell."""
        return Sampling(0.0) if cell.mode == Mode.GREEDY else self.sampling

    def generated(self, cell: Cell) -> int:
        """Return the number of generated tokens in each sequence of a cell. The tokens before them are the prompt."""
        return min(self.new_tokens, cell.length // 2)
