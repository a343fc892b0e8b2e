"""Base class of all family models: a Hugging Face model with some layers replaced."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, Unpack, overload

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.backend import Combine, should_combine
from nrl_models.common.checkpoint.writing import checked_file_size, folder_to_write, require_save_keywords, staged
from nrl_models.common.documents.packing import (
    WrapsReplacedForward,
    inner_models_keep_documents_apart,
    keep_documents_apart,
)
from nrl_models.common.dtypes import warn_of_rounding
from nrl_models.common.flags import Flags, ModelFlag, MTPForm
from nrl_models.common.forward.reentrant import RefusesReentrantCheckpointing
from nrl_models.common.forward.rewriting import adopt_rewrites, rewritten
from nrl_models.common.forward.soft_cap import drops_soft_cap
from nrl_models.common.model_components.upstream_peft import (
    explaining_peft_version,
    has_adapter,
    have_peft_name_references,
)
from nrl_models.common.modules import peft_modules
from nrl_models.common.projections import groups_of
from nrl_models.common.state_dict.adapter import StateDictAdapter, adapter_of
from nrl_models.common.state_dict.own_tensors import TO_FILES, require_no_peft
from nrl_models.common.state_dict.ties import ties_as_read
from nrl_models.common.state_dict.to_checkpoint import quantizer_returns, to_checkpoint
from nrl_models.common.trust.adapter_files import require_safe_adapter
from nrl_models.common.value_checks import require_names
from nrl_models.distributed import saving
from nrl_models.loading import pretrained
from nrl_models.loading.names.hub_state_dicts import accepting_one_name, convert_names
from nrl_models.loading.options import LoadKeywords, NewModelKeywords, PathOrId
from nrl_models.loading.source import with_source

if TYPE_CHECKING:
    from transformers import GenerationMixin

    class Upstream(WrapsReplacedForward, PreTrainedModel, GenerationMixin):
        """Base of every model class for type checkers, because transformers' wrappers hide these signatures."""

        to: Callable[..., Self]  # type: ignore[assignment]
        cuda: Callable[..., Self]  # type: ignore[assignment]
        eval: Callable[..., Self]
else:
    Upstream = WrapsReplacedForward


