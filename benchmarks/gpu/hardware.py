"""The GPU: whether there is one, its description, and its peak speed."""

from __future__ import annotations

import re
import shutil
import subprocess

from benchmarks.reporting import machine

PEAK_TFLOPS = {
    "GB300": 2500.0,
    "GB200": 2500.0,
    "B300": 2250.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A10G": 70.0,
    "A10": 125.0,
    "A6000": 154.8,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}
"""Dense bf16 matmul with fp32 accumulation, in 10^12 operations per second, from NVIDIA's data sheets. The first
name that is part of torch's device name counts."""


def peak_tflops(name: str) -> float | None:
    """Return the peak of a device by torch's name for it; None if it is not in the table."""
    return next((peak for key, peak in PEAK_TFLOPS.items() if re.search(rf"\b{key}\b", name)), None)


def why_no_gpu() -> str:
    """Return the reason why the kit cannot run on a GPU, or an empty string."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported ({error})"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return ""


def describe(cpu: bool, peak: float | None) -> dict[str, str]:
    """Describe the machine, with `peak` in TFLOPS instead of the table's."""
    import torch

    found = machine()
    if cpu:
        return found | {"accelerator": "none"}
    properties = torch.cuda.get_device_properties(0)
    known = peak or peak_tflops(properties.name)
    return found | {
        "GPU memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "CUDA": str(torch.version.cuda),
        "driver": _driver(),
        "bf16 peak": f"{known:g} TFLOPS" if known else "unknown",
    }


def _driver() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown"
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else "unknown"
