"""The table of edits, and the results that most of them return."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from edits import models
from edits.outcome import TOLERANCE, Outcome


@dataclass
class Subject:
    """A model to edit, with everything an edit may need.

    Args:
        library: The model's library, `transformers` or `ours`.
        which: The configuration, a key of `models.CONFIGS`.
        dtype: The dtype of its parameters.
        folder: An empty folder to write into.

    Attributes:
        model: The model to edit, in evaluation mode.
        input_ids: Two sequences of seven tokens.
    """

    library: str
    which: str
    dtype: torch.dtype
    folder: Path

    def __post_init__(self) -> None:
        # Created now, because a first access might happen under the mode being tested.
        self.model = self.new()
        self.input_ids = torch.randint(2, 128, (2, 7), generator=torch.Generator().manual_seed(1))

    def new(self) -> PreTrainedModel:
        """Create another model of the same library with the same weights."""
        return models.BUILDERS[self.library](self.which).to(self.dtype)

    def other(self) -> PreTrainedModel:
        """Create a model of the other library with the same weights."""
        other = "ours" if self.library == "transformers" else "transformers"
        return models.BUILDERS[other](self.which).to(self.dtype)

    def hidden_states(self, seed: int = 2) -> torch.Tensor:
        """An input for a linear, of shape `(2, 7, 64)`."""
        return torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    @property
    def attention(self) -> nn.Module:
        """The first layer's attention."""
        return self.model.model.layers[0].self_attn

    @property
    def mlp(self) -> nn.Module:
        """The first layer's MLP."""
        return self.model.model.layers[0].mlp

    @property
    def q(self) -> nn.Linear:
        return self.attention.q_proj

    @property
    def k(self) -> nn.Linear:
        return self.attention.k_proj

    @property
    def v(self) -> nn.Linear:
        return self.attention.v_proj

    @property
    def gate(self) -> nn.Linear:
        return self.mlp.gate_proj

    @property
    def up(self) -> nn.Linear:
        return self.mlp.up_proj

    def part(self, name: str) -> nn.Linear:
        """Return the first layer's `q_proj`, `gate_proj`, ..."""
        return getattr(self.attention, name) if hasattr(self.attention, name) else getattr(self.mlp, name)


@dataclass(frozen=True)
class Edit:
    """An edit that a user may make to a model.

    Args:
        name: A short description.
        kind: The file that defines it.
        apply: Makes the edit and returns its outcome. If outputs do not show that the edit took place, other evidence
            is in the outcome under `seen`, which must not be empty.
        which: The configuration, a key of `models.CONFIGS`.
        dtype: The model's dtype. fp64 if rounding would be amplified.
        raises: The error that transformers' model also raises. None if nothing is raised.
        needs: Packages without which it is skipped.
        half: Whether it computes in half precision, where the fused matmul rounds once and separate matmuls once each.
        tolerance: The largest difference of outcomes, at most 2e-4. A few steps of bfloat16 if `half`.
    """

    name: str
    kind: str
    apply: Callable[[Subject], Outcome]
    which: str = "llama"
    dtype: torch.dtype = torch.float32
    raises: type[Exception] | None = None
    needs: tuple[str, ...] = ()
    half: bool = False
    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        if self.half:
            object.__setattr__(self, "tolerance", 2e-2)
        elif self.tolerance > 2e-4:
            raise ValueError(f"{self.name}: a tolerance of {self.tolerance} hides differences; at most 2e-4")

    @property
    def id(self) -> str:
        """Its kind and name."""
        return f"{self.kind}: {self.name}"


EDITS: list[Edit] = []


def edit(name: str = "", **options) -> Callable:
    """Register a function as an edit. The function name is the edit's name, unless another is passed."""

    def enter(apply: Callable[[Subject], Outcome]) -> Callable[[Subject], Outcome]:
        kind = apply.__module__.rpartition(".")[2].rstrip("_")
        add(name or apply.__name__.replace("_", " ").strip(), apply, kind=kind, **options)
        return apply

    return enter


def add(name: str, apply: Callable[[Subject], Outcome], kind: str = "", **options) -> None:
    """Register an edit, for rows created in a loop. `kind` is the calling file's name.

    Raises:
        ValueError: The name exists already.
    """
    kind = kind or sys._getframe(1).f_globals["__name__"].rpartition(".")[2].rstrip("_")
    new = Edit(name, kind, apply, **options)
    if any(known.id == new.id for known in EDITS):
        raise ValueError(f"two edits are called {new.id!r}")
    EDITS.append(new)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the gradient of every parameter, or None without a gradient."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the state dict."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def forward(subject: Subject, model: nn.Module | None = None) -> torch.Tensor:
    """Return the logits without a graph."""
    with torch.no_grad():
        model = subject.model if model is None else model
        return model(input_ids=subject.input_ids, use_cache=False).logits


def step(subject: Subject, model: nn.Module | None = None) -> dict[str, Outcome]:
    """Return logits and gradients of a forward and backward pass. Gradients accumulate."""
    model = subject.model if model is None else model
    output = model(input_ids=subject.input_ids, labels=subject.input_ids, use_cache=False)
    if output.loss.requires_grad:
        output.loss.backward()
    return {"logits": output.logits.detach(), "gradients": gradients(model)}
