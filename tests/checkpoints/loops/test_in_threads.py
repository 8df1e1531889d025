"""Loops in replicas, without actors: each replica is a thread."""

from __future__ import annotations

import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, TypeVarTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import raydist as rd
from raydist.actors.portable_errors import PortableError, pack_error
from raydist.checkpoints.checkpoint import contents_of
from raydist.checkpoints.driver_loop import DriverLoop, ManagedLoop, begin_loop
from raydist.checkpoints.listing import Retention, SaveInterval
from raydist.checkpoints.loop_commands import (
    IteratorPosition,
    LoopCommand,
    LoopCount,
    LoopReport,
    ManagerCommand,
    RequestedSave,
    SaveOutcome,
)
from raydist.checkpoints.replica_loop import DrawGate, ManagerProxy, ReplicaLoop, ReplicaLoops
from raydist.checkpoints.run_directory import RunDirectory
from raydist.checkpoints.saves import ManagerSaves
from raydist.checkpoints.shards import DispatchedSave, Shard, ShardRequest, ShardTerms, ShardWriter
from raydist.checkpoints.watch import ManagerWatch
from raydist.cluster.preemption import ignore_draws, unwatch_steps, watch_steps
from raydist.core.errors import DeadlineExceededError
from raydist.distributed_dataset import DistributedIterator
from tests.refused import check_refused

T = TypeVar("T")

Args = TypeVarTuple("Args")


def _sent(value: T) -> T:
    copy: T = pickle.loads(pickle.dumps(value))
    return copy


