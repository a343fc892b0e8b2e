"""Log-probabilities of tokens without full logits, and metrics that compare two sets of them."""

from nrl_models.logprobs.metrics import (
    ConsistencyMetrics,
    consistency_metrics,
    js_divergence_error,
    kl_k1,
    kl_k2,
    kl_k3,
    sampling_importance_ratio,
    token_mult_prob_error,
)
from nrl_models.logprobs.rollout_batch import rollout_logprobs
from nrl_models.logprobs.sampling import Sampling
from nrl_models.logprobs.tokens import LossTerms, TokenLogprobs, token_logprobs

__all__ = [
    "ConsistencyMetrics",
    "LossTerms",
    "Sampling",
    "TokenLogprobs",
    "consistency_metrics",
    "js_divergence_error",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "rollout_logprobs",
    "sampling_importance_ratio",
    "token_logprobs",
    "token_mult_prob_error",
]
