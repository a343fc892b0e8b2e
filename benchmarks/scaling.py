"""Write the table in docs/memory.md: memory of published models per rank, as `nrl-models plan` estimates it.

The figures are estimates from configurations on the meta device. tests/distributed/test_estimate.py compares such
estimates with measured memory on small meshes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "memory.md"
BEGIN, END = "<!-- begin: python -m benchmarks.scaling -->\n", "<!-- end -->\n"
MEMORY = 80
"""Memory of a device in GiB."""


def _decoder(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, groups: int, **more: Any) -> Any:
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, **more,
    }  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row: a published model, given by its sizes, on a mesh."""

    model: str
    kind: str
    values: dict[str, Any]
    mesh: str
    seq_len: int = 4096


_LLAMA_8B = _decoder(128256, 4096, 14336, 32, 32, 8)
_LLAMA_70B = _decoder(128256, 8192, 28672, 80, 64, 8)
_QWEN_30B = _decoder(
    151936, 2048, 6144, 48, 32, 4, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
)
_QWEN_235B = _decoder(
    151936, 4096, 12288, 94, 64, 4, head_dim=128, moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8
)

CASES = [
    Case("Llama-3.1-8B", "Llama", _LLAMA_8B, "fsdp=8"),
    Case("Llama-3.1-8B", "Llama", _LLAMA_8B, "fsdp=8", seq_len=32768),
    Case("Llama-3.1-8B", "Llama", _LLAMA_8B, "fsdp=2,tp=4", seq_len=32768),
    Case("Qwen3-30B-A3B", "Qwen3Moe", _QWEN_30B, "fsdp=16"),
    Case("Qwen3-30B-A3B", "Qwen3Moe", _QWEN_30B, "fsdp=2,ep=8"),
    Case("Llama-3.1-70B", "Llama", _LLAMA_70B, "fsdp=16"),
    Case("Llama-3.1-70B", "Llama", _LLAMA_70B, "fsdp=32"),
    Case("Llama-3.1-70B", "Llama", _LLAMA_70B, "fsdp=4,tp=8"),
    Case("Qwen3-235B-A22B", "Qwen3Moe", _QWEN_235B, "fsdp=64"),
    Case("Qwen3-235B-A22B", "Qwen3Moe", _QWEN_235B, "fsdp=16,ep=4"),
    Case("DeepSeek-V3 (671B)", "DeepseekV3", {}, "fsdp=256"),
    Case("DeepSeek-V3 (671B)", "DeepseekV3", {}, "fsdp=32,ep=8"),
    Case("DeepSeek-V3 (671B)", "DeepseekV3", {}, "fsdp=32,ep=16"),
]
"""The default values of `DeepseekV3Config` are those of the published model."""

HEAD = (
    "| model | mesh | tokens | parameters, gradients, optimizer | gathered | activations | total | sent per step "
    "| 80 GiB |"
)


def row(case: Case) -> str:
    """Format a case as a line of the table, in GiB per rank."""
    import transformers

    from nrl_models.common.mesh_sizes import parse_mesh
    from nrl_models.onboarding.estimate import estimate
    from nrl_models.onboarding.estimate_step import Setting
    from nrl_models.onboarding.plan_table import GIB

    config = getattr(transformers, f"{case.kind}Config")(**case.values, architectures=[f"{case.kind}ForCausalLM"])
    found = estimate(config, Setting(parse_mesh(case.mesh), seq_len=case.seq_len))
    kept = found.parameters + found.gradients + found.optimizer
    sent = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in found.traffic.items())
    figures = [f"{nbytes / GIB:.1f}" for nbytes in (kept, found.gathered, found.activations, found.total)]
    verdict = "fits" if found.total <= MEMORY * GIB else "does not fit"
    return f"| {case.model} | `{case.mesh}` | {case.seq_len} | {' | '.join(figures)} | {sent} | {verdict} |"


def main() -> None:
    """Estimate all cases, and write the table into the page."""
    rows = []
    for case in CASES:
        rows.append(row(case))
        print(rows[-1], file=sys.stderr)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join([HEAD, "|" + "---|" * (HEAD.count("|") - 1), *rows])
    PAGE.write_text(f"{before}{BEGIN}{table}\n{END}{after}")


if __name__ == "__main__":
    main()
