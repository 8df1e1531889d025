"""Calls of functions on one replica, and the iterators among their arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import raydist as rd
from raydist.actors.readers.replica_iterator import ReplicaIterator
from raydist.checkpoints.loop_commands import LoopCommand
from raydist.checkpoints.replica_loop import ReplicaLoops
from raydist.checkpoints.shards import ShardWriter
from raydist.collectives.base import Membership
from raydist.collectives.reducer.nonfinite import NonfinitePolicy
from raydist.core.errors import FailedPreconditionError
from raydist.dataset import Dataset
from raydist.distributed_dataset import distribute
from raydist.mirroring.messages import StepPayload
from raydist.mirroring.replica import MirrorReplica
from raydist.options import InputOptions
from raydist.replicas.device_copies import Accelerator, DeviceCopies
from raydist.replicas.function_calls import FunctionCalls, ReplicaView
from raydist.replicas.results import StepResult
from raydist.replicas.step import StepHeader
from raydist.replicas.sync_peers import SyncPeers
from raydist.summary.recording import SummaryOrder, condition, step_sink
from raydist.utils.torch_modes import TorchModes
from tests.actors.readers.fakes import fake_side
from tests.collectives.local_group import LocalGroup, LocalHub
from tests.replicas.test_sync_peers import NotingReducer

CPU = torch.device("cpu")


class Alone:
    def __init__(self) -> None:
        group = LocalGroup(LocalHub(), Membership("alone", 0, 0, 1), 10.0).start()
        self.mirror = MirrorReplica(0)
        policy = NonfinitePolicy(lambda _: [])
        self.peers = SyncPeers(group, NotingReducer(), CPU, self.mirror, policy)  # type: ignore[arg-type]  # a stand-in
        saves = mock.create_autospec(ShardWriter, instance=True)
        loops = ReplicaLoops(saves)
        self.calls = FunctionCalls(self.mirror, saves, loops, DeviceCopies(CPU), Accelerator("cpu"), 1.0)
        self.calls.join(ReplicaView(("cpu",), list), self.peers)

    def call(self, fn: Callable[..., Any], *args: Any, **header: Any) -> StepResult:
        said = StepHeader(0, 0, StepPayload(), **header)
        return self.calls.pack(self.calls.call(said, self.peers, fn, args, {}), said, self.peers)


def test_a_function_is_called_as_a_replica_of_its_group() -> None:
    def step(number: int) -> tuple[int, bool]:
        context = rd.get_replica_context()
        return number + context.num_replicas_in_sync, rd.in_cross_replica_context()

    result = Alone().call(step, 4)
    assert result.leaves == (5, False)
    assert not rd.has_strategy()
    assert step_sink() is None


@pytest.mark.parametrize("fails", [False, True])
def test_mirrored_modules_are_guarded_meanwhile_and_no_longer(fails: bool) -> None:
    alone, found = Alone(), []

    def step() -> None:
        found.append(alone.mirror.guard().is_on)
        if fails:
            raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            alone.call(step)
    else:
        alone.call(step)
    assert (found, alone.mirror.guard().is_on, rd.has_strategy()) == ([True], False, False)


def test_what_the_driver_had_set_holds_inside() -> None:
    def step() -> tuple[bool, bool]:
        return torch.is_grad_enabled(), condition()

    with torch.no_grad():
        modes = TorchModes.here()
    assert Alone().call(step, modes=modes).leaves == (False, True)
    assert Alone().call(step, summaries=SummaryOrder(wanted=False)).leaves == (True, False)
    assert Alone().call(step, modes=modes, summaries=SummaryOrder(wanted=False)).leaves == (False, False)
    assert Alone().call(step).leaves == (True, True)


def test_what_was_recorded_goes_with_the_result_of_its_step(tmp_path: Any) -> None:
    alone = Alone()

    def step() -> None:
        rd.summary.scalar("loss", 2.0, step=3)

    with rd.summary.create_file_writer(tmp_path) as writer:
        order = SummaryOrder(writer.key, 3)
        (record,) = alone.call(step, summaries=order).summaries
        assert (record.name, record.step) == ("loss", 3)
        assert alone.call(lambda: None).summaries == ()

        def fail() -> None:
            step()
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            alone.call(fail, summaries=order)
        alone.calls.drop_records()
        assert alone.call(lambda: None).summaries == ()


_HEADER = StepHeader(7, 0, mock.create_autospec(StepPayload, instance=True))


@pytest.fixture
def iterators() -> Iterator[list[ReplicaIterator]]:
    """Two passes over five rows in batches of two, as replica 1 of 2 gets them."""
    with fake_side(2) as side:
        dataset = distribute(Dataset.range(5).batch(2), side, InputOptions(num_input_workers=0))
        sent: list[Any] = [iter(dataset).__reduce__() for _ in range(2)]
        yield [make(*args) for make, args in sent]


@pytest.fixture
def peers() -> Any:
    return mock.Mock(rank=1, loop=None)


def draws(loops: ReplicaLoops | None = None) -> FunctionCalls:
    writer = mock.create_autospec(ShardWriter, instance=True)
    loops = loops or ReplicaLoops(writer)
    cpu = Accelerator("cpu")
    return FunctionCalls(mock.Mock(), writer, loops, DeviceCopies(cpu.device), cpu, 1.0)


def test_they_draw_this_replicas_pieces_and_tell_everybodys_rows(iterators: list[ReplicaIterator], peers: Any) -> None:
    with draws().bound(((iterators[0],), {"other": {"nested": iterators[1]}}), _HEADER, peers):
        assert next(iterators[0]).tolist() == [1]
        assert next(iterators[1]).tolist() == [1]
    assert [call.args for call in peers.next_batch.call_args_list] == [((1, 1),), ((1, 1),)]


@pytest.mark.parametrize(("padding", "rows"), [(True, [4]), (False, [])])
def test_where_there_are_no_rows_the_header_says_what_is_drawn(
    padding: bool, rows: list[int], iterators: list[ReplicaIterator], peers: Any
) -> None:
    header = StepHeader(7, 0, _HEADER.payload, padding=padding)
    with draws().bound(iterators[0], header, peers):
        assert [batch.tolist() for batch in iterators[0]] == [[1], [3], rows]


def test_they_are_let_go_of_whatever_happens(iterators: list[ReplicaIterator], peers: Any) -> None:
    with contextlib.suppress(KeyError), draws().bound(tuple(iterators), _HEADER, peers):
        assert [next(iterator).tolist() for iterator in iterators] == [[1], [1]]
        raise KeyError("of the step")
    for iterator in iterators:
        with pytest.raises(FailedPreconditionError):
            next(iterator)


def test_a_run_whose_draws_are_boundaries_is_known_while_it_goes_on(
    iterators: list[ReplicaIterator], peers: Any
) -> None:
    loops = ReplicaLoops(mock.create_autospec(ShardWriter, instance=True))
    header = StepHeader(7, 0, _HEADER.payload, loop=LoopCommand((), 5.0))
    with draws(loops).bound(tuple(iterators), header, peers):
        assert peers.loop is not None
        assert loops.hold(7) == 0
    assert peers.loop is None
    assert loops.hold(7) is None


@pytest.mark.parametrize("arguments", [(1, "text"), ()])
def test_a_step_that_draws_from_none_is_no_loop(arguments: Any, peers: Any) -> None:
    loops = ReplicaLoops(mock.create_autospec(ShardWriter, instance=True))
    with draws(loops).bound(arguments, StepHeader(7, 0, _HEADER.payload, loop=LoopCommand((), 5.0)), peers):
        assert peers.loop is None
    assert loops.report(7) is None


def enter_scope(view: ReplicaView) -> None:
    with view.scope():
        pass


@pytest.mark.parametrize(
    "call",
    [
        enter_scope,
        lambda view: view.run(len),
        lambda view: view.distribute_dataset(None),
        lambda view: view.distribute_datasets_from_function(len),
        lambda view: view.distribute_values_from_function(len),
        lambda view: view.close(),
    ],
    ids=["scope", "run", "dataset", "datasets from function", "values from function", "close"],
)
def test_what_is_the_drivers_is_refused(call: Callable[[ReplicaView], None]) -> None:
    with pytest.raises(FailedPreconditionError, match="is for the driver"):
        call(ReplicaView(("CPU:0",)))
