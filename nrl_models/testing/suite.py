"""The generated tests. Each takes a `family_case`, and runs for every registered class or those of `--nrl-family`.

The reference is always the Hugging Face class that a family extends, with the same weights, every
1-D parameter randomised. fp32 must agree to 1e-5 and bf16 to 1e-2; copies and files must be exact.
"""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from nrl_models.common import CombinedLinear, ProjectionPart
from nrl_models.common.routing import replay_routing
from nrl_models.common.tracing import trace_groups
from nrl_models.parity.components import calls_of, run_layer
from nrl_models.parity.noise import limit, logits_and_routing, logits_noise, logits_of
from nrl_models.testing.case import SEED, FamilyCase, randomise
from nrl_models.testing.matmuls import count_matmuls

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))


def assert_close(actual: Any, expected: Any, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> None:
    """Equal to the dtype's tolerance, absolute and relative, times `scale`."""
    tolerance = TOLERANCE[dtype] * scale
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


# State dict


def test_state_dict_roundtrip(family_case: FamilyCase) -> None:
    """Own tensors to Hugging Face ones and back, exactly, in both layouts; and they are the reference's."""
    model, reference = family_case.model(), family_case.reference()
    adapter = model.state_dict_adapter
    own = model.state_dict()
    expected = {
        "transformers": reference.state_dict(),
        "hub": revert_weight_conversion(reference, dict(reference.state_dict())),
    }
    for layout, tensors in expected.items():
        converted = adapter.to_hf(own, layout=layout)
        assert_same_tensors(converted, tensors)
        assert_same_tensors(adapter.from_hf(converted), own)


def test_views_partition_parameters(family_case: FamilyCase) -> None:
    """Each element of each tensor is in exactly one Hugging Face tensor of either layout."""
    model = family_case.model()
    adapter = model.state_dict_adapter
    numbers = {name: torch.arange(tensor.numel()).view(tensor.shape) for name, tensor in model.state_dict().items()}
    for layout in ("hub", "transformers"):
        for name, number in numbers.items():
            views = [
                piece.view
                for tensor in adapter.tensors_in(name, layout)
                for piece in tensor.pieces
                if piece.view.parameter == name
            ]
            seen = torch.cat([view.of(number).reshape(-1) for view in views])
            assert torch.equal(seen.sort().values, number.reshape(-1)), f"{name} in {layout}"


def test_full_size_names_and_shapes(family_case: FamilyCase) -> None:
    """At published size, on meta: names, shapes and order are those of transformers, in both layouts."""
    with torch.device("meta"):
        reference = family_case.reference_class(family_case.full_config)
        model = family_case.model_class(family_case.full_config)
    adapter = model.state_dict_adapter
    in_memory = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    assert {name: tensor.shape for name, tensor in adapter.transformers.items()} == in_memory
    assert list(adapter.transformers) == list(in_memory)
    saved = revert_weight_conversion(reference, dict(reference.state_dict()))
    assert {name: tensor.shape for name, tensor in adapter.hub.items()} == {
        name: tuple(tensor.shape) for name, tensor in saved.items()
    }


def test_single_tensor_export(family_case: FamilyCase) -> None:
    """Exporting tensor by tensor gives what exporting all at once gives, sharing the parameters' storage."""
    model = family_case.model()
    adapter = model.state_dict_adapter
    own = model.state_dict()
    one_by_one = {name: tensor for key in own for name, tensor in adapter.convert_single_tensor_to_hf(key, own[key])}
    assert_same_tensors(one_by_one, adapter.to_hf(own))
    storages = {tensor.untyped_storage().data_ptr() for tensor in own.values()}
    assert all(tensor.untyped_storage().data_ptr() in storages for tensor in one_by_one.values())


def test_export_plan(family_case: FamilyCase) -> None:
    """The plan names what the stream yields, in its order; buckets hold the same values."""
    model = family_case.model(torch.bfloat16)
    adapter = model.state_dict_adapter
    plan = adapter.export_plan()
    for max_bytes in (None, 100_000):
        stream = list(adapter.iter_export(model, max_bytes))
        assert [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in stream] == plan
        assert_same_tensors(dict(stream), {name: adapter.to_hf(model.state_dict())[name] for name, _, _ in plan})


def test_load_state_dict_accepts_hf_names(family_case: FamilyCase) -> None:
    """`load_state_dict` takes transformers' and the hub's names, strictly."""
    reference, expected = family_case.reference(), family_case.model().state_dict()
    for tensors in (reference.state_dict(), revert_weight_conversion(reference, dict(reference.state_dict()))):
        model = family_case.model_class.from_config(family_case.config, device=family_case.device)
        result = model.load_state_dict(tensors, strict=False)
        assert set(result.missing_keys) <= set(model.all_tied_weights_keys)
        assert not result.unexpected_keys
        assert_same_tensors(model.state_dict(), expected)


# Layers


def test_declaration_matches_trace(family_case: FamilyCase) -> None:
    """The groups a family combines are exactly the linears that read one input in the Hugging Face model."""
    reference, model = family_case.reference(), family_case.model()
    traced = trace_groups(reference, lambda: reference(**family_case.inputs()))
    found = {(owner, frozenset(group)) for owner, groups in traced.items() for group in groups}
    declared = {
        (owner, frozenset(module.rows))
        for name, module in model.named_modules()
        if isinstance(module, CombinedLinear)
        for owner in [name.rpartition(".")[0]]
    }
    assert declared == found


@dtypes
def test_attention_equivalence(family_case: FamilyCase, rewritten_layer: str, dtype: torch.dtype) -> None:
    """A rewritten attention equals the attention it replaces, on random inputs, with fewer matmuls."""
    check_layer(family_case, rewritten_layer, dtype)


@dtypes
def test_mlp_equivalence(family_case: FamilyCase, rewritten_layer: str, dtype: torch.dtype) -> None:
    """A rewritten MLP equals the MLP it replaces, on random inputs, with fewer matmuls."""
    check_layer(family_case, rewritten_layer, dtype)


@dtypes
def test_layer_equivalence(family_case: FamilyCase, rewritten_layer: str, dtype: torch.dtype) -> None:
    """Any other rewritten layer equals the layer it replaces, on random inputs."""
    check_layer(family_case, rewritten_layer, dtype)


def check_layer(case: FamilyCase, layer_name: str, dtype: torch.dtype) -> None:
    """Compare every instance of a rewritten class with what it replaces; a group of n linears saves n - 1 matmuls."""
    reference, model = case.reference(dtype), case.model(dtype)
    original_class, new_class = next(
        (original, new) for original, new in case.model_class.rewrites.items() if original.__name__ == layer_name
    )
    calls = calls_of(reference, {original_class}, case.inputs())
    if not calls:
        pytest.skip(f"has no {layer_name}")
    for name, call in calls.items():
        layer, original = model.get_submodule(name), reference.get_submodule(name)
        assert type(layer) is new_class
        call = call.with_random_input(seed=SEED)
        assert_close(run_layer(layer, call), run_layer(original, call), dtype)
        saved = sum(len(part.rows) - 1 for part in layer.modules() if isinstance(part, CombinedLinear))
        assert count_matmuls(layer, call) == count_matmuls(original, call) - saved


# Model


def test_forward_shape(family_case: FamilyCase) -> None:
    """Logits have a row for each token (or sequence) and a column for each word (or label)."""
    inputs, config = family_case.inputs(), family_case.config
    with torch.no_grad():
        logits = family_case.model()(**inputs).logits
    batch, length = inputs["input_ids"].shape
    name = family_case.architecture
    columns = config.num_labels if name.endswith("Classification") else config.get_text_config().vocab_size
    rows = (batch,) if name.endswith("SequenceClassification") else (batch, length)
    assert tuple(logits.shape) == (*rows, columns)


@dtypes
def test_logits_equivalence(family_case: FamilyCase, dtype: torch.dtype) -> None:
    """The whole model equals the reference; below fp32, to what rounding makes of it, on the same experts."""
    model, reference, inputs = family_case.model(dtype), family_case.reference(dtype), family_case.inputs()
    expected, routing = logits_and_routing(reference, inputs)
    if dtype == torch.float32:
        assert_close(logits_of(model, inputs), expected)
        return
    with replay_routing(model, routing):
        difference = (logits_of(model, inputs) - expected).abs().max().item()
    assert difference <= limit(logits_noise(reference, inputs, routing), dtype)


def test_gradient_equivalence(family_case: FamilyCase) -> None:
    """Gradients, mapped through the adapter, equal the reference's; every parameter that has one there has one here."""
    reference, model = family_case.new_pair()
    expected, actual = _gradients(reference.train(), family_case), _gradients(model.train(), family_case)
    mapped = model.state_dict_adapter.to_hf(actual, layout="transformers")
    assert_close(mapped, expected)


def test_activation_checkpointing(family_case: FamilyCase) -> None:
    """Recomputing activations in the backward changes no gradient."""
    _, model = family_case.new_pair()
    model.train()
    expected = _gradients(model, family_case)
    model.gradient_checkpointing_enable()
    assert_close(_gradients(model, family_case), expected)


def _gradients(model: nn.Module, case: FamilyCase) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**case.inputs(labels=True), use_cache=False).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(family_case: FamilyCase, side: str) -> None:
    """A sequence has the same logits alone and padded in a batch, on either side."""
    if side == "left" and family_case.architecture.endswith("SequenceClassification"):
        pytest.skip("transformers' classification heads take the last token that is not padding")
    model = family_case.model()
    documents = _documents(family_case)
    length = max(len(document) for document in documents)
    input_ids = torch.zeros(len(documents), length, dtype=torch.long, device=family_case.device)
    mask = torch.zeros_like(input_ids)
    for row, document in enumerate(documents):
        place = slice(length - len(document), None) if side == "left" else slice(len(document))
        input_ids[row, place], mask[row, place] = document, 1
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=input_ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits
        alone = [model(input_ids=document[None], use_cache=False).logits[0] for document in documents]
    for row, expected in enumerate(alone):
        actual = logits[row] if logits.ndim == 2 else logits[row][mask[row].bool()]
        assert_close(actual, expected, scale=10)  # matmuls of other shapes add up in another order


