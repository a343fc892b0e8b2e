"""Plan a new family from a configuration and the model class that it names."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models import registry
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.config.keys import BOOKKEEPING
from nrl_models.common.process_state import BUILDING
from nrl_models.common.upstream import architectures_of
from nrl_models.errors import NRLModelsError, StateDictError, one_line
from nrl_models.families import folders
from nrl_models.loading.fit import fit_checkpoint
from nrl_models.loading.read_config import read_config
from nrl_models.loading.shared_classes import shared_class_note
from nrl_models.onboarding.detect import Detection, detect
from nrl_models.onboarding.inspect import ModelKind, kinds_of

HEADS = ("ForSequenceClassification", "ForTokenClassification")
"""Heads of the same model that a family also serves, in addition to the requested one."""

NOT_STRUCTURE = BOOKKEEPING | {"output_attentions", "output_hidden_states", "problem_type", "return_dict", "use_cache"}
"""Configuration keys that are unrelated to layers."""


class OnboardingError(NRLModelsError, ValueError):
    """Error if a family cannot or must not be created. Nothing was written."""


@dataclass(frozen=True)
class FamilyPlan:
    """A family that is not written yet.

    Args:
        name: Name of its package: the configuration's `model_type`.
        architectures: Architectures that it serves. The first is the requested one.
        model_class: The Hugging Face class of the first architecture.
        config: The configuration that the plan is based on.
        kinds: Kinds of the model.
        nearest: The family whose configuration shares most keys with this one, and the fraction; None if none does.
        detection: Result of the detection of fusable linears.
        tiny: Values for the tests' model: values of the configuration that are neither sizes nor defaults of the class.
        undecided: Open decisions that were found without running a test.
    """

    name: str
    architectures: tuple[str, ...]
    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    kinds: tuple[ModelKind, ...]
    nearest: tuple[str, float] | None
    detection: Detection
    tiny: Mapping[str, Any] = field(default_factory=dict)
    undecided: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """Linears with a common input that cannot be fused, with the reason. They need no decision."""
        return [f"{layer}: {reason}" for layer, reasons in self.detection.obstacles.items() for reason in reasons]


def plan_family(source: str | Path, name: str | None = None, *, again: bool = False) -> FamilyPlan:
    """Plan a family: read a configuration, and the headers of weights next to it, and detect fusable linears.

    Args:
        source: A directory with a `config.json`, or such a file.
        name: Name of the package. None uses the configuration's `model_type`.
        again: Whether to allow architectures that a family already serves.

    Raises:
        OnboardingError: If there is no such file, the installed transformers lacks the architecture, or a family
            already serves it.
        RemoteCodeError: If the model needs its own code.
    """
    path = Path(source)
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json" if path.is_dir() else path).is_file():
        raise OnboardingError(f"{source}: expected a directory with a config.json, or such a file")
    config = read_config(path)
    model_class = _class_of(config, source)
    architecture = model_class.__name__
    if not again and architecture in registry.architectures():
        module, _ = registry.MODEL_ARCH_MAPPING[architecture]
        raise OnboardingError(f"{architecture} is already served by {module}: nothing was written")
    tiny = structure_of(config)
    detection = detect(model_class, overrides=tiny)
    undecided = []
    if not detection.ok:
        message = (
            f"the tiny model fails at the step '{detection.step}': {detection.failure}. Find values for `tiny` that let"
        )
        message += " it build and run (nrl_models/testing/sizes.py has the rules)."
        undecided.append(message)
    for layer, names in detection.uncalled.items():
        undecided.append(f"{layer}: {', '.join(names)} was never called; decide whether it belongs to a group")
    undecided += misfits(model_class, config, folder)
    return FamilyPlan(
        name=(name or config.model_type).replace("-", "_").replace(".", "_"),
        architectures=(architecture, *heads_beside(model_class, config)),
        model_class=model_class,
        config=config,
        kinds=tuple(kinds_of(config)),
        nearest=nearest_family(config),
        detection=detection,
        tiny=tiny,
        undecided=tuple(undecided),
    )


def _class_of(config: PreTrainedConfig, source: str | Path) -> type[PreTrainedModel]:
    names = config.architectures or architectures_of(config.model_type)[:1]
    if len(names) != 1:
        raise OnboardingError(f"{source}: its `architectures` is {names}, expected one name")
    model_class = getattr(transformers, names[0], None)
    if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
        return model_class
    if note := shared_class_note(config):
        raise OnboardingError(f"{source}: {note}. It needs no family: nothing was written")
    raise OnboardingError(
        f"{source} is a {names[0]}, which transformers {transformers.__version__} does not have. Install one that has "
        "it, or write the family by hand (docs/add-a-family.md): with its modeling code or, if the code of a class of "
        "transformers fits, as under `Outside this repository`."
    )


def heads_beside(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> tuple[str, ...]:
    """Return names of classification heads for the same model in the module of a causal language model.

    Heads that are built around another model are left out: an encoder with its decoder, of which only the decoder
    generates.
    """
    base, causal, _ = model_class.__name__.partition("ForCausalLM")
    names = [base + head for head in HEADS] if causal else []
    module = import_module(model_class.__module__)
    heads = [name for name in names if hasattr(module, name) and hasattr(transformers, name)]
    trunk = _trunk_of(model_class, config) if heads else None
    return tuple(name for name in heads if _trunk_of(getattr(module, name), config) is trunk)


def _trunk_of(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> type | None:
    """Return the class of a model without its head; None if it cannot be built from this configuration."""
    try:
        with BUILDING, torch.device("meta"):
            return type(model_class._from_config(copy.deepcopy(config)).base_model)
    except Exception:  # the detection reports the reason
        return None


def structure_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return values of a configuration that differ from its class's defaults: flags, names and None, but no sizes."""
    default = type(config)().to_dict()
    return {
        key: value
        for key, value in config.to_dict().items()
        if not (key in default and default[key] == value)
        and not (key in NOT_STRUCTURE or key.startswith("_") or key.endswith("_token_id"))
        and (value is None or isinstance(value, bool | str))
    }


def nearest_family(config: PreTrainedConfig) -> tuple[str, float] | None:
    """Return the family with a separate package whose configuration shares most keys (Jaccard index)."""
    keys = set(config.to_dict()) - NOT_STRUCTURE
    scores = {}
    for family, facts in folders().items():
        if not any(registry.unmet_requirement(name) for name in facts.architectures):
            model_class: Any = registry.model_class(facts.architectures[0])
            other = set(model_class.reference_class().config_class().to_dict()) - NOT_STRUCTURE
            scores[family] = len(keys & other) / len(keys | other)
    best = max(scores, key=scores.__getitem__)
    return (best, round(scores[best], 2)) if scores[best] > 0 else None


def misfits(model_class: type[PreTrainedModel], config: PreTrainedConfig, folder: Path) -> list[str]:
    """Return mismatches between a class and the weights in `folder`, if there are any. Reads only headers."""
    if not any(folder.glob("*.safetensors")):
        return []
    try:
        files = CheckpointFiles(folder)
        with BUILDING, torch.device("meta"):
            model = model_class._from_config(config)
        with closing(files):
            fit_checkpoint(model, files, dtype=torch.float32)
    except StateDictError as error:
        return [str(problem) for problem in error.problems]
    except Exception as error:
        return [f"the class cannot be built at full size: {one_line(error)}"]
    return []