class Rank:
    """A `ReplicaSide` with its own objects, by handle."""

    def __init__(self, rank: int, num_ranks: int, objects: Mapping[int, Any]) -> None:
        self.objects = dict(objects)
        self.writer = ShardWriter(rank, num_ranks, torch.device("cpu"))
        self.loops = ReplicaLoops(self.writer)
        self.drawn = self.num_left = 0

    def object_of(self, handle: int) -> Any:
        return self.objects[handle]

    def settle(self) -> None:
        """Do nothing: there is nothing to settle."""

    def leave(self) -> None:
        self.num_left += 1

    def agree(self, number: float) -> float:
        return number

    def copy(self, token: str, terms: ShardTerms, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        self.writer.copy(token, terms, objects, modules)

    def positions(self) -> tuple[IteratorPosition, ...]:
        return (IteratorPosition({"drawn": self.drawn}, False),)

    def take_records(self) -> tuple[Any, ...]:
        return (f"records of {self.drawn}",)


class Host:
    """A `LoopHost` whose replicas are threads.

    Args:
        objects: Creates the objects of a replica, by handle.
        handles: The driver's objects with their handles.
    """

    limit_s = 20.0

    def __init__(self, num_ranks: int, objects: Callable[[], Mapping[int, Any]], handles: Sequence[tuple[Any, int]]):
        self.ranks = [Rank(rank, num_ranks, objects()) for rank in range(num_ranks)]
        self.handles = list(handles)
        self.saved_how = "divided"
        self.records: list[list[list[Any]]] = []
        self._runs: list[Any] = []
        self._pool = ThreadPoolExecutor(num_ranks)

    def handle_of(self, obj: Any) -> int | None:
        return next((handle for known, handle in self.handles if known is obj), None)

    def save_mode(self, obj: Any) -> str:
        return self.saved_how

    def driver_items(self, objects: Mapping[str, Any]) -> Mapping[str, Mapping[str, int]]:
        return {}

    def ask(self, rank: int | None, method: Callable[[ReplicaLoops, *Args], T], *args: *Args) -> list[T]:
        ranks = self.ranks if rank is None else [self.ranks[rank]]
        return [_sent(getattr(each.loops, method.__name__)(*_sent(args))) for each in ranks]

    def shards(self, step: int, token: str) -> Sequence[Shard | PortableError | None]:
        found = [each.writer.report(token) for each in self.ranks]
        return [pack_error(each) if isinstance(each, Exception) else each for each in found]

    def take_records(self, by_replica: Sequence[Sequence[Any]]) -> None:
        self.records.append([list(records) for records in by_replica])

    def drain(self) -> None:
        for run in self._runs:
            run.result(20)

    def run(self, part: ManagedLoop, body: Callable[[ReplicaLoop, Rank], Any], step: int = 3) -> DriverLoop:
        """Run `body` on every rank, watched by a `DriverLoop`."""
        loop = DriverLoop(self, [part])
        command = _sent(loop.command())

        def on_rank(rank: Rank) -> Any:
            with rank.loops.running(step, command, rank) as own:
                return body(own, rank)

        self._runs = [self._pool.submit(on_rank, rank) for rank in self.ranks]
        loop.start(step)
        return loop

    def close(self) -> None:
        self._pool.shutdown()
        for each in self.ranks:
            each.writer.close(5.0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    made = RunDirectory(str(tmp_path), "ckpt", Retention(None))
    made.acquire()
    yield made
    made.release()


def managed(run: RunDirectory, iterators: list[Any], **objects: Any) -> tuple[ManagedLoop, ManagerSaves]:
    saves = ManagerSaves(contents_of(rd.Checkpoint(**objects)), run, SaveInterval(), None)
    return ManagedLoop("key", saves, 42, iterators, asynchronous=True), saves


def test_objects_of_the_driver_are_saved_as_they_were_when_the_run_began(run: RunDirectory) -> None:
    state = rd.State(epoch=1)
    part, _ = managed(run, [], state=state)
    host = Host(1, dict, [])
    command = part.command(host)
    assert command.objects == {}
    state.epoch = 2
    outcome = part.write(RequestedSave("t", "key", 5, 9, None, ()), lambda request: _begun(host, request), None)
    host.close()
    assert outcome.error is None
    again = rd.State(epoch=0)
    rd.Checkpoint(state=again).restore(run.path_to(5))
    assert again.epoch == 1
    assert run.find()[0].details["calls"] == 9


def _begun(host: Host, request: ShardRequest) -> DispatchedSave:
    host.ranks[0].writer.begin(request, {}, {})
    return DispatchedSave(lambda: host.shards(0, request.token), limit_s=30.0)


def test_positions_of_datasets_and_iterators_are_those_of_the_replicas(run: RunDirectory) -> None:
    data = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(8).batch(2))
    iterator, other = iter(data), iter(rd.Dataset.range(3))
    next(iterator)
    position = IteratorPosition(iterator.state_dict(), False)
    part, _ = managed(run, [iterator], data=data, iterator=iterator, other=other)
    host = Host(1, dict, [])
    part.command(host)
    next(iterator)  # here; the replicas are elsewhere
    requested = RequestedSave("t", "key", 1, 1, None, (position,))
    assert part.write(requested, lambda request: _begun(host, request), None).error is None
    ended = RequestedSave("u", "key", 2, 2, None, (IteratorPosition(position.state, True),))
    assert part.write(ended, lambda request: _begun(host, request), None).error is None
    host.close()
    rd.Checkpoint(data=data).restore(run.path_to(1), only="data")
    assert [batch.tolist() for batch in data] == [[2, 3], [4, 5], [6, 7]]
    rd.Checkpoint(data=data).restore(run.path_to(2), only="data")
    assert len(list(data)) == 4, "an epoch that has ended is followed by a new one"


def test_the_command_has_the_step_at_the_beginning_of_the_run(run: RunDirectory) -> None:
    host = Host(1, dict, [("known", 5)])
    cases: list[tuple[Any, Any]] = [(None, (None, 0)), ("known", (5, 0)), (lambda: 7, (None, 7))]
    for counter, expected in cases:
        saves = ManagerSaves(contents_of(rd.Checkpoint(state=rd.State())), run, SaveInterval(), counter)
        command = ManagedLoop("key", saves, 42, [], asynchronous=True).command(host)
        assert ((command.counter, command.step), command.counts_calls) == (expected, counter is None)
    host.close()


def test_a_failed_last_save_does_not_keep_the_process_alive(run: RunDirectory, tmp_path: Path) -> None:
    part, saves = managed(run, [], state=rd.State())
    host = Host(1, dict, [])
    part.command(host)
    (tmp_path / "ckpt-4").write_text("in the way")
    requested = RequestedSave("t", "key", 4, 1, None, (), is_last=True)
    outcome = part.write(requested, lambda request: _begun(host, request), "it received SIGTERM")
    host.close()
    assert outcome.failures == 1
    assert outcome.preempted is part.preempted
    assert "it received SIGTERM. It could not be saved" in str(outcome.preempted)
    saves.writer.close()  # raises nothing: the error is already reported


MODEL = torch.nn.Linear(1, 1, bias=False)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(2, lambda: {1: torch.nn.Linear(1, 1, bias=False)}, [(MODEL, 1)])
    yield made
    made.close()


@pytest.fixture
def saves(run: RunDirectory) -> ManagerSaves:
    return ManagerSaves(contents_of(rd.Checkpoint(model=MODEL)), run, SaveInterval(2), None)


def part_of(saves: ManagerSaves) -> ManagedLoop:
    return ManagedLoop("key", saves, 42, [], asynchronous=True)


def set_weight(rank: Rank, value: float) -> None:
    with torch.no_grad():
        rank.objects[1].weight.fill_(value)


def saved(path: Path) -> float:
    return float(load_file(path / "model.safetensors")["weight"])


def test_a_save_has_the_state_of_its_call(host: Host, saves: ManagerSaves, tmp_path: Path) -> None:
    def body(loop: ReplicaLoop, rank: Rank) -> None:
        for step in range(1, 6):
            loop.draw()
            set_weight(rank, step)
            rank.drawn = step
            time.sleep(0.001 if rank is host.ranks[0] else 0.01)
            loop.save("key")
            set_weight(rank, -1.0)  # the saved copy keeps the step

    loop = host.run(part_of(saves), body)
    loop.settle()
    assert [saved(tmp_path / f"ckpt-{number}") for number in (2, 4)] == [2.0, 4.0]
    assert (saves.calls, saves.last_step) == (5, 4)
    assert "raydist-loop" not in [thread.name for thread in threading.enumerate()]
    assert host.records == [[["records of 2"], ["records of 2"]], [["records of 4"], ["records of 4"]]]


def test_replicas_stop_at_the_same_draw_and_raise_after_the_commit(
    host: Host, saves: ManagerSaves, tmp_path: Path
) -> None:
    watch, drawn, there = ManagerWatch(saves, 42), dict[int, int](), dict[int, bool]()
    watch_steps(watch)

    def body(loop: ReplicaLoop, rank: Rank) -> None:
        position = host.ranks.index(rank)
        try:
            for step in range(1, 10_000):
                loop.draw()
                set_weight(rank, step)
                drawn[position] = step
                time.sleep(0.001 * (1 + 5 * position))
        except rd.Preempted:
            there[position] = (tmp_path / "ckpt-0").exists()
            raise

    loop = host.run(part_of(saves), body)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(rd.Preempted, match="What it reached is in .*ckpt-0"):
        loop.settle()
    unwatch_steps(watch)
    assert there == {0: True, 1: True}
    assert drawn[0] == drawn[1]
    assert saved(tmp_path / "ckpt-0") == drawn[0]


def test_a_run_that_ends_first_is_not_preempted(host: Host, saves: ManagerSaves) -> None:
    go, watch = threading.Event(), ManagerWatch(saves, 42)
    watch_steps(watch)

    def body(loop: ReplicaLoop, rank: Rank) -> None:
        loop.draw()
        assert go.wait(20)

    loop = host.run(part_of(saves), body)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)  # it is held meanwhile
    go.set()
    loop.settle()
    assert "could not be saved" not in str(watch.save_before_exit("why", undone=None))
    unwatch_steps(watch)


