"""Let a torchvision that was built for CUDA be imported without it; `make setup` and `make test-engine` run this once.

The builds on PyPI want CUDA's libraries for their compiled operators. Where these do not load, torchvision goes on
without them, but for two whose declaration it takes for granted. timm's towers and vLLM's models of images import
torchvision for what is written in Python (resizing), which needs no compiled operator.
"""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

DECLARE = """
if not _has_ops():  # added by nrl_models: built for CUDA, which is not here
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    """Add the declarations to the installed torchvision, once."""
    file = Path(distribution("torchvision").locate_file("torchvision/extension.py"))
    text = file.read_text()
    if DECLARE not in text:
        file.write_text(text + DECLARE)


if __name__ == "__main__":
    main()
