"""The base of every family's models: a Hugging Face model with some layers rewritten."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.checkpoint.writing import staged
from nrl_models.common.flags import Flags, ModelFlag, MTPForm
from nrl_models.common.forward.layer_by_document import ByDocument, DecoderByDocument
from nrl_models.common.forward.mrope import FreshPositions, PackedTextPositions
from nrl_models.common.forward.packing import (
    WrapsReplacedForward,
    inner_models_keep_documents_apart,
    keep_documents_apart,
)
from nrl_models.common.forward.soft_cap import drops_soft_cap
from nrl_models.common.projections import CombinedProjections
from nrl_models.common.state_dict.adapter import StateDictAdapter, adapter_of
from nrl_models.common.state_dict.ties import ties_as_read
from nrl_models.common.state_dict.to_checkpoint import to_checkpoint
from nrl_models.common.upstream import have_peft_name_references, record_as, require_peft
from nrl_models.distributed import saving
from nrl_models.loading import pretrained
from nrl_models.loading.weights import accept_hub_names

if TYPE_CHECKING:

    class Upstream(WrapsReplacedForward, PreTrainedModel):
        """Every class made here is one."""
else:
    Upstream = WrapsReplacedForward


class FamilyModel(Upstream):
    """Base class of a family's models; `head` makes the model classes.

        class LlamaFamily(FamilyModel):
            rewrites = {hf.LlamaAttention: CombinedQKV, hf.LlamaMLP: CombinedGateUp}

        LlamaForCausalLM = ModelClass = LlamaFamily.head(hf.LlamaForCausalLM)

    A model class may also be written out, with this base before the Hugging Face class. The model is built exactly as
    transformers builds it; then each module whose class is in `rewrites` becomes an instance of the rewritten class,
    in place. So initial weights, names, hooks and attributes stay as they are, and the result is a `PreTrainedModel`
    like any other.

    Args:
        config: the configuration.
        combine: whether to form groups of projections, which run as one matmul.

    Attributes:
        rewrites: by Hugging Face layer class the subclass that replaces it, or a `CombinedProjections` (`CombinedQKV`,
            `combine(...)`) from which such a subclass is made, under upstream's name in the family's module.
        flags: what a trainer has to know, see `ModelFlag`; what follows from the configurations is added.
        limits: features that the family lacks (`nrl_models.testing.features`, or others), each with the reason.
        tiny: configuration values for the generated tests that the general rules for tiny models get wrong.
        published: configuration values of published models by name, for the generated tests at full size; the
            configuration class's defaults may be left out.
        tensor_parallel: corrections to transformers' `base_model_tp_plan`, in its vocabulary, by module name (`*` for
            a number). Where that plan is wrong altogether, `limits["tensor parallelism"]` says why, and sharding is
            refused.
        sharding: how the model is sharded (`nrl_models.distributed`); None if it is not.
        keeps_unused: patterns of checkpoint tensors that the model does not use and transformers drops; they are
            saved again unchanged.
        mtp_form: how its layer of multi-token prediction is made, where that is a decoder layer of its own; None where
            there is none, or it is made otherwise.
        handles_quirks: names of entries in the quirk catalogue that these models handle; rewritten layers declare
            theirs in the same way.
        ignored_config_keys: keys of published configurations that have no effect, whatever their value.
        config_values: the supported values of keys that are honoured at some values only; others are refused.
        combine: whether groups of projections were formed.
    """

    rewrites: ClassVar[Mapping[type[nn.Module], type[nn.Module]]] = {}
    flags: ClassVar[ModelFlag] = ModelFlag.NONE
    limits: ClassVar[Mapping[str, str]] = {}
    tiny: ClassVar[Mapping[str, Any]] = {}
    published: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    keeps_unused: ClassVar[tuple[str, ...]] = ()
    mtp_form: ClassVar[MTPForm | None] = None
    handles_quirks: ClassVar[tuple[str, ...]] = ()
    tensor_parallel: ClassVar[Mapping[str, str]] = {}
    ignored_config_keys: ClassVar[tuple[str, ...]] = ()
    config_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    sharding: Any = None

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

    def __init__(self, config: PreTrainedConfig, *args: Any, combine: bool = True, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.combine = combine
        adopt_rewrites(self, self.rewrite_of, combine)
        inner_models_keep_documents_apart(self)

    @classmethod
    def rewrite_of(cls, layer: type[nn.Module]) -> type[nn.Module] | None:
        """The class that replaces a Hugging Face layer class; None if it stays."""
        return cls.rewrites.get(layer)

    @classmethod
    def head(cls, upstream: type[PreTrainedModel], **attributes: Any) -> type[Any]:
        """This family's class for a Hugging Face model class, under the same name.

        Checkpoints name upstream's architecture, whatever name the class is assigned to. The family's module also gets
        the class under upstream's name, where pickle looks for it.

        Args:
            upstream: the Hugging Face class.
            attributes: what differs from the rest of the family (`limits`, `tiny`, ...).
        """
        stated = {"__module__": cls.__module__, "__doc__": f"`{upstream.__name__}` of transformers, rewritten."}
        metaclass: Any = type(upstream)
        made = metaclass(upstream.__name__, (cls, upstream), stated | attributes)
        vars(sys.modules[made.__module__]).setdefault(made.__qualname__, made)
        return made

    @classmethod
    def base_model_class(cls, upstream: type[PreTrainedModel], module: str) -> type[Any]:
        """The class of this model's family for a base model: the same layers, without a head.

        Args:
            upstream: the Hugging Face class.
            module: the name of the module that has the class, for pickle.
        """
        family: Any = next(
            base for base in cls.__mro__ if issubclass(base, FamilyModel) and not issubclass(base, PreTrainedModel)
        )
        stated = ("tiny", "limits", "config_values", "ignored_config_keys", "rewrites")
        prefix = f"{upstream.base_model_prefix}."
        return family.head(
            cls.rewrite_of(upstream) or upstream,  # which some families rewrite, too
            __module__=module,
            reference_class=classmethod(lambda _: upstream),
            tensor_parallel={name.removeprefix(prefix): rule for name, rule in cls.tensor_parallel.items()},
            **{name: getattr(cls, name) for name in stated},
        )

    @classmethod
    def reference_class(cls) -> type[PreTrainedModel]:
        """The Hugging Face class that this class extends and must be equivalent to."""
        return next(
            base for base in cls.__mro__ if issubclass(base, PreTrainedModel) and not issubclass(base, FamilyModel)
        )

    @classmethod
    def is_custom_code(cls) -> bool:
        """As for the reference class: transformers' conversions apply to rewritten classes too."""
        return cls.reference_class().is_custom_code()

    # transformers reads the source of a class's module to see whether it supports other kernels. From a family's
    # module it would conclude that experts cannot be grouped, and loop over them.

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return cls.reference_class()._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls.reference_class()._can_set_experts_implementation()

    @classmethod
    def from_pretrained(cls, path_or_id: str | Path | None = None, **options: Any) -> Any:  # type: ignore[override]
        """Load a checkpoint into this class.

        Takes and raises what `nrl_models.AutoModelForCausalLM.from_pretrained` does.
        """
        for attempt in pretrained.attempts(path_or_id, options):
            with attempt, pretrained.open_source(path_or_id, options) as source:
                loaded = pretrained.load(cls, source)
        return loaded

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **options: Any) -> Any:
        """A model of this class with new weights.

        Takes what `nrl_models.AutoModelForCausalLM.from_config` does.
        """
        return pretrained.from_config(cls, config, **options)

    def add_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Add a PEFT adapter, as in transformers.

        Raises:
            PackageVersionError: The installed transformers does not accept the installed PEFT.
        """
        require_peft("add_adapter", "peft.get_peft_model(model, config)")
        return super().add_adapter(*args, **kwargs)

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load a PEFT adapter, as in transformers.

        Raises:
            PackageVersionError: The installed transformers does not accept the installed PEFT.
        """
        require_peft("load_adapter", "peft.PeftModel.from_pretrained(model, folder)")
        return super().load_adapter(*args, **kwargs)

    @property
    def state_dict_adapter(self) -> StateDictAdapter:
        """Maps this model's parameters to the hub's tensors; made once and kept until the structure changes.

        A sharded model keeps the adapter that was made when it was sharded, with what is tied now.
        """
        sharding = getattr(self, "sharding", None)
        return sharding.adapter.retied(self) if sharding is not None else adapter_of(self)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        have_peft_name_references()  # PEFT takes a model's state dict before it records the model's class
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool, *rest: Any
    ) -> None:
        missing: list[str] = []
        accept_hub_names(self, state_dict, prefix, missing)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *rest)
        missing_keys: list[str] = rest[0]
        missing_keys += [f"{prefix}{name}" for name in missing]

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | Path,
        *,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        max_shard_size: int | str = "5GB",
        save_original_format: bool = True,
        **options: Any,
    ) -> None:
        """Write what transformers' `save_pretrained` writes for the same model, tensor for tensor.

        Files are staged and then moved into place: an interrupted save leaves the previous checkpoint intact. For a
        sharded model every rank makes the call; the first rank writes, gathering one file at a time.

        Args:
            save_directory: created if needed.
            state_dict: tensors under the model's own names, to write in place of the model's (a gathered copy, say).
            max_shard_size: maximum file size, unless a single tensor is larger.
            save_original_format: True writes the names and shapes of the original checkpoint, or of the hub; False
                those that transformers has in memory (stacked experts, ...).
            options: passed on to transformers' `save_pretrained` (`push_to_hub`, `is_main_process`, ...).

        Raises:
            StateDictError: `state_dict` does not fit the model.
            CheckpointError: the configuration and the model disagree about tied embeddings.
        """
        adapter = getattr(self, "_hf_peft_config_loaded", False)  # transformers then writes the adapter only
        if self.sharding is not None and state_dict is None and not adapter:
            saving.save_pretrained(
                self,
                save_directory,
                max_shard_size=max_shard_size,
                save_original_format=save_original_format,
                **options,
            )
            return
        tensors: Any = state_dict
        if not adapter:
            tensors = to_checkpoint(self, state_dict, original_format=save_original_format)
        if not options.get("is_main_process", True):
            return  # before 5.15, transformers writes the weights all the same
        if options.get("push_to_hub"):
            options.setdefault("repo_id", Path(save_directory).name)
        with staged(save_directory) as stage, ties_as_read(self):
            super().save_pretrained(
                stage, state_dict=tensors, max_shard_size=max_shard_size, save_original_format=adapter, **options
            )


