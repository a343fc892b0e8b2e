"""Records of `numbers` for the library itself: code outside of transformers' models, under the name of a base class."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from tools.release_check.numbers.cases import case_names
from tools.release_check.numbers.facts import Facts, Kind, Section, fingerprint

SIZE = 8


class SmallConfig(PreTrainedConfig):
    """Configuration of a class that transformers does not define."""

    model_type = "release-check-small"


class SmallModel(PreTrainedModel):
    """A class that transformers does not define: one linear, whose initialization draws random numbers."""

    config_class = SmallConfig
    main_input_name = "inputs"

    def __init__(self, config: SmallConfig) -> None:
        super().__init__(config)
        self.linear = nn.Linear(SIZE, SIZE)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.5)
            module.bias.data.normal_(std=0.5)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> SequenceClassifierOutput:
        """Return outputs and their mean squared error. Does not accept `num_items_in_batch`."""
        logits = self.linear(inputs)
        return SequenceClassifierOutput(
            loss=None if labels is None else (logits - labels).square().mean(), logits=logits
        )


def _loaded() -> Facts:
    """Save and load a class outside of transformers."""
    torch.manual_seed(0)
    model = SmallModel(SmallConfig())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        result: Any = SmallModel.from_pretrained(folder, output_loading_info=True)
        loaded, info = result
    same = torch.equal(model.linear.weight, loaded.linear.weight) and torch.equal(model.linear.bias, loaded.linear.bias)
    return {
        Kind.LOADING: {"weights are those of the file": same, "missing": sorted(map(str, info["missing_keys"]))},
    }


def _trained() -> Facts:
    """Take one step of Trainer over two accumulated batches."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model = SmallModel(SmallConfig())
    values = torch.arange(2 * SIZE, dtype=torch.float32).view(2, SIZE) / SIZE
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1 + number, parameter.numel()).view_as(parameter))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=1,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            optim="sgd",
            learning_rate=1.0,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        data: Any = [{"inputs": row, "labels": torch.ones(SIZE)} for row in values]
        Trainer(model, arguments, train_dataset=data).train()
    moved = {name: fingerprint(before[name] - parameter) for name, parameter in model.named_parameters()}
    return {Kind.GRADIENTS: moved}


@dataclass(frozen=True)
class LibraryCase:
    """Sections under one name.

    Args:
        modules: transformers modules that they run.
        sections: The sections.
    """

    modules: tuple[str, ...]
    sections: Mapping[Section, Callable[[], Facts]]


CASES: Mapping[str, LibraryCase] = {
    "PreTrainedModel": LibraryCase(
        ("transformers.modeling_utils", "transformers.initialization", "transformers.trainer"),
        {Section.LOADING: _loaded, Section.GRADIENTS: _trained},
    ),
}


def recorded_names() -> list[str]:
    """Return all names that `numbers` records: library cases, and architectures that have a fixture."""
    return [*CASES, *case_names()]
