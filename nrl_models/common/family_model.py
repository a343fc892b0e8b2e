"""What every family's model is: a Hugging Face model with some of its layers rewritten."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common import pretrained
from nrl_models.common.combined import CombinedProjections
from nrl_models.common.flags import ModelFlag
from nrl_models.common.hf_names import fill_from_hf_names, to_checkpoint
from nrl_models.common.saving import staged
from nrl_models.common.state_dict_adapter import StateDictAdapter


class FamilyModel:
    """Mixin for a family's model classes; it goes before the Hugging Face class.

        class LlamaForCausalLM(FamilyModel, hf.LlamaForCausalLM):
            rewrites = {hf.LlamaAttention: LlamaAttention, hf.LlamaMLP: LlamaMLP}

    The Hugging Face model is built first, exactly as transformers builds it; then each module whose
    class is in `rewrites` is adopted: the same object, of the rewritten class. So weights under a
    seed, names, hooks and whatever transformers hangs on a model stay as they are. The result is
    a `PreTrainedModel` like any other.

    Args:
        config: the configuration.
        combine: whether to combine projections.

    Attributes:
        rewrites: for each Hugging Face layer class the class to use in its place: a subclass, and a
            `CombinedProjections` if it combines.
        flags: what a trainer has to know, see `ModelFlag`.
        limits: what the family cannot do, in words, for its coverage page.
        tiny: values for the generated tests' tiny configuration that its general rules get wrong.
        tensor_parallel: rules of tensor parallelism that transformers lacks for these models, or has otherwise, by
            the names of the modules (`*` for a number) and in the words of its `base_model_tp_plan`. None says that
            transformers' rules are wrong for these models, so that tensor parallelism is refused.
        context_parallel: why torch's context parallelism is wrong for these models, in words, where their configuration
            does not show it; None if it is not.
        sharding: how the model is sharded (`nrl_models.distributed`); None if it is not.
        combine: whether this model's projections are combined.
    """

    rewrites: ClassVar[Mapping[type[nn.Module], type[nn.Module]]] = {}
    flags: ClassVar[ModelFlag] = ModelFlag.NONE
    limits: ClassVar[tuple[str, ...]] = ()
    tiny: ClassVar[Mapping[str, Any]] = {}
    tensor_parallel: ClassVar[Mapping[str, str] | None] = {}
    context_parallel: ClassVar[str | None] = None
    sharding: Any = None

    def __init__(self, config: PreTrainedConfig, *args: Any, combine: bool = True, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        self.combine = combine
        adopt_rewrites(self, self.rewrites, combine)  # type: ignore[arg-type]

    @classmethod
    def reference_class(cls) -> type[PreTrainedModel]:
        """The uncombined class this one must equal: the Hugging Face class it extends."""
        return next(
            base for base in cls.__mro__ if issubclass(base, PreTrainedModel) and not issubclass(base, FamilyModel)
        )

    @classmethod
    def is_custom_code(cls) -> bool:
        """As of the reference: transformers' conversions hold for a rewritten class of its own, too."""
        return cls.reference_class().is_custom_code()

    @classmethod
    def from_pretrained(cls, path_or_id: str | Path, **options: Any) -> PreTrainedModel:
        """Load a checkpoint into this class.

        Takes and raises what `nrl_models.AutoModelForCausalLM.from_pretrained` does.
        """
        return pretrained.from_pretrained(lambda config, folder: cls, path_or_id, **options)  # type: ignore[arg-type, return-value]

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
        """A model of this class with new weights.

        Takes what `nrl_models.AutoModelForCausalLM.from_config` does.
        """
        return pretrained.from_config(lambda given, folder: cls, config, **options)  # type: ignore[arg-type, return-value]

    @property
    def state_dict_adapter(self) -> StateDictAdapter:
        """The way between this model's tensors and Hugging Face's, made anew from the model as it is now.

        Of a sharded model it is the one made when it was sharded.
        """
        sharding = getattr(self, "sharding", None)
        return sharding.adapter if sharding is not None else StateDictAdapter(self)  # type: ignore[arg-type]

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        max_shard_size: int | str = "5GB",
        **options: Any,
    ) -> None:
        """Write what transformers' `save_pretrained` writes for the same model, tensor for tensor.

        The files are written aside and then moved into place: an interrupted save leaves the previous
        checkpoint whole. Every rank calls it for a sharded model; one writes, file by file as they are gathered.

        Args:
            save_directory: the folder; made if need be.
            state_dict: own tensors to write in place of the model's (a gathered copy, say).
            max_shard_size: no file is larger, unless a single tensor is.
            options: what else transformers' `save_pretrained` takes (`push_to_hub`, `is_main_process`, ...).

        Raises:
            StateDictError: `state_dict` is not this model's.
            CheckpointError: the configuration says that embeddings are tied and they are not, or the reverse.
        """
        if getattr(self, "_hf_peft_config_loaded", False):  # transformers then writes the adapter only
            super().save_pretrained(  # type: ignore[misc]
                save_directory, state_dict=state_dict, max_shard_size=max_shard_size, **options
            )
            return
        if self.sharding is not None and state_dict is None:
            self.sharding.save_pretrained(self, save_directory, max_shard_size, **options)
            return
        tensors = to_checkpoint(self, state_dict)  # type: ignore[arg-type]
        if options.get("push_to_hub"):
            options.setdefault("repo_id", Path(save_directory).name)
        with staged(save_directory) as stage:
            super().save_pretrained(  # type: ignore[misc]
                stage, state_dict=tensors, max_shard_size=max_shard_size, save_original_format=False, **options
            )

    def _load_from_state_dict(
        self,
        state_dict: dict[str, torch.Tensor],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *rest: Any,
    ) -> None:
        # `load_state_dict` takes Hugging Face names too: `Trainer` resumes that way, not strictly, and
        # would otherwise drop every combined weight without a word.
        missing_keys += fill_from_hf_names(self, state_dict, prefix)  # type: ignore[arg-type]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)  # type: ignore[misc]


def adopt_rewrites(model: nn.Module, rewrites: Mapping[type[nn.Module], type[nn.Module]], combine: bool) -> None:
    """Turn each module of `model` whose class is in `rewrites` into the rewritten class, in place.

    Raises:
        TypeError: a rewrite is no subclass of what it replaces: transformers finds layers by `isinstance`.
    """
    for original, rewritten in rewrites.items():
        if not issubclass(rewritten, original):
            raise TypeError(f"{rewritten.__name__} rewrites {original.__name__}, so it has to be a subclass of it")
    for module in list(model.modules()):
        rewritten = rewrites.get(type(module))
        if rewritten is None:
            continue
        module.__class__ = rewritten
        if combine and isinstance(module, CombinedProjections):
            module.combine_projections()
