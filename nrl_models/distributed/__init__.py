"""Models larger than one device: sharding, checkpoints and refit, on torch.distributed."""

from nrl_models.distributed.parallelize import parallelize
from nrl_models.distributed.plan import ParallelPlan, plan_for

__all__ = ["ParallelPlan", "parallelize", "plan_for"]
