"""Check the types of the public API as users' type checkers do."""

from __future__ import annotations

import os
import re
from pathlib import Path
from secrets import token_hex
from typing import get_type_hints

import pytest
from versions import since

import nrl_models
from nrl_models.loading.keywords import NAMES
from nrl_models.loading.options import OPTIONS, LoadKeywords, LoadOptions, NewModelKeywords
from nrl_models.loading.pretrained import NEW_MODEL_OPTIONS
from nrl_models.loading.read_config import IMPLEMENTATIONS
from nrl_models.loading.source import PATH_NAME

api = pytest.importorskip("mypy.api")

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("typing")]  # mypy runs once per worker

ROOT = Path(nrl_models.__file__).parent.parent

IMPORTS = """
from typing import Any, assert_type

import torch
from transformers import PreTrainedConfig

from nrl_models import AutoModelForCausalLM
from nrl_models.families.llama.model import LlamaForCausalLM, LlamaFamily
from nrl_models.family import FamilyModel

overrides: dict[str, Any] = {}
"""

ACCEPTED = {
    "generate": "AutoModelForCausalLM.from_pretrained('x', dtype='bf16').generate(torch.zeros(1, 4))",
    "loading_info": """
model, info = AutoModelForCausalLM.from_pretrained("x", output_loading_info=True)
assert_type(model, FamilyModel)
assert_type(info, dict[str, Any])
""",
    "loading_info_of_a_family": """
model, info = LlamaForCausalLM.from_pretrained("x", output_loading_info=True)
assert_type(model, LlamaFamily)
""",
    "loading_info_by_variable": """
flag: bool = bool(input())
assert_type(AutoModelForCausalLM.from_pretrained("x", output_loading_info=flag), Any)
""",
    "family": "assert_type(LlamaForCausalLM.from_pretrained('x', combine='auto', num_labels=1), LlamaFamily)",
    "moved": "assert_type(AutoModelForCausalLM.from_pretrained('x').to('cuda').eval().train(), FamilyModel)",
    "values_of_the_configuration": "assert_type(AutoModelForCausalLM.from_pretrained('x', **overrides), Any)",
    "cuda": "assert_type(AutoModelForCausalLM.from_pretrained('x').cuda(), FamilyModel)",
}
"""Snippets that mypy accepts."""

REJECTED = {
    "misspelled": ("AutoModelForCausalLM.from_pretrained('x', dtpe=torch.float32)", 'did you mean "dtype"?'),
    "misspelled_with_info": (
        "model, info = AutoModelForCausalLM.from_pretrained('x', output_loading_info=True, dtpe=torch.float32)",
        'Unexpected keyword argument "dtpe"',
    ),
    "misspelled_of_a_family": ("LlamaForCausalLM.from_pretrained('x', dtpe=torch.float32)", 'did you mean "dtype"?'),
    "misspelled_from_config": ("AutoModelForCausalLM.from_config(PreTrainedConfig(), dtpe=1)", 'did you mean "dtype"?'),
    "wrong_type": ("AutoModelForCausalLM.from_pretrained('x', strict='no')", "No overload variant"),
    "wrong_value": ("AutoModelForCausalLM.from_pretrained('x', mtp='keeep')", "No overload variant"),
    "attribute_of_a_pair": (
        "AutoModelForCausalLM.from_pretrained('x', output_loading_info=True).generate()",
        'has no attribute "generate"',
    ),
}
"""Snippets that mypy rejects, each with a part of its message."""


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return mypy's errors for each snippet, by name. mypy runs once, because it reads torch and transformers."""
    folder = tmp_path_factory.mktemp("snippets")
    run = token_hex(4)  # mypy caches messages by module, with paths of earlier runs
    for name, code in (ACCEPTED | {name: code for name, (code, _) in REJECTED.items()}).items():
        (folder / f"{name}_{run}.py").write_text(IMPORTS + code + "\n")
    before = Path.cwd()
    os.chdir(ROOT)  # the folder of mypy's settings and cache
    try:
        output, errors, _ = api.run([*map(str, folder.iterdir()), "--no-error-summary", "--no-pretty"])
    finally:
        os.chdir(before)
    assert not errors
    errors_by_name: dict[str, str] = {}
    for line in output.splitlines():
        if match := re.match(rf"{folder}/(\w+)_{run}\.py:\d+: error: (.*)", line):
            errors_by_name[match[1]] = errors_by_name.get(match[1], "") + match[2] + "\n"
        else:
            assert ": note: " in line, line
    return errors_by_name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=since("5.24")) if name == "generate" else name for name in ACCEPTED]
)
def test_valid_snippet_passes_mypy(messages: dict[str, str], name: str) -> None:
    assert messages.get(name, "") == ""


@pytest.mark.parametrize("name", REJECTED)
def test_invalid_snippet_fails_mypy(messages: dict[str, str], name: str) -> None:
    assert REJECTED[name][1] in messages.get(name, "")


def test_typed_keywords_match_runtime_options() -> None:
    typed, options = get_type_hints(LoadKeywords), get_type_hints(LoadOptions)
    of_configuration = {"architectures", "num_labels"}
    assert typed.keys() == {*OPTIONS, *NAMES, *IMPLEMENTATIONS, PATH_NAME, *of_configuration} - {"output_loading_info"}
    for name in typed.keys() & options.keys() - {"dtype"}:  # `dtype` may also be None, which becomes "auto"
        assert typed[name] == options[name], name
    assert get_type_hints(NewModelKeywords).keys() == {*NEW_MODEL_OPTIONS, "torch_dtype", "backend_config"}
