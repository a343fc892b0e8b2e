"""Read a checkpoint's configuration, apply keyword overrides, and select the part for a model class."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nrl_models.common.checkpoint.generations import require_links_inside
from nrl_models.common.checkpoint.json_reading import read_object
from nrl_models.common.checkpoint.limits import check_limits, negative_layers
from nrl_models.common.checkpoint.local_path import CONFIG_NAME, is_gguf
from nrl_models.common.config.at_fault import keys_at_fault
from nrl_models.common.config.generation import generation_settings
from nrl_models.common.config.keys import is_value
from nrl_models.common.config.rope_keys import KEYS as ROPE_KEYS
from nrl_models.common.config.rope_keys import contradicting_keys
from nrl_models.common.config.types import with_declared_types
from nrl_models.common.config.validate import without_ignored
from nrl_models.common.config.walk import parts
from nrl_models.common.gguf import gguf_tables
from nrl_models.common.trust.hub_kernels import refuse_hub_kernels
from nrl_models.common.trust.other_models import refuse_timm_files
from nrl_models.common.upstream import class_of_transformers
from nrl_models.errors import (
    CheckpointError,
    ConfigurationError,
    NRLModelsError,
    Problem,
    ProblemKind,
    RemoteCodeError,
    UnknownArchitectureError,
    UnknownArgumentError,
    did_you_mean,
    one_line,
    shown,
)
from nrl_models.loading.keywords import unknown_keywords
from nrl_models.loading.options import KEYWORDS
from nrl_models.loading.shared_classes import shared_class_sentence, takes_config

IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Keywords that transformers handles like configuration values, although `config.json` has no such keys."""


def read_config(
    folder: Path,
    *,
    trust_remote_code: bool = False,
    ignored: Collection[str] | str = (),
    default_class: type[PreTrainedConfig] | None = None,
) -> PreTrainedConfig:
    """Read the configuration of a checkpoint.

    Args:
        folder: A directory, or the path of a configuration or GGUF file.
        trust_remote_code: Whether the checkpoint's own code may run.
        ignored: Names or paths of keys that may contradict others.
        default_class: Class of a configuration without `model_type`. None if it is not known.

    Raises:
        ConfigurationError: If `config.json` states two values for a setting of the rotary embedding.
        CheckpointError: If links leave the directory, `config.json` is not a JSON object, has an invalid value or names
            another timm model, or a GGUF file is damaged or of an architecture that transformers cannot read.
        UnknownArchitectureError: If the `model_type` is unknown, or missing without a `default_class`.
        RemoteCodeError: If the checkpoint needs its own code or a kernel of the hub, and `trust_remote_code` is not
            set.
    """
    if is_gguf(folder):
        values = gguf_tables.configuration(folder)
        config_class = CONFIG_MAPPING[values["model_type"]]
        try:
            return config_class.from_dict(with_declared_types(config_class, values, str(folder)))
        except Exception as error:
            raise _refused_values(folder, error, "correct the file's metadata, or download it again") from error
    require_links_inside(folder)
    content = read_object(_config_file(folder))
    needs_its_code = _needs_its_code(folder, content, trust_remote_code, default_class)
    try:
        if default_class is not None and not content.get("model_type"):
            config = default_class.from_pretrained(folder, model_type=default_class.model_type)
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=needs_its_code)
    except StrictDataclassFieldValidationError as refused:
        if needs_its_code:
            raise own_code_failed(folder, refused) from refused
        try:
            config = _with_declared_types(folder, default_class)
        except Exception as error:
            raise _refused_values(folder, error, "use a value of the expected type") from refused
    except Exception as error:  # any error of a configuration's class for invalid values
        if needs_its_code:
            raise own_code_failed(folder, error) from error
        raise _refused_values(folder, error, "correct the values that its class rejects") from error
    if needs_its_code:  # its class may treat these keys in any way
        return config
    if problems := without_ignored(contradicting_keys(content, config), ignored):
        raise ConfigurationError(f"{folder} states two rotary embeddings", problems)
    return config


def own_code_failed(folder: Path | str, error: Exception) -> NRLModelsError:
    """Return the error for a checkpoint's own code that cannot be found, imported or run."""
    if isinstance(error, NRLModelsError):
        return error
    return RemoteCodeError(
        f"{folder}: its own code, which auto_map in {CONFIG_NAME} names, failed: {one_line(error)}. Correct auto_map "
        "or the code, or install what the code needs"
    )


