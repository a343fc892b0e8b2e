"""Targeted checks for known failure modes, with the output of NeMo RL's model diagnostics.

| | command | check |
|---|---|---|
| 1 | `max-model-len` | the engine enforces its maximum length |
| 2 | `decode-vs-prefill` | decoding has the same log-probabilities as a prefill |
| 3 | `embeddings` | no embedding row is untrained: zero, constant, duplicated, or part of a cluster |
| 4 | `precision` | compiled modes have the same log-probabilities as eager mode; informative |
| 5 | `prefix-caching` | no NaN if an answer is part of the next prompt |
"""

from nrl_models.diagnostics.embeddings import diagnose_embeddings
from nrl_models.diagnostics.engine_checks import (
    diagnose_decode_vs_prefill,
    diagnose_max_model_len,
    diagnose_precision,
    diagnose_prefix_caching,
)
from nrl_models.diagnostics.result import Diagnosis

__all__ = [
    "Diagnosis",
    "diagnose_decode_vs_prefill",
    "diagnose_embeddings",
    "diagnose_max_model_len",
    "diagnose_precision",
    "diagnose_prefix_caching",
]
