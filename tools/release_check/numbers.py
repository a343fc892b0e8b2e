"""Record names, dtypes and numbers of transformers' own classes on fixed tiny checkpoints, to find silent changes.

    python -m tools.release_check.numbers --out numbers.jsonl [--names LlamaForCausalLM ...] [--jobs 2]

It needs torch and transformers, and not nrl_models. Checkpoints, configurations and inputs are fixtures
(`number_cases`), so that a difference between two records is a change of the library. `compare` in `facts` lists the
changes.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from tools.release_check.cached_steps import NoCacheError, cache_argument, cached_logits
from tools.release_check.facts import Facts, Kind, Section, SectionRecord, fingerprint, number
from tools.release_check.number_cases import FOLDER, NumberCase, case_names
from tools.release_check.outcome_files import OutcomeFile, source_digest, versions_of
from tools.release_check.workers import Ending, Result, run_subjects

TIMEOUT = 300.0
"""Seconds for one architecture; they take 1 to 5 on a quiet machine."""

OWN_SOURCES = ("numbers.py", "facts.py", "number_cases.py", "cached_steps.py")
NEW_TOKENS = 8
PADDING = 5


class NotApplicableError(Exception):
    """The class has nothing that the section records."""


class Recorded:
    """One class, loaded from its fixture.

    Args:
        case: the fixture.
        model_class: transformers' class.
        folder: an empty folder for checkpoints.
    """

    def __init__(self, case: NumberCase, model_class: type[PreTrainedModel], folder: Path) -> None:
        self.case, self.model_class, self.folder = case, model_class, folder

    def config(self) -> Any:
        """The tiny configuration, new at each call."""
        assert self.model_class.config_class is not None
        return self.model_class.config_class.from_dict(self.case.config_values())

    def write_checkpoint(self, name: str, dtype: torch.dtype) -> Path:
        """The fixture as a checkpoint in a dtype."""
        path = self.folder / name
        if not path.exists():
            config = self.config()
            config.dtype, config.architectures = dtype, [self.case.architecture]
            config.save_pretrained(path)
            tensors = {
                key: tensor.to(dtype) if tensor.is_floating_point() else tensor
                for key, tensor in self.case.checkpoint().items()
            }
            save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    def load(self, dtype: torch.dtype | str, stored: torch.dtype, **options: Any) -> Any:
        """The class with the checkpoint that is stored in one dtype, loaded in another (or `auto`)."""
        path = self.write_checkpoint(str(stored).removeprefix("torch."), stored)
        return self.model_class.from_pretrained(path, dtype=dtype, **options)

    @cached_property
    def _model_and_info(self) -> tuple[PreTrainedModel, dict[str, Any]]:
        model, info = self.load(torch.float32, torch.float32, attn_implementation="eager", output_loading_info=True)
        return model.eval(), info

    @property
    def loading_info(self) -> dict[str, Any]:
        """transformers' lists of missing, unexpected and mismatched names."""
        return self._model_and_info[1]

    def model(self) -> PreTrainedModel:
        """The class in fp32 with eager attention, a new copy, because some keep state of their last forward."""
        return deepcopy(self._model_and_info[0])

    def inputs(self, kind: str, *, labels: bool = False) -> dict[str, torch.Tensor]:
        """Inputs of a kind.

        Raises:
            NotApplicableError: the fixture has none.
        """
        inputs = self.case.input_tensors(kind)
        if inputs is None:
            raise NotApplicableError(f"no {kind} inputs")
        return inputs if labels else {name: value for name, value in inputs.items() if name != "labels"}

    def any_inputs(self, *, labels: bool = False) -> dict[str, torch.Tensor]:
        """Text, or with media where the class takes no text alone."""
        return self.inputs("text" if "text" in self.case.inputs else "media", labels=labels)


# Sections


def _loading(recorded: Recorded) -> Facts:
    model = recorded.model()
    state = model.state_dict(keep_vars=True)
    tensors = dict(state) | dict(model.named_buffers())
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(tensor.data_ptr(), []).append(name)
    info = recorded.loading_info
    return {
        Kind.NAMES: {name: _shape(tensor) for name, tensor in tensors.items()},
        Kind.DTYPES: _dtypes("fp32", tensors),
        Kind.TIES: {names[0]: names[1:] for names in groups.values() if len(names) > 1 and state[names[0]].numel()},
        Kind.LOADING: {key: sorted(map(str, names)) for key, names in info.items() if names and key != "error_msgs"},
    }