def test_the_driver_stops_asking_replicas_that_are_gone(
    host: Host, saves: ManagerSaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = host.run(part_of(saves), lambda own, rank: None)

    def gone(*args: Any) -> Any:
        raise rd.UnavailableError("gone")

    monkeypatch.setattr(host, "ask", gone)
    loop.close()
    loop.close()
    assert "raydist-loop" not in [thread.name for thread in threading.enumerate()]


def distributed_iterator() -> DistributedIterator:
    """Return an iterator that has not begun, without replicas."""
    job: Any = SimpleNamespace(state=None, label="nothing")
    nobody: Any = None
    return DistributedIterator(nobody, job, find_spec=lambda: None, drain=lambda: None)


def test_loops_need_an_iterator_and_a_watching_manager(tmp_path: Path) -> None:
    host, iterator = Host(1, dict, []), distributed_iterator()
    assert begin_loop(((iterator,), {}), host) is None
    with rd.CheckpointManager(rd.Checkpoint(state=rd.State()), tmp_path, 1) as manager:
        manager.watch()
        assert begin_loop(((1, "text"), {}), host) is None
        with ignore_draws():
            assert begin_loop(((iterator,), {}), host) is None
        loop = begin_loop(((1, {"nested": iterator}), {}), host)
        assert loop is not None
        assert [each.directory for each in loop.command().managers] == [str(tmp_path)]
    host.close()


def test_all_gates_stop_after_the_same_draw() -> None:
    pace = random.Random(0)
    for _ in range(3):
        gates, drawn = [DrawGate(20.0) for _ in range(4)], [0] * 4

        def draw(rank: int, pause_s: float, gates: list[DrawGate] = gates, drawn: list[int] = drawn) -> None:
            while not gates[rank].draw():
                drawn[rank] += 1
                time.sleep(pause_s)

        threads = [threading.Thread(target=draw, args=(rank, pace.random() / 500)) for rank in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        last = max(gate.hold() for gate in gates)
        for gate in gates:
            gate.stop_after(last)
        for thread in threads:
            thread.join(20)
        assert drawn == [last] * 4
        assert gates[0].draw(), "the gate stays closed"


def test_a_held_gate_waits_until_it_may_go_on_but_not_forever() -> None:
    gate = DrawGate(20.0)
    assert not gate.draw()
    assert gate.hold() == 1
    with ThreadPoolExecutor(1) as thread:
        drawing = thread.submit(gate.draw)
        with pytest.raises(TimeoutError):
            drawing.result(0.05)
        gate.go_on()
        assert not drawing.result(20)
    assert gate.hold() == 2
    gate = DrawGate(0.01)
    gate.hold()
    with pytest.raises(DeadlineExceededError, match=r"within 0\.01 s \(Timeouts\.step_s\) at which batch"):
        gate.draw()


def loop_of(limit_s: float = 0.05, **options: Any) -> ReplicaLoop:
    settings: dict[str, Any] = {"interval": SaveInterval(2), "count": LoopCount(1, 0), **options}
    counter = torch.tensor(7)
    side = Rank(0, 1, {1: torch.nn.Linear(1, 1), 2: counter})
    return ReplicaLoop(3, LoopCommand((ManagerCommand("key", "/runs", "ckpt", **settings),), limit_s), side)


def test_counts_continue_from_the_counts_of_the_driver_or_a_variable() -> None:
    one = loop_of(objects={"model": 1})
    assert [each and each.path for each in (one.save("key") for _ in range(3))] == [
        "/runs/ckpt-2",
        None,
        "/runs/ckpt-4",
    ]
    report = one.report(ended=False)
    assert [(requested.number, requested.calls) for requested in report.requested] == [(2, 2), (4, 4)]
    assert report.counts == {"key": LoopCount(4, 4)}
    saved = loop_of(counts_calls=False, counter=2).save("key")
    assert saved is not None
    assert saved.path == "/runs/ckpt-7"
    with pytest.raises(rd.FailedPreconditionError, match=r"step_counter=rd\.get_global_step\(\)"):
        loop_of(counts_calls=False).save("key")


def test_preemption_with_each_kind_of_step_counter() -> None:
    cases: list[tuple[dict[str, Any], int]] = [
        ({"counts_calls": False, "counter": 2}, 7),
        ({"counts_calls": False, "step": 5}, 5),
        ({"step": 5}, 1),
    ]
    for options, number in cases:
        one, preempted = loop_of(20.0, **options), rd.Preempted(message="why")
        one.gate.hold()
        one.gate.stop_after(0)
        with ThreadPoolExecutor(1) as thread:
            drawing = thread.submit(one.draw)
            while not (requested := one.report(ended=False).requested):
                assert not drawing.done()
            assert (requested[0].number, requested[0].is_last) == (number, True)
            one.end_save(requested[0].token, SaveOutcome(preempted=preempted))
            with pytest.raises(rd.Preempted, match="why"):
                drawing.result(20)
        with pytest.raises(rd.Preempted, match="why"):
            one.draw()  # that ends what catches it, too
        assert one._side.num_left == 1  # type: ignore[attr-defined]  # a Rank of tests


def test_handles_raise_the_error_of_their_save_and_the_third_failure_ends_the_run() -> None:
    one = loop_of(interval=SaveInterval())
    for number in range(3):
        handle = one.save("key", 9)
        assert handle is not None
        assert not handle.done()
        with pytest.raises(rd.DeadlineExceededError, match="must be written in time"):
            handle.wait(0.0)
        (requested,) = one.report(ended=False).requested
        one.end_save(requested.token, SaveOutcome(pack_error(OSError("full")), number + 1))
        with pytest.raises(OSError, match="full"):
            handle.wait()
    with pytest.raises(OSError, match="full"):
        one.save("key")


def test_bad_input() -> None:
    cases: list[tuple[Any, str]] = [
        (({"key": "other"}, {}), "must be open and watching"),
        (({"number": -1}, {}), "must be an int >= 0, got -1"),
        (({"metrics": {"a": 1.0}}, {"metric": "loss"}), "must have 'loss', which `best` names, got a"),
    ]
    save: Any = lambda case: loop_of(**case[1]).save(**{"key": "key", "check_interval": False, **case[0]})  # noqa: E731
    check_refused(save, cases, rd.RaydistError)
    with pytest.raises(rd.FailedPreconditionError, match="after a draw from a distributed iterator"):
        ManagerProxy("key").save()
    with pytest.raises(rd.FailedPreconditionError, match="'checkpoints' was asked for"):
        _ = ManagerProxy("key").checkpoints
    assert not hasattr(ManagerProxy("key"), "_missing")


def test_reports_before_during_and_after_a_run() -> None:
    loops = ReplicaLoops(ShardWriter(0, 1, torch.device("cpu")))
    assert loops.report(4) is None
    assert loops.hold(4) is None
    loops.draw()
    with loops.running(4, LoopCommand((), 1.0), Rank(0, 1, {})):
        loops.draw()
        assert loops.report(4) == LoopReport()
        assert loops.hold(4) == 1
        loops.stop_after(4, None)
        loops.draw()
        assert loops.hold(4) == 2
    assert loops.report(4) == LoopReport(ended=True)
    assert loops.hold(4) is None
