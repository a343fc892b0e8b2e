"""Qwen3.5: gated delta nets and gated attention."""
