"""A save replaces a checkpoint completely or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import INDEX, WEIGHTS, assert_same, edit_config, hf_tensors, problems, stored, weight_map
from safetensors.torch import load_file
from transformers import LlamaConfig, MixtralConfig, PreTrainedModel
from transformers import LlamaForCausalLM as HFLlama
from transformers import MixtralForCausalLM as HFMixtral

from nrl_models import AutoModelForCausalLM, CheckpointError, StateDictError, UnknownArgumentError
from nrl_models.common.checkpoint.local_path import short_name
from nrl_models.common.checkpoint.publication.locks import TEMPORARY
from nrl_models.common.checkpoint.writing import write_whole
from nrl_models.common.projections import own_storage
from nrl_models.common.trust.own_folder import claim, default_folder
from nrl_models.errors import SaveError
from nrl_models.families.llama.model import LlamaForCausalLM
from nrl_models.families.table.classes import MixtralForCausalLM

SIZES = {"single": "5GB", "three shards": "160KB", "more shards": "90KB"}
"""`max_shard_size` for the small models here."""

TRANSITIONS = [
    ("single", "single"),
    ("single", "three shards"),
    ("three shards", "three shards"),
    ("three shards", "more shards"),
    ("more shards", "three shards"),
    ("three shards", "single"),
]

transitions = pytest.mark.parametrize(("before", "after"), TRANSITIONS, ids=lambda name: name.replace(" ", "-"))


def small_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM.from_config(config, combine=True)


@pytest.fixture(scope="module")
def models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Return the old and the new model."""
    return small_model(0), small_model(1)


@pytest.fixture
def target(models: tuple[LlamaForCausalLM, LlamaForCausalLM], before: str, tmp_path: Path) -> Path:
    """The old model's checkpoint, in a folder with unrelated files."""
    folder = tmp_path / "checkpoint"
    models[0].save_pretrained(folder, max_shard_size=SIZES[before])
    (folder / "optimizer.pt").write_text("state")
    (folder / "logs").mkdir()
    (folder / "logs" / "model.txt").write_text("log")
    return folder


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


UNRELATED = {"optimizer.pt", "logs/model.txt"}


def checkpoint_index(folder: Path, models: tuple[PreTrainedModel, ...]) -> int:
    """Return the index of the model in the folder. nrl_models and transformers must read the same tensors."""
    loaded = [hf_tensors(AutoModelForCausalLM.from_pretrained(folder)), HFLlama.from_pretrained(folder).state_dict()]
    assert_same(*loaded)
    return next(
        index
        for index, model in enumerate(models)
        if all(torch.equal(tensor, loaded[0][name]) for name, tensor in hf_tensors(model).items())
    )


# Atomic saves


@transitions
def test_save_replaces_checkpoint_completely(
    models: tuple[LlamaForCausalLM, LlamaForCausalLM], target: Path, after: str, tmp_path: Path
) -> None:
    models[1].save_pretrained(target, max_shard_size=SIZES[after])
    models[1].save_pretrained(tmp_path / "fresh", max_shard_size=SIZES[after])
    assert files_of(target) == files_of(tmp_path / "fresh") | UNRELATED
    for path in (tmp_path / "fresh").iterdir():
        assert (target / path.name).read_bytes() == path.read_bytes()
        assert (target / path.name).stat().st_mode == path.stat().st_mode
    assert checkpoint_index(target, models) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "fresh"]


def test_shard_sizes_give_expected_file_counts(
    models: tuple[LlamaForCausalLM, LlamaForCausalLM], tmp_path: Path
) -> None:
    for name, size in SIZES.items():
        models[0].save_pretrained(tmp_path / name, max_shard_size=size)
    counts = [len(list((tmp_path / name).glob("*.safetensors"))) for name in SIZES]
    assert counts[:2] == [1, 3]
    assert counts[2] > 3


class InterruptedError(Exception):
    """Raised to interrupt a save."""


STEPS = ("replace", "rename", "link", "unlink")


