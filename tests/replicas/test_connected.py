from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from raydist.collectives.local import LocalGroup
from raydist.replicas.connected import Connected, weights_of
from raydist.values import PerReplica, ReduceOp
from tests.collectives.threads import run_ranks

CPU = torch.device("cpu")


class Reducer:
    """Notes with which weights steps were opened."""

    def __init__(self) -> None:
        self.opened: list[tuple[float, bool]] = []

    def attach(self, parameters: Any) -> None:
        """Nothing to reduce here."""

    @contextlib.contextmanager
    def step(self, *, weight: float, op: ReduceOp, empty: bool) -> Iterator[None]:
        self.opened.append((weight, empty))
        yield


class Mirror:
    """One buffer and one metric, which hold the rank."""

    def __init__(self, rank: int) -> None:
        self.buffer = torch.tensor([float(rank)])
        self.rank = rank
        self.restored: list[dict[int, Any]] = []

    def parameters(self) -> list[Any]:
        return []

    def objects(self) -> list[Any]:
        return []

    def export_buffers(self) -> list[torch.Tensor]:
        return [self.buffer.clone()]

    def import_buffers(self, buffers: list[torch.Tensor]) -> None:
        self.buffer = buffers[0]

    def hold_metrics(self) -> dict[int, Any]:
        return {3: self.rank}

    def restore_metrics(self, held: dict[int, Any]) -> None:
        self.restored.append(held)


def on_replicas(world_size: int, body: Callable[[Connected, Reducer, Mirror], Any]) -> list[Any]:
    def main(group: LocalGroup) -> Any:
        reducer, mirror = Reducer(), Mirror(group.rank)
        return body(Connected(group, reducer, CPU, mirror), reducer, mirror)  # type: ignore[arg-type]  # stand-ins

    return run_ranks(world_size, main)


@pytest.mark.parametrize(
    ("rows", "weights"),
    [((3, 1), (0.75, 0.25)), ((2, 0), (1.0, 0.0)), ((0, 0), (0.5, 0.5)), (None, (0.5, 0.5))],
)
def test_weights_are_shares_of_rows(rows: tuple[int, ...] | None, weights: tuple[float, ...]) -> None:
    assert weights_of(rows, 2) == weights


def test_a_replica_without_rows_stands_in_and_takes_anothers_buffers() -> None:
    def body(peers: Connected, reducer: Reducer, mirror: Mirror) -> Any:
        with peers.run((0, 2, 1), ReduceOp.MEAN, stand_in=True):
            stood_in = peers.stands_in
        return stood_in, reducer.opened, mirror.buffer.item()

    assert on_replicas(3, body) == [
        (True, [(0.0, True)], 1.0),
        (False, [(2 / 3, False)], 1.0),
        (False, [(1 / 3, False)], 2.0),
    ]


def test_after_an_error_others_rows_have_left_no_trace() -> None:
    def body(peers: Connected, reducer: Reducer, mirror: Mirror) -> Any:
        def step() -> None:
            mirror.buffer = mirror.buffer + 10
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), peers.run((0, 2), ReduceOp.MEAN, stand_in=True):
            step()
        return mirror.buffer.item(), mirror.restored

    assert on_replicas(2, body) == [(0.0, [{3: 0}]), (11.0, [])]


def test_zero_rows_keep_their_buffers_and_weigh_nothing() -> None:
    def body(peers: Connected, reducer: Reducer, mirror: Mirror) -> Any:
        with peers.run((0, 2), ReduceOp.MEAN, stand_in=False):
            pass
        return peers.stands_in, reducer.opened, mirror.buffer.item()

    assert on_replicas(2, body) == [(False, [(0.0, True)], 0.0), (False, [(1.0, False)], 1.0)]


def test_each_batch_of_a_loop_has_its_own_weights() -> None:
    def body(peers: Connected, reducer: Reducer, mirror: Mirror) -> Any:
        with peers.run(None, ReduceOp.MEAN, stand_in=True):
            peers.next_batch((2, 2))
            peers.next_batch((3, 1))
        return [weight for weight, _ in reducer.opened]

    assert on_replicas(2, body) == [[0.5, 0.5, 0.75], [0.5, 0.5, 0.25]]


def test_merge_call_sees_all_replicas_and_gives_each_its_part() -> None:
    def merge(value: PerReplica, *, factor: PerReplica) -> Any:
        pairs = zip(value.values, factor.values, strict=True)
        return PerReplica([number * times for number, times in pairs]), sum(value.values)

    def body(peers: Connected, reducer: Reducer, mirror: Mirror) -> Any:
        return peers.merge_call(merge, (peers.rank + 1,), {"factor": 10})

    assert on_replicas(2, body) == [(10, 3), (20, 3)]


def test_a_run_counts_the_rows_of_its_batch_or_of_all_that_it_drew() -> None:
    def body(peers: Connected, reducer: Reducer, mirror: Mirror) -> Any:
        with peers.run((3, 1), ReduceOp.MEAN, stand_in=True):
            peers.next_batch((5, 5))  # an argument comes first
            argument = peers.num_rows_seen
        with peers.run(None, ReduceOp.MEAN, stand_in=True):
            none = peers.num_rows_seen
        with peers.run(None, ReduceOp.MEAN, stand_in=True):
            for rows in [(2, 2), (1, 0)]:
                peers.next_batch(rows)
        return argument, none, peers.num_rows_seen

    assert on_replicas(2, body) == [(3, None, 3), (1, None, 2)]
