"""Build prompts from image files, and report how an engine and the trainer compare on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from rich.markup import escape

from nrl_models.common.value_checks import finite_or_none
from nrl_models.consistency.vision.image_check import ImageComparison, ImagePrompt
from nrl_models.logprobs.metrics import shown_error
from nrl_models.parity.parity_report import Outcome, Unit, passed_line
from nrl_models.parity.result_table import ResultTable


def file_prompt(processor: Any, file: Path, text: str) -> ImagePrompt:
    """Create a prompt from an image file followed by a text.

    The prompt is a user message in the processor's chat template. Without a template, it is the processor's image
    placeholder, if there is one, and the text.

    Raises:
        OSError: If Pillow cannot read the file.
    """
    image = Image.open(file).convert("RGB")
    if getattr(processor, "chat_template", None):
        message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
        prompt = processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        return ImagePrompt(prompt, (image,))
    placeholder = getattr(processor, "image_placeholder_token", getattr(processor, "image_token", ""))
    return ImagePrompt(f"{placeholder} {text}".lstrip(), (image,))


@dataclass(frozen=True, slots=True)
class ImageReport:
    """Result of a check of image files.

    Args:
        path: The checkpoint.
        files: The image files, one per prompt.
        comparisons: Result of each prompt.
    """

    path: Path
    files: Sequence[Path]
    comparisons: Sequence[ImageComparison]

    @property
    def passed(self) -> bool:
        """Whether every prompt passed."""
        return all(comparison.passed for comparison in self.comparisons)

    @property
    def title(self) -> str:
        """Checkpoint and compared sides."""
        return f"{self.path}: vLLM and the trainer on images"

    @property
    def summary(self) -> str:
        """The result in one line: the number of images that passed."""
        passed = sum(comparison.passed for comparison in self.comparisons)
        return f"{passed_line(self.passed, passed, len(self.comparisons), 'images')}: {self.title}"

    def table(self) -> ResultTable:
        """Return a table with a row for each image."""
        table = ResultTable(title=escape(self.title))
        table.add_column("image", no_wrap=True)
        for name in ("size", "tokens", "decode", "prefill", "bound"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("differs first", overflow="fold")
        table.add_column("verdict")
        for file, comparison in zip(self.files, self.comparisons, strict=True):
            errors = comparison.decode, comparison.prefill, comparison.bound
            table.add_row(
                escape(file.name),
                "x".join(map(str, comparison.sizes[0])),
                f"{comparison.prompt_tokens}+{comparison.new_tokens}",
                *(shown_error(error, aligned=True) for error in errors),
                comparison.fault or "-",
                Outcome.of(comparison.passed).markup,
            )
        return table

    def to_json(self) -> dict[str, Any]:
        """Return `{"verdict", "checkpoint", "images": [{"file", "verdict", "value", "unit", "fault", ...}]}`."""
        return {
            "verdict": Outcome.of(self.passed),
            "checkpoint": str(self.path),
            "images": [
                {"file": str(file), "verdict": Outcome.of(comparison.passed)}
                | {
                    "value": finite_or_none(comparison.worst),
                    "unit": Unit.TOKEN_MULT_PROB_ERROR,
                }
                | finite_or_none(asdict(comparison))
                for file, comparison in zip(self.files, self.comparisons, strict=True)
            ],
        }