def test_packing(family_case: FamilyCase) -> None:
    """Sequences packed into one row, told apart by their positions, have the logits they have alone."""
    if family_case.architecture.endswith("SequenceClassification"):
        pytest.skip("a sequence classifier has one score a row")
    model = family_case.model()
    documents = _documents(family_case)
    position_ids = torch.cat([torch.arange(len(document)) for document in documents])[None].to(family_case.device)
    with torch.no_grad():
        packed = model(input_ids=torch.cat(documents)[None], position_ids=position_ids, use_cache=False).logits[0]
        alone = torch.cat([model(input_ids=document[None], use_cache=False).logits[0] for document in documents])
    assert_close(packed, alone, scale=10)


def _documents(case: FamilyCase) -> list[torch.Tensor]:
    rows = case.inputs(batch=3, length=13, images=False, seed=3)["input_ids"]
    return [row[:size] for row, size in zip(rows, (7, 13, 10), strict=True)]


def test_cached_decode(family_case: FamilyCase) -> None:
    """Decoding token by token with a cache gives the logits of one full forward."""
    if not family_case.model().can_generate():
        pytest.skip("does not generate")
    model = family_case.model()
    input_ids = family_case.inputs(length=14, images=False)["input_ids"]
    with torch.no_grad():
        full = model(input_ids=input_ids, use_cache=False).logits
        output = model(input_ids=input_ids[:, :10], use_cache=True)
        steps = [output.logits]
        for token in range(10, 14):
            output = model(
                input_ids=input_ids[:, token : token + 1], past_key_values=output.past_key_values, use_cache=True
            )
            steps.append(output.logits)
    assert_close(torch.cat(steps, dim=1), full, scale=10)


