"""Loading over a mesh equals loading in one process, with reads of slices only. Errors occur on every rank."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from jobs import loading, setting
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from world import RanksFailedError, World

from tests.unit.compressed_checkpoints import write
from tests.unit.gguf_checkpoints import write_gguf

LAYOUTS = {
    "fsdp": {"fsdp": 2},
    "tp": {"tp": 2},
    "ep": {"ep": 2},
    "fsdp-tp": {"fsdp": 2, "tp": 2},
    "fsdp-ep": {"fsdp": 2, "ep": 2},
    "ep-tp": {"ep": 2, "tp": 2},
}
DENSE = ("fsdp", "tp", "fsdp-tp")
CASES = [
    *(("LlamaForCausalLM", layout) for layout in DENSE),
    *(("Qwen2ForCausalLM", layout) for layout in DENSE),  # biases
    *(("Gemma3ForCausalLM", layout) for layout in DENSE),  # tied
    *(("Gemma3ForConditionalGeneration", layout) for layout in ("fsdp", "tp")),  # images
    *(("Phi3ForCausalLM", layout) for layout in DENSE),  # packed on the hub
    *(("MixtralForCausalLM", layout) for layout in LAYOUTS),  # one tensor per expert on the hub
    *(("DeepseekV3ForCausalLM", layout) for layout in LAYOUTS),  # latent attention, a buffer
    *(("GptOssForCausalLM", layout) for layout in LAYOUTS),  # experts with biases, sinks
]

LONG = ("Qwen2ForCausalLM", "Phi3ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM")
"""Architectures whose cases with four processes are marked long."""

MARKED_CASES = [
    pytest.param(*case, id="-".join(case), marks=pytest.mark.long if case[0] in LONG and "-" in case[1] else ())
    for case in CASES
]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of several files for each architecture, saved by transformers."""
    folders: dict[str, Path] = {}
    for architecture in dict.fromkeys(name for name, _ in CASES):
        folders[architecture] = tmp_path_factory.mktemp(architecture)
        setting.case_of(architecture).reference(torch.float32).save_pretrained(
            folders[architecture], max_shard_size="700KB"
        )
    return folders