def interrupting(monkeypatch: pytest.MonkeyPatch, at: int, stop: Callable[[], None]) -> Callable[[], int]:
    """Call `stop` instead of the `at`-th step that changes a folder (starting at 1). Returns the step counter."""
    steps = 0

    def patched(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == at:
                stop()
            return original(*args, **options)

        return step

    for name in STEPS:
        monkeypatch.setattr(os, name, patched(getattr(os, name)))
    return lambda: steps


def interrupt() -> None:
    raise InterruptedError


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [("three shards", "more shards"), ("three shards", "single")])
def test_interrupted_save_leaves_old_or_new_model(
    models: tuple[LlamaForCausalLM, LlamaForCausalLM], target: Path, after: str
) -> None:
    spare = shutil.copytree(target, target.parent / "spare")
    models[1].save_pretrained(target.parent / "new", max_shard_size=SIZES[after])
    indices = []
    while True:
        with pytest.MonkeyPatch.context() as patch:
            steps = interrupting(patch, len(indices) + 1, interrupt)
            try:
                models[1].save_pretrained(target, max_shard_size=SIZES[after])
            except InterruptedError:
                pass
            else:
                break
        assert steps() >= len(indices) + 1
        assert files_of(target) >= UNRELATED
        assert not list(target.glob(".*"))  # the temporary folder is removed
        indices.append(checkpoint_index(target, models))
        # A later save repairs the checkpoint.
        models[1].save_pretrained(target, max_shard_size=SIZES[after])
        assert files_of(target) == files_of(target.parent / "new") | UNRELATED
        assert checkpoint_index(target, models) == 1
        shutil.rmtree(target)
        shutil.copytree(spare, target)
    assert indices[0] == 0
    assert indices == sorted(indices)  # the new checkpoint never turns back into the old one
    assert len(indices) >= 3


@transitions
def test_write_error_keeps_old_checkpoint(
    models: tuple[LlamaForCausalLM, LlamaForCausalLM], target: Path, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: (target / name).read_bytes() for name in files_of(target)}
    written = []
    original = PreTrainedModel.save_pretrained.__globals__["safe_save_file"]

    def fail_at_the_last(tensors: Any, path: str, **options: Any) -> None:
        original(tensors, path, **options)
        written.append(path)
        if "model.norm.weight" in tensors or after == "single":
            raise OSError("no space left on device")

    monkeypatch.setitem(PreTrainedModel.save_pretrained.__globals__, "safe_save_file", fail_at_the_last)
    with pytest.raises(OSError, match="no space left"):
        models[1].save_pretrained(target, max_shard_size=SIZES[after])
    assert written
    assert {name: (target / name).read_bytes() for name in files_of(target)} == before


@pytest.mark.parametrize("before", ["three shards"])
def test_next_save_cleans_up_interrupted_saves(
    models: tuple[LlamaForCausalLM, LlamaForCausalLM], target: Path, before: str
) -> None:
    clean = files_of(target)
    with pytest.MonkeyPatch.context() as patch:
        steps = interrupting(patch, 0, interrupt)
        models[1].save_pretrained(target, max_shard_size=SIZES[before])
        last = steps()
    for at in range(1, last):
        with pytest.MonkeyPatch.context() as patch, suppress(InterruptedError):
            interrupting(patch, at, interrupt)
            models[1].save_pretrained(target, max_shard_size=SIZES[before])
    models[1].save_pretrained(target, max_shard_size=SIZES[before])
    assert files_of(target) == clean
    assert checkpoint_index(target, models) == 1


