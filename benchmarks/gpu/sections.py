"""The sections of the GPU kit, in the order in which they run."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PATTERNS: tuple[str, ...] = runpy.run_path(str(Path(__file__).parents[2] / "tests" / "patterns.py"))[
    "ONE_OF_EACH_PATTERN"
]
"""Families of the sections `parity` and `tests`. Not imported, because other packages may install a module `tests`."""


@dataclass(frozen=True)
class Section:
    """A group of cases that run in one subprocess.

    Args:
        name: Name on the command line and in the JSON file.
        title: Heading on the page.
        module: Module in this package with `cases(context)`, which returns a function for each case.
        seconds: Time after which the subprocess is stopped. Cases without an outcome then count as failed.
        note: Measurement, peers and meaning of the columns.
        environment: Variables of the subprocess.
    """

    name: str
    title: str
    module: str
    seconds: int
    note: str
    environment: Mapping[str, str] = field(default_factory=dict)


SECTIONS = (
    Section(
        "parity",
        "Parity, level 3",
        "level_three",
        180,
        "Logits of a checkpoint loaded here and by transformers, in fp32 and bf16, for one family of each pattern at a "
        "tiny size, and for larger shapes with random weights. [Parity](parity.md) has the bounds.",
    ),
    Section(
        "training",
        "Training step",
        "training",
        120,
        "Forward, backward and AdamW in bf16, without compilation. MFU counts six operations per token and active "
        "parameter, and causal attention, and divides by the GPU's dense bf16 peak. The share of matmul speed divides "
        "by the fastest matmul of the same process. Contenders take turns. `transformers, again` is the null ratio.",
    ),
    Section(
        "rl",
        "RL loss step",
        "policy_step",
        180,
        "Forward and backward of a clipped policy loss on rollouts whose lengths have a long tail. With shared "
        "prompts, groups of 8 rollouts begin with the same 512 tokens. `TRL's math` pads the batch, computes logits of "
        "completions with transformers' class, and calls TRL's `selective_log_softmax`, or the same formula if TRL is "
        "not installed. All ways must have the same loss and gradient norm. "
        "`Liger` runs if it is installed. Ratios are medians over turns; `again` is the null ratio.",
    ),
    Section(
        "projections",
        "Fused and separate projections",
        "projections",
        90,
        "Time of `combine=True` relative to `combine=False` and to transformers, with random weights in bf16. "
        "Below 1, fusing is faster. The last column is the null ratio: transformers against itself.",
    ),
    Section(
        "logprobs",
        "Log-probabilities of a vocabulary of 128,256",
        "vocabulary",
        90,
        "Extra memory and time of one pass from hidden states, relative to a log-softmax over all logits in fp32. "
        "`full logits again` is the null ratio.",
    ),
    Section(
        "load",
        "Loading to the device",
        "loading",
        90,
        "Loading a bf16 checkpoint from a warm page cache to the device, relative to transformers and to a bare read "
        "of the same bytes with pinned copies. `transformers, again` is the null ratio.",
    ),
    Section(
        "refit",
        "Refit",
        "export",
        60,
        "Streaming every weight to a consumer with separate memory, whole and in buckets, relative to one copy of as "
        "many bytes and to one copy of each tensor, on the device and to pinned memory of the host.",
    ),
    Section(
        "determinism",
        "Deterministic reruns",
        "reruns",
        90,
        "The same steps twice from the same seed. With `torch.use_deterministic_algorithms(True)` losses and tensors "
        "must be bitwise equal. The rows `default` report the same without that setting.",
        {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    ),
    Section(
        "tests",
        "Generated tests",
        "generated_tests",
        240,
        "The generated tests of `make test` on the device, for one family of each pattern.",
        {"NVIDIA_TF32_OVERRIDE": "0"},  # some convolutions use TF32 by default, which the fp32 bounds exclude
    ),
)
