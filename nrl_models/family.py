"""What every family's model is: a Hugging Face model with some of its layers rewritten."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from nrl_models.common.checkpoint.writing import staged
from nrl_models.common.flags import ModelFlag
from nrl_models.common.forward.mrope import FreshPositions, PackedTextPositions
from nrl_models.common.forward.packing import keep_documents_apart
from nrl_models.common.forward.soft_cap import drops_soft_cap
from nrl_models.common.projections import CombinedProjections
from nrl_models.common.state_dict.adapter import StateDictAdapter, adapter_of
from nrl_models.common.state_dict.to_checkpoint import to_checkpoint
from nrl_models.loading import pretrained

if TYPE_CHECKING:
    Upstream = PreTrainedModel  # of which every class made here is one, too
else:
    Upstream = object


class FamilyModel(Upstream):
    """What the models of a family share; `head` makes the model classes.

        class LlamaFamily(FamilyModel):
            rewrites = {hf.LlamaAttention: CombinedQKV, hf.LlamaMLP: CombinedGateUp}

        LlamaForCausalLM = ModelClass = LlamaFamily.head(hf.LlamaForCausalLM)

    A model class may as well be written out, with this before the Hugging Face class.
    The Hugging Face model is built first, exactly as transformers builds it; then each module whose
    class is in `rewrites` is adopted: the same object, of the rewritten class. So weights under a
    seed, names, hooks and whatever transformers hangs on a model stay as they are. The result is
    a `PreTrainedModel` like any other.

    Args:
        config: the configuration.
        combine: whether to form groups of projections, which run as one matmul.

    Attributes:
        rewrites: for each Hugging Face layer class what becomes of it: a subclass to use in its place, or
            a `CombinedProjections` (`CombinedQKV`, `combine(...)`), of which such a subclass is made, of upstream's
            name and in the family's module.
        flags: what a trainer has to know, see `ModelFlag`.
        limits: for each feature the family lacks (`nrl_models.testing.features`, or one that no test proves) why.
        tiny: values for the generated tests' tiny configuration that its general rules get wrong.
        published: by name of a published model its configuration's values, for the generated tests at full size; those
            that the configuration class has by default may be left out.
        tensor_parallel: rules of tensor parallelism that transformers lacks for these models, or has otherwise, by
            the names of the modules (`*` for a number) and in the words of its `base_model_tp_plan`. Where they are
            wrong altogether, `limits["tensor parallelism"]` says why, and it is refused.
        sharding: how the model is sharded (`nrl_models.distributed`); None if it is not.
        keeps_unused: patterns of a checkpoint's tensors that nothing in the model is for, as transformers knows, and
            that are saved again as they were; transformers drops them.
        handles_quirks: names of entries of the catalogue of quirks that concern these models; rewritten layers declare
            theirs in the same way.
        ignored_config_keys: keys that published configurations have and that change nothing here, whatever their value.
        config_values: for each key that is honoured at some values only, whether the configuration class declares it
            or not, those values; others are refused.
        combine: whether groups of projections were formed.
    """

    rewrites: ClassVar[Mapping[type[nn.Module], type[nn.Module]]] = {}
    flags: ClassVar[ModelFlag] = ModelFlag.NONE
    limits: ClassVar[Mapping[str, str]] = {}
    tiny: ClassVar[Mapping[str, Any]] = {}
    published: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    keeps_unused: ClassVar[tuple[str, ...]] = ()
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
            cls.forward = keep_documents_apart(cls.forward)
        if issubclass(cls, PreTrainedModel) and drops_soft_cap(cls.reference_class()):
            cls._supports_sdpa = False

    def __init__(self, config: PreTrainedConfig, *args: Any, combine: bool = True, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.combine = combine
        adopt_rewrites(self, self.rewrite_of, combine)

    @classmethod
    def rewrite_of(cls, layer: type[nn.Module]) -> type[nn.Module] | None:
        """What becomes of a layer of this Hugging Face class: None if it stays as it is."""
        return cls.rewrites.get(layer)

    @classmethod
    def head(cls, upstream: type[PreTrainedModel], **attributes: Any) -> type[Any]:
        """This family's class for one of the Hugging Face model classes, of the same name.

        Checkpoints then name upstream's architecture, whatever the class is assigned to. In the family's module it is
        found under upstream's name, too, because pickle looks for it there.

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
    def reference_class(cls) -> type[PreTrainedModel]:
        """The Hugging Face class this one extends, and must equal."""
        return next(
            base for base in cls.__mro__ if issubclass(base, PreTrainedModel) and not issubclass(base, FamilyModel)
        )

    @classmethod
    def is_custom_code(cls) -> bool:
        """As of the reference: transformers' conversions hold for a rewritten class of its own, too."""
        return cls.reference_class().is_custom_code()

    # transformers finds out whether a class may choose its kernels by reading the source of the class's module. Of
    # a family's module it would conclude that experts cannot be grouped, and compute them one by one.

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return cls.reference_class()._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls.reference_class()._can_set_experts_implementation()

    @classmethod
    def from_pretrained(cls, path_or_id: str | Path, **options: Any) -> Any:  # type: ignore[override]
        """Load a checkpoint into this class.

        Takes and raises what `nrl_models.AutoModelForCausalLM.from_pretrained` does.
        """
        return pretrained.load(cls, pretrained.open_source(path_or_id, options))

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **options: Any) -> Any:
        """A model of this class with new weights.

        Takes what `nrl_models.AutoModelForCausalLM.from_config` does.
        """
        return pretrained.from_config(cls, config, **options)

    @property
    def state_dict_adapter(self) -> StateDictAdapter:
        """The way between this model's tensors and Hugging Face's, made anew from the model as it is now.

        Of a sharded model it is the one made when it was sharded.
        """
        sharding = getattr(self, "sharding", None)
        return sharding.adapter if sharding is not None else adapter_of(self)

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

        The files are written aside and then moved into place: an interrupted save leaves the previous
        checkpoint whole. Every rank calls it for a sharded model; one writes, file by file as they are gathered.

        Args:
            save_directory: the folder; made if need be.
            state_dict: own tensors to write in place of the model's (a gathered copy, say).
            max_shard_size: no file is larger, unless a single tensor is.
            save_original_format: True writes the names and shapes of the checkpoint the model came from, or the hub's;
                False those that transformers' class has in memory (stacked experts, ...).
            options: what else transformers' `save_pretrained` takes (`push_to_hub`, `is_main_process`, ...).

        Raises:
            StateDictError: `state_dict` is not this model's.
            CheckpointError: the configuration says that embeddings are tied and they are not, or the reverse.
        """
        if getattr(self, "_hf_peft_config_loaded", False):  # transformers then writes the adapter only
            own: Any = state_dict
            super().save_pretrained(save_directory, state_dict=own, max_shard_size=max_shard_size, **options)
            return
        if self.sharding is not None and state_dict is None:
            self.sharding.save_pretrained(
                self, save_directory, max_shard_size, save_original_format=save_original_format, **options
            )
            return
        tensors = to_checkpoint(self, state_dict, original_format=save_original_format)
        if options.get("push_to_hub"):
            options.setdefault("repo_id", Path(save_directory).name)
        with staged(save_directory) as stage:
            super().save_pretrained(
                stage, state_dict=tensors, max_shard_size=max_shard_size, save_original_format=False, **options
            )


MIXINS = (CombinedProjections, FreshPositions, PackedTextPositions)
"""What may stand for a subclass of a Hugging Face class, of which such a subclass is then made."""


def rewritten(original: type[nn.Module], by: type[nn.Module], module: str, *, within: str = "") -> type[nn.Module]:
    """The class that takes the place of `original`: `by` itself if it is a subclass, else the two together.

    Args:
        original: a Hugging Face layer class.
        by: a subclass of it, or one of `MIXINS`.
        module: name of the module in which a class that is made here stands, under upstream's name.
        within: what in that module the class is an attribute of, of itself; it is put into the module if empty.

    Raises:
        TypeError: `by` is neither: transformers finds layers by `isinstance`.
    """
    if issubclass(by, original):
        return by
    if not issubclass(by, MIXINS):
        mixins = ", ".join(mixin.__name__ for mixin in MIXINS)
        raise TypeError(
            f"{by.__name__} rewrites {original.__name__}, so it has to be a subclass of it, or of one of {mixins}"
        )
    attributes: dict[str, Any] = {"__module__": module, "__doc__": original.__doc__}
    if issubclass(by, CombinedProjections):
        attributes["forward"] = by.forward_like(original.forward)
    made = type(original.__name__, (by, original), attributes)
    if within:
        made.__qualname__ = f"{within}.{original.__name__}"
    else:
        setattr(sys.modules[module], original.__name__, made)  # where pickle looks for it
    return made


def adopt_rewrites(
    model: nn.Module, rewrite_of: Callable[[type[nn.Module]], type[nn.Module] | None], combine: bool
) -> None:
    """Turn each module of `model` whose class is rewritten into the rewritten class, in place."""
    for name, module in list(model.named_modules()):
        rewritten_class = rewrite_of(type(module))
        if rewritten_class is None:
            continue
        module.__class__ = rewritten_class
        if isinstance(module, PreTrainedModel):
            # What a model can record (hidden states, router logits) is noted by its class, when it is built.
            dict.__setitem__(_CAN_RECORD_REGISTRY, str(rewritten_class), module._can_record_outputs)
        if combine and isinstance(module, CombinedProjections):
            module.combine_projections(name)
