"""Run the examples in docstrings of the public API, and check the names in docstrings and messages."""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import nrl_models
from nrl_models.distributed import load_checkpoint, save_checkpoint
from nrl_models.watch import Watch
from tests.unit.docs_pages import ROOT, resolves

EXPLAINED: tuple[Callable[..., Any], ...] = (
    nrl_models.AutoModelForCausalLM.from_pretrained,
    nrl_models.check_consistency,
    nrl_models.check_parity,
    nrl_models.consistency_metrics,
    nrl_models.export_adapter,
    nrl_models.freeze,
    nrl_models.parallelize,
    nrl_models.rollout_logprobs,
    nrl_models.start_engine,
    nrl_models.token_logprobs,
    load_checkpoint,
    save_checkpoint,
    Watch,
)
"""Parts of the public API whose docstrings have an example."""


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of one rank, as `torchrun` starts it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("explained", EXPLAINED, ids=lambda explained: explained.__qualname__)
def test_docstring_example_runs(
    explained: Callable[..., Any], llama_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "checkpoint").symlink_to(llama_shards)
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(explained.__doc__ or "", {}, explained.__qualname__, None, None)
    assert example.examples, "no example"
    output: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=output.append)
    assert not output, "".join(output)


OTHER_NAMES = frozenset({"nrl_models.configs", "nrl_models.families", "nrl_models.one_name_is_enough"})
"""Groups of entry points and keys of metadata, which are not modules or attributes."""


def test_names_in_docstrings_and_messages_resolve() -> None:
    names = {
        name
        for file in (ROOT / "nrl_models").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name in re.findall(r"(?<![\w./\"-])nrl_models(?:\.\w+)+", node.value)
    }
    assert len(names) > len(OTHER_NAMES)
    assert {name for name in names if not resolves(name)} <= OTHER_NAMES