def _files(recorded: Recorded) -> Facts:
    path = recorded.folder / "saved"
    recorded.model().save_pretrained(path)
    tensors = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {
        Kind.FILES: {name: f"{_shape(tensor)} {_dtype(tensor)} {_hash(tensor)}" for name, tensor in tensors.items()}
    }


def _dtypes_section(recorded: Recorded) -> Facts:
    facts: dict[str, str] = {}
    loads: tuple[tuple[str, torch.dtype | str, torch.dtype], ...]
    loads = ("auto", "auto", torch.bfloat16), ("fp16", torch.float16, torch.float32)
    for label, dtype, stored in loads:
        facts |= _dtypes(label, recorded.load(dtype, stored).state_dict())
    return {Kind.DTYPES: facts}


def _initialization(recorded: Recorded) -> Facts:
    torch.manual_seed(0)
    model = recorded.model_class._from_config(recorded.config(), dtype=torch.float32)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    return {
        Kind.INITIALIZATION: {name: _hash(tensor) for name, tensor in tensors.items()},
        Kind.INITIALIZATION_SCALE: {name: _scale(tensor) for name, tensor in tensors.items() if tensor.numel()},
    }


def _config(recorded: Recorded) -> Facts:
    facts: Facts = {Kind.CONFIG_KEYS: dict.fromkeys(_flat(json.loads(recorded.config().to_json_string())), True)}
    assert recorded.model_class.config_class is not None
    try:
        default = recorded.model_class.config_class()
    except Exception:  # some have no default
        return facts
    values = _flat(json.loads(default.to_json_string(use_diff=False)))
    facts[Kind.CONFIG_DEFAULTS] = {key: _short(value) for key, value in values.items()}
    return facts


def _eager(recorded: Recorded) -> Facts:
    inputs, model = recorded.any_inputs(), recorded.model()
    output = _forward(model, inputs, use_cache=model.can_generate() or None)
    facts: Facts = {
        Kind.NUMBERS: {"logits": fingerprint(output.logits)},
        Kind.FIELDS: {"output": sorted(output), "logits": f"{_shape(output.logits)} {_dtype(output.logits)}"},
    }
    if "decoder_input_ids" not in inputs and "input_ids" in inputs:
        ones = {"attention_mask": torch.ones_like(inputs["input_ids"])}
        facts[Kind.NUMBERS]["logits with a mask of ones"] = fingerprint(_forward(model, inputs | ones).logits)
    return facts


def _sdpa(recorded: Recorded) -> Facts:
    model = recorded.model()
    if not model._supports_sdpa:
        return {Kind.FIELDS: {"supports sdpa": False}}
    model.set_attn_implementation("sdpa")
    return {
        Kind.FIELDS: {"supports sdpa": True},
        Kind.NUMBERS: {"logits": fingerprint(_forward(model, recorded.any_inputs()).logits)},
    }


def _bf16(recorded: Recorded) -> Facts:
    model = recorded.load(torch.bfloat16, torch.float32).eval()
    inputs = {
        name: value.to(torch.bfloat16) if value.is_floating_point() else value
        for name, value in recorded.any_inputs().items()
    }
    logits = _forward(model, inputs).logits
    return {Kind.LOW_PRECISION: {"logits": fingerprint(logits)}, Kind.FIELDS: {"logits": _dtype(logits)}}


def _media(recorded: Recorded) -> Facts:
    logits = _forward(recorded.model(), recorded.inputs("media")).logits
    return {Kind.NUMBERS: {"logits": fingerprint(logits)}, Kind.FIELDS: {"logits": _shape(logits)}}


def _padding(recorded: Recorded) -> Facts:
    inputs = recorded.inputs("text")
    if "input_ids" not in inputs:
        raise NotApplicableError("takes no tokens")
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, :PADDING] = 0
    logits = _forward(recorded.model(), inputs | {"attention_mask": mask}).logits
    per_token = logits.shape[:2] == mask.shape and logits.ndim == 3 and "decoder_input_ids" not in inputs
    return {Kind.NUMBERS: {"logits": fingerprint(logits[mask.bool()] if per_token else logits)}}


