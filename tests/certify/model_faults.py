"""Faults of the model's code: mutants of the catalog that concern what `certify` checks.

Not faults of fused projections: `certify` loads models with the default `combine="auto"`, which fuses none.
"""

from __future__ import annotations

LLAMA = (
    "a norm's epsilon ten times as large",
    "a norm's weight off by one",
    "a norm's weight gets no gradient",
    "another activation",
    "attention scale dropped",
    "attention begins one token late",
    "a tensor not loaded",
    "garbage in computed buffers",
    "packed documents see each other",
    "exported transposed",
)

OTHERS = (
    ("Qwen3MoeForCausalLM", "norms of queries and keys skipped"),
    ("Qwen3MoeForCausalLM", "one expert too few"),
    ("Qwen3MoeForCausalLM", "routing weights not normalized"),
    ("Qwen3MoeForCausalLM", "routing recorded and not replayed"),
    ("Qwen3MoeForCausalLM", "experts in another order"),
    ("Gemma2ForCausalLM", "final softcap missing"),
    ("Gemma2ForCausalLM", "softcap of a layer missing"),
    ("Gemma2ForCausalLM", "embedding unscaled"),
    ("Gemma2ForCausalLM", "window one word too short"),
    ("GptOssForCausalLM", "attention sinks dropped"),
    ("GptOssForCausalLM", "experts' biases dropped"),
    ("GraniteForCausalLM", "residual scale dropped"),
    ("GraniteForCausalLM", "logits scale dropped"),
    ("OPTForCausalLM", "positions counted with padding"),
    ("Mamba2ForCausalLM", "state carried over"),
)

MODEL_FAULTS = (*(("LlamaForCausalLM", name) for name in LLAMA), *OTHERS)
"""Architectures and names of mutants."""
