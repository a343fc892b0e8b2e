"""Selection of architectures for generated tests."""

from __future__ import annotations

import chosen_families
import pytest


def test_commits_select_shares_that_cover_all_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    architectures = chosen_families.others()
    shares = []
    for commit in range(4):
        monkeypatch.setattr(chosen_families, "git", lambda *_, commit=commit: f"{commit:08x}\n")
        shares.append(chosen_families.share_of(architectures, 4))
    assert sorted(name for share in shares for name in share) == sorted(architectures)
    assert all(shares)
    assert chosen_families.share_of(architectures, 1) == architectures
