"""Megatron-Core's layout: names, interleaving, the shares of ranks, and conversion back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import new_model
from transformers import DeepseekV3Config, Gemma3TextConfig, LlamaConfig, Phi3Config, PreTrainedConfig, Qwen3MoeConfig
from versions import has_reached

from nrl_models import registry
from nrl_models.errors import StateDictError
from nrl_models.family import FamilyModel
from nrl_models.megatron.ranks import MegatronRank, Share, from_megatron, ranks_of, to_megatron
from nrl_models.testing.tiny import tiny_config

GRIDS: list[dict[str, Any]] = [
    {},
    {"tp": 2},
    {"pp": 2},
    {"tp": 2, "pp": 2, "ep": 2, "transformer_engine": False, "grouped_experts": False},
    {"tp": 4, "vocabulary": 1600},  # two ranks have only padding rows
]

CONFIGS = [LlamaConfig, Phi3Config, Qwen3MoeConfig, DeepseekV3Config]


def model_of(config_class: type[PreTrainedConfig], **values: Any) -> FamilyModel:
    """Create a tiny model with random weights, norms included."""
    architecture = new_model(tiny_config(config_class, values))
    model = registry.model_class(type(architecture).__name__).from_config(architecture.config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


@pytest.mark.long
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("config_class", CONFIGS)
def test_to_megatron_and_from_megatron_round_trip(config_class: type[PreTrainedConfig], grid: dict[str, Any]) -> None:
    model = model_of(config_class, num_hidden_layers=2)
    tensors_by_rank = {rank: dict(to_megatron(model, rank)) for rank in ranks_of(**grid)}
    other = model_of(config_class, num_hidden_layers=2)
    from_megatron(other, tensors_by_rank)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def test_qkv_and_mlp_row_order_matches_megatron() -> None:
    model = model_of(LlamaConfig, attention_bias=True)
    tensors = dict(to_megatron(model))
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    groups, size = model.config.num_key_value_heads, model.config.head_dim
    for kind in ("weight", "bias"):
        shares = [
            getattr(linear, kind).unflatten(0, (groups, -1, size))
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        expected = torch.cat(shares, dim=1).flatten(0, 2)
        assert torch.equal(tensors[f"decoder.layers.0.self_attention.linear_qkv.{kind}"], expected)
    both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    assert torch.equal(tensors["decoder.layers.0.mlp.linear_fc1.weight"], both)
    rank = MegatronRank(tp=Share(1, 2))
    halves = [weight.chunk(2)[1] for weight in (mlp.gate_proj.weight, mlp.up_proj.weight)]
    assert torch.equal(dict(to_megatron(model, rank))["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat(halves))


def test_names_match_megatron_layers() -> None:
    model = model_of(Qwen3MoeConfig, num_hidden_layers=2, tie_word_embeddings=True)
    engine = set(dict(to_megatron(model, MegatronRank(pp=Share(1, 2)))))
    assert {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.0.mlp.router.weight",
        "decoder.layers.0.mlp.experts.linear_fc1.weight0",
        "decoder.final_layernorm.weight",
        "output_layer.weight",  # the last stage has a copy of tied weights
    } <= engine
    assert "embedding.word_embeddings.weight" not in engine
    local = set(dict(to_megatron(model, MegatronRank(transformer_engine=False, grouped_experts=False))))
    assert {
        "decoder.layers.1.input_layernorm.weight",
        "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight",
    } <= local
    assert "output_layer.weight" not in local


def test_adapter_accepts_megatron_layout() -> None:
    model = model_of(LlamaConfig)
    adapter, rank = model.state_dict_adapter, MegatronRank(tp=Share(0, 2))
    plan = adapter.export_plan(layout=rank)
    exported = list(adapter.iter_export(model, 10_000, layout=rank))
    assert [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in exported] == plan
    megatron_tensors = adapter.to_hf(model.state_dict(), layout=rank)
    assert all(torch.equal(megatron_tensors[name], tensor) for name, tensor in exported)
    own = "model.layers.0.mlp.down_proj.weight"
    ((name, tensor),) = adapter.convert_single_tensor_to_hf(own, model.state_dict()[own], layout=rank)
    assert name == "decoder.layers.0.mlp.linear_fc2.weight"
    assert torch.equal(tensor, megatron_tensors[name])


def test_error_lists_all_unsupported_tensors() -> None:
    with pytest.raises(StateDictError) as refused:
        dict(to_megatron(model_of(Gemma3TextConfig)))
    subjects = {problem.subject for problem in refused.value.problems}
    assert subjects == {
        "layers.*.pre_feedforward_layernorm.weight",
        "layers.*.post_feedforward_layernorm.weight",
    }


@pytest.mark.parametrize(
    ("rank", "messages"),
    [
        (
            MegatronRank(tp=Share(0, 3)),
            ("query groups: are 4, which do not divide over 3", "mlp.gate_proj.weight: has 320 rows"),
        ),
        (MegatronRank(pp=Share(0, 3)), ("layers: are 2, which do not divide over 3",)),
    ],
)
def test_indivisible_sizes_raise(rank: MegatronRank, messages: tuple[str, ...]) -> None:
    values = {"num_hidden_layers": 2, "intermediate_size": 320}
    with pytest.raises(StateDictError) as refused:
        dict(to_megatron(model_of(LlamaConfig, **values), rank))
    assert all(text in str(refused.value) for text in messages)


def test_share_index_out_of_range_raises() -> None:
    with pytest.raises(ValueError, match=r"tp=Share\(index=2, of=2\): expected an index from 0 to 1"):
        MegatronRank(tp=Share(2, 2))


def test_from_megatron_lists_all_problems_and_loads_nothing() -> None:
    model = model_of(LlamaConfig)
    tensors_by_rank = {rank: dict(to_megatron(model, rank)) for rank in ranks_of(tp=2)}
    first, second = tensors_by_rank
    norm = "decoder.final_layernorm.weight"
    tensors_by_rank[first]["nonsense"] = tensors_by_rank[first].pop(
        "decoder.layers.0.self_attention.linear_proj.weight"
    )
    tensors_by_rank[first]["decoder.layers.1.mlp.linear_fc2.weight"] = torch.zeros(2, 2)
    tensors_by_rank[second][norm] = tensors_by_rank[second][norm] + 1
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(StateDictError) as refused:
        from_megatron(model, tensors_by_rank)
    assert [(problem.subject, problem.file) for problem in refused.value.problems] == [
        ("decoder.layers.0.self_attention.linear_proj.weight", "rank tp 0 of 2, pp 0 of 1, ep 0 of 1"),
        ("decoder.layers.1.mlp.linear_fc2.weight", "rank tp 0 of 2, pp 0 of 1, ep 0 of 1"),
        ("nonsense", "rank tp 0 of 2, pp 0 of 1, ep 0 of 1"),
        (norm, "rank tp 1 of 2, pp 0 of 1, ep 0 of 1"),
    ]
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def test_from_megatron_with_missing_rank_raises() -> None:
    model = model_of(LlamaConfig, num_hidden_layers=2)
    tensors_by_rank = {rank: dict(to_megatron(model, rank)) for rank in ranks_of(tp=2, pp=2)}
    del tensors_by_rank[next(iter(tensors_by_rank))]
    with pytest.raises(StateDictError, match=r"of its \d+ values are present: expected the tensors of all ranks"):
        from_megatron(model, tensors_by_rank)


@pytest.mark.parametrize("tied", [False, True])
def test_padded_vocabulary_ends_in_zeros(tied: bool) -> None:
    model = model_of(LlamaConfig, vocab_size=1001, tie_word_embeddings=tied)
    ranks = ranks_of(tp=2, pp=2, vocabulary=1024)
    tensors_by_rank = {rank: dict(to_megatron(model, rank)) for rank in ranks}
    for stage, name, weight in (
        (0, "embedding.word_embeddings.weight", model.get_input_embeddings().weight),
        (1, "output_layer.weight", model.get_output_embeddings().weight),
    ):
        rows = torch.cat([tensors[name] for rank, tensors in tensors_by_rank.items() if rank.pp.index == stage])
        assert torch.equal(rows[:1001], weight)
        assert rows.shape[0] == 1024
        assert not rows[1001:].any()
    tensors_by_rank[ranks[-1]]["output_layer.weight"][-23:] = 1.0  # training may change the padding
    other = model_of(LlamaConfig, vocab_size=1001, tie_word_embeddings=tied)
    from_megatron(other, tensors_by_rank)
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_too_small_padded_vocabulary_raises() -> None:
    model = model_of(LlamaConfig, vocab_size=1001)
    with pytest.raises(StateDictError, match=r"has 1001 rows, and a padded vocabulary of 1000 has no room for them"):
        dict(to_megatron(model, MegatronRank(vocabulary=1000)))
    with pytest.raises(StateDictError, match=r"padded vocabulary: has 1025 rows, which do not divide over 2 ranks"):
        dict(to_megatron(model, MegatronRank(tp=Share(0, 2), vocabulary=1025)))


@pytest.mark.long
def test_every_supported_decoder_round_trips() -> None:
    checked = 0
    for architecture in registry.architectures(aliases=False):
        if not architecture.endswith("ForCausalLM") or registry.unmet_requirement(architecture):
            continue
        model_class = registry.model_class(architecture)
        model = model_class.from_config(tiny_config(model_class.config_class, model_class.tiny, model_class))
        for grid in ({"tp": 2}, {"tp": 2, "ep": 2, "grouped_experts": False}):
            try:
                tensors_by_rank = {rank: dict(to_megatron(model, rank)) for rank in ranks_of(**grid)}
            except StateDictError:
                continue
            copies = {
                rank: {name: tensor.clone() for name, tensor in tensors_by_rank[rank].items()}
                for rank in tensors_by_rank
            }
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            with torch.no_grad():
                for tensor in model.state_dict().values():
                    tensor.zero_()
            from_megatron(model, copies)
            assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items()), architecture
            checked += 1
    assert checked >= (90 if has_reached("5.23") else 80)


def test_layout_is_made_in_inference_mode() -> None:
    model = model_of(LlamaConfig)
    with torch.inference_mode():
        found = dict(model.state_dict_adapter.iter_export(model, layout=MegatronRank()))
    expected = dict(model_of(LlamaConfig).state_dict_adapter.layout(MegatronRank()))
    assert found.keys() == expected.keys()


def test_equal_nans_of_ranks_agree() -> None:
    """For example of a model whose training diverged."""
    model, loaded = model_of(LlamaConfig), model_of(LlamaConfig)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    from_megatron(loaded, {rank: dict(to_megatron(model, rank)) for rank in ranks_of(tp=2)})
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("retied", [False, True])
def test_ties_changed_after_loading_round_trip(pp: int, retied: bool) -> None:
    """Untie the head by hand, or tie it to the embeddings: the layout has the current weights."""
    model, other = (model_of(LlamaConfig, num_hidden_layers=2, tie_word_embeddings=not retied) for _ in range(2))
    for each in (model, other):
        weight = each.model.embed_tokens.weight
        each.lm_head.weight = weight if retied else torch.nn.Parameter(torch.randn_like(weight))
    tensors_by_rank = {rank: dict(to_megatron(model, rank)) for rank in ranks_of(pp=pp)}
    heads = [rank["output_layer.weight"] for rank in tensors_by_rank.values() if "output_layer.weight" in rank]
    assert all(torch.equal(head, model.lm_head.weight) for head in heads)
    assert len(heads) == 1 or (retied and pp == 1 and not heads)
    from_megatron(other, tensors_by_rank)
    assert (other.lm_head.weight is other.model.embed_tokens.weight) is retied
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
