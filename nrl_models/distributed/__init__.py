"""Models larger than one device: sharding, checkpoints and refit, on torch.distributed."""

from nrl_models.distributed.checkpoint import load_checkpoint, save_checkpoint
from nrl_models.distributed.context_parallel import check_context_parallel, context_parallel
from nrl_models.distributed.parallelize import parallelize
from nrl_models.distributed.plan import ParallelPlan, plan_for
from nrl_models.distributed.saving import save_pretrained

__all__ = [
    "ParallelPlan",
    "check_context_parallel",
    "context_parallel",
    "load_checkpoint",
    "parallelize",
    "plan_for",
    "save_checkpoint",
    "save_pretrained",
]