def test_greedy_generation(family_case: FamilyCase) -> None:
    """`generate` picks the reference's tokens."""
    if not family_case.model().can_generate():
        pytest.skip("does not generate")
    inputs = family_case.inputs(length=12)
    options = {"max_new_tokens": 8, "do_sample": False, "min_new_tokens": 8}
    actual = family_case.model().generate(**inputs, **options)
    assert torch.equal(actual, family_case.reference().generate(**inputs, **options))
    assert actual.shape[1] == inputs["input_ids"].shape[1] + 8


def test_tied_weights_share_storage(family_case: FamilyCase, tmp_path: Path) -> None:
    """What the configuration ties is one storage: built, loaded, copied; what it does not tie is not."""
    for tie in (True, False):
        config = family_case.config
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tie
        built = family_case.model_class.from_config(config)
        if built.get_output_embeddings() is None or not built._tied_weights_keys:
            pytest.skip("has no output embeddings to tie")
        built.save_pretrained(tmp_path / str(tie))
        loaded = family_case.model_class.from_pretrained(tmp_path / str(tie))
        for model in (built, loaded, copy.deepcopy(loaded)):
            pair = model.get_input_embeddings().weight, model.get_output_embeddings().weight
            assert (pair[0].data_ptr() == pair[1].data_ptr()) is tie
            assert model.config.tie_word_embeddings is tie


