"""Auto classes: `from_pretrained` and `from_config` for any architecture, with a family's class where registered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Unpack, overload

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from nrl_models import registry
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.logs import get_logger
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.upstream import class_of_transformers, classes_by_config
from nrl_models.distributed.mesh import agreed
from nrl_models.errors import RemoteCodeError, UnknownArchitectureError, did_you_mean
from nrl_models.family import FamilyModel
from nrl_models.loading import pretrained
from nrl_models.loading.options import LoadKeywords, NewModelKeywords, PathOrId
from nrl_models.loading.read_config import own_code_failed, part_for, read_config
from nrl_models.loading.shared_classes import class_of_user, shared_class_sentence, shared_classes
from nrl_models.loading.source import Source, again_if_replaced, with_source

logger = get_logger(__name__)


class _AutoModel:
    """Base class of the auto classes, which select the class for a checkpoint or a configuration.

    Attributes:
        kind: Name of the kind of models in messages.
        upstream: transformers' auto class of the same name.
        suffixes: Suffixes of the architectures' names.
    """

    kind: ClassVar[str]
    upstream: ClassVar[Any]
    suffixes: ClassVar[tuple[str, ...]]

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError(f"{type(self).__name__} is not instantiated: use from_pretrained(path) or from_config(config)")

    @overload
    @classmethod
    def from_pretrained(cls, path_or_id: PathOrId | None = None, **options: Unpack[LoadKeywords]) -> FamilyModel: ...

    @overload
    @classmethod
    def from_pretrained(
        cls, path_or_id: PathOrId | None = None, *, output_loading_info: Literal[True], **options: Unpack[LoadKeywords]
    ) -> tuple[FamilyModel, dict[str, Any]]: ...

    @overload
    @classmethod
    def from_pretrained(
        cls, path_or_id: PathOrId | None = None, *, output_loading_info: bool, **options: Unpack[LoadKeywords]
    ) -> Any: ...

    @classmethod
    def from_pretrained(cls, path_or_id: PathOrId | None = None, **options: Any) -> Any:
        """Load a checkpoint. The model is in evaluation mode.

        Unregistered architectures fall back to the transformers class, with the same adapter and one warning.

        Args:
            path_or_id: A directory or a Hub repository ID. Also accepted as `pretrained_model_name_or_path`.
            options: See `nrl_models.loading.options.LoadOptions` (`dtype`, `device`, `mesh`, `strict`, ...). Other
                keywords override values of the configuration. Type checkers accept `LoadKeywords`, which documents how
                to pass other values of the configuration.

        Returns:
            The model. With `output_loading_info`, a tuple of the model and the missing and unused tensors.

        Raises:
            CheckpointError: If files are missing, damaged, unsafe, or do not fit the model. Lists all problems.
            ConfigurationError: If keys are misspelled, or the model does not support values. Lists all problems.
            UnknownArchitectureError: If the architecture is unknown or not of this kind.
            FamilyImportError: If the family cannot be imported, or needs another version of a package.
            RemoteCodeError: If the checkpoint needs its own code.
            ShardingError: On every rank, if mesh or plan do not fit the model, or ranks failed or disagree.
            UnknownArgumentError: If a keyword is neither an option nor in the configuration, or has an invalid value.
            DeviceError: If the device is meta or does not exist.

        Examples:
            >>> import torch
            >>> from nrl_models import AutoModelForCausalLM
            >>> model = AutoModelForCausalLM.from_pretrained("demo/checkpoint", dtype=torch.float32)
            >>> type(model).__name__
            'LlamaForCausalLM'
        """
        registry.register_custom_configs()
        loaded: Any = with_source(path_or_id, options, cls._load)
        _with_adapter(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    @classmethod
    def _load(cls, source: Source) -> Any:
        """Select the class for a checkpoint, and load it."""
        with agreed(source.options.mesh, "choose the model's class"):
            model_class = cls._class_for(source.config, source.folder, source.options.trust_remote_code)
        return pretrained.load(model_class, source)

    @classmethod
    def from_config(
        cls, config: PreTrainedConfig, *, trust_remote_code: bool = False, **options: Unpack[NewModelKeywords]
    ) -> FamilyModel:
        """Create a model with new weights, in training mode. With a given seed, they are bitwise equal to
        transformers'.

        Args:
            config: The configuration; not modified.
            trust_remote_code: See `from_pretrained`.
            options: `dtype`, `device`, `combine`, `backend` and `ignore_config_keys`, see
                `nrl_models.loading.pretrained.from_config`.

        Raises:
            ConfigurationError, UnknownArchitectureError, FamilyImportError, RemoteCodeError: See `from_pretrained`.
        """
        pretrained.require_config(config)
        registry.register_custom_configs()
        model_class = cls._class_for(config, None, trust_remote_code)
        return _with_adapter(pretrained.from_config(model_class, config, **options))

    @classmethod
    def _class_for(
        cls, config: PreTrainedConfig, folder: Path | None, trust_remote_code: bool
    ) -> type[PreTrainedModel]:
        """Return the model class for `config`, which was read from `folder`."""
        architecture = cls.architecture(config)
        if architecture is None:
            model_class = cls._remote_class(config, folder, trust_remote_code)
            registry.warn_unregistered(model_class.__name__)
            return model_class
        registered, served = registry.model_class(architecture), cls._served_for(config)
        user_class = class_of_user(served, architecture)
        # A family may be for the user's class.
        if registered is not None and (user_class is None or issubclass(registered, user_class)):
            return registered
        registry.warn_unregistered(architecture)
        known = {each.__name__: each for each in served}
        return user_class or known.get(architecture) or getattr(transformers, architecture)

    @classmethod
    def serves(cls, architecture: str) -> bool:
        """Return True if an architecture's name is the name of a model of this kind."""
        return architecture.endswith(cls.suffixes)

    @classmethod
    def architecture(cls, config: PreTrainedConfig) -> str | None:
        """Return the architecture of this kind in `config`; None if only the checkpoint's own code has it.

        Raises:
            UnknownArchitectureError: If it has none of this kind, or an unknown one.
        """
        named = list(config.architectures or [])
        registered = set(registry.architectures())
        for name in named:
            if name in registered and cls.serves(name) and not _is_another_models(name, config):
                return name
        if names := _class_names(cls._served_for(config)):
            # Also classes that others registered with transformers' auto classes.
            known = registered.union(*(_class_names(auto_class._served_for(config)) for auto_class in AUTO_CLASSES))
            is_known = any(name in known or hasattr(transformers, name) for name in named)
            is_known = is_known or class_of_user(cls._served_for(config), names[0]) is not None
            # A model type that shares a class is published under a name that no library has.
            if named and not is_known and next(shared_classes(config), None) is None:
                if cls._has_own_code(config):
                    return None
                raise UnknownArchitectureError(_unknown_name(named, sorted(known), config))
            return next((name for name in named if name in names), names[0])
        if cls._has_own_code(config):
            return None
        if texts := [name for name in named if cls.serves(name) and _is_text_model(config, name)]:
            return texts[0]
        raise UnknownArchitectureError(
            f"{config.name_or_path or type(config).__name__} (model_type {config.model_type!r}, architectures {named}) "
            f"is not a {cls.kind}. {_kinds_of(config)}{shared_class_sentence(config)}"
        )

    @classmethod
    def _has_own_code(cls, config: PreTrainedConfig) -> bool:
        """Return True if the checkpoint comes with its own code for this auto class."""
        return cls.upstream.__name__ in (getattr(config, "auto_map", None) or {})

    @classmethod
    def _served_for(cls, config: PreTrainedConfig) -> Sequence[type[PreTrainedModel]]:
        """Return transformers' classes for a configuration in this auto class."""
        mapping: Mapping[type, Any] = classes_by_config(cls.upstream)
        classes = mapping.get(type(config), ())
        return classes if isinstance(classes, (list, tuple)) else (classes,)

    @classmethod
    def _remote_class(
        cls, config: PreTrainedConfig, folder: Path | None, trust_remote_code: bool
    ) -> type[PreTrainedModel]:
        reference = config.auto_map[cls.upstream.__name__]
        if not trust_remote_code:
            raise RemoteCodeError(
                f"{config.name_or_path} comes with its own code for a {cls.kind} ({reference}), which may not run. "
                "Review that code; if you trust it, pass trust_remote_code=True."
            )
        source = str(folder or config.name_or_path)  # the checkpoint's own revision and subfolder
        try:
            model_class = get_class_from_dynamic_module(reference, source)
        except Exception as error:  # any error of foreign code
            raise own_code_failed(source, error) from error
        if not issubclass(model_class, PreTrainedModel):
            raise own_code_failed(source, TypeError(f"{reference} is not a PreTrainedModel"))
        model_class.register_for_auto_class(cls.upstream.__name__)  # save_pretrained then writes its code
        return model_class


