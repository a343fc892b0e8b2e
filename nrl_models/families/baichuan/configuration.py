"""Configuration of Baichuan 1 and 2."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig, PreTrainedConfig

BAICHUAN2_VOCAB_SIZE = 125696
"""Vocabulary size of Baichuan 2. It is the only difference in published configurations that identifies Baichuan 2."""


@strict
class BaichuanConfig(PreTrainedConfig):
    """Baichuan 1 and 2, 7B (rotary positions) and 13B (ALiBi). Defaults are those of Baichuan2-7B.

    The four configurations on the hub share one `model_type` and omit different keys. This class sets the implied
    values explicitly, and saves them.

    Attributes:
        max_position_embeddings: Length of the rotary table. Configurations of the 13B models have none.
        model_max_length: Sequence length of training.
        position_embedding_type: `rotary` or `alibi`. None is `rotary` if `max_position_embeddings` is set.
        normalize_head: Whether to normalize the rows of the output embedding (`NormHead`). None enables it for the
            vocabulary size of Baichuan 2.
        z_loss_weight: Weight of the squared largest logit in the loss.
        rope_parameters: Rotary parameters. None is the default type with base 10,000.
    """

    model_type = "baichuan"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    base_model_tp_plan = LlamaConfig.base_model_tp_plan
    base_model_pp_plan = LlamaConfig.base_model_pp_plan
    attention_bias = False

    vocab_size: int = BAICHUAN2_VOCAB_SIZE
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    hidden_act: str = "silu"
    max_position_embeddings: int | None = None
    model_max_length: int = 4096
    position_embedding_type: str | None = None
    normalize_head: bool | None = None
    z_loss_weight: float | int = 0.0
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    attention_dropout: float | int = 0.0
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Set the values that published configurations imply."""
        if self.position_embedding_type is None:
            self.position_embedding_type = "alibi" if self.max_position_embeddings is None else "rotary"
        if self.normalize_head is None:
            self.normalize_head = self.vocab_size == BAICHUAN2_VOCAB_SIZE
        if self.position_embedding_type == "alibi":
            # Each head has a separate slope, and no plan shards slopes, so attention is not sharded.
            plan = {name: by for name, by in (self.base_model_tp_plan or {}).items() if ".mlp." in name}
            self.base_model_tp_plan = plan  # type: ignore[misc]
        elif self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": kwargs.pop("rope_theta", 10000.0)}
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Check values that no Baichuan model has. transformers calls this."""
        if self.position_embedding_type not in ("rotary", "alibi"):
            raise ValueError(
                f"position_embedding_type={self.position_embedding_type!r}: expected 'rotary' (7B) or 'alibi' (13B)"
            )
        if self.position_embedding_type == "rotary" and self.max_position_embeddings is None:
            raise ValueError("rotary positions need max_position_embeddings, the length they were trained for")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}"
            )

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.num_attention_heads