MIXINS = (CombinedProjections, FreshPositions, PackedTextPositions, ByDocument, DecoderByDocument)
"""Mixins that `rewrites` may name: a subclass of the Hugging Face class is made from them."""


def rewritten(original: type[nn.Module], by: type[nn.Module], module: str, *, within: str = "") -> type[nn.Module]:
    """The class that replaces `original`: `by` itself if it is a subclass, else one made from both.

    Args:
        original: a Hugging Face layer class.
        by: a subclass of it, or one of `MIXINS`.
        module: name of the module that gets the new class, under upstream's name.
        within: the attribute of that module that holds the class; empty puts it into the module itself.

    Raises:
        TypeError: `by` is neither a subclass nor one of `MIXINS`; transformers finds layers by `isinstance`.
    """
    if issubclass(by, original):
        return by
    if not issubclass(by, MIXINS):
        mixins = ", ".join(mixin.__name__ for mixin in MIXINS)
        raise TypeError(
            f"{by.__name__} rewrites {original.__name__}, so it must be a subclass of it, or of one of {mixins}"
        )
    attributes: dict[str, Any] = {"__module__": module, "__doc__": original.__doc__} | _answers_of(original)
    if issubclass(by, (CombinedProjections, ByDocument)):
        attributes["forward"] = _forward_like(original.forward, by)
    made = type(original.__name__, (by, original), attributes)
    if within:
        made.__qualname__ = f"{within}.{original.__name__}"
    else:
        setattr(sys.modules[module], original.__name__, made)  # for pickle
    return made


def _answers_of(original: type[nn.Module]) -> dict[str, Any]:
    """What transformers asks a model's class of its source: a decoder that is rewritten is no custom code either."""
    asked = ("is_custom_code", "_can_set_attn_implementation", "_can_set_experts_implementation")
    return {name: staticmethod(getattr(original, name)) for name in asked if hasattr(original, name)}


def _forward_like(upstream: Callable[..., Any], mixin: Any) -> Callable[..., Any]:
    """The mixin's forward, which takes anything, with the signature of `upstream`, which transformers inspects."""

    @functools.wraps(upstream)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return mixin.forward(self, *args, **kwargs)

    return forward


def adopt_rewrites(
    model: nn.Module, rewrite_of: Callable[[type[nn.Module]], type[nn.Module] | None], combine: bool
) -> None:
    """Change each module of `model` whose class is rewritten to the rewritten class, in place."""
    for name, module in list(model.named_modules()):
        rewritten_class = rewrite_of(type(module))
        if rewritten_class is None:
            continue
        module.__class__ = rewritten_class
        if isinstance(module, PreTrainedModel):
            record_as(rewritten_class, module)
        if combine and isinstance(module, CombinedProjections):
            module.combine_projections(name)
