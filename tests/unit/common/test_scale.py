"""What keeps tens of thousands of tensors cheap: garbage left alone, conversions compared, reads in batches."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.core_model_loading import PrefixChange, WeightRenaming

from nrl_models.common.garbage import no_collections
from nrl_models.common.projections import own_storage
from nrl_models.common.state_dict.conversions import are_alike, conversions_of
from nrl_models.loading.weights import BATCHES, READERS, run_readers


def test_collections_are_off_inside_and_on_again_after_errors() -> None:
    @no_collections()
    def fails() -> None:
        assert not gc.isenabled()
        with no_collections():
            pass
        assert not gc.isenabled()
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert gc.isenabled()


def test_conversions_are_alike_if_they_do_the_same() -> None:
    with torch.device("meta"):
        mixtral = MixtralForCausalLM(MixtralConfig(hidden_size=64, intermediate_size=8, num_hidden_layers=1))
        qwen = Qwen3MoeForCausalLM(Qwen3MoeConfig(hidden_size=64, intermediate_size=8, num_hidden_layers=1))
    assert are_alike(conversions_of(mixtral), conversions_of(mixtral))
    assert not are_alike(conversions_of(mixtral), conversions_of(qwen))
    assert not are_alike(conversions_of(mixtral), conversions_of(mixtral)[:-1])
    assert not are_alike([], [])
    assert not are_alike(None, None)
    assert not are_alike([WeightRenaming("a", "b")], [WeightRenaming("a", "c")])
    assert not are_alike([WeightRenaming("a", "b")], [PrefixChange(prefix_to_remove="a")])
    scoped = WeightRenaming("a", "b")
    scoped.scope_prefix = "tower"
    assert not are_alike([WeightRenaming("a", "b")], [scoped])
    first, second = conversions_of(mixtral), conversions_of(mixtral)
    converter = next(one for one in second if getattr(one, "operations", None))
    converter.operations[0].dim = 7
    assert not are_alike(first, second)


@pytest.mark.parametrize("count", [0, 1, READERS * BATCHES + 1, 3 * READERS * BATCHES + 5])
def test_every_job_is_done_once(count: int) -> None:
    done: list[int] = []
    lock = threading.Lock()

    def read(job: int) -> None:
        with lock:
            done.append(job)

    run_readers(read, range(count))
    assert sorted(done) == list(range(count))


def test_an_error_in_a_batch_is_raised() -> None:
    def read(job: int) -> None:
        if job == 777:
            raise OSError("the file ended")

    with pytest.raises(OSError, match="the file ended"):
        run_readers(read, range(2000))


def test_storages_of_their_own_over_the_same_memory() -> None:
    stack = torch.arange(24, dtype=torch.bfloat16).view(4, 2, 3)
    alone = torch.ones(3)
    tensors = {f"experts.{index}": stack[index] for index in range(4)} | {
        "alone": alone,
        "a part": torch.zeros(4, 4)[1:],
        "transposed": stack[0].t(),
        "none": torch.empty(0, 3),
    }
    separate = {name: own_storage(tensor) for name, tensor in tensors.items()}
    assert list(separate) == list(tensors)
    assert all(
        torch.equal(separate[name], tensor) and separate[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    stored = [tensor for tensor in separate.values() if tensor.numel()]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in stored)
    assert len({tensor.untyped_storage().data_ptr() for tensor in stored if tensor.is_contiguous()}) == len(stored)
    for index in range(4):
        assert separate[f"experts.{index}"].data_ptr() == stack[index].data_ptr()
    del tensors, stack
    assert separate["experts.3"].tolist() == [[18, 19, 20], [21, 22, 23]]  # the memory is still there