def _packed(recorded: Recorded) -> Facts:
    inputs = recorded.inputs("text")
    if "position_ids" not in _parameters(recorded.model_class) or inputs.keys() != {"input_ids"}:
        raise NotApplicableError("takes no positions")
    length = inputs["input_ids"].shape[1]
    positions = torch.cat([torch.arange(length // 3), torch.arange(length - length // 3)])[None]
    packed = {"input_ids": inputs["input_ids"][:1], "position_ids": positions}
    return {Kind.NUMBERS: {"logits": fingerprint(_forward(recorded.model(), packed).logits)}}


def _cached(recorded: Recorded, kind: str) -> Facts:
    if not recorded.case.generates:
        raise NotApplicableError("does not generate")
    model, inputs = recorded.model(), recorded.inputs(kind)
    try:
        name = cache_argument(model, reference_class=recorded.model_class)
    except NoCacheError as error:
        raise NotApplicableError(str(error)) from error
    return {Kind.NUMBERS: {"logits": fingerprint(cached_logits(model, inputs, name))}}


def _cached_steps(recorded: Recorded) -> Facts:
    return _cached(recorded, "text")


def _media_cached_steps(recorded: Recorded) -> Facts:
    return _cached(recorded, "media")


def _generation(recorded: Recorded, **options: Any) -> Facts:
    if not recorded.case.generates:
        raise NotApplicableError("does not generate")
    output: Any = recorded.model().generate(  # type: ignore[operator]
        **recorded.any_inputs(),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return {
        Kind.TOKENS: {"tokens": output.sequences[:, -NEW_TOKENS:].tolist()},
        Kind.NUMBERS: {"logits": fingerprint(torch.stack(output.logits, dim=1))},
    }


def _greedy(recorded: Recorded) -> Facts:
    return _generation(recorded)


def _static_cache(recorded: Recorded) -> Facts:
    return _generation(recorded, cache_implementation="static")


def _gradients(recorded: Recorded) -> Facts:
    return _backward(recorded, recorded.model())


def _checkpointing(recorded: Recorded) -> Facts:
    model = recorded.model()
    if not model.supports_gradient_checkpointing:
        raise NotApplicableError("does not support it")
    model.gradient_checkpointing_enable()
    for module in model.modules():  # not the whole model: some drop out in training, or ask for more inputs
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
    return _backward(recorded, model)


def _backward(recorded: Recorded, model: PreTrainedModel) -> Facts:
    torch.manual_seed(0)  # some routers draw random numbers
    loss = model(**recorded.any_inputs(labels=True), use_cache=False).loss
    loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    norms = {name: [number(float(grad.norm())), *fingerprint(grad.flatten())] for name, grad in gradients.items()}
    return {Kind.NUMBERS: {"loss": [number(loss.item())]}, Kind.GRADIENTS: norms}


def _resize(recorded: Recorded) -> Facts:
    model: Any = recorded.model()
    inputs = recorded.any_inputs()
    size = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(size + 8, mean_resizing=False)
    head = model.get_output_embeddings()
    shapes = {"input embeddings": _shape(model.get_input_embeddings().weight)}
    if head is not None:
        shapes["output embeddings"] = _shape(head.weight)
    logits = _forward(model, inputs).logits
    return {
        Kind.NAMES: shapes,
        Kind.FIELDS: {"logits": _shape(logits)},
        Kind.NUMBERS: {"logits of the old tokens": fingerprint(logits[..., :size])},
    }


SECTIONS: Mapping[Section, Callable[[Recorded], Facts]] = {
    Section.LOADING: _loading,
    Section.FILES: _files,
    Section.DTYPES: _dtypes_section,
    Section.INITIALIZATION: _initialization,
    Section.CONFIG: _config,
    Section.EAGER: _eager,
    Section.SDPA: _sdpa,
    Section.BF16: _bf16,
    Section.MEDIA: _media,
    Section.PADDING: _padding,
    Section.PACKED: _packed,
    Section.CACHED_STEPS: _cached_steps,
    Section.MEDIA_CACHED_STEPS: _media_cached_steps,
    Section.GREEDY: _greedy,
    Section.STATIC_CACHE: _static_cache,
    Section.GRADIENTS: _gradients,
    Section.CHECKPOINTING: _checkpointing,
    Section.RESIZE: _resize,
}


def record(architecture: str, fixtures: Path = FOLDER) -> Iterator[SectionRecord]:
    """Record every section of a class, in the order of `Section`."""
    case = NumberCase.from_file(architecture, fixtures)
    model_class = case.model_class()
    if model_class is None:
        yield from (SectionRecord(architecture, section, {Kind.CLASS: {"present": False}}) for section in SECTIONS)
        return
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorded = Recorded(case, model_class, Path(folder))
        for section, function in SECTIONS.items():
            started = time.monotonic()
            try:
                found = SectionRecord(architecture, section, function(recorded))
            except NotApplicableError:
                found = SectionRecord(architecture, section)
            except Exception as error:
                message = " ".join(str(error).split()).replace(folder, "")[:300]
                found = SectionRecord(architecture, section, error_type=type(error).__name__, message=message)
            yield replace(found, seconds=round(time.monotonic() - started, 3))


@torch.no_grad()
def _forward(model: PreTrainedModel, inputs: Mapping[str, Any], use_cache: bool | None = False) -> Any:
    return model(**inputs, **({} if use_cache is None else {"use_cache": use_cache}))


def _parameters(model_class: type[PreTrainedModel]) -> Mapping[str, Any]:
    return inspect.signature(model_class.forward).parameters


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dtypes(label: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The most frequent dtype of a model's tensors, and the names of those that have another."""
    dtypes = {name: _dtype(tensor) for name, tensor in tensors.items()}
    usual = Counter(dtypes.values()).most_common(1)[0][0]
    others = {f"{label}: {name}": dtype for name, dtype in dtypes.items() if dtype != usual}
    return {label: usual} | others


def _hash(tensor: torch.Tensor) -> str:
    content = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:8]


def _scale(tensor: torch.Tensor) -> list[float | None]:
    spread = float(tensor.double().std()) if tensor.numel() > 1 else 0.0
    mean = float(tensor.double().mean())
    # Both relative to the larger one; the mean of few random numbers is a random number.
    return [number(round(mean, 1)), number(float(f"{spread:.2g}"))]


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key == "transformers_version":
            continue
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 60 else f"{text[:40]}... {hashlib.sha256(text.encode()).hexdigest()[:8]}"


# The command line


def main(arguments: list[str] | None = None) -> int:
    """Record every class that has a fixture."""
    parser = argparse.ArgumentParser(description="Record names, dtypes and numbers of transformers' own classes.")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines file; an interrupted run resumes from it")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="architectures; default: all that have a fixture")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="worker processes; default: one a core")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds for one architecture")
    options = parser.parse_args(arguments)
    names = case_names()
    if unknown := sorted(set(options.names or ()) - set(names)):
        parser.error(f"no fixture: {', '.join(unknown)}. Write it with tools.release_check.write_number_cases.")
    records = list(record_all(options.out, options.names or names, jobs=options.jobs, timeout=options.timeout))
    errors = [found for found in records if found.error_type]
    for found in errors:
        print(f"{found.architecture}: {found.section}: {found.error_type}: {found.message[:160]}")
    print(f"{len(records)} sections of {len({found.architecture for found in records})} classes, {len(errors)} errors")
    return 0


def record_all(path: Path, names: list[str], *, jobs: int, timeout: float = TIMEOUT) -> Iterator[SectionRecord]:
    """Yield a record for every section of every class: those in the file, then new ones, which are added to it.

    Args:
        path: the file of records.
        names: architectures.
        jobs: worker processes.
        timeout: seconds for one architecture.
    """
    versions = recorded_versions()
    file = OutcomeFile(path, ("architecture", "section"))
    done: dict[str, list[SectionRecord]] = {}
    for values in file:
        if values.get("versions") == versions and values["architecture"] in names:
            done.setdefault(values["architecture"], []).append(SectionRecord.from_json(values))
    finished = {name for name, records in done.items() if {found.section for found in records} == set(Section)}
    for name in sorted(finished):
        yield from done[name]
    left = {name: list(Section) for name in names if name not in finished}

    def keep(found: SectionRecord) -> SectionRecord:
        found = replace(found, versions=versions)
        left[found.architecture].remove(found.section)
        file.add(found.to_json())
        return found

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the workers
    for event in run_subjects(record, list(left), jobs=jobs, timeout=timeout):
        if isinstance(event, Result):
            yield keep(event.value)
        elif event.ending is not Ending.FINISHED:
            for section in list(left[event.subject]):
                yield keep(SectionRecord(event.subject, section, error_type=str(event.ending), message=event.detail))


def recorded_versions() -> dict[str, str]:
    """Versions of the packages that decide the records, and a hash of this module."""
    here = Path(__file__).parent
    return versions_of("torch", "transformers") | {"numbers": source_digest(*(here / name for name in OWN_SOURCES))}


if __name__ == "__main__":
    sys.exit(main())
