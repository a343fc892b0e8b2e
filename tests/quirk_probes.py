"""Probes that detect quirks. Each runs or inspects a model or a package, and returns True if the quirk is present.

Some probes apply to any model, transformers' and ours. The others apply only to upstream. Models are tiny, in
evaluation mode and never changed. The tables at the end map catalog entries to probes.
"""

from __future__ import annotations

import copy
import inspect
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, conversion_mapping
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, WeightRenaming
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from nrl_models.common.config.types import takes_floats_only
from nrl_models.common.forward.routing import flip_rate, record_routing
from nrl_models.families.table import TABLE
from nrl_models.inputs.model_inputs import Inputs
from nrl_models.onboarding.detect import LOGITS_DIFFER, offsets_stay
from nrl_models.parity.noise import rounded_otherwise
from nrl_models.quirks import Subject, predicates
from nrl_models.testing.case import FamilyCase, randomize
from nrl_models.testing.mtp_weights import mtp_tensors


def differ(actual: torch.Tensor, expected: torch.Tensor, by: float = LOGITS_DIFFER) -> bool:
    """Return True if two tensors differ by more than rounding."""
    return bool((actual - expected).abs().max() > by)


@torch.no_grad()
def documents_share_attention(model: PreTrainedModel, inputs: Inputs, *, mask: bool) -> bool:
    """Return True if a document's logits depend on one packed before it, with positions that restart.

    Args:
        model: A decoder.
        inputs: Its `input_ids` `(2, length)` are the two documents.
        mask: Whether to pass a mask of ones and use the default cache. Otherwise, pass neither.
    """
    first, second = inputs["input_ids"][0, :-5], inputs["input_ids"][1]
    positions = [torch.arange(len(document), device=second.device) for document in (first, second)]
    packed: dict[str, Any] = {"input_ids": torch.cat([first, second])[None], "position_ids": torch.cat(positions)[None]}
    packed |= {"attention_mask": torch.ones_like(packed["input_ids"])} if mask else {"use_cache": False}
    together = model(**packed).logits[0, -len(second) :]
    alone = model(input_ids=second[None], use_cache=False).logits[0]
    return differ(together, alone)


@torch.no_grad()
def image_depends_on_text_before(model: PreTrainedModel, inputs: Inputs) -> bool:
    """Return True if a row with images has other logits if a document of text is packed before it."""
    row: dict[str, Any] = {name: value for name, value in inputs.items() if name != "attention_mask"}
    text = inputs["input_ids"].new_ones(1, 9)
    sizes = text.shape[1], row["input_ids"].shape[1]
    packed = row | {
        name: torch.cat([text if name == "input_ids" else torch.zeros_like(text), row[name]], 1)
        for name in ("input_ids", "token_type_ids", "mm_token_type_ids")
        if name in row
    }
    with images_as_published(model):
        alone = model(**row, use_cache=False).logits[0]
        packed["position_ids"] = torch.cat([torch.arange(size, device=text.device) for size in sizes])[None]
        together = model(**packed, use_cache=False).logits[0, sizes[0] :]
    return differ(together, alone)


@torch.no_grad()
def text_raises(model: PreTrainedModel, inputs: Inputs) -> bool:
    """Return whether a forward on text raises `AttributeError`."""
    try:
        model(**inputs)
    except AttributeError:
        return True
    return False


def transformers_model(case: FamilyCase) -> PreTrainedModel:
    """Return a model of transformers' own class with the case's weights."""
    upstream = next(base for base in case.reference_class.__mro__ if "forward" in vars(base))
    model = upstream(case.config).eval()
    model.load_state_dict(case.reference().state_dict())
    return model


@torch.no_grad()
def images_are_causal(model: PreTrainedModel, inputs: Inputs) -> bool:
    """Return True if a batch with images has other logits without token types, or raises an error without them."""
    kinds = [name for name in ("token_type_ids", "mm_token_type_ids") if name in inputs]
    without = {name: value for name, value in inputs.items() if name not in kinds}
    with images_as_published(model):
        try:
            return differ(model(**without).logits, model(**inputs).logits)
        except ValueError:
            return True


