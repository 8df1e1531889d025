"""Calls of functions on one replica, the iterators among their arguments, and the summaries that they record."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
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
from raydist.core.nest import flatten
from raydist.dataset import Dataset
from raydist.distributed_dataset import distribute
from raydist.mirroring.messages import StepPayload
from raydist.mirroring.replica import MirrorReplica
from raydist.options import InputOptions
from raydist.replicas.device_copies import Accelerator, DeviceCopies
from raydist.replicas.function_calls import FunctionCalls, ReplicaView
from raydist.replicas.results import StepResult
from raydist.replicas.step import StepHeader
from raydist.replicas.step_summaries import StepSummaries
from raydist.replicas.sync_peers import SyncPeers
from raydist.summary.record import Record
from raydist.summary.recording import SummaryOrder, condition, step_sink
from raydist.summary.scalars import ScalarValue
from raydist.utils.torch_modes import TorchModes
from tests.actors.readers.fakes import fake_side
from tests.collectives.local_group import LocalGroup, LocalHub
from tests.replicas.test_sync_peers import NotingReducer
from tests.summary.reading import curves

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


def test_mirrored_modules_are_guarded_meanwhile_and_no_longer() -> None:
    alone, found = Alone(), []

    def step(number: int) -> None:
        found.append(alone.mirror.guard().is_on)
        assert 1 // number

    alone.call(step, 1)
    with pytest.raises(ZeroDivisionError):
        alone.call(step, 0)
    assert (found, alone.mirror.guard().is_on, rd.has_strategy()) == ([True, True], False, False)


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


def test_where_there_are_no_rows_the_header_says_what_is_drawn(iterators: list[ReplicaIterator], peers: Any) -> None:
    for iterator, padding, rows in zip(iterators, (True, False), ([4], []), strict=True):
        header = StepHeader(7, 0, _HEADER.payload, padding=padding)
        with draws().bound(iterator, header, peers):
            assert [batch.tolist() for batch in iterator] == [[1], [3], rows]


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
    for arguments in ((1, "text"), ()):  # a step that draws from none is no loop
        with draws(loops).bound(arguments, header, peers):
            assert peers.loop is None
        assert loops.report(7) is None
    with draws(loops).bound(tuple(iterators), header, peers):
        assert peers.loop is not None
        assert loops.hold(7) == 0
    assert peers.loop is None
    assert loops.hold(7) is None


def test_what_is_the_drivers_is_refused() -> None:
    view = ReplicaView(("CPU:0",))
    calls: list[Callable[[], Any]] = [
        lambda: view.scope().__enter__(),
        lambda: view.run(len),
        lambda: view.distribute_dataset(None),
        lambda: view.distribute_datasets_from_function(len),
        lambda: view.distribute_values_from_function(len),
        lambda: view.close(),
    ]
    for call in calls:
        with pytest.raises(FailedPreconditionError, match="is for the driver"):
            call()


def step_result(*records: Record) -> StepResult:
    return StepResult(flatten(0)[1], (0,), summaries=records)


def record(writer: rd.summary.SummaryWriter, value: float, weight: float = 1.0) -> Record:
    return Record(writer.key, "loss", 3, ScalarValue(value, weight), wall_time=1.0)


def nobody() -> Any:
    return None


def test_a_step_is_told_of_the_default_writer(tmp_path: Path) -> None:
    summaries = StepSummaries(nobody, nobody)
    with rd.summary.create_file_writer(tmp_path) as writer:
        with writer.as_default(step=3), rd.summary.record_if(lambda: 0):
            assert summaries.order() == SummaryOrder(writer.key, 3, wanted=False)
        with writer.as_default():
            assert summaries.order() == SummaryOrder(writer.key)
    assert summaries.order() is None
    with rd.summary.record_if(False):
        assert summaries.order() == SummaryOrder(wanted=False)


def test_what_replicas_recorded_is_written_together(tmp_path: Path) -> None:
    summaries = StepSummaries(nobody, nobody)
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default():
        summaries.order()
        summaries.take_results([step_result(record(writer, 1.0, 3.0)), step_result(record(writer, 5.0, 1.0))])
        summaries.take_results([step_result(), step_result()])
    assert curves(tmp_path).scalars("loss") == [(3, 2.0)]
    summaries.take_results([step_result(record(writer, 1.0))])  # too late: nobody is told, nothing breaks


def test_a_writer_waits_for_the_steps_that_may_use_it(tmp_path: Path) -> None:
    class Strategy:
        def __init__(self) -> None:
            self.waited = 0

        def wait(self) -> None:
            self.waited += 1

    strategy = Strategy()
    summaries = StepSummaries(weakref.WeakMethod(strategy.wait), nobody)
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default():
        summaries.order()
        summaries.order()
        writer.flush()
        assert strategy.waited == 1
        del strategy
        writer.flush()


def test_what_a_writer_has_to_say_is_said_where_steps_are_dispatched(tmp_path: Path) -> None:
    summaries = StepSummaries(nobody, nobody)
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default():
        summaries.order()
        for _ in range(10):
            summaries.take_results([step_result(record(writer, 1.0))])
        with pytest.warns(UserWarning, match="'loss' was recorded 10 times at step 3"):
            summaries.order()