class AutoModelForCausalLM(_AutoModel):
    """Language models: logits over the vocabulary for the next token."""

    kind = "causal language model"
    upstream = transformers.AutoModelForCausalLM
    suffixes = ("ForCausalLM", "LMHeadModel")


class AutoModelForImageTextToText(_AutoModel):
    """Vision-language models."""

    kind = "vision-language model"
    upstream = transformers.AutoModelForImageTextToText
    suffixes = ("ForConditionalGeneration",)


class AutoModelForMultimodalLM(_AutoModel):
    """Models of text with any of images, video and audio: vision-language models, speech models, and both in one."""

    kind = "multimodal language model"
    upstream = transformers.AutoModelForMultimodalLM
    suffixes = ("ForConditionalGeneration",)


class AutoModelForSequenceClassification(_AutoModel):
    """Sequence classifiers: reward models."""

    kind = "sequence classifier"
    upstream = transformers.AutoModelForSequenceClassification
    suffixes = ("ForSequenceClassification",)


class AutoModelForTokenClassification(_AutoModel):
    """Token classifiers: value and process-reward models."""

    kind = "token classifier"
    upstream = transformers.AutoModelForTokenClassification
    suffixes = ("ForTokenClassification",)


class AutoModel(_AutoModel):
    """Base models: hidden states, without a head. Encoders that embed, and the decoders of language models."""

    kind = "base model"
    upstream = transformers.AutoModel
    suffixes = ("Model",)

    @classmethod
    def serves(cls, architecture: str) -> bool:
        """Return True if an architecture's name is that of a base model."""
        heads = tuple(suffix for auto_class in AUTO_CLASSES if auto_class is not cls for suffix in auto_class.suffixes)
        if architecture.endswith(heads) or any(architecture in names for names in registry.FAMILIES.values()):
            return False
        return architecture.endswith(cls.suffixes)