@contextmanager
def images_as_published(model: PreTrainedModel) -> Iterator[None]:
    """Let the tokens of an image attend to each other, as in published models, within a `with` block."""
    text = model.config.get_text_config()
    is_unset = getattr(text, "use_bidirectional_attention", False) is None
    if is_unset:
        text.use_bidirectional_attention = "vision"  # None is the class's default
    try:
        yield
    finally:
        if is_unset:
            text.use_bidirectional_attention = None


def reentrant_checkpointing_loses_gradients(model: PreTrainedModel, inputs: Inputs) -> bool:
    """Return True if reentrant checkpointing changes gradients.

    Args:
        model: A model in which some layers share keys and values.
        inputs: Inputs with labels.
    """
    gradients = []
    for reentrant in (False, True):
        one = copy.deepcopy(model).train()
        if reentrant:
            one.gradient_checkpointing_enable({"use_reentrant": True})
            one.enable_input_require_grads()
        one(**inputs, use_cache=False).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in one.named_parameters()})
    expected, actual = gradients
    return any(
        gradient is not None and (actual[name] is None or differ(actual[name], gradient, 1e-4))
        for name, gradient in expected.items()
    )


def unused_weights_are_dropped(load: Callable[[Path], PreTrainedModel], reference: PreTrainedModel) -> bool:
    """Return True if loading and saving drops a checkpoint's keys and values for layers that share.

    Args:
        load: Loads a checkpoint.
        reference: The model that writes it.
    """
    with tempfile.TemporaryDirectory() as folder:
        published, again = Path(folder, "published"), Path(folder, "again")
        reference.save_pretrained(published)
        file = published / "model.safetensors"
        tensors = load_file(file)
        queries = {name for name in tensors if name.endswith("self_attn.q_proj.weight") and "tower" not in name}
        unused = {name.replace("q_proj", "k_proj") for name in queries} - tensors.keys()
        save_file(tensors | {name: torch.randn(4, 4) for name in unused}, file, metadata={"format": "pt"})
        load(published).save_pretrained(again)
        return bool(unused) and not unused <= load_file(again / "model.safetensors").keys()


def mtp_weights_are_dropped(load: Callable[[Path], PreTrainedModel], reference: PreTrainedModel) -> bool:
    """Return True if loading and saving drops weights of multi-token prediction.

    Args:
        load: Loads a checkpoint.
        reference: The model that writes it.
    """
    with tempfile.TemporaryDirectory() as folder:
        published, again = Path(folder, "published"), Path(folder, "again")
        reference.save_pretrained(published)
        mtp = mtp_tensors(reference)
        save_file(load_file(published / "model.safetensors") | mtp, published / "model.safetensors", {"format": "pt"})
        load(published).save_pretrained(again)
        return mtp.keys().isdisjoint(load_file(again / "model.safetensors"))


def untrained_row_gradient_explodes(model: PreTrainedModel, inputs: Inputs) -> bool:
    """Return True if an embedding row of zeros has a gradient ten times larger than any other row."""
    model = copy.deepcopy(model)
    tokens = inputs["input_ids"]
    weight = model.get_input_embeddings().weight
    row = int(tokens[0, 3])
    with torch.no_grad():
        weight[row] = 0
    weight.requires_grad_(True)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    (gradient,) = torch.autograd.grad(loss, weight)
    sizes = gradient.norm(dim=1)
    return bool(sizes[row] > 10 * torch.cat([sizes[:row], sizes[row + 1 :]]).max())


def full_logits_are_allocated(model: PreTrainedModel, inputs: Inputs) -> bool:
    """Return True if log-probabilities from the model's own forward allocate a `(tokens, vocabulary)` tensor."""
    tokens = inputs["input_ids"]
    vocabulary = model.config.get_text_config().vocab_size
    with new_tensors(vocabulary) as sizes, torch.no_grad():
        model(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)
    return max(sizes) >= tokens.numel() * vocabulary


@contextmanager
def new_tensors(width: int) -> Iterator[list[int]]:
    """Record the sizes of new tensors whose last dimension is `width`, within a `with` block."""
    sizes: list[int] = [0]

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            inputs = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            for output in result if isinstance(result, (tuple, list)) else (result,):
                is_wide = isinstance(output, torch.Tensor) and output.ndim > 0 and output.shape[-1] == width
                if is_wide and output.untyped_storage().data_ptr() not in inputs:
                    sizes.append(output.numel())
            return result

    with Sizes():
        yield sizes