def test_training_loss_decreases(family_case: FamilyCase) -> None:
    """A few optimiser steps lower the loss, and as they do in the reference."""
    losses = []
    for model in family_case.new_pair():
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses.append([])
        for _ in range(5):
            loss = model(**family_case.inputs(labels=True), use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[1][-1] < losses[1][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_from_config_is_bit_exact(family_case: FamilyCase) -> None:
    """Under a seed, new weights are bit for bit those of transformers."""
    tensors = []
    for build in (family_case.reference_class._from_config, family_case.model_class.from_config):
        torch.manual_seed(SEED)
        tensors.append(build(family_case.config))
    expected, model = tensors
    assert_same_tensors(
        model.state_dict_adapter.to_hf(model.state_dict(), layout="transformers"), expected.state_dict()
    )


def test_copies_keep_one_storage(family_case: FamilyCase) -> None:
    """`deepcopy`, pickling and `torch.save` keep parts views of the combined weights, apart from the original."""
    model = family_case.model()
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)
    for one in copies:
        assert_same_tensors(one.state_dict(), model.state_dict())
        parts = {name: part for name, part in one.named_modules() if isinstance(part, ProjectionPart)}
        for name, part in parts.items():
            combined = one.get_submodule(name.rpartition(".")[0]).get_submodule(part._combined_name)
            assert part.weight.untyped_storage().data_ptr() == combined.weight.untyped_storage().data_ptr()
            assert part.weight.data_ptr() != model.get_submodule(name).weight.data_ptr()


def test_uncombined(family_case: FamilyCase) -> None:
    """`combine=False` has transformers' own parameters, and the same logits."""
    model = family_case.model_class.from_config(family_case.config, combine=False, device=family_case.device).eval()
    reference = family_case.reference()
    assert list(model.state_dict()) == list(reference.state_dict())
    model.load_state_dict(reference.state_dict())
    with torch.no_grad():
        assert torch.equal(model(**family_case.inputs()).logits, reference(**family_case.inputs()).logits)


def test_lora(family_case: FamilyCase) -> None:
    """A PEFT adapter for every linear of the Hugging Face model loads unchanged, and merges, with equal outputs."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    inputs = family_case.inputs()
    logits, adapters = [], []
    for model in family_case.new_pair():
        torch.manual_seed(SEED)
        # Not initialised as PEFT does, which would make B zero and hide a lost adapter.
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        with_lora = peft.get_peft_model(model, config).eval()
        if adapters:
            loaded = peft.set_peft_model_state_dict(with_lora, adapters[0])
            assert not loaded.unexpected_keys
        adapters.append(peft.get_peft_model_state_dict(with_lora))
        with torch.no_grad():
            logits.append(with_lora(**inputs).logits)
            logits.append(with_lora.merge_and_unload()(**inputs).logits)
    reference, reference_merged, actual, actual_merged = logits
    assert_same_tensors(adapters[1], adapters[0])
    assert not torch.allclose(reference, family_case.reference()(**inputs).logits, atol=1e-2)
    assert_close(actual, reference)
    assert_close(actual_merged, reference_merged, scale=10)  # merged weights multiply other numbers


# Files


def test_load_from_transformers(family_case: FamilyCase, tmp_path: Path) -> None:
    """A sharded checkpoint written by transformers loads here, exactly, buffers included."""
    reference = family_case.reference_class._from_config(family_case.config, dtype=torch.bfloat16)
    randomise(reference)
    reference.save_pretrained(tmp_path, max_shard_size="700KB")
    reference = family_case.reference_class.from_pretrained(tmp_path)
    model = family_case.model_class.from_pretrained(tmp_path)
    assert_same_tensors(
        model.state_dict_adapter.to_hf(model.state_dict(), layout="transformers"), reference.state_dict()
    )
    assert_same_tensors(dict(model.named_buffers()), dict(reference.named_buffers()))
    assert not model.training


def test_save_equals_transformers(family_case: FamilyCase, tmp_path: Path) -> None:
    """What is saved here is what transformers saves, tensor for tensor, and it loads in both."""
    family_case.reference(torch.bfloat16).save_pretrained(tmp_path / "first")
    model = family_case.model_class.from_pretrained(tmp_path / "first")
    reference = family_case.reference_class.from_pretrained(tmp_path / "first")
    for shard_size in ("5GB", "700KB"):
        ours, theirs = tmp_path / f"ours-{shard_size}", tmp_path / f"theirs-{shard_size}"
        model.save_pretrained(ours, max_shard_size=shard_size)
        reference.save_pretrained(theirs, max_shard_size=shard_size)
        assert_same_tensors(all_tensors(ours), all_tensors(theirs))
        for path in theirs.glob("*config.json"):
            assert (ours / path.name).read_text() == path.read_text()
        reloaded, info = family_case.reference_class.from_pretrained(ours, output_loading_info=True)
        assert not any(info.values()), info
        assert_same_tensors(reloaded.state_dict(), reference.state_dict())
        assert_same_tensors(family_case.model_class.from_pretrained(ours).state_dict(), model.state_dict())


def test_new_model_saves_as_transformers(family_case: FamilyCase, tmp_path: Path) -> None:
    """A model that was never loaded saves in the layout transformers gives a new one."""
    for directory, build in (
        ("a", family_case.reference_class._from_config),
        ("b", family_case.model_class.from_config),
    ):
        torch.manual_seed(SEED)
        build(family_case.config).save_pretrained(tmp_path / directory)
    assert_same_tensors(*(load_file(tmp_path / directory / "model.safetensors") for directory in "ba"))


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of every safetensors file in `folder`."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, dtypes and values, bit for bit."""
    assert set(actual) == set(expected), f"names differ: {sorted(set(actual) ^ set(expected))[:8]}"
    different = [
        name
        for name, tensor in expected.items()
        if actual[name].dtype != tensor.dtype or not torch.equal(actual[name], tensor)
    ]
    assert not different, f"{len(different)} tensors differ: {different[:8]}"
