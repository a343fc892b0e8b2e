"""Memory and traffic of one rank's pipeline stage in a step, from one microbatch on meta.

The schedule is the default, 1F1B: a rank first runs the forward of as many microbatches as there are ranks from it to
the last. Then it alternates backward and forward. A step has the minimum number of microbatches: one per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PreTrainedModel

from nrl_models.distributed.mesh import rank_in, size_of
from nrl_models.distributed.pipeline.shared import held_by_several
from nrl_models.distributed.sharding import sharding_of
from nrl_models.distributed.shards import local_of


@dataclass(frozen=True)
class OneStage:
    """A rank's stage.

    Args:
        model: on meta, with that stage.
        tokens: of a micro-batch, `(sequences, length)`.
    """

    model: PreTrainedModel
    tokens: torch.Tensor

    def __post_init__(self) -> None:
        sharding = sharding_of(self.model)
        assert sharding.stages is not None
        sharding.stages.running = rank_in(sharding.mesh, "pp")

    @property
    def rank(self) -> int:
        """Of `pp`."""
        return rank_in(sharding_of(self.model).mesh, "pp")

    @property
    def ranks(self) -> int:
        """Of `pp`, all of them; and micro-batches of a step."""
        return size_of(sharding_of(self.model).mesh, "pp")

    @property
    def is_last(self) -> bool:
        """Whether the stage computes logits."""
        return self.rank == self.ranks - 1

    @cached_property
    def received(self) -> torch.Tensor:
        """Hidden states of a microbatch; token ids for the first stage."""
        stages = sharding_of(self.model).stages
        assert stages is not None
        shape = *self.tokens.shape, *stages.cut.crossing.features
        return torch.zeros(shape, dtype=stages.cut.crossing.dtype, device="meta", requires_grad=True)

    def run(self) -> torch.Tensor:
        """Return the stage's output: hidden states, or logits for the last stage."""
        return self.model(self.received, input_ids=self.tokens)

    def kept(self, nbytes: int) -> int:
        """Return the bytes kept between forward and backward, if one microbatch keeps `nbytes`.

        torch keeps sent tensors until the backward, and allocates received ones once per microbatch of a step: hidden
        states (except in the first stage), and their gradients (except in the last).
        """
        running = self.ranks - self.rank
        hidden = self.ranks * (self.rank > 0) + (self.ranks + running) * (not self.is_last)
        return running * nbytes + hidden * self.received.nbytes

    @property
    def sent(self) -> int:
        """Bytes that a rank sends per microbatch, plus gradients of shared parameters once per step."""
        shared, replicas = 0, size_of(sharding_of(self.model).mesh, "fsdp")
        for parameter, ranks in held_by_several(self.model):
            shared += local_of(parameter).nbytes // replicas * (len(ranks) - 1 if self.rank == ranks[0] else 1)
        return ((self.rank > 0) + (not self.is_last)) * self.received.nbytes + shared
