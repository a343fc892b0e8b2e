"""Models larger than one device: sharding, checkpoints and refit, on torch.distributed."""

from nrl_models.common.mesh_sizes import parse_mesh
from nrl_models.distributed.checked_plan import plan_for
from nrl_models.distributed.parallel_plan import ParallelPlan
from nrl_models.distributed.parallelize import parallelize
from nrl_models.distributed.pipeline.running import Pipeline
from nrl_models.distributed.pipeline.shared import clip_grad_norm_
from nrl_models.distributed.resume_checkpoints.background import CheckpointSave
from nrl_models.distributed.resume_checkpoints.resume import load_checkpoint, save_checkpoint
from nrl_models.distributed.shards import share_of

__all__ = [
    "CheckpointSave",
    "ParallelPlan",
    "Pipeline",
    "clip_grad_norm_",
    "load_checkpoint",
    "parallelize",
    "parse_mesh",
    "plan_for",
    "save_checkpoint",
    "share_of",
]