def small_updates_vanish(dtype: torch.dtype) -> bool:
    """Return True if an AdamW step at a post-training learning rate does not change a weight of that dtype."""
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return torch.equal(weight.detach(), torch.ones(4, dtype=dtype))


def integer_for_float_raises(read: Callable[[Path], Any], values: dict[str, Any], key: str) -> bool:
    """Return True if a `config.json` with `key: 0` for a float of zero cannot be read.

    Args:
        read: Reads the configuration in a folder.
        values: The configuration's values.
        key: A key with a float value.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(values | {key: 0}))
        try:
            return getattr(read(Path(folder)), key) != 0
        except Exception:  # transformers' error, or the error it is converted to
            return True


def frozen_parts_train(from_pretrained: Callable[[Path], PreTrainedModel], model: PreTrainedModel) -> bool:
    """Return True if parameters that the class freezes when it is built are trainable after loading.

    Args:
        from_pretrained: Loads a checkpoint.
        model: A built model with such parameters.
    """
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = dict(from_pretrained(Path(folder)).named_parameters())
    return any(loaded[name].requires_grad for name in frozen)


@torch.no_grad()
def soft_cap_is_dropped(model: PreTrainedModel, inputs: Inputs) -> bool:
    """Return True if the configured soft cap of attention scores does not change logits."""
    uncapped = copy.deepcopy(model)
    for module in uncapped.modules():
        if getattr(module, "attn_logit_softcapping", None) is not None:
            module.attn_logit_softcapping = None
    return not differ(model(**inputs).logits, uncapped(**inputs).logits)


# Probes of upstream only


class _WithComputedPositions(PreTrainedModel):
    """A model that freezes a parameter when it is built."""

    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.positions = nn.Embedding(4, 4).requires_grad_(False)
        self.post_init()


def loading_unfreezes() -> bool:
    """Probe transformers, for positions that a class computes and freezes."""
    return frozen_parts_train(_WithComputedPositions.from_pretrained, _WithComputedPositions(PreTrainedConfig()))


def sdpa_drops_soft_caps(case: FamilyCase) -> bool:
    """Probe the upstream class with `sdpa`, if it declares support for it."""
    upstream = case.reference_class
    if not upstream._supports_sdpa:
        return False
    config = case.config
    config.attn_logit_softcapping = 0.05
    torch.manual_seed(0)
    model = upstream._from_config(config, attn_implementation="sdpa").eval()
    randomize(model)
    return soft_cap_is_dropped(model, case.inputs())


def shared_keys_need_a_cache(case: FamilyCase) -> bool:
    """Return True if the upstream class gives other logits without a cache."""
    model, inputs = case.reference(), case.inputs()
    with torch.no_grad():
        with_cache, without = (model(**inputs, use_cache=use).logits for use in (True, False))
    return bool((with_cache - without).abs().max() > LOGITS_DIFFER)


def reader_rejects_integers_for_floats(case: FamilyCase) -> bool:
    """Probe transformers' reader with a key of the upstream class that must be a float."""
    config = case.config
    key = next(key for key in config.to_dict() if takes_floats_only(type(config), key))
    return integer_for_float_raises(AutoConfig.from_pretrained, json.loads(config.to_json_string()), key)


def transformers_has_no_configuration(case: FamilyCase) -> bool:
    """Return True if transformers has no configuration class for a family's model type."""
    return case.config.model_type not in CONFIG_MAPPING_NAMES


def fused_parts_revert_to_equal_sizes(case: FamilyCase) -> bool:
    """Return True if transformers reverts a concatenation of parts of different sizes into equal ones."""
    conversions = conversion_mapping._build_checkpoint_conversion_mapping()
    package = case.reference_class.__module__.split(".")[2]
    places = [place.split(": ") for place in TABLE[package].part_sizes]
    return any(
        type(operation) is Concatenate
        for key, target in places
        for conversion in conversions[key]
        if target in conversion.target_patterns
        for operation in conversion.operations
    )


def tower_names_are_lost(case: FamilyCase) -> bool:
    """Return True if transformers' conversions do not find a tower under its names in older checkpoints."""
    reference = case.reference()
    tower = reference.get_encoder(modality="image")
    where = next(name for name, module in reference.named_modules() if module is tower)
    names = [name for name in reference.state_dict() if name.startswith(f"{where}.")]
    older = [name.removeprefix(f"{reference.base_model_prefix}.") for name in names]
    renamings = [step for step in get_model_conversion_mapping(reference) if isinstance(step, WeightRenaming)]
    return [reduce(lambda key, renaming: renaming.rename_source_key(key)[0], renamings, key) for key in older] != names


