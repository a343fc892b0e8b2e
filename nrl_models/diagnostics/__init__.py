"""Targeted checks for known failure modes, with the output of NeMo RL's model diagnostics.

| | command | what it checks |
|---|---|---|
| 1 | `max-model-len` | the engine enforces its longest sequence |
| 2 | `decode-vs-prefill` | decoding gives the same log-probabilities as a prefill |
| 3 | `embeddings` | no embedding row was left untrained: zero, constant, a duplicate, one of a cluster |
| 4 | `precision` | compiled modes give the same log-probabilities as eager; informative |
| 5 | `prefix-caching` | no NaN where an answer is part of the next prompt |
"""
