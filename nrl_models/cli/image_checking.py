"""Image checks of the `consistency` command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nrl_models.cli.arguments import INPUT, TEXT, input_file, require_only
from nrl_models.cli.console import show, show_report, status

if TYPE_CHECKING:
    from nrl_models.logprobs.sampling import Sampling

ImageFiles = Annotated[
    list[Path] | None,
    input_file(
        "Image file. Compare the log-probabilities of one prompt per image, instead of text prompts. --dtype is then "
        "float32 by default. Repeatable. Needs --engine vllm.",
        panel=INPUT,
    ),
]
ImagePrompt = Annotated[
    str | None,
    typer.Option(
        metavar=TEXT,
        help="Text of each prompt, after its image. \\[default: Describe the image.]",
        rich_help_panel=INPUT,
    ),
]

APPLIES = {
    *("path", "engine", "engine_option", "images", "image_prompt", "new_tokens", "temperature", "top_k", "top_p"),
    *("seed", "threshold", "noise_factor", "dtype", "ignore_config_key", "verbose", "json_file"),
}
"""Parameters of `consistency` that also apply to images."""


def check_image_files(
    context: typer.Context, files: Sequence[Path], text: str, *, sampling: Sampling, **options: Any
) -> None:
    """Compare vLLM and the trainer on image files. Exit with status 1 if they differ.

    Args:
        context: Context of the `consistency` command.
        files: Image files, each for a prompt.
        text: The text after each image.
        sampling: How the engine samples.
        options: Further keywords of `check_images`.

    Raises:
        typer.BadParameter: Another engine, or an option that does not apply to images.
    """
    require_only(context, APPLIES, "--images")
    path, engine = context.params["path"], context.params["engine"]
    if engine != "vllm" or "python" in options["engine_options"]:
        raise typer.BadParameter("--images needs --engine vllm in this environment, without --engine-option python")

    from nrl_models.common.checkpoint.resolve_folder import resolve_folder
    from nrl_models.consistency.vision.image_check import check_images
    from nrl_models.consistency.vision.image_files import ImageReport, file_prompt
    from nrl_models.inputs.processors import load_processor

    folder = resolve_folder(path)
    processor = load_processor(folder)
    prompts = [file_prompt(processor, file, text) for file in files]
    with status("comparing images"):
        comparisons = check_images(folder, prompts, sampling=sampling, **options)
    report = ImageReport(path, files, comparisons)
    show(report.summary)
    show_report(report, context.params["json_file"])
