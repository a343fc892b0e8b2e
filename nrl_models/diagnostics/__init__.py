"""Small checks of single things that have gone wrong before, with the output of NeMo RL's model diagnostics.

| | command | what it checks |
|---|---|---|
| 1 | `max-model-len` | the engine keeps to the longest sequence it was told |
| 2 | `decode-vs-prefill` | decoding gives the log-probabilities of one prefill |
| 3 | `embeddings` | no embedding row is zero or constant |
| 4 | `precision` | compiled modes give eager's log-probabilities; informative |
| 5 | `prefix-caching` | no NaN once an answer is part of the next prompt |
"""
