"""Fixtures for recipe tests: a JSONL data set file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recipe_inputs import ROWS


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file
