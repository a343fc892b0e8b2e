"""Probes: is a quirk still there upstream? Each runs what is upstream's, or reads it, and changes nothing."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from nrl_models.common.config_types import takes_floats_only
from nrl_models.common.routing import flip_rate, record_routing
from nrl_models.common.state_dict_adapter import StateDictAdapter
from nrl_models.parity.noise import rounded_otherwise
from nrl_models.quirks import bugs
from nrl_models.testing.case import FamilyCase, randomise

if TYPE_CHECKING:
    from nrl_models.consistency.refit import RefitStep


def small_updates_vanish_in_bf16() -> bool:
    """Of torch's AdamW."""
    return bugs.small_updates_vanish(torch.bfloat16)


class _WithComputedPositions(PreTrainedModel):
    """A model that freezes a part when it is built."""

    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.positions = nn.Embedding(4, 4).requires_grad_(False)
        self.post_init()


def loading_unfreezes() -> bool:
    """Of transformers, for positions that a class computes and freezes."""
    with tempfile.TemporaryDirectory() as folder:
        model = _WithComputedPositions(PreTrainedConfig())
        return bugs.frozen_parts_train(_WithComputedPositions.from_pretrained, model, Path(folder))


def sdpa_drops_soft_caps(case: FamilyCase) -> bool:
    """Of the class upstream, computed by `sdpa` if it says that it can be."""
    upstream = case.reference_class
    if not upstream._supports_sdpa:
        return False
    config = case.config
    config.attn_logit_softcapping = 0.05
    torch.manual_seed(0)
    model = upstream._from_config(config, attn_implementation="sdpa").eval()
    randomise(model)
    return bugs.soft_cap_is_dropped(model, case.inputs())


def packed_documents_meet_under_a_mask(case: FamilyCase) -> bool:
    """Of the class upstream."""
    return bugs.documents_meet(case.reference(), case.inputs(images=False), mask=True)


def packed_documents_meet(case: FamilyCase) -> bool:
    """Of the class upstream, without mask and cache."""
    return bugs.documents_meet(case.reference(), case.inputs(images=False), mask=False)


def offsets_stay(case: FamilyCase) -> bool:
    """Of the class upstream."""
    return bugs.offsets_stay(case.reference(), case.inputs(images=True), case.inputs(images=False)["input_ids"])


def images_are_causal(case: FamilyCase) -> bool:
    """Of the class upstream."""
    return bugs.images_are_causal(case.reference(), case.inputs(images=True))


def reentrant_checkpointing_loses_gradients(case: FamilyCase) -> bool:
    """Of the class upstream."""
    return bugs.reentrant_checkpointing_loses_gradients(case.reference(), case.inputs(labels=True))


def shared_keys_need_a_cache(case: FamilyCase) -> bool:
    """Of the class upstream: whether it computes otherwise without a cache."""
    model, inputs = case.reference(), case.inputs()
    with torch.no_grad():
        with_cache, without = (model(**inputs, use_cache=use).logits for use in (True, False))
    return bool((with_cache - without).abs().max() > bugs.APART)


def unused_weights_are_dropped(case: FamilyCase) -> bool:
    """Of the class upstream."""
    with tempfile.TemporaryDirectory() as folder:
        return bugs.unused_weights_are_dropped(case.reference_class.from_pretrained, case.reference(), Path(folder))


def a_new_row_explodes(case: FamilyCase) -> bool:
    """Of the class upstream."""
    return bugs.a_new_row_explodes(case.reference(), case.inputs(images=False))


def whole_logits_are_made(case: FamilyCase) -> bool:
    """Of the class upstream."""
    return bugs.whole_logits_are_made(case.reference(), case.inputs(images=False))


def an_integer_is_refused(case: FamilyCase) -> bool:
    """Of transformers' reader, for a key of the class upstream that is a float."""
    with tempfile.TemporaryDirectory() as folder:
        return bugs.an_integer_is_refused(
            AutoConfig.from_pretrained, json.loads(case.config.to_json_string()), float_key(case), Path(folder)
        )


def float_key(case: FamilyCase) -> str:
    """A key of a case's configuration that has to be a float."""
    return next(key for key in case.config.to_dict() if takes_floats_only(type(case.config), key))


def transformers_has_no_configuration(case: FamilyCase) -> bool:
    """Whether its table of configurations lacks the one that a family brings."""
    return case.config.model_type not in CONFIG_MAPPING_NAMES


def tower_names_are_lost(case: FamilyCase) -> bool:
    """Whether transformers' conversions do not find a tower under the names checkpoints had from before."""
    reference = case.reference()
    tower = reference.get_encoder(modality="image")
    where = next(name for name, module in reference.named_modules() if module is tower)
    names = [name for name in reference.state_dict() if name.startswith(f"{where}.")]
    older = [name.removeprefix(f"{reference.base_model_prefix}.") for name in names]
    renamings = [one for one in get_model_conversion_mapping(reference) if isinstance(one, WeightRenaming)]
    found = []
    for key in older:
        for renaming in renamings:
            key, _ = renaming.rename_source_key(key)
        found.append(key)
    return found != names


