"""Connections to a Ray that are played here; a real one is shut down in tests/strategies/test_faults.py."""

from __future__ import annotations

import pytest
import ray

from raydist.cluster.ray_session import RaySession
from raydist.core.errors import UnavailableError


class Node:
    """Every ray.init makes one."""


def test_a_session_ends_with_its_ray_and_another_ray_is_another_session(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = [True]
    first, second = Node(), Node()
    monkeypatch.setattr(ray, "is_initialized", lambda: connected[0])
    monkeypatch.setattr(ray._private.worker, "_global_node", first)
    session = RaySession()
    assert session.is_open
    session.require("This pool")
    monkeypatch.setattr(ray._private.worker, "_global_node", second)
    assert not session.is_open
    message = r"This pool needs the Ray .* shut down \(ray\.shutdown\(\)\)"
    with pytest.raises(UnavailableError, match=message) as caught:
        session.require("This pool")
    assert caught.value.actor == "This pool"
    monkeypatch.setattr(ray._private.worker, "_global_node", first)
    assert session.is_open
    connected[0] = False
    assert not session.is_open
