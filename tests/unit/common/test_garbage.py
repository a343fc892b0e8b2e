"""Garbage collection is disabled while many objects are created."""

from __future__ import annotations

import gc

import pytest

from nrl_models.common.process_state import no_collections


def test_garbage_collection_is_reenabled_after_errors() -> None:
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
