"""How relays are set up, with actors that only note it. On a cluster: tests/strategies/test_multi_worker.py."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.actors import relays
from raydist.actors.relayed_hub import RelayedHub
from raydist.actors.relays import open_relays, ranks_by_node
from raydist.actors.step_relay import Relayed


class Replica:
    """An actor whose calls are done at once: what they return stands for its own object ref."""

    def __init__(self, rank: int, *, can_share: bool = True, can_open: bool = True) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._rank = rank
        answers: dict[str, Callable[..., Any]] = {
            "open_relay": lambda count: [f"{rank}/{end}" for end in range(count)] if can_share else [],
            "open_channel": lambda ticket: can_open,
            "begin_relay": lambda: None,
            "carry": lambda number, messages: self._later(),
            "collect": self._later,
        }
        for method, answer in answers.items():
            setattr(self, method, SimpleNamespace(remote=self._noting(method, answer)))

    def _noting(self, method: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.asked.append((method, *args))
            return answer(*args)

        return call

    @staticmethod
    def _later() -> SimpleNamespace:
        done: Future[Relayed] = Future()
        done.set_result(Relayed(0, (), 0, ()))
        return SimpleNamespace(future=lambda: done)


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "ray", SimpleNamespace(get=lambda refs, timeout: refs))


def test_ranks_of_a_node_need_not_follow_each_other() -> None:
    assert ranks_by_node(["b", "a", "b", "b", "a"]) == [[0, 2, 3], [1, 4]]


def test_the_last_replica_of_each_node_is_its_relay() -> None:
    replicas = [Replica(rank) for rank in range(3)]
    hub = open_relays(replicas, ["a", "b", "a"], 1.0)
    assert isinstance(hub, RelayedHub)
    hub.put(0, b"x")
    hub.put(1, b"y")
    hub.flush()
    assert [replica.asked for replica in replicas] == [
        [("open_channel", "2/0")],
        [("open_relay", 1), ("open_channel", "1/0"), ("begin_relay",), ("carry", 1, [(0, b"y")])],
        [("open_relay", 2), ("open_channel", "2/1"), ("begin_relay",), ("carry", 1, [(0, b"x")])],
    ]


@pytest.mark.parametrize("cannot", ["can_share", "can_open"])
def test_there_are_none_where_a_node_cannot_share_memory(cannot: str) -> None:
    replicas = [Replica(0), Replica(1, **{cannot: False})]
    assert open_relays(replicas, ["a", "b"], 1.0) is None
    assert not any(("begin_relay",) in replica.asked for replica in replicas)