@pytest.mark.parametrize("before", ["three shards"])
def test_save_without_hard_links(
    models: tuple[LlamaForCausalLM, LlamaForCausalLM], target: Path, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("operation not permitted")

    clean = files_of(target)
    monkeypatch.setattr(os, "link", refuse)
    models[1].save_pretrained(target, max_shard_size=SIZES[before])
    assert files_of(target) == clean
    assert checkpoint_index(target, models) == 1


# Target folders


def test_parent_folders_are_created(models: tuple[LlamaForCausalLM, LlamaForCausalLM], tmp_path: Path) -> None:
    models[0].save_pretrained(tmp_path / "a" / "b" / "c")
    assert checkpoint_index(tmp_path / "a" / "b" / "c", models) == 0
    assert (tmp_path / "a" / "b" / "c").stat().st_mode == (tmp_path / "a").stat().st_mode
    assert os.listdir(tmp_path / "a" / "b") == ["c"]


@pytest.mark.parametrize("name", ["n" * 255, "ü" * 127], ids=["ascii", "utf-8"])
def test_maximum_folder_name_length(
    models: tuple[LlamaForCausalLM, LlamaForCausalLM], tmp_path: Path, name: str
) -> None:
    folder = tmp_path / name
    (tmp_path / f".{short_name(name)}{TEMPORARY}01234567").mkdir()  # left by a killed save
    for expected_index in (0, 1):  # into a new directory, and into an existing one
        models[expected_index].save_pretrained(folder)
        assert checkpoint_index(folder, models) == expected_index
        assert os.listdir(tmp_path) == [name]
    write_whole(folder / name, "text")
    assert (folder / name).read_text() == "text"
    claim(default_folder(str(tmp_path / "checks"), folder, "0" * 64), "test")


def test_save_to_existing_file_raises(models: tuple[LlamaForCausalLM, LlamaForCausalLM], tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(SaveError, match="is a file, expected a directory"):
        models[0].save_pretrained(tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"


def test_save_through_symlink(models: tuple[LlamaForCausalLM, LlamaForCausalLM], tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    models[0].save_pretrained(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert checkpoint_index(tmp_path / "real", models) == 0


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_save_into_source_folder_of_mapped_model(size: str, tmp_path: Path) -> None:
    small_model(0).save_pretrained(tmp_path, max_shard_size=size)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    expected = {name: tensor.clone() + 1 for name, tensor in hf_tensors(model).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    for _ in range(2):
        model.save_pretrained(tmp_path, max_shard_size=size)
        assert_same(hf_tensors(model), expected)
        assert_same(stored(tmp_path), expected)
    for other in SIZES.values():
        model.save_pretrained(tmp_path, max_shard_size=other)
        assert_same(stored(tmp_path), expected)


@pytest.mark.parametrize("before", SIZES)
def test_non_main_process_writes_nothing(
    models: tuple[LlamaForCausalLM, LlamaForCausalLM], target: Path, before: str
) -> None:
    files = files_of(target)
    models[1].save_pretrained(target, is_main_process=False)
    models[1].save_pretrained(target.parent / "elsewhere", is_main_process=False)
    assert files_of(target) == files
    assert checkpoint_index(target, models) == 0
    assert not list(target.parent.glob("*elsewhere*"))


@pytest.mark.parametrize("before", SIZES)
def test_variant_is_saved_next_to_weights(
    models: tuple[LlamaForCausalLM, LlamaForCausalLM], target: Path, before: str
) -> None:
    files = files_of(target)
    models[1].save_pretrained(target, variant="new")
    assert files_of(target) == files | {"model.new.safetensors"}
    assert checkpoint_index(target, models) == 0
    assert_same(load_file(target / "model.new.safetensors"), hf_tensors(models[1]))


@pytest.mark.parametrize("sizes", [("5GB", "100KB"), ("100KB", "5GB"), ("100KB", "300KB")])
def test_saving_variant_twice_replaces_files(
    models: tuple[LlamaForCausalLM, LlamaForCausalLM], tmp_path: Path, sizes: tuple[str, str]
) -> None:
    target = tmp_path / "target"
    models[0].save_pretrained(target)
    models[0].save_pretrained(tmp_path / "expected", variant="new", max_shard_size=sizes[1])
    for model, size in zip(models, sizes, strict=True):
        model.save_pretrained(target, variant="new", max_shard_size=size)
    assert files_of(target) == files_of(tmp_path / "expected") | {WEIGHTS}
    loaded = LlamaForCausalLM.from_pretrained(target, variant="new")
    assert_same(hf_tensors(loaded), hf_tensors(models[1]))
    assert_same(load_file(target / WEIGHTS), hf_tensors(models[0]))


@pytest.mark.parametrize("size", ["1XB", "", None, 1.5, True])
def test_invalid_max_shard_size_raises(
    models: tuple[LlamaForCausalLM, LlamaForCausalLM], tmp_path: Path, size: Any
) -> None:
    with pytest.raises(UnknownArgumentError, match=r"max_shard_size=.*expected bytes, or a size such as '5GB'"):
        models[0].save_pretrained(tmp_path / "saved", max_shard_size=size)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("folder", [None, 5, b"saved", "~nobody-has-this-name/saved", "", "a\0b", "n" * 256])
def test_invalid_folder_raises(models: tuple[LlamaForCausalLM, LlamaForCausalLM], folder: Any) -> None:
    with pytest.raises(UnknownArgumentError):
        models[0].save_pretrained(folder)


def test_home_directory_is_expanded(
    models: tuple[LlamaForCausalLM, LlamaForCausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    models[0].save_pretrained("~/saved")
    assert (tmp_path / "saved" / WEIGHTS).is_file()
    assert not (tmp_path / "~").exists()


# Saved contents


def test_saved_names_are_hugging_face_names(tmp_path: Path) -> None:
    model = small_model(0)
    for name, size in SIZES.items():
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        assert not [key for key in stored(tmp_path / name) if "qkv_proj" in key or "gate_up_proj" in key]
        if name != "single":
            assert weight_map(tmp_path / name).keys() == stored(tmp_path / name).keys()


def test_fused_qkv_is_split_at_head_boundaries(tmp_path: Path) -> None:
    # transformers' own `Concatenate` splits back into chunks of 22, 22 and 20 rows.
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attention_bias=True)
    model = LlamaForCausalLM.from_config(config, combine=True)
    combined = model.model.layers[0].self_attn.qkv_proj
    with torch.no_grad():
        combined.weight.copy_(torch.arange(64.0)[:, None].expand(-1, 32))
        combined.bias.copy_(torch.arange(64.0))
    model.save_pretrained(tmp_path)
    tensors, start = load_file(tmp_path / WEIGHTS), 0
    for name, rows in {"q": 32, "k": 16, "v": 16}.items():
        expected = torch.arange(start, start + rows, dtype=torch.float32)
        assert torch.equal(tensors[f"model.layers.0.self_attn.{name}_proj.weight"][:, 0], expected)
        assert torch.equal(tensors[f"model.layers.0.self_attn.{name}_proj.bias"], expected)
        start += rows


def test_save_state_dict_argument(models: tuple[LlamaForCausalLM, LlamaForCausalLM], tmp_path: Path) -> None:
    old, new = models
    old.save_pretrained(tmp_path, state_dict=new.state_dict())
    assert checkpoint_index(tmp_path, models) == 1


def test_save_state_dict_with_other_dtype(tmp_path: Path) -> None:
    model = small_model(0)
    given = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    names = list(given)
    model.save_pretrained(tmp_path, state_dict=given)
    assert list(given) == names
    assert_same(stored(tmp_path), {name: tensor.bfloat16() for name, tensor in hf_tensors(model).items()})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda given: given.update(extra=torch.ones(1)), {("unexpected", "extra")}),
        (
            lambda given: given.update({"model.norm.weight": torch.ones(3)}),
            {("shape", "model.norm.weight")},
        ),
    ],
)
def test_save_mismatched_state_dict_raises(
    models: tuple[LlamaForCausalLM, LlamaForCausalLM],
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
    expected: set[tuple[str, str]],
) -> None:
    models[0].save_pretrained(tmp_path)
    given = models[1].state_dict()
    change(given)
    with pytest.raises(StateDictError) as caught:
        models[0].save_pretrained(tmp_path, state_dict=given)
    assert problems(caught.value) == expected
    assert checkpoint_index(tmp_path, models) == 0


@pytest.fixture
def untied() -> LlamaForCausalLM:
    return small_model(0)


def test_tied_config_with_untied_weights_raises(untied: LlamaForCausalLM, tmp_path: Path) -> None:
    untied.config.tie_word_embeddings = True
    untied.all_tied_weights_keys = untied.get_expanded_tied_weights_keys(all_submodels=True)
    with pytest.raises(CheckpointError, match=r"model\.tie_weights\(\), or set model\.config\.tie_word") as caught:
        untied.save_pretrained(tmp_path / "out")
    assert problems(caught.value) == {("tied", "lm_head.weight")}
    assert not (tmp_path / "out").exists()


def test_untied_config_with_tied_weights_raises(untied: LlamaForCausalLM, tmp_path: Path) -> None:
    untied.lm_head.weight = untied.model.embed_tokens.weight
    with pytest.raises(CheckpointError, match="disagree on tied weights"):
        untied.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tied_embeddings_are_saved_once(tmp_path: Path) -> None:
    config = small_model(0).config
    config.tie_word_embeddings = True
    model = LlamaForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in stored(tmp_path)
    loaded = HFLlama.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_index_matches_transformers(tmp_path: Path) -> None:
    small_model(0).save_pretrained(tmp_path)
    for name, model_class in (("ours", LlamaForCausalLM), ("theirs", HFLlama)):
        model_class.from_pretrained(tmp_path).save_pretrained(tmp_path / name, max_shard_size=SIZES["three shards"])
    assert (tmp_path / "ours" / INDEX).read_text() == (tmp_path / "theirs" / INDEX).read_text()


# Storages


def test_own_storage_shares_memory_with_view() -> None:
    whole = torch.randn(6, 4)
    tensors = {"top": whole[:2], "rest": whole[2:], "empty": torch.empty(0, 4), "column": whole[:, 1]}
    separate = {name: own_storage(tensor) for name, tensor in tensors.items()}
    assert_same(separate, tensors)
    assert separate["top"].data_ptr() == whole.data_ptr()
    storages = [separate[name].untyped_storage() for name in ("top", "rest")]
    assert [storage.nbytes() for storage in storages] == [32, 64]
    assert separate["column"].is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64], ids=str)
def test_own_storage_dtypes(dtype: torch.dtype) -> None:
    tensor = torch.arange(32, dtype=torch.uint8).remainder(2).view(torch.bool if dtype is torch.bool else torch.uint8)
    tensor = tensor.view(dtype)[1:]
    assert torch.equal(own_storage(tensor).view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_own_storage_keeps_memory_alive() -> None:
    separate = own_storage(torch.full((1000, 1000), 3.0)[10:])
    torch.full((1000, 1000), 5.0)
    assert separate.eq(3).all()


def test_loaded_config_values_are_saved(tmp_path: Path) -> None:
    model = small_model(0)
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, rms_norm_eps=0.5)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    again.save_pretrained(tmp_path)
    assert LlamaForCausalLM.from_pretrained(tmp_path).config.rms_norm_eps == 0.5


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("size", ["5GB", "1MB"])
@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "new"])
def test_save_original_format_matches_transformers(
    mixtral_checkpoint: Path, mixtral_config: MixtralConfig, loaded: bool, size: str, original: bool, tmp_path: Path
) -> None:
    """For a mixture of experts, the hub layout has one tensor per expert, and the in-memory layout has stacks."""
    for name, model_class in (("ours", MixtralForCausalLM), ("theirs", HFMixtral)):
        torch.manual_seed(0)
        model = model_class.from_pretrained(mixtral_checkpoint) if loaded else model_class._from_config(mixtral_config)
        model.save_pretrained(tmp_path / name, save_original_format=original, max_shard_size=size)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert_same(stored(ours), stored(theirs))
    # transformers' experts are views of one stack. huggingface_hub saves them in one file, as if they were tied.
    if size == "5GB" or not original:
        assert files_of(ours) == files_of(theirs)
        assert all((ours / file.name).read_bytes() == file.read_bytes() for file in theirs.glob("model*"))
    assert any("experts.gate_up_proj" in name for name in stored(ours)) is not original


def test_in_memory_format_loads(mixtral_checkpoint: Path, mixtral: PreTrainedModel, tmp_path: Path) -> None:
    MixtralForCausalLM.from_pretrained(mixtral_checkpoint).save_pretrained(tmp_path, save_original_format=False)
    assert_same(hf_tensors(AutoModelForCausalLM.from_pretrained(tmp_path)), mixtral.state_dict())
