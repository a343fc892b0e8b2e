"""The pipeline stages of a rank: the complete model, with modules of other stages emptied.

Every stage runs the unmodified Hugging Face forward from its beginning. Layers of earlier stages return their input.
The first layer of the stage reads the received hidden states instead. The layer after the last one ends the forward.
Modules before the layers return zeros if the stage does not need them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.upstream_torch import tree_map_only
from nrl_models.distributed.pipeline.crossing import hidden_of, replaced
from nrl_models.distributed.pipeline.cut import Cut
from nrl_models.distributed.tensor.local_tensors import become
from nrl_models.errors import Problem, ProblemKind, ShardingError


class Stages:
    """The pipeline stages of a rank.

    Args:
        cut: Split of the complete model.
        held: Numbers of this rank's stages.
        stack: Name of the model's list of layers.

    Attributes:
        running: Number of the stage that is running; None between steps.
        received: Hidden states from the previous stage.
    """

    running: int | None = None
    received: torch.Tensor | None = None

    def __init__(self, cut: Cut, held: Sequence[int], stack: nn.ModuleList) -> None:
        self.cut, self.held, self.stack = cut, tuple(held), stack
        layer_indices = {index for stage in held for index in cut.layers(stage)}
        for index, layer in enumerate(stack):
            if index not in layer_indices:
                stack[index] = PassOn(layer.to("meta"), self)
        self._first_layer = stack[cut.layers(held[0]).start]
        self._layers = {stage: self._layers_of(stage) for stage in held}

    @property
    def device(self) -> torch.device:
        """Device on which the stages compute."""
        return next(self._first_layer.parameters()).device

    def require_running(self) -> int:
        """Return the number of the stage that is running.

        Raises:
            ShardingError: If no stage is running, because the model or a part of it was called directly.
        """
        if self.running is None:
            noun = "stage" if len(self.held) == 1 else "stages"
            detail = f"has {noun} {' and '.join(map(str, self.held))} of {self.cut.stages}, and cannot compute alone"
            problem = Problem(ProblemKind.MESH, "this rank", detail)
            advice = [
                "use nrl_models.distributed.Pipeline: `step` takes a complete batch on every rank, and `evaluate` "
                "returns values computed from logits, such as log-probabilities",
            ]
            raise ShardingError("a model over the stages of a pipeline was called", [problem], advice)
        return self.running

    @contextmanager
    def only(self, stage: int, received: torch.Tensor | None) -> Iterator[None]:
        """Restrict the model's list of layers to the layers of one stage while the context is open."""
        layers, self.stack._modules = self.stack._modules, self._layers[stage]
        self.received = received
        try:
            yield
        finally:
            self.stack._modules, self.received = layers, None

    def _layers_of(self, stage: int) -> dict[str, nn.Module]:
        layer_range = self.cut.layers(stage)
        layers: dict[str, nn.Module] = {}
        for index, layer in enumerate(self.stack):
            if index == layer_range.stop:
                layers[str(index)] = End(layer)
            elif index not in layer_range:
                layers[str(index)] = PassOn(layer, self)
            else:
                layers[str(index)] = Entry(layer, self) if index == layer_range.start and stage > 0 else layer
        return layers


class StandIn(nn.Module):
    """Replaces a module. It has the module's attributes, but not its parameters.

    Args:
        was: The replaced module.
        stages: Stages of this rank, if its forward uses them.
    """

    def __init__(self, was: nn.Module, stages: Stages | None = None) -> None:
        super().__init__()
        self.__dict__["was"] = was.was if isinstance(was, StandIn) else was
        self.__dict__["stages"] = stages

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["was"], name)


class PassOn(StandIn):
    """A layer of another stage: returns its hidden states unchanged."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states; other results of the layer are None."""
        self.stages.require_running()
        _, hidden = hidden_of(args, kwargs)
        returns = self.stages.cut.crossing.returns
        if returns is None:
            return hidden
        position, count = returns
        return tuple(hidden if number == position else None for number in range(count))


class Entry(StandIn):
    """The first layer of a stage: runs on the received hidden states."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on the received hidden states. Same other arguments and results."""
        key, _ = hidden_of(args, kwargs)
        received = self.stages.received
        assert received is not None
        args, kwargs = replaced(args, kwargs, key, received)
        return self.was(*args, **kwargs)


class End(StandIn):
    """The first layer of the next stage: ends the forward."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `StageEndError` with the hidden states to send."""
        _, hidden = hidden_of(args, kwargs)
        raise StageEndError(hidden) from None


class StageEndError(BaseException):
    """Ends the forward of a stage. `OverStages` catches it; as a `BaseException`, error handlers do not.

    Args:
        hidden: Hidden states to send.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Absent(StandIn):
    """A module outside the layers that no stage of this rank needs: returns zeros of the module's output shapes.

    Args:
        was: The replaced module.
        stages: Stages of this rank.
    """

    def __init__(self, was: nn.Module, stages: Stages) -> None:
        super().__init__(was.to("meta", stages.cut.dtype), stages)

    def __getattr__(self, name: str) -> Any:
        attribute = super().__getattr__(name)
        # Code reads its device, dtype and shape. The expanded tensor uses no memory.
        return self._zeros(attribute).expand(attribute.shape) if isinstance(attribute, torch.Tensor) else attribute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute only shapes."""
        self.stages.require_running()
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        with torch.no_grad():
            shapes = self.was(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda shape: self._zeros(shape, *shape.shape), shapes)

    def _zeros(self, like: torch.Tensor, *sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, dtype=like.dtype, device=self.stages.device)


class OverStages(nn.Module):
    """Mixin whose forward runs one stage, from received to sent hidden states."""

    stages: Stages

    def forward(self, received: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        """Run a stage.

        Args:
            received: Hidden states from the previous stage. The first stage ignores them.
            kwargs: Inputs of the complete model.

        Returns:
            Hidden states for the next stage; logits from the last stage.
        """
        with self.stages.only(self.stages.require_running(), received):
            try:
                output = super().forward(**kwargs, use_cache=False)
            except StageEndError as end:
                return end.hidden.contiguous()  # gloo requires contiguous tensors
        return output.logits if hasattr(output, "logits") else output[0]


def keep_stages(model: PreTrainedModel, cut: Cut, held: Sequence[int]) -> Stages:
    """Remove, in place, all modules that the given stages do not need.

    Args:
        model: A model with values or on meta.
        cut: Split of the model.
        held: Numbers of the stages to keep.
    """
    stack = model.get_submodule(cut.crossing.stack)
    assert isinstance(stack, nn.ModuleList)
    inside = {id(module) for layer in stack for module in layer.modules()}
    stages = Stages(cut, held, stack)
    needed = frozenset().union(*map(cut.outside, held))
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in inside or isinstance(module, StandIn):
            continue
        dot = f"{name}." if name else ""
        within = {f"{dot}{inner}" for inner, _ in module.named_parameters(remove_duplicate=False)}
        attributes = [attribute for attribute, value in module._parameters.items() if value is not None]
        if attributes and needed.isdisjoint(within):
            model.set_submodule(name, Absent(module, stages))
            inside |= {id(inner) for inner in module.modules()}
            continue
        for attribute in attributes:  # unneeded parameters of a module with needed ones
            if f"{dot}{attribute}" not in needed:
                module.__dict__[attribute] = module._parameters.pop(attribute).to("meta", cut.dtype)
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.all_tied_weights_keys = {name: source for name, source in ties.items() if {name, source} <= names}
    cast(Any, model).stages = stages
    become(model, OverStages)
    return stages
