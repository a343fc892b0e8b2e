"""The GPU kit: correctness and speed on one GPU in under ten minutes, without a network (`make gpu`).

`python -m benchmarks.gpu` runs each section of `sections.py` in a subprocess, saves the outcome of each case as it
ends, and writes one JSON file and docs/gpu.md. `--cpu` runs the same program on a CPU at tiny sizes.
"""