AUTO_CLASSES = (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModel,
)


def auto_class_of(config: PreTrainedConfig) -> type[_AutoModel]:
    """Return the auto class for the architecture in `config`, or for its type if no architecture matches."""
    with_type = [auto_class for auto_class in AUTO_CLASSES if type(config) in classes_by_config(auto_class.upstream)]
    for named in config.architectures or []:
        # Several auto classes have the same suffixes, but not each of them loads speech models.
        for auto_class in (*with_type, *AUTO_CLASSES):
            if auto_class.serves(named):
                return auto_class
    return next(iter(with_type), AutoModelForCausalLM)


def auto_class_for(folder: str | Path) -> type[_AutoModel]:
    """Return the auto class for the checkpoint in a directory.

    Raises:
        CheckpointError, UnknownArchitectureError, RemoteCodeError: If the configuration cannot be read.
    """
    registry.register_custom_configs()
    return again_if_replaced(folder, lambda: auto_class_of(read_config(resolve_folder(folder))))


def _class_names(classes: Sequence[type]) -> list[str]:
    return [each.__name__ for each in classes]


def _is_another_models(architecture: str, config: PreTrainedConfig) -> bool:
    """Return True if transformers' class of this name belongs to a configuration class that `config` lacks."""
    upstream = class_of_transformers(architecture)
    return upstream is not None and part_for(upstream, config) is None


def _is_text_model(config: PreTrainedConfig, architecture: str) -> bool:
    """Return True for a class that auto classes only find by another configuration, that of a model around it."""
    upstream = class_of_transformers(architecture)
    return upstream is not None and upstream.config_class is type(config)


def _unknown_name(named: list[str], known: list[str], config: PreTrainedConfig) -> str:
    return (
        f"{config.name_or_path or type(config).__name__} names the architecture {', '.join(named)}"
        f"{did_you_mean(named[0], known, count=3)}, which neither "
        f"transformers {transformers.__version__} nor a registered family has. Correct `architectures` in its "
        "config.json, or pass architectures=[...]; an architecture of your own needs a family (docs/add-a-family.md)."
    )


def _kinds_of(config: PreTrainedConfig) -> str:
    fitting = [auto_class for auto_class in AUTO_CLASSES if type(config) in classes_by_config(auto_class.upstream)]
    if AutoModelForImageTextToText in fitting:  # AutoModelForMultimodalLM returns the same class
        fitting = [auto_class for auto_class in fitting if auto_class is not AutoModelForMultimodalLM]
    if fitting:
        heads = [auto_class.__name__ for auto_class in fitting if auto_class is not AutoModel]
        return f"Use {' or '.join(heads or [AutoModel.__name__])}."
    return "No auto class serves it; a family can (docs/add-a-family.md)."


def _with_adapter(model: Any) -> FamilyModel:
    """Attach an adapter to a regular Hugging Face model, as family models have."""
    if not isinstance(model, FamilyModel):
        model.state_dict_adapter = StateDictAdapter(model)
        if model.state_dict_adapter.mtp:
            logger.warning_once(
                f"{type(model).__name__} exports the checkpoint's weights of multi-token prediction, but is "
                "transformers' own class, whose save_pretrained leaves them out."
            )
    return model