def routing_flips(case: FamilyCase) -> bool:
    """Return True if other rounding makes the upstream class choose other experts, in bf16."""
    model = case.reference(torch.bfloat16)
    inputs = case.inputs(images=False, batch=16, length=128)
    for row in range(16):  # most models need the first only
        one = {name: value[row : row + 1] for name, value in inputs.items()}
        records = []
        with torch.no_grad(), record_routing(model) as record:
            model(**one, use_cache=False)
            records.append(dict(record))
            with rounded_otherwise(model):
                model(**one, use_cache=False)
            records.append(dict(record))
        if flip_rate(*records) > 0:
            return True
    return False


@contextmanager
def fake_mesh(ranks: int, name: str = "tp") -> Iterator[DeviceMesh]:
    """Create a one-dimensional mesh with this process as its first rank. Tensors are sharded, collectives do nothing.

    Raises:
        RuntimeError: A process group exists already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("this process is a rank already")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=(name,))
    finally:
        dist.destroy_process_group()


def parallelize_module_unties_weights() -> bool:
    """Return True if torch's `parallelize_module` unties an embedding and a head that share a tensor."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.words.weight

    with fake_mesh(2) as mesh:
        model = parallelize_module(Tied(), mesh, {"words": RowwiseParallel(), "head": ColwiseParallel()})
        return model.words.weight is not model.head.weight


def fused_kernel_bypasses_out_proj(case: FamilyCase) -> bool:
    """Return True if a mixer passes the weight of its projection to a fused kernel, bypassing the module's hooks."""
    mixers = {
        type(module)
        for module in case.reference().modules()
        if hasattr(module, "A_log") and hasattr(module, "out_proj")
    }
    return any("outproj_weight=self.out_proj.weight" in inspect.getsource(mixer) for mixer in mixers)


def optimizers_keep_no_state_without_gradients() -> bool:
    """Probe torch's AdamW."""
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([used, unused])
    used.square().sum().backward()
    optimizer.step()
    return unused not in optimizer.state


def unknown_attributes_are_accepted() -> bool:
    """Return True if torch silently accepts a misspelled freeze, `requires_gradient`."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.requires_gradient = False  # type: ignore[attr-defined]
    return parameter.requires_grad


# Probes of vLLM, which run if it is installed


def dummy_loading_touches_buffers(model: nn.Module) -> bool:
    """Return True if vLLM's dummy loader randomizes a model's derived buffers.

    Args:
        model: A model inside a running vLLM engine. Its weights are random afterwards.
    """
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    # vLLM sets its own buffers, whose names contain an underscore, afterwards (scales of a quantized cache).
    derived = {name: buffer for name, buffer in model.named_buffers() if not name.rpartition(".")[2].startswith("_")}
    before = {name: buffer.clone() for name, buffer in derived.items()}
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(model, None)
    return any(not torch.equal(buffer, before[name]) for name, buffer in derived.items())


@contextmanager
def layerwise_reload(model: nn.Module) -> Iterator[None]:
    """Reload the weights that are loaded into a model within the `with` block, as vLLM does."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    record_metadata_for_reloading(model)
    initialize_layerwise_reload(model)
    yield
    finalize_layerwise_reload(model, None)


def reloading_touches_buffers() -> bool:
    """Return True if vLLM's layerwise reload changes a derived buffer when it loads a weight of the same module."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4), requires_grad=False)
            self.register_buffer("scale", torch.tensor(0.0188), persistent=False)

    model = nn.Sequential(Scaled())
    with layerwise_reload(model):
        model[0].weight.weight_loader(model[0].weight, torch.full((4,), 2.0))
    assert torch.equal(model[0].weight, torch.full((4,), 2.0))
    return bool(model[0].scale != torch.tensor(0.0188))


def reloading_loses_statistics() -> bool:
    """Return True if a batch norm lacks the statistics that vLLM's layerwise reload loaded."""
    from vllm.model_executor.models.utils import AutoWeightsLoader

    model = nn.Sequential(nn.BatchNorm1d(4)).requires_grad_(False)
    sent = {name: torch.full_like(tensor, 7) for name, tensor in model.state_dict().items()}
    with layerwise_reload(model):
        assert set(AutoWeightsLoader(model).load_weights(sent.items())) == sent.keys()
    assert torch.equal(model[0].weight, sent["0.weight"])
    return not torch.equal(model[0].running_mean, sent["0.running_mean"])


