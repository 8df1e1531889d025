"""Shared by the tests of checkpoints."""

from __future__ import annotations

import pytest

from raydist.context import current


@pytest.fixture
def no_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget strategies of earlier tests: one that Python has not collected yet has its global step in checkpoints."""
    monkeypatch.setattr(current, "_living", set)
