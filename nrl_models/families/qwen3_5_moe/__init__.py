"""Qwen3.5-MoE: gated delta nets and gated attention."""