def generation_config(model_class: type[PreTrainedModel], folder: Path) -> GenerationConfig | None:
    """Return the generation settings of the checkpoint; None if it has none, or the model does not generate.

    Raises:
        CheckpointError: See `generation_settings`.
    """
    return generation_settings(folder) if model_class.can_generate() else None


def _refused_values(folder: Path, error: Exception, advice: str) -> CheckpointError:
    content = {} if is_gguf(folder) else read_object(_config_file(folder))
    at_fault = ", ".join(f"{path} is {shown(value)}" for path, value in keys_at_fault(error, content).items())
    problem = Problem(ProblemKind.CONFIG, CONFIG_NAME, f"{at_fault}{': ' if at_fault else ''}{one_line(error)}")
    return CheckpointError(f"cannot load {folder}", [problem], [advice])


def _config_file(path: Path) -> Path:
    return path / CONFIG_NAME if path.is_dir() else path


def _with_declared_types(folder: Path, default_class: type[PreTrainedConfig] | None) -> PreTrainedConfig:
    """Read the configuration, with integers converted to floats if its class declares floats."""
    values, _ = PreTrainedConfig.get_config_dict(folder)
    if default_class is not None and not values.get("model_type"):
        values["model_type"] = default_class.model_type
    config_class = CONFIG_MAPPING[values["model_type"]]
    return config_class.from_dict(with_declared_types(config_class, values, str(_config_file(folder))))


def _is_class_reference(value: object) -> bool:
    """Return True for `module.Class`, or a list of them with nulls (tokenizers)."""
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str | None) for each in value))


def _needs_its_code(
    folder: Path, content: Mapping[str, Any], trust_remote_code: bool, default_class: type[PreTrainedConfig] | None
) -> bool:
    """Return True if the configuration needs the checkpoint's own code. Raises if that is not allowed."""
    model_type, names = content.get("model_type"), content.get("architectures")
    problems = []
    if not isinstance(model_type, str | None):
        problems.append(Problem(ProblemKind.CONFIG, "model_type", f"is {shown(model_type)}, expected a name"))
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        problems.append(Problem(ProblemKind.CONFIG, "architectures", f"is {shown(names)}, expected a list of names"))
    auto_map = content.get("auto_map")
    if auto_map is not None and not (isinstance(auto_map, dict) and all(map(_is_class_reference, auto_map.values()))):
        detail = f"is {shown(auto_map)}, expected an object with the module and class of each auto class"
        problems.append(Problem(ProblemKind.CONFIG, "auto_map", detail))
    if problems:
        raise CheckpointError(f"cannot load {folder}", problems, [f"correct it in {CONFIG_NAME}"])
    check_limits(content, _config_file(folder))
    refuse_timm_files(content, _config_file(folder))
    if not trust_remote_code:
        refuse_hub_kernels(content, str(_config_file(folder)))
    if model_type in CONFIG_MAPPING:
        return False
    if auto_map:
        if trust_remote_code:
            return True
        raise RemoteCodeError(
            f"{folder} has its own code for model_type {model_type!r} ({auto_map}), which does not run by "
            "default. Review that code. If you trust it, load the model in Python with "
            "from_pretrained(..., trust_remote_code=True). The nrl-models commands never run it."
        )
    if not model_type and default_class is not None:
        return False
    if not model_type:
        raise _without_model_type(folder, names or ())
    hint = did_you_mean(model_type, CONFIG_MAPPING, count=3)
    raise UnknownArchitectureError(
        f"{_config_file(folder)} has model_type {model_type!r}{hint}, which neither transformers nor a "
        "registered family knows. Upgrade transformers if a newer release has it (`pip install --upgrade "
        "transformers`). For your own architecture, register the configuration class and a family: "
        "docs/add-a-family.md, nrl_models.register_architecture(..., config={model_type: class})."
    )