@pytest.fixture
def llama(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a Llama checkpoint that tests may damage."""
    return shutil.copytree(checkpoints["LlamaForCausalLM"], tmp_path / "llama")


def world_for(layout: str, two: World, four: World) -> World:
    return four if "-" in layout else two


@pytest.mark.parametrize(("architecture", "layout"), MARKED_CASES)
def test_sharded_loading_matches_one_process(
    two: World, four: World, checkpoints: dict[str, Path], architecture: str, layout: str
) -> None:
    world = world_for(layout, two, four)
    for results in world.run(partial(loading.loads, **LAYOUTS[layout]), str(checkpoints[architecture]), architecture):
        assert results["logits"] <= 1e-5
        if "ep" not in layout and (layout, architecture) != ("tp", "Gemma3ForConditionalGeneration"):
            # ep does not shard other modules than experts, and tp does not shard the vision tower
            replicated_share = 0.04
            assert results["read"] <= 1 / world.size + replicated_share


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
@pytest.mark.parametrize("form", ["base model", "GGUF", "compressed-tensors"])
def test_other_checkpoint_formats_match_one_process(
    two: World, llama: Path, tmp_path: Path, layout: str, form: str
) -> None:
    """A base model from a checkpoint with a head; a dequantized and permuted GGUF file; INT4."""
    path, auto = llama, "AutoModel"
    model = setting.case_of("LlamaForCausalLM").reference(torch.float32)
    if form == "GGUF":
        path, auto = write_gguf(tmp_path / "llama.gguf", model, "llama", Kind.Q8_0), "AutoModelForCausalLM"
    elif form == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
        write(tmp_path, model.config, "int4")
        path, auto = tmp_path, "AutoModelForCausalLM"
    for difference, bound in two.run(partial(loading.loads_alike, **LAYOUTS[layout]), str(path), auto):
        assert difference <= bound < 1e-4


def test_only_column_shards_are_copied(two: World, four: World, tmp_path: Path) -> None:
    """Other shards are memory-mapped. Writing copies them. No rank needs more than its share plus one tensor."""
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=5, num_attention_heads=16, num_key_value_heads=8,
        vocab_size=8192, head_dim=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="60MB")
    sizes = [tensor.nbytes for tensor in model.state_dict().values()]
    del model
    for world, layout in ((two, "tp"), (two, "fsdp"), (four, "tp")):
        share = sum(sizes) / world.size
        for peak in world.run(partial(loading.peak_of_loading, **{layout: world.size}), str(tmp_path)):
            assert (peak["copied"] > 0) is (layout == "tp")
            assert peak["copied"] <= peak["loading"] <= peak["copied"] + max(sizes), (layout, world.size, peak)
            assert share * 0.95 <= peak["loading"] + peak["writing"] <= share + max(sizes), (layout, world.size, peak)


@pytest.mark.parametrize("keywords", [{"strict": False}, {"new_head": True}], ids=str)
@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_new_head_is_equal_on_all_ranks(two: World, llama: Path, layout: str, keywords: dict[str, bool]) -> None:
    for results in two.run(partial(loading.loads_classifier, **LAYOUTS[layout]), str(llama), keywords):
        assert results["std"] > 0.01
        assert results["same"]
        assert results["body"]


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_missing_layers_get_different_values(two: World, llama: Path, layout: str) -> None:
    tensors = {name: tensor for file in llama.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in llama.glob("model*"):
        file.unlink()
    others = {name: tensor for name, tensor in tensors.items() if "down_proj" not in name}
    save_file(others, llama / "model.safetensors", {"format": "pt"})
    for results in two.run(partial(loading.initializes_layers, **LAYOUTS[layout]), str(llama)):
        assert min(results["std"]) > 0.01
        assert not results["equal layers"]
        assert results["equal ranks"]


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_load_state_dict_over_mesh(two: World, llama: Path, layout: str) -> None:
    two.run(partial(loading.loads_state_dict, **LAYOUTS[layout]), str(llama))


# Errors


def errors_on_every_rank(world: World, job: object, *arguments: object) -> list[tuple[str, str]]:
    """Return the errors of a job that must fail on every rank."""
    with pytest.raises(RanksFailedError) as caught:
        world.run(job, *arguments)  # type: ignore[arg-type]
    errors = caught.value.errors
    assert sorted(errors) == list(range(world.size)), f"only ranks {sorted(errors)} failed: {errors}"
    return [errors[rank] for rank in range(world.size)]


@pytest.mark.parametrize(
    ("sizes", "names", "message"),
    [
        ((2,), None, "has dimensions without names"),
        ((2,), ("data",), "'data': is not a dimension of a model; expected some of pp, fsdp, ep, tp"),
        ((1, 2), ("tp", "fsdp"), "tp, fsdp: are in the wrong order"),
    ],
    ids=["unnamed", "unknown", "order"],
)
def test_invalid_mesh_dimensions_raise(
    two: World, llama: Path, sizes: tuple[int, ...], names: tuple[str, ...] | None, message: str
) -> None:
    for kind, text in errors_on_every_rank(two, loading.loads_over, str(llama), sizes, names):
        assert kind == "ShardingError"
        assert message in text
        assert "mesh_dim_names=" in text or "order" in text


def test_indivisible_model_raises(two: World, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    LlamaForCausalLM(LlamaConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=3, vocab_size=64,
                                 intermediate_size=33, num_hidden_layers=1)).save_pretrained(folder)  # fmt: skip
    for kind, text in errors_on_every_rank(two, partial(loading.loads_plainly, tp=2), str(folder)):
        assert kind == "ShardingError"
        assert "model.layers.0.self_attn.k_proj: has 3 heads of 16 (num_key_value_heads)" in text
        assert "model.layers.0.self_attn.v_proj" in text


def test_plan_with_unknown_module_or_style_raises(two: World, llama: Path) -> None:
    plan = {"model.layers.*.self_attn.query": "colwise", "model.layers.*.mlp.up_proj": "sideways"}
    for kind, text in errors_on_every_rank(two, partial(loading.loads_plainly, plan=plan, tp=2), str(llama)):
        assert kind == "ShardingError"
        assert "model.layers.*.self_attn.query: names no module or parameter" in text
        assert "has the style 'sideways'; known are " in text
        assert "colwise" in text


def test_checkpoint_of_another_architecture_raises(two: World, llama: Path, checkpoints: dict[str, Path]) -> None:
    shutil.copy(checkpoints["GptOssForCausalLM"] / "config.json", llama)
    for kind, text in errors_on_every_rank(two, partial(loading.loads_plainly, tp=2), str(llama)):
        assert kind == "CheckpointError"
        assert "missing: model.layers.0.self_attn.sinks" in text


def test_different_config_per_rank_raises(two: World, llama: Path, tmp_path: Path) -> None:
    other = shutil.copytree(llama, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}})
    )
    for kind, text in errors_on_every_rank(two, partial(loading.loads_differently, tp=2), [str(llama), str(other)]):
        assert kind == "ShardingError"
        assert "config of rank 1" in text


def test_missing_file_on_one_rank_raises(two: World, llama: Path, tmp_path: Path) -> None:
    other = shutil.copytree(llama, tmp_path / "other")
    next(other.glob("model-00002-*.safetensors")).unlink()
    (first, second) = errors_on_every_rank(two, partial(loading.loads_differently, fsdp=2), [str(llama), str(other)])
    assert second[0] == "CheckpointError"
    assert first[0] == "ShardingError"
    assert "rank 1: CheckpointError" in first[1]
    assert "model-00002-of" in first[1]
    assert "model-00002-of" in second[1]


def test_different_weights_per_rank_raise(two: World) -> None:
    for kind, text in errors_on_every_rank(two, partial(loading.shards_what_differs, fsdp=2)):
        assert kind == "ShardingError"
        assert "values of rank 1: differ from those of rank 0 in model.norm.weight\n" in text
        assert "seed all ranks alike, torch.manual_seed(0), before adding adapters or heads" in text


def test_different_tied_tensors_in_one_shard_raise(two: World, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints["Gemma3ForCausalLM"], tmp_path / "gemma")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = index["weight_map"]["model.norm.weight"]
    tensors = load_file(folder / file)
    embeddings = load_file(folder / index["weight_map"]["model.embed_tokens.weight"])["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embeddings.clone()
    tensors["lm_head.weight"][-1] += 1  # in the second rank's shard
    save_file(tensors, folder / file, metadata={"format": "pt"})
    index["weight_map"]["lm_head.weight"] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    errors = errors_on_every_rank(two, partial(loading.loads_plainly, tp=2), str(folder))
    assert "lm_head.weight" in errors[1][1]
    assert "differs from model.embed_tokens.weight" in errors[0][1]


def test_transformers_sharding_options_raise(llama: Path) -> None:
    from nrl_models import AutoModelForCausalLM
    from nrl_models.errors import UnknownArgumentError

    for name in ("tp_plan", "distributed_config", "tp_size", "device_mesh"):
        with pytest.raises(UnknownArgumentError, match=rf"{name}: transformers' own sharded loading .* mesh="):
            AutoModelForCausalLM.from_pretrained(llama, **{name: "auto"})
    with pytest.raises(UnknownArgumentError, match="pass mesh"):
        AutoModelForCausalLM.from_pretrained(llama, plan="auto")


def test_rank_crash_during_loading_does_not_hang(llama: Path) -> None:
    world = World(2)
    try:
        (kind, text) = world.run_dying(1, partial(loading.dies_while_loading, tp=2), str(llama))[0]
    finally:
        world.close()
    assert kind == "ShardingError"
    assert "cannot load the checkpoint" in text
    assert "is gone" in text