def hub_names_differ(case: FamilyCase) -> bool:
    """Whether transformers saves the class upstream under other names than it has in memory."""
    adapter = StateDictAdapter(case.reference())
    return adapter.hub.keys() != adapter.transformers.keys()


def routing_flips(case: FamilyCase) -> bool:
    """Whether rounding otherwise makes the class upstream choose other experts, in bf16."""
    model = case.reference(torch.bfloat16)
    inputs = case.inputs(images=False, batch=16, length=128)
    records = []
    with torch.no_grad(), record_routing(model) as record:
        model(**inputs, use_cache=False)
        records.append(dict(record))
        with rounded_otherwise(model):
            model(**inputs, use_cache=False)
        records.append(dict(record))
    return flip_rate(*records) > 0


def untied_by_dividing() -> bool:
    """Whether torch's `parallelize_module` parts an embedding and a head that are one tensor."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from nrl_models.quirks.ranks import pretended_mesh

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.words.weight

    with pretended_mesh(2) as mesh:
        model = parallelize_module(Tied(), mesh, {"words": RowwiseParallel(), "head": ColwiseParallel()})
        return model.words.weight is not model.head.weight


def ring_attention_rejects_masks() -> bool:
    """Whether torch's ring attention refuses a mask."""
    try:
        from torch.distributed.tensor.experimental._attention import (
            _scaled_dot_product_ring_efficient_attention as ring,
        )
    except ImportError:
        from torch.distributed.tensor.experimental._context_parallel._attention import (
            _scaled_dot_product_ring_efficient_attention as ring,
        )
    one: Any = torch.zeros(1, 1, 2, 2)
    try:
        ring(None, one, one, one, attn_bias=one)
    except NotImplementedError:
        return True
    except Exception:  # it went on, and has no mesh
        return False
    return False


def a_kernel_projects_out(case: FamilyCase) -> bool:
    """Whether a mixer hands the weight of its projection to a fused kernel, past the module's hooks."""
    mixers = {type(one) for one in case.reference().modules() if hasattr(one, "A_log") and hasattr(one, "out_proj")}
    return any("outproj_weight=self.out_proj.weight" in inspect.getsource(mixer) for mixer in mixers)


def optimisers_keep_no_state_without_gradients() -> bool:
    """Of torch's AdamW."""
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([used, unused])
    used.square().sum().backward()
    optimizer.step()
    return unused not in optimizer.state


def unknown_attributes_are_accepted() -> bool:
    """Whether torch takes a misspelt freeze, `requires_gradient`, without a word."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.requires_gradient = False  # type: ignore[attr-defined]
    return parameter.requires_grad


# Of vLLM: these run where it is installed


def dummy_loading_touches_buffers(model: nn.Module) -> bool:
    """Whether vLLM's dummy loader makes a model's derived buffers random.

    Args:
        model: one inside a running vLLM; its weights are random afterwards.
    """
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    # Names with an underscore are vLLM's own, which it sets afterwards (scales of a quantised cache).
    derived = {name: one for name, one in model.named_buffers() if not name.rpartition(".")[2].startswith("_")}
    before = {name: buffer.clone() for name, buffer in derived.items()}
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(model, None)
    return any(not torch.equal(buffer, before[name]) for name, buffer in derived.items())


def reloading_touches_buffers() -> bool:
    """Whether vLLM's layerwise reload changes a buffer that is derived, beside a weight that is loaded."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4), requires_grad=False)
            self.register_buffer("scale", torch.tensor(0.0188), persistent=False)

    model = nn.Sequential(Scaled())
    record_metadata_for_reloading(model)
    initialize_layerwise_reload(model)
    model[0].weight.weight_loader(model[0].weight, torch.full((4,), 2.0))
    finalize_layerwise_reload(model, None)
    assert torch.equal(model[0].weight, torch.full((4,), 2.0))
    return bool(model[0].scale != torch.tensor(0.0188))


def refit_misses_something(refit: Callable[[], RefitStep]) -> bool:
    """Whether a refit leaves an engine on other weights than it was sent.

    Args:
        refit: refits a running engine with new weights and compares it with the trainer; with what is asked about
            switched off.
    """
    return not refit().passed


def processors_need_a_tokenizer() -> bool:
    """Whether vLLM's processor of images refuses to start without a tokenizer."""
    from types import SimpleNamespace

    from vllm.multimodal.processing.processor import BaseMultiModalProcessor

    class Processor(BaseMultiModalProcessor):
        """Abstract as it is: only its beginning is run."""

    Processor.__abstractmethods__ = frozenset()
    info = SimpleNamespace(ctx=SimpleNamespace(tokenizer=None), get_data_parser=lambda: None)
    try:
        Processor(info, None)  # type: ignore[arg-type]
    except ValueError:
        return True
    return False