def _without_model_type(folder: Path, architectures: Sequence[str]) -> UnknownArchitectureError:
    """Return the error for a configuration without `model_type`, which transformers' auto classes require."""
    classes = {name: model_class for name in architectures if (model_class := class_of_transformers(name)) is not None}
    types = {name: getattr(model_class.config_class, "model_type", "") for name, model_class in classes.items()}
    advice = "add the model_type of the class that saved the checkpoint"
    if known := {name: kind for name, kind in types.items() if kind in CONFIG_MAPPING}:
        advice = "add " + " or ".join(f'"model_type": "{kind}" (for {name})' for name, kind in known.items())
    return UnknownArchitectureError(
        f"{_config_file(folder)} has no model_type, which selects the configuration's class",
        f"  What to do: {advice}",
    )


def override(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> None:
    """Set keyword overrides on `config`, in place.

    Raises:
        UnknownArgumentError: If a name is unknown, is not a configuration value, or has a value of the wrong type.
    """
    unknown = [name for name in overrides if name not in IMPLEMENTATIONS and not is_value(config, name)]
    fixed = [name for name in unknown if hasattr(config, name) and not callable(getattr(config, name))]
    if fixed:
        raise UnknownArgumentError(
            f"{', '.join(fixed)}: not a configuration value, because {type(config).__name__} computes it. Leave it "
            "out; to use another class, change config.json, or pass config="
        )
    if unknown:
        kind = f", or a key of {type(config).__name__}"
        rope, replaced = getattr(config, "rope_parameters", None), dict[str, str]()
        if isinstance(rope, Mapping) and not any(isinstance(value, Mapping) for value in rope.values()):
            replaced = {
                name: f"rope_parameters={dict(rope) | {name: overrides[name]}}"
                for name in ROPE_KEYS
                if name in overrides
            }
        known = (*KEYWORDS, *IMPLEMENTATIONS)
        raise UnknownArgumentError(unknown_keywords(unknown, known, config.to_dict(), kind, replaced))
    if negative := next(negative_layers(overrides), None):
        raise UnknownArgumentError(f"{negative.subject} {negative.detail}. Pass a different value, or leave it out")
    values = with_declared_types(type(config), overrides, "what was passed")
    # These also set other values, which their own keywords then replace, in any order of the keywords.
    first = [name for name in values if isinstance(getattr(config, name, None), PreTrainedConfig)]
    first += [*IMPLEMENTATIONS, "num_labels"]
    for name in sorted(values, key=lambda name: first.index(name) if name in first else len(first)):
        try:
            _set_value(config, name, values[name])
        except Exception as error:  # any error of a setter or of the class of a part
            raise UnknownArgumentError(
                f"{name}={shown(values[name])}: {type(config).__name__} does not accept this value: {one_line(error)}",
                f"  What to do: pass a different value for {name}, or leave it out",
            ) from error


def _set_value(config: PreTrainedConfig, name: str, value: Any) -> None:
    """Set a value that was passed. A mapping updates the values of a nested configuration."""
    if name in IMPLEMENTATIONS:
        setattr(config, f"_{name}", value)
    elif isinstance(nested := getattr(config, name), PreTrainedConfig) and isinstance(value, Mapping):
        setattr(config, name, type(nested)(**(nested.to_dict() | dict(value))))
    else:
        setattr(config, name, value)


def config_for(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration for `model_class`: `config`, its text configuration, or another part.

    Raises:
        UnknownArchitectureError: If `config` belongs to another model.
    """
    if (part := part_for(model_class, config)) is not None:
        if part is not config:
            part.name_or_path = config.name_or_path
        return part
    wanted = model_class.config_class
    raise UnknownArchitectureError(
        f"{config.name_or_path or 'the configuration'} is a {type(config).__name__} (model_type "
        f"{config.model_type!r}), and {model_class.__name__} takes a {wanted.__name__ if wanted else 'configuration'}. "
        f"Use that model's class, or an auto class (nrl_models.AutoModelForCausalLM, ...), which chooses "
        f"it.{shared_class_sentence(config)}"
    )


def part_for(model_class: Any, config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return the configuration for `model_class`: `config`, its text configuration, or another part.

    Another part is, for example, the thinker of Qwen's Omni models. None if `config` belongs to another model.
    """
    wanted = model_class.config_class
    if wanted is not None and not isinstance(config, wanted):
        for part in (config.get_text_config(), *parts(config).values()):
            if isinstance(part, wanted):
                return part
    return config if takes_config(model_class, config) else None