class FamilyModel(RefusesReentrantCheckpointing, Upstream):
    """Base class of a family's models; `head` makes the model classes.

        class LlamaFamily(FamilyModel):
            rewrites = {hf.LlamaAttention: CombinedQKV, hf.LlamaMLP: CombinedGateUp}

        LlamaForCausalLM = ModelClass = LlamaFamily.head(hf.LlamaForCausalLM)

    A model class may also be defined explicitly, with this base before the Hugging Face class. The model is built in
    the same way as in transformers. Then each module whose class is in `rewrites` changes its class to the rewritten
    one, in place. So initial weights, names, hooks and attributes are unchanged, and the result is a regular
    `PreTrainedModel`.

    Args:
        config: The configuration.
        combine: Whether to form groups of projections, which run as one matmul, see `should_combine`.

    Attributes:
        rewrites: For each Hugging Face layer class, the subclass that replaces it. For a `CombinedProjections`
            (`CombinedQKV`, `combine(...)`), such a subclass is created, with the Hugging Face name in the family's
            module.
        flags: Properties that trainers need, see `ModelFlag`. Properties that follow from the configurations are
            added.
        limits: Unsupported features (`nrl_models.testing.features`, or others), each with the reason. With
            `"log-probabilities"`, functions that score tokens raise `HeadError`.
        tiny: Configuration values for the generated tests where the general rules for tiny models do not work.
        variants: Tiny models that stand for published models with other kinds of layers: by name the configuration
            values that differ from those of the tiny model. Sweeps and generated tests run each.
        published: Configuration values of published models by name, for the generated tests at full size. Defaults of
            the configuration class may be left out.
        tensor_parallel: Corrections to transformers' `base_model_tp_plan`, in its vocabulary, by module name (`*` for
            a number). If that plan is completely wrong, sharding raises the reason in `limits["tensor parallelism"]`.
        sharding: How the model is sharded (`nrl_models.distributed`); None if it is not.
        keeps_unused: Patterns of checkpoint tensors that the model does not use and transformers drops. They are saved
            unchanged.
        mtp_form: Structure of its layer of multi-token prediction, if that is a separate decoder layer; None if there
            is none, or it has another structure.
        handles_quirks: Names of quirks that these models handle. Rewritten layers declare theirs in the same way.
        ignored_config_keys: Keys of published configurations that have no effect at any value.
        config_values: Supported values of keys that work only at some values. Other values raise.
        combine: Whether projections are fused.
        has_default_dtype: Whether the model was loaded without a `dtype`, and not put into training mode yet.
    """

    rewrites: ClassVar[Mapping[type[nn.Module], type[nn.Module]]] = {}
    flags: ClassVar[ModelFlag] = ModelFlag.NONE
    limits: ClassVar[Mapping[str, str]] = {}
    tiny: ClassVar[Mapping[str, Any]] = {}
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    published: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    keeps_unused: ClassVar[tuple[str, ...]] = ()
    mtp_form: ClassVar[MTPForm | None] = None
    handles_quirks: ClassVar[tuple[str, ...]] = ()
    tensor_parallel: ClassVar[Mapping[str, str]] = {}
    ignored_config_keys: ClassVar[tuple[str, ...]] = ()
    config_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    sharding: Any = None
    has_default_dtype: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "rewrites" in cls.__dict__:
            cls.rewrites = {original: rewritten(original, by, cls.__module__) for original, by in cls.rewrites.items()}
        if issubclass(cls, PreTrainedModel) and not hasattr(cls.forward, "keeps_documents_apart"):
            home: Any = next(base for base in cls.__mro__ if "forward" in vars(base))
            cls.forward = keep_documents_apart(home.forward, defined_by=None if home is cls else home)
        if issubclass(cls, PreTrainedModel) and drops_soft_cap(cls.reference_class()):
            cls._supports_sdpa = False
        if issubclass(cls, PreTrainedModel):
            cls.flags = Flags(cls.flags)  # type: ignore[assignment]

    def __init__(self, config: PreTrainedConfig, *args: Any, combine: Combine = "auto", **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.combine = should_combine(combine, None)
        adopt_rewrites(self, self.rewrite_of, self.combine)
        inner_models_keep_documents_apart(self)

    @classmethod
    def rewrite_of(cls, layer: type[nn.Module]) -> type[nn.Module] | None:
        """Return the class that replaces a Hugging Face layer class, or None if the layer stays."""
        return cls.rewrites.get(layer)

    @classmethod
    def head(cls, upstream: type[PreTrainedModel], **attributes: Any) -> type[Self]:
        """Create this family's class for a Hugging Face model class, with the same name.

        Checkpoints name the Hugging Face architecture, whatever name the class is assigned to. The family's module also
        gets the class under the Hugging Face name, where pickle looks for it.

        Args:
            upstream: The Hugging Face class.
            attributes: Class attributes that differ from the rest of the family (`limits`, `tiny`, ...).
        """
        stated = {"__module__": cls.__module__, "__doc__": f"`{upstream.__name__}` of transformers, rewritten."}
        metaclass: Any = type(upstream)
        made = metaclass(upstream.__name__, (cls, upstream), stated | attributes)
        vars(sys.modules[made.__module__]).setdefault(made.__qualname__, made)
        return made

    @classmethod
    def base_model_class(cls, upstream: type[PreTrainedModel], module: str) -> type[Any]:
        """Return this family's class for a base model: the same layers without a head.

        Args:
            upstream: The Hugging Face class.
            module: Name of the module that contains the returned class, for pickle.
        """
        family: Any = next(
            base for base in cls.__mro__ if issubclass(base, FamilyModel) and not issubclass(base, PreTrainedModel)
        )
        stated = ("tiny", "limits", "config_values", "ignored_config_keys", "rewrites")
        prefix = f"{upstream.base_model_prefix}."
        return family.head(
            cls.rewrite_of(upstream) or upstream,  # some families also rewrite the base model
            __module__=module,
            reference_class=classmethod(lambda _: upstream),
            tensor_parallel={name.removeprefix(prefix): rule for name, rule in cls.tensor_parallel.items()},
            **{name: getattr(cls, name) for name in stated},
        )

    @classmethod
    def reference_class(cls) -> type[PreTrainedModel]:
        """Return the Hugging Face class that this class extends and must be equivalent to."""
        return next(
            base for base in cls.__mro__ if issubclass(base, PreTrainedModel) and not issubclass(base, FamilyModel)
        )

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return the reference class's value, because transformers' conversions apply to rewritten classes too."""
        return cls.reference_class().is_custom_code()

    # transformers reads the source of a class's module to see whether it supports other kernels. From a family's
    # module it would conclude that experts cannot be grouped, and loop over them.

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return cls.reference_class()._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls.reference_class()._can_set_experts_implementation()

    @overload  # type: ignore[override]
    @classmethod
    def from_pretrained(cls, path_or_id: PathOrId | None = None, **options: Unpack[LoadKeywords]) -> Self: ...

    @overload
    @classmethod
    def from_pretrained(
        cls, path_or_id: PathOrId | None = None, *, output_loading_info: Literal[True], **options: Unpack[LoadKeywords]
    ) -> tuple[Self, dict[str, Any]]: ...

    @overload
    @classmethod
    def from_pretrained(
        cls, path_or_id: PathOrId | None = None, *, output_loading_info: bool, **options: Unpack[LoadKeywords]
    ) -> Any: ...

    @classmethod
    def from_pretrained(cls, path_or_id: PathOrId | None = None, **options: Any) -> Any:
        """Load a checkpoint into this class.

        Arguments and errors are those of `nrl_models.AutoModelForCausalLM.from_pretrained`.
        """
        return with_source(path_or_id, options, lambda source: pretrained.load(cls, source), cls.config_class)

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **options: Unpack[NewModelKeywords]) -> Self:
        """Create a model of this class with new weights.

        Arguments are those of `nrl_models.AutoModelForCausalLM.from_config`.
        """
        return pretrained.from_config(cls, config, **options)

    def extra_repr(self) -> str:
        """Return the fused projections for `print(model)`."""
        fused = Counter(" + ".join(group.linears) for _, _, group in groups_of(self))
        text = ", ".join(f"{count} x {names}" for names, count in fused.items())
        return "\n".join(filter(None, [super().extra_repr(), text and f"fused projections: {text}"]))

    def train(self, mode: bool = True) -> Self:
        """Put the model into training mode, as in torch. Warn once if a default 16-bit dtype rounds steps away."""
        if mode and self.has_default_dtype:
            self.has_default_dtype = False
            warn_of_rounding(self)
        return super().train(mode)

    def add_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Add a PEFT adapter, as in transformers.

        Raises:
            PackageVersionError: The installed transformers does not accept the installed PEFT.
        """
        with explaining_peft_version("add_adapter", "peft.get_peft_model(model, config)"):
            return super().add_adapter(*args, **kwargs)

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load a PEFT adapter, as in transformers.

        Raises:
            CheckpointError: The adapter is not found, has no safetensors, or has links out of its directory.
            PackageVersionError: The installed transformers does not accept the installed PEFT.
            UnknownArgumentError: `use_safetensors=False`, which requests a pickle.
        """
        require_safe_adapter(inspect.signature(super().load_adapter).bind(*args, **kwargs).arguments)
        with explaining_peft_version("load_adapter", "peft.PeftModel.from_pretrained(model, folder)"):
            return super().load_adapter(*args, **kwargs)

    @property
    def state_dict_adapter(self) -> StateDictAdapter:
        """Adapter between this model's parameters and the hub's tensors. Cached until the structure changes.

        A sharded model keeps the adapter from when it was sharded, updated with the current ties and dtypes.
        """
        sharding = getattr(self, "sharding", None)
        return sharding.adapter_of(self) if sharding is not None else adapter_of(self)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load tensors under the model's names or the hub's, as in torch. If `strict`, one name of a tie is enough."""
        accepted = accepting_one_name(state_dict) if strict else state_dict
        return super().load_state_dict(accepted, strict=strict, assign=assign)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        have_peft_name_references()  # PEFT takes a model's state dict before it records the model's class
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool, *rest: Any
    ) -> None:
        missing = convert_names(self, state_dict, prefix, local_metadata, errors=rest[2])
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *rest)
        rest[0].extend(missing)

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | Path,
        *,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        max_shard_size: int | str = "5GB",
        save_original_format: bool = True,
        **options: Any,
    ) -> None:
        """Save the same tensors and files as transformers' `save_pretrained`.

        Files are staged and then moved into place, so an interrupted save leaves the previous checkpoint intact. For a
        sharded model, every rank has to call this; the first rank writes, gathering one file at a time.

        Args:
            save_directory: Directory to write; created if necessary.
            state_dict: Tensors under the model's own names to write instead of the model's (such as a gathered copy).
                For a model with PEFT adapters, merged weights under the base model's names.
            max_shard_size: Maximum file size, unless a single tensor is larger.
            save_original_format: True writes the names and shapes of the original checkpoint, or of the hub. False
                writes those in transformers' memory (stacked experts, ...).
            options: Passed on to transformers' `save_pretrained` (`push_to_hub`, `is_main_process`, ...).

        Raises:
            StateDictError: If `state_dict` does not fit the model or the model stays quantized, or it is None and the
                model has PEFT adapters or weights that were quantized in place (torchao's `quantize_`). Adapters of
                transformers' `add_adapter` are saved. Also if weights were cast to integers, complex numbers or 8-bit
                floats, or names share tensors and the configuration does not tie them, as in transformers.
            CheckpointError: If configuration and model disagree about shapes or tied embeddings.
            UnknownArgumentError: If an argument is misspelled or of another type, or `save_directory` cannot be a path.
        """
        save_directory, max_shard_size = folder_to_write(save_directory), checked_file_size(max_shard_size)
        require_save_keywords(options, inspect.signature(super().save_pretrained).parameters)
        require_names({} if state_dict is None else state_dict)
        adapter = has_adapter(self)  # transformers then writes the adapter only
        if state_dict is None and not adapter:
            require_no_peft(any(peft_modules(self)), TO_FILES)
        if self.sharding is not None and state_dict is None and not adapter:
            saving.save_pretrained(
                self,
                save_directory,
                max_shard_size=max_shard_size,
                save_original_format=save_original_format,
                **options,
            )
            return
        tensors: Any = state_dict if adapter else to_checkpoint(self, state_dict, original_format=save_original_format)
        if not options.get("is_main_process", True):
            return  # before 5.15, transformers writes the weights all the same
        if options.get("push_to_hub"):
            options.setdefault("repo_id", save_directory.name)
        own_format: Any = {"has_adapter": adapter, "original_format": save_original_format}
        with staged(save_directory) as stage, ties_as_read(self), quantizer_returns(self, state_dict, **own_format):
            super().save_pretrained(
                stage, state_dict=tensors, max_shard_size=max_shard_size, save_original_format=adapter, **options
            )
