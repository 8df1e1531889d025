"""How the actors of replicas are asked for; on a cluster they are run by `tests/strategies/test_mirrored.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raydist.actors import replica
from raydist.actors.replica import ReplicaActors, Seat


class FakeRay:
    """Notes what actors would be made with."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def remote(self, **_: Any) -> Callable[[type], FakeRay]:
        return lambda kind: self

    def options(self, **_: Any) -> FakeActor:
        return FakeActor(self)


class FakeActor:
    def __init__(self, fake: FakeRay) -> None:
        self._fake = fake

    def remote(self, *args: Any) -> None:
        self._fake.made.append(args)


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(replica, "ray", fake)
    monkeypatch.setattr(replica, "RaySession", lambda: None)
    monkeypatch.setattr(replica, "guard_reservation", lambda group: None)
    monkeypatch.setattr(replica, "bundle_options", lambda *args: {})
    return fake


def seat(node_id: str) -> Seat:
    return Seat(0, {}, {"A": "1"}, node_id=node_id)


def test_each_process_knows_how_many_of_the_group_are_on_its_node(fake_ray: FakeRay) -> None:
    ReplicaActors(None, [seat("a"), seat("b"), seat("a"), seat("a")], name="name")  # type: ignore[arg-type]  # no Ray
    assert fake_ray.made == [({"A": "1"}, 3), ({"A": "1"}, 1), ({"A": "1"}, 3), ({"A": "1"}, 3)]


def test_one_process_of_several_replicas_knows_how_many(fake_ray: FakeRay) -> None:
    ReplicaActors(None, [seat("a"), seat("b")], name="name", per_process=4)  # type: ignore[arg-type]  # no Ray
    assert fake_ray.made == [(4, {"A": "1"})] * 2
