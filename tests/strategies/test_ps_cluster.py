"""Without Ray: what is started, when, and what becomes of it; on a cluster `test_parameter_server.py` runs it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.coordinator.launch import PsRequest
from raydist.core.errors import InvalidArgumentError, UnavailableError
from raydist.options import Timeouts
from raydist.strategies import ps_cluster
from raydist.strategies.ps_cluster import PsCluster, PsOptions


class Launched:
    """In the place of workers and servers."""

    coordinator = "the coordinator"
    worker_hosts = ("node a", "node b")
    server_hosts = ("node c",)

    def __init__(self) -> None:
        self.terms: dict[str, Any] = {}
        self.closed = 0
        self.error: Exception | None = None

    def start(self, timeouts: Timeouts, **terms: Any) -> None:
        self.terms = terms
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    found = Launched()
    setups = [SimpleNamespace(worker_devices=(f"CPU:{rank}",), device="cpu") for rank in range(2)]
    plan = SimpleNamespace(setups=setups, server_resources={"memory": 8e9})
    monkeypatch.setattr(ps_cluster, "connect", lambda: SimpleNamespace(nodes=()))
    monkeypatch.setattr(ps_cluster, "plan_ps", lambda *_, **__: plan)
    monkeypatch.setattr(ps_cluster, "launch_ps", lambda *_: found)
    monkeypatch.setattr(ps_cluster, "add_step_queue", lambda _: None)
    return found


def cluster(
    request: PsRequest | None = None,
    dropped: Callable[[Callable[[], None]], None] = lambda _: None,
    on_start: Callable[[Any], None] = lambda _: None,
) -> PsCluster:
    return PsCluster(
        "test",
        "the strategy",
        request or PsRequest(),
        PsOptions(prefetch_pulls=False),
        Timeouts(),
        close_when_dropped=dropped,
        on_start=on_start,
    )


def test_what_was_said_needs_no_cluster() -> None:
    asked = cluster(PsRequest(num_workers=3))
    assert (asked.num_workers, asked.nodes(), asked.launched) == (3, (), None)


def test_what_was_left_open_is_planned(launched: Launched) -> None:
    asked = cluster()
    assert (asked.num_workers, asked.worker_devices, asked.device_types()) == (2, ("CPU:0", "CPU:1"), {"cpu"})
    assert asked.launched is None


def test_workers_and_servers_start_once(launched: Launched) -> None:
    dropped: list[Callable[[], None]] = []
    started: list[Any] = []
    asked = cluster(dropped=dropped.append, on_start=started.append)
    for _ in range(2):
        assert asked.launch() is launched  # type: ignore[comparison-overlap]  # it stands in its place
    assert (started, dropped, asked.nodes()) == ([launched], [launched.close], ("node a", "node b", "node c"))
    assert launched.terms == {
        "consistency": "async",
        "partitioner": None,
        "prefetch_pulls": False,
        "server_memory": 8_000_000_000,
    }


def test_what_does_not_start_is_stopped(launched: Launched) -> None:
    launched.error = UnavailableError("no room")
    started: list[Any] = []
    asked = cluster(on_start=started.append)
    with pytest.raises(UnavailableError, match="no room"):
        asked.launch()
    assert (launched.closed, asked.launched, started) == (1, None, [])


def test_a_partitioner_is_a_function() -> None:
    with pytest.raises(InvalidArgumentError, match="variable_partitioner must be a function .* got 3"):
        PsOptions(partitioner=3)  # type: ignore[arg-type]  # that is what is tried
