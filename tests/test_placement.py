"""Waiting for a placement, and what a cluster can never hold."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.cluster import placement
from raydist.cluster.nodes import place
from raydist.cluster.placement import Outlook, Request, await_placed, look, require_feasible
from raydist.cluster.resource_check import why_never
from raydist.core.errors import FailedPreconditionError

TWO = Request(({"CPU": 2.0},) * 2, "STRICT_PACK", "abc", "replicas")


class Waits:
    """A placement that is there at the wait of this number, or never."""

    def __init__(self, there_at: int | None = None) -> None:
        self.there_at = there_at
        self.waits: list[float] = []

    def __call__(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return len(self.waits) == self.there_at


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The nodes of a cluster, to be changed; nothing is in use on them."""
    nodes: list[dict[str, Any]] = [
        {"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": {"CPU": 3.0}}
    ]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    free = lambda: {node["NodeID"]: dict(node["Resources"]) for node in nodes}  # noqa: E731
    monkeypatch.setattr("ray._private.state.available_resources_per_node", free)
    return nodes


@pytest.fixture
def outlooks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Outlook], None]:
    """Says what the autoscaler says."""
    return lambda outlook: monkeypatch.setattr(placement, "look", lambda: outlook)


def test_what_fits_is_not_asked_about(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(placement, "look", lambda: pytest.fail("asked"))
    waits = Waits(there_at=1)
    assert await_placed(TWO, waits, timeout_s=60)
    assert waits.waits == [2.0]
    assert not caplog.records


def test_says_once_what_is_waited_for(outlooks: Callable[[Outlook], None], caplog: pytest.LogCaptureFixture) -> None:
    outlooks(Outlook(grows=True, starting={"gpu-replica": 2}, failed=("It could not add a spot node: none left",)))
    with caplog.at_level(logging.WARNING, "raydist"):
        assert await_placed(TWO, Waits(there_at=4), timeout_s=60)
    (record,) = caplog.records
    assert record.getMessage() == (
        "Waiting for the cluster to place replicas (2 x {'CPU': 2.0} on one node), at most 60 s. "
        "The autoscaler adds 2 x gpu-replica. It could not add a spot node: none left"
    )


def test_nodes_that_cannot_hold_it_and_do_not_grow_are_an_error(nodes: list[dict[str, Any]]) -> None:
    with pytest.raises(
        FailedPreconditionError,
        match=r"can never hold 2 replicas. Asked: 2 x .*2.0} on one node; but no node has 4 CPU, for 2 together: the "
        r"most is 3. There is: node 10.0.0.1: 3 CPU. Ask for fewer",
    ):
        require_feasible(TWO, Outlook(grows=False))
    nodes[0]["Resources"]["CPU"] = 4.0
    require_feasible(TWO, Outlook(grows=False))
    nodes[0]["Alive"] = False
    with pytest.raises(FailedPreconditionError, match="the most is 0"):
        require_feasible(TWO, Outlook(grows=False))


@pytest.mark.usefixtures("nodes")
def test_where_nobody_says_whether_nodes_are_added_it_is_waited_for_a_while(
    outlooks: Callable[[Outlook], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    outlooks(Outlook(grows=None))
    assert await_placed(TWO, Waits(there_at=5), timeout_s=60)
    monkeypatch.setattr(placement, "_REPORT_S", 0.0)
    with pytest.raises(FailedPreconditionError, match="can never hold"):
        await_placed(TWO, Waits(), timeout_s=60)


def test_what_an_autoscaler_refuses_is_an_error_unless_others_may_end(
    nodes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    require_feasible(TWO, Outlook(grows=True, refused=("another",)))
    with pytest.raises(FailedPreconditionError, match="and no node that its autoscaler may add would change that"):
        require_feasible(TWO, Outlook(grows=True, refused=("abc",)))
    worker = Request(({"GPU": 1.0},), "PACK", "", "input workers")
    require_feasible(worker, Outlook(grows=True, refused_shapes=({"GPU": 2.0},)))
    with pytest.raises(FailedPreconditionError, match="can never hold 1 input workers.*no node has 1 GPU"):
        require_feasible(worker, Outlook(grows=True, refused_shapes=({"GPU": 1.0},)))
    monkeypatch.setattr("ray._private.state.available_resources_per_node", lambda: {"a": {"CPU": 1.0}})
    require_feasible(TWO, Outlook(grows=True, refused=("abc",)))


def test_the_first_autoscaler_is_told_from_a_monitor_that_only_looks_on() -> None:
    def report(**summary: Any) -> bytes:
        return json.dumps({"autoscaler_report": summary}).encode()

    assert placement._outlook_of_report(None).grows is None
    assert placement._outlook_of_report(report(active_nodes={})).grows is None
    assert placement._outlook_of_report(report(active_nodes={"node_0f3a": 1, "node_1d": 1})).grows is False
    growing = placement._outlook_of_report(report(active_nodes={"head": 1}, pending_launches={"cpu-input": 2}))
    assert growing == Outlook(grows=True, starting={"cpu-input": 2})


@pytest.mark.ray
def test_a_reservation_that_can_never_be_is_given_up(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    assert look().grows is not True
    monkeypatch.setattr(placement, "_REPORT_S", 0.0)
    before = set(ray.util.placement_group_table())  # strategies of the session have some
    with pytest.raises(FailedPreconditionError, match=r"no node has 1 TPU: the most is 0. There is: .*0 TPU, 4 CPU"):
        place([{"TPU": 1.0}], strategy="PACK", timeout_s=60)
    mine = [entry["state"] for key, entry in ray.util.placement_group_table().items() if key not in before]
    assert set(mine) <= {"REMOVED"}


Amounts = Mapping[str, float]
AMOUNTS = st.fixed_dictionaries({"CPU": st.sampled_from([0.0, 1.0, 2.0, 3.0])}, optional={"GPU": st.just(1.0)})


def can_be_placed(bundles: Sequence[Amounts], nodes: Sequence[Amounts], strategy: str) -> bool:
    """By trying every way."""
    for places in itertools.product(range(len(nodes)), repeat=len(bundles)):
        if strategy == "STRICT_PACK" and len(set(places)) > 1:
            continue
        if strategy == "STRICT_SPREAD" and len(set(places)) < len(bundles):
            continue
        loads = [[bundle for bundle, place in zip(bundles, places, strict=True) if place == node] for node in range(9)]
        if all(
            sum(one.get(name, 0.0) for one in load) <= node.get(name, 0.0)
            for load, node in zip(loads, nodes, strict=False)
            for name in ("CPU", "GPU")
        ):
            return True
    return False


@given(st.lists(AMOUNTS, min_size=1, max_size=4), st.lists(AMOUNTS, max_size=3))
def test_says_so_exactly_where_no_way_is_left(bundles: list[Amounts], nodes: list[Amounts]) -> None:
    for strategy in ("STRICT_PACK", "STRICT_SPREAD"):
        assert (why_never(bundles, nodes, strategy) is None) == can_be_placed(bundles, nodes, strategy)
    for strategy in ("PACK", "SPREAD"):  # exact for bundles of one kind; of several, nothing that fits is refused
        alike = bundles[:1] * len(bundles)
        assert (why_never(alike, nodes, strategy) is None) == can_be_placed(alike, nodes, strategy)
        assert why_never(bundles, nodes, strategy) is None or not can_be_placed(bundles, nodes, strategy)


def test_names_what_is_lacking() -> None:
    nodes = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 32.0}]
    assert why_never([{"TPU": 4.0}], nodes, "PACK") == "no node has 4 TPU: the most is 0"
    assert why_never([{"CPU": 16.0, "GPU": 1.0}], nodes, "PACK") == (
        "no node has 16 CPU and 1 GPU on one node: the most is 32 and 4"
    )
    assert why_never([{"GPU": 1.0}] * 6, nodes, "PACK") == "all nodes together have room for 4, not 6"
    assert why_never([{"GPU": 2.0}, {"GPU": 1.0}, {"GPU": 4.0}], nodes, "SPREAD") == (
        "all nodes together have 4 GPU, not 7"
    )
    assert why_never([{"CPU": 1.0}], [], "PACK") == "no node has 1 CPU: the most is 0"
