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
        "Logits of the same checkpoint, loaded with nrl_models and with transformers, in fp32 and bf16. The models are "
        "tiny models of several architectures, and larger ones, all with random weights. bf16 logits that are not "
        "equal bit for bit are compared with fp32 logits: the RMS error may be at most 1.25 times that of "
        "transformers, and the largest error at most twice. For MoE models, the share of expert choices that differ is "
        "compared with a bound that is measured per model. [Parity](parity.md) explains level 3 and the bounds.",
    ),
    Section(
        "training",
        "Training step",
        "training",
        120,
        "Forward, backward and AdamW in bf16, without compilation. `combined`: nrl_models with fused projections "
        "(`combine=True`). `separate`: without. Measurements alternate between the models. MFU is the "
        "fraction of the GPU's dense bf16 peak. It counts six operations per active parameter for every token, and "
        "those of causal attention. `share of matmul speed` is the fraction of the speed of the fastest matmul in the "
        "same process. `transformers, again` repeats the baseline; its ratio shows the measurement noise.",
    ),
    Section(
        "rl",
        "RL loss step",
        "policy_step",
        180,
        "Forward and backward of a clipped policy loss on rollouts with a long-tailed length distribution. With shared "
        "prompts, groups of 8 rollouts begin with the same 512 tokens. `TRL's math` pads the batch, computes logits of "
        "completions with transformers' class, and calls TRL's `selective_log_softmax`, or the same formula if TRL is "
        "not installed. In bf16, losses may differ by at most 0.01 and gradient norms by 5 % (in fp32: 1e-5 and "
        "0.1 %). `Liger` is also measured if it is installed. Ratios are medians over repetitions. `TRL's math, "
        "again` repeats the baseline; its ratio shows the measurement noise.",
    ),
    Section(
        "projections",
        "Fused and separate projections",
        "projections",
        90,
        "Time of `combine=True` relative to `combine=False` and to transformers, with random weights in bf16. "
        "Below 1, fusing is faster. The last column, `null ratio`, compares transformers with itself: it shows the "
        "measurement noise.",
    ),
    Section(
        "logprobs",
        "Log-probabilities of a vocabulary of 128,256",
        "vocabulary",
        90,
        "Extra memory and time of one pass from the last hidden states to log-probabilities. `full logits` computes "
        "all logits in the dtype of the row, and their log-softmax in fp32. `nrl_models, loss` receives the loss "
        "function (`token_logprobs(..., loss=...)`), so it computes gradients in the same pass as log-probabilities. "
        "The rows `transformers` use transformers' loss function. `full logits again` repeats the baseline; its ratio "
        "shows the measurement noise.",
    ),
    Section(
        "load",
        "Loading to the device",
        "loading",
        90,
        "Time to load a bf16 checkpoint from a warm page cache to the device. It is compared with two baselines: "
        "transformers, and `pinned copies`, which only reads the same bytes and copies them through pinned memory. "
        "`transformers, again` repeats the first baseline; its ratio shows the measurement noise.",
    ),
    Section(
        "refit",
        "Refit",
        "export",
        60,
        "`iter_export` sends every weight to a consumer, which copies it into its own memory: on the device, or in "
        "pinned memory of the host. `in buckets` collects tensors in buckets on the device first; `through pinned "
        "buckets` collects them in pinned memory of the host. `one copy` copies a single buffer with as many bytes. "
        "Time is relative to `one copy`, and to copies of each tensor. `one copy, again` repeats the baseline.",
    ),
    Section(
        "determinism",
        "Deterministic reruns",
        "reruns",
        90,
        "The same steps run twice from the same seed, with 4 layers of each model. The rows `deterministic` use "
        "`torch.use_deterministic_algorithms(True)`: losses and tensors must be equal bit for bit. The rows `default` "
        "show the difference without this setting.",
        {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    ),
    Section(
        "tests",
        "Generated tests",
        "generated_tests",
        240,
        "The generated tests of `make test` run on the device, for the architectures below.",
        {"NVIDIA_TF32_OVERRIDE": "0"},  # some convolutions use TF32 by default, which the fp32 bounds exclude
    ),
)
