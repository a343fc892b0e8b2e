"""Freeze components of a model by name, and select the parameters to train.

The keys are those of NeMo's `freeze_config`. NeMo ignores a misspelled key, and its component is trained; here it
raises an error. Recipes of different models often share a block, so a component that a model lacks is only logged. The
modules of a component follow from the model, because transformers declares decoder, towers and routers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.logs import get_logger
from nrl_models.common.model_components.routers import routers_of
from nrl_models.common.modules import input_embeddings
from nrl_models.common.recording import modules_running
from nrl_models.errors import UnknownArgumentError, did_you_mean, listed, shown

logger = get_logger(__name__)

COMPONENTS: dict[str, str] = {
    "freeze_vision_tower": "the encoder of images and videos, with its merger where that is a part of it",
    "freeze_audio_tower": "the encoder of audio",
    "freeze_projector": "all other modules: mostly those that connect towers and decoder",
    "freeze_language_model": "the decoder, with its embeddings and routers",
    "freeze_embeddings": "the decoder's embeddings",
    "freeze_routers": "the modules that choose experts",
    "freeze_lm_head": "the output embeddings, or the head of a classifier",
}
"""Keys of a freeze configuration, and the component that each key freezes."""

SHORT_NAMES: dict[str, str] = {
    key.removeprefix("freeze_").removesuffix("_tower").removesuffix("_model"): key for key in COMPONENTS
}
"""Shorter names of the keys: `vision`, `audio`, `projector`, `language`, `embeddings`, `routers`, `lm_head`."""

_WITHIN = {"freeze_embeddings": "freeze_language_model", "freeze_routers": "freeze_language_model"}
"""Components that are parts of another one. The key of the part takes precedence."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """Result of a freeze configuration.

    Args:
        frozen: Number of frozen parameters of each component.
        trainable: Number of parameters that are trained.
        total: Number of all parameters, counting tied ones once.
        absent: Keys of components that the model lacks.
    """

    frozen: dict[str, int]
    trainable: int
    total: int
    absent: tuple[str, ...] = ()


def freeze(model: PreTrainedModel, config: Mapping[str, bool]) -> Frozen:
    """Freeze or unfreeze components of a model. Components that are not named do not change.

    Call it before creating the optimizer. Sharded models are supported.

    Args:
        model: The model.
        config: Whether to freeze each component, by key of `COMPONENTS` or name in `SHORT_NAMES`. Embeddings and
            routers are parts of the language model: their keys take precedence over its key. Components that the model
            lacks are reported in the log and in the result. False unfreezes a component, except parameters that
            transformers builds frozen (computed positions, corrections set by a router's load balancing).

    Raises:
        UnknownArgumentError: If `config` is not a dictionary, a key is not a component (with the nearest names), a
            component has two names, a value is neither True nor False, components that share a tensor (a tied head)
            have different values, or nothing is left to train. Then nothing is frozen.

    Examples:
        >>> import torch
        >>> from nrl_models import AutoModelForCausalLM, freeze, trainable_parameters
        >>> model = AutoModelForCausalLM.from_pretrained("demo/checkpoint")
        >>> frozen = freeze(model, {"freeze_embeddings": True})
        >>> model.get_input_embeddings().weight.requires_grad
        False
        >>> optimizer = torch.optim.AdamW(trainable_parameters(model))
    """
    components = components_of(model)
    config = _by_key(config, type(model).__name__)
    absent = tuple(key for key in config if key not in components)
    config = {key: value for key, value in config.items() if key in components}
    wanted: dict[int, tuple[str, bool]] = {}
    conflicts: list[str] = []
    # Parts first: the language model skips their parameters. Towers and heads may share parameters with it.
    for key in sorted(config, key=lambda key: key not in _WITHIN):
        for name, parameter in components[key].items():
            chosen_by, frozen = wanted.setdefault(id(parameter), (key, config[key]))
            if frozen != config[key] and _WITHIN.get(chosen_by) != key:
                conflicts.append(f"{name} is a part of {chosen_by}={frozen} and of {key}={config[key]}")
    if conflicts:
        raise UnknownArgumentError(
            f"one tensor cannot be frozen and trained: {'; '.join(conflicts)} (tied weights). Give both the same value."
        )
    parameters = list(model.parameters())
    unfrozen = {key for key, (_, frozen) in wanted.items() if not frozen}
    built_frozen = _built_frozen(model, unfrozen)
    unfrozen -= {id(parameter) for parameter in built_frozen.values()}
    trains = {id(parameter): parameter.requires_grad for parameter in parameters}
    trains |= {key: key in unfrozen for key in wanted}
    if parameters and not any(trains.values()):
        raise UnknownArgumentError(f"nothing of {type(model).__name__} would train: {dict(config)}")
    if absent:
        logger.warning(
            f"{type(model).__name__} has no component for {', '.join(absent)}: there is nothing of it to freeze or "
            f"to train. It has {', '.join(components)}."
        )
    if built_frozen:
        logger.warning(
            f"{type(model).__name__} is built with {len(built_frozen)} frozen parameters, which stay frozen: "
            f"{listed(sorted(built_frozen))}. To train them, set requires_grad, or the key of the configuration that "
            "freezes them."
        )
    for parameter in parameters:
        parameter.requires_grad_(trains[id(parameter)])
    counts = {key: _size(component.values(), requires_grad=False) for key, component in components.items()}
    trainable = _size(parameters, requires_grad=True)
    return Frozen(counts, trainable, trainable + _size(parameters, requires_grad=False), absent)


def _built_frozen(model: PreTrainedModel, unfrozen: Collection[int]) -> dict[str, nn.Parameter]:
    """Return the parameters with these ids that are frozen now and in a new model of this class."""
    frozen = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and id(parameter) in unfrozen
    }
    if not frozen:
        return {}
    with torch.device("meta"):
        new = dict(type(model)(copy.deepcopy(model.config)).named_parameters())
    return {name: frozen[name] for name in frozen if name in new and not new[name].requires_grad}


def _size(parameters: Iterable[nn.Parameter], *, requires_grad: bool) -> int:
    """Return the number of elements of parameters with this `requires_grad`."""
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad is requires_grad)


def freeze_unreachable(model: nn.Module, run: Callable[[], torch.Tensor]) -> dict[str, str]:
    """Freeze the parameters that cannot receive a gradient from a loss, and return them with the reason.

    An optimizer has no state for such parameters, so resuming with `torch.distributed.checkpoint` fails. Examples:
    projections that no layer calls, or a tower in text-only training.

    Args:
        model, run: See `unreachable_parameters`.

    Returns:
        The reason by name, for parameters that were not frozen before.
    """
    parameters = dict(model.named_parameters())
    reasons = {
        name: reason
        for name, reason in unreachable_parameters(model, run).items()
        if name in parameters and parameters[name].requires_grad
    }
    for name in reasons:
        parameters[name].requires_grad_(False)
    return reasons


def unreachable_parameters(model: nn.Module, run: Callable[[], torch.Tensor]) -> dict[str, str]:
    """Find the parameters that cannot receive a gradient from a loss.

    Traverses the loss's graph without a backward pass. The result is specific to the inputs: text-only inputs do not
    reach a vision tower.

    Args:
        model: The model, in the mode and with the settings of training.
        run: Computes the loss, a scalar or any tensor with a graph, on some input.

    Returns:
        The reason by parameter name, in the model's order.

    Raises:
        ValueError: If the result of `run` has no graph.
    """
    called: set[str] = set()
    with torch.enable_grad(), modules_running(model, lambda name, *_: called.add(name)):
        loss = run()
    if loss.grad_fn is None:
        raise ValueError("the loss has no graph: every parameter is frozen, or `run` computes it under torch.no_grad()")
    reached = _leaves(loss)
    result = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            result[name] = "is frozen (requires_grad=False)"
        elif id(parameter) not in reached:
            owner = name.rpartition(".")[0]
            result[name] = "is computed with, but the loss does not depend on it" if owner in called else _UNCALLED
    return result


_UNCALLED = "belongs to a module that is never called"


def _leaves(loss: torch.Tensor) -> set[int]:
    """Return the ids of the leaves of `loss`'s graph."""
    leaf_ids: set[int] = set()
    seen: set[Any] = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaf_ids.add(id(node.variable))
        nodes += [following for following, _ in node.next_functions]
    return leaf_ids


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters for an optimizer: all that require grad, tied ones once.

    Raises:
        ValueError: If there are none.
        UnknownArgumentError: If `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise UnknownArgumentError(f"model={shown(model)}: expected a model")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(f"every parameter of {type(model).__name__} is frozen: there is nothing to train")
    return parameters


def components_of(model: PreTrainedModel) -> dict[str, dict[str, nn.Parameter]]:
    """Return the parameters of each component that a model has, by key of `COMPONENTS` and parameter name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decoder = model.get_decoder()
    towers = {modality: _towers(model, modality) for modality in ("image", "audio")}
    in_towers = {
        module for modality_towers in towers.values() for tower in modality_towers for module in tower.modules()
    }
    embeddings = [
        input_embeddings(model),
        *(module for module in decoder.modules() if isinstance(module, nn.Embedding) and module not in in_towers),
    ]
    heads = [model.get_output_embeddings(), *(getattr(model, name, None) for name in ("score", "classifier"))]
    parts = {
        "freeze_vision_tower": _parameters(towers["image"], names),
        "freeze_audio_tower": _parameters(towers["audio"], names),
        "freeze_embeddings": _parameters(embeddings, names),
        "freeze_routers": _parameters(routers_of(model, decoder), names),
        "freeze_lm_head": _parameters(heads, names),
    }
    # Some models are their own decoder, and have their towers and their head in it.
    text = parts["freeze_embeddings"] | _parameters([decoder], names)
    outside = {name for key in parts if key not in _WITHIN for name in parts[key]} - parts["freeze_embeddings"].keys()
    parts["freeze_language_model"] = {name: parameter for name, parameter in text.items() if name not in outside}
    others = {name for component in parts.values() for name in component}
    parts["freeze_projector"] = {name: parameter for name, parameter in model.named_parameters() if name not in others}
    return {key: parts[key] for key in COMPONENTS if parts[key]}


def _towers(model: PreTrainedModel, modality: str) -> list[nn.Module]:
    """Return the tower of a modality. transformers returns the model itself if it has none."""
    tower = model.get_encoder(modality=modality)
    return [tower] if isinstance(tower, nn.Module) and tower not in (model, model.base_model) else []


def _parameters(modules: Iterable[nn.Module | None], names: Mapping[int, str]) -> dict[str, nn.Parameter]:
    return {
        names[id(parameter)]: parameter for module in modules if module is not None for parameter in module.parameters()
    }


def _by_key(config: Mapping[str, bool], model: str) -> dict[str, bool]:
    """Validate a freeze configuration, and return it by key of `COMPONENTS`."""
    if not isinstance(config, Mapping):
        example = f"{{{config!r}: True}}" if config in (*COMPONENTS, *SHORT_NAMES) else '{"freeze_vision_tower": True}'
        raise UnknownArgumentError(f"config={shown(config)}: expected a dictionary, for example {example}")
    settings: dict[str, bool] = {}
    wrong = []
    for name, value in config.items():
        key = SHORT_NAMES.get(name, name)
        if key not in COMPONENTS:
            wrong.append(name + did_you_mean(name, [*COMPONENTS, *SHORT_NAMES]))
        elif not isinstance(value, bool):
            wrong.append(f"{name}={value!r} (neither True nor False)")
        elif key in settings:
            wrong.append(f"{name} (also passed as {key})")
        else:
            settings[key] = value
    if wrong:
        raise UnknownArgumentError(
            f"cannot freeze parts of {model}: {', '.join(wrong)}. Expected True or False for some of "
            f"{', '.join(COMPONENTS)}"
        )
    return settings
