"""Make a torchvision built for CUDA importable without CUDA. `make setup` and `make test-engine` run this once.

The PyPI builds need CUDA's libraries for their compiled operators. If these do not load, torchvision works without
them, except for two operators whose declaration it expects. timm's towers and vLLM's image models import torchvision
only for Python code (resizing), which needs no compiled operators.
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