def processors_need_a_tokenizer() -> bool:
    """Return True if vLLM's image processor does not start without a tokenizer."""
    from types import SimpleNamespace

    from vllm.multimodal.processing.processor import BaseMultiModalProcessor

    class Processor(BaseMultiModalProcessor):
        """Abstract, because only its initialization runs."""

    Processor.__abstractmethods__ = frozenset()
    info = SimpleNamespace(ctx=SimpleNamespace(tokenizer=None), get_data_parser=lambda: None)
    try:
        Processor(info, None)  # type: ignore[arg-type]
    except ValueError:
        return True
    return False


# Tables of probes

OF_INSTALLED: dict[str, Callable[[], bool]] = {
    "fp32-masters": lambda: small_updates_vanish(torch.bfloat16),
    "frozen-parts": loading_unfreezes,
    "unreachable-parameters": optimizers_keep_no_state_without_gradients,
    "misspelled-freezing": unknown_attributes_are_accepted,
    "tied-weights-under-tp": parallelize_module_unties_weights,
}
"""Probes of installed packages."""

OF_CLASS: dict[str, Callable[[FamilyCase], bool]] = {
    "strict-config-types": reader_rejects_integers_for_floats,
    "tower-names": tower_names_are_lost,
    "unequal-parts": fused_parts_revert_to_equal_sizes,
    "own-configuration": transformers_has_no_configuration,
    "shared-kv-unused-weights": lambda case: unused_weights_are_dropped(
        case.reference_class.from_pretrained, case.reference()
    ),
    "mtp-weights": lambda case: mtp_weights_are_dropped(case.reference_class.from_pretrained, case.reference()),
    "token-types": lambda case: images_are_causal(case.reference(), case.inputs(images=True)),
    "packed-documents": lambda case: documents_share_attention(case.reference(), case.inputs(images=False), mask=True),
    "masks-without-positions": lambda case: documents_share_attention(
        case.reference(), case.inputs(images=False), mask=False
    ),
    "text-output-without-images": lambda case: text_raises(transformers_model(case), case.inputs(images=False)),
    "mrope-packed-documents": lambda case: documents_share_attention(
        case.reference(), case.inputs(images=False), mask=False
    ),
    "image-masks-in-packed-rows": lambda case: image_depends_on_text_before(
        case.reference(), case.inputs(images=True, batch=1)
    ),
    "layers-across-documents": lambda case: documents_share_attention(
        case.reference(), case.inputs(images=False), mask=False
    ),
    "mrope-stale-offsets": lambda case: offsets_stay(
        case.reference(), case.inputs(images=True), case.inputs(images=False)["input_ids"]
    ),
    "shared-kv-without-cache": shared_keys_need_a_cache,
    "soft-cap-under-sdpa": sdpa_drops_soft_caps,
    "shared-kv-reentrant-checkpointing": lambda case: reentrant_checkpointing_loses_gradients(
        case.reference(), case.inputs(labels=True)
    ),
    "routing-flips": routing_flips,
    "full-vocabulary-logits": lambda case: full_logits_are_allocated(case.reference(), case.inputs(images=False)),
    "untrained-rows": lambda case: untrained_row_gradient_explodes(case.reference(), case.inputs(images=False)),
    "fused-out-projection": fused_kernel_bypasses_out_proj,
    "names-on-the-hub": lambda case: predicates.has_several_names(Subject(case.reference())),
}
"""Probes of the upstream class of a family, at tiny size."""

OF_VLLM: dict[str, Callable[[], bool]] = {
    "engine-batch-norms": reloading_loses_statistics,
    "engine-reload-buffers": reloading_touches_buffers,
    "engine-tokenizer": processors_need_a_tokenizer,
}
"""Probes of vLLM, if it is installed."""

OF_RUNNING_VLLM = ("engine-dummy-buffers", "engine-tied-head", "engine-experts-on-cpu")
"""Probes of a running vLLM engine, used by `tests/engine/test_quirks.py`."""
