"""Setup of the tests with trainers and other libraries."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _cheap_collection() -> None:
    """Exclude other tests' objects from collection: accelerate collects in each run, which takes a second for them."""
    gc.collect()
    gc.freeze()
