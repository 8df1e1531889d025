"""The driver's half of a run that draws batches itself: what it commands, saves and waits for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import raydist as rd
from raydist.checkpoints.checkpoint import contents_of
from raydist.checkpoints.driver_loop import ManagedLoop, begin_loop
from raydist.checkpoints.listing import Retention, SaveInterval
from raydist.checkpoints.loop_commands import IteratorPlace, WantedSave
from raydist.checkpoints.replica_loop import ReplicaLoop
from raydist.checkpoints.run_directory import RunDirectory
from raydist.checkpoints.saves import ManagerSaves
from raydist.checkpoints.shards import DispatchedSave, ShardRequest
from raydist.checkpoints.watch import ManagerWatch
from raydist.cluster.preemption import undivided_run, unwatch_steps, watch_steps
from raydist.distributed_dataset import DistributedIterator
from tests.checkpoints.loops.in_process import Host, Rank


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    made = RunDirectory(str(tmp_path), "ckpt", Retention(None))
    made.acquire()
    yield made
    made.release()


def managed(run: RunDirectory, iterators: list[Any], **objects: Any) -> tuple[ManagedLoop, ManagerSaves]:
    saves = ManagerSaves(contents_of(rd.Checkpoint(**objects)), run, SaveInterval(), None)
    return ManagedLoop("key", saves, 42, iterators, asynchronous=True), saves


def test_what_the_driver_has_is_that_of_the_runs_beginning(run: RunDirectory) -> None:
    state = rd.State(epoch=1)
    part, _ = managed(run, [], state=state)
    host = Host(1, dict, [])
    command = part.command(host)
    assert command.objects == {}
    state.epoch = 2
    outcome = part.write(WantedSave("t", "key", 5, 9, None, ()), lambda request: _begun(host, request), None)
    host.close()
    assert outcome.error is None
    again = rd.State(epoch=0)
    rd.Checkpoint(state=again).restore(run.path_to(5))
    assert again.epoch == 1
    assert run.find()[0].details["calls"] == 9


def _begun(host: Host, request: ShardRequest) -> DispatchedSave:
    host.ranks[0].writer.begin(request, {}, {})
    return DispatchedSave(lambda: host.shards(0, request.token), limit_s=30.0)


def test_datasets_and_iterators_are_where_the_replicas_are(run: RunDirectory) -> None:
    data = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(8).batch(2))
    iterator, other = iter(data), iter(rd.Dataset.range(3))
    next(iterator)
    place = IteratorPlace(iterator.state_dict(), False)
    part, _ = managed(run, [iterator], data=data, iterator=iterator, other=other)
    host = Host(1, dict, [])
    part.command(host)
    next(iterator)  # here; the replicas are elsewhere
    wanted = WantedSave("t", "key", 1, 1, None, (place,))
    assert part.write(wanted, lambda request: _begun(host, request), None).error is None
    ended = WantedSave("u", "key", 2, 2, None, (IteratorPlace(place.state, True),))
    assert part.write(ended, lambda request: _begun(host, request), None).error is None
    host.close()
    rd.Checkpoint(data=data).restore(run.path_to(1), only="data")
    assert [batch.tolist() for batch in data] == [[2, 3], [4, 5], [6, 7]]
    rd.Checkpoint(data=data).restore(run.path_to(2), only="data")
    assert len(list(data)) == 4, "an epoch that has ended is followed by a new one"


def test_replicas_save_pending_gradients_beside_the_modules(run: RunDirectory) -> None:
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    saves = ManagerSaves(
        contents_of(rd.Checkpoint(model=model, other=other, gradients=True)), run, SaveInterval(), None
    )
    part = ManagedLoop("key", saves, 42, [], asynchronous=True)
    host = Host(1, dict, [(model, 1)])
    host.saved_how = "whole"
    command = part.command(host)
    host.close()
    assert command.objects == {"model": 1}
    assert command.gradients == {"gradients.model": 1}  # those of the other one are the driver's, as it is itself
    assert command.terms.whole == {"model", "gradients.model"}


@pytest.mark.parametrize(("counter", "told"), [(None, (None, 0)), ("known", (5, 0)), (lambda: 7, (None, 7))])
def test_what_only_the_driver_counts_is_told_as_it_is_when_the_run_begins(
    run: RunDirectory, counter: Any, told: tuple[int | None, int]
) -> None:
    saves = ManagerSaves(contents_of(rd.Checkpoint(state=rd.State())), run, SaveInterval(), counter)
    host = Host(1, dict, [("known", 5)])
    command = ManagedLoop("key", saves, 42, [], asynchronous=True).command(host)
    host.close()
    assert (command.counter, command.step) == told
    assert command.counts_calls == (counter is None)


def test_modules_whose_variables_alone_are_used_are_sent_as_well(run: RunDirectory) -> None:
    inner, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    outer, norm = torch.nn.Sequential(inner), torch.nn.Sequential(torch.nn.BatchNorm1d(1))
    part, _ = managed(run, [], inner=inner, outer=outer, norm=norm, other=other, state=rd.State())
    host = Host(1, dict, [(inner, 1), (inner.weight, 2), (norm[0].running_mean, 3)])
    assert part.unreached(host) == [outer, norm]
    host.close()


def test_a_failure_is_told_and_does_not_keep_the_process(run: RunDirectory, tmp_path: Path) -> None:
    part, saves = managed(run, [], state=rd.State())
    host = Host(1, dict, [])
    part.command(host)
    (tmp_path / "ckpt-4").write_text("in the way")
    wanted = WantedSave("t", "key", 4, 1, None, (), leaving=True)
    outcome = part.write(wanted, lambda request: _begun(host, request), "it received SIGTERM")
    host.close()
    assert outcome.failures == 1
    assert outcome.left is part.left
    assert "it received SIGTERM. It could not be saved" in str(outcome.left)
    saves.writer.close()  # nobody is told again


MODEL = torch.nn.Linear(1, 1, bias=False)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(2, lambda: {1: torch.nn.Linear(1, 1, bias=False)}, [(MODEL, 1)])
    yield made
    made.close()


@pytest.fixture
def saves(tmp_path: Path) -> Iterator[ManagerSaves]:
    run = RunDirectory(str(tmp_path), "ckpt", Retention(None))
    run.acquire()
    made = ManagerSaves(contents_of(rd.Checkpoint(model=MODEL)), run, SaveInterval(2), None)
    yield made
    run.release()


def part_of(saves: ManagerSaves) -> ManagedLoop:
    return ManagedLoop("key", saves, 42, [], asynchronous=True)


def set_weight(rank: Rank, value: float) -> None:
    with torch.no_grad():
        rank.objects[1].weight.fill_(value)


def saved(path: Path) -> float:
    return float(load_file(path / "model.safetensors")["weight"])


def test_saves_have_the_state_of_their_call_and_count_once(host: Host, saves: ManagerSaves, tmp_path: Path) -> None:
    def body(loop: ReplicaLoop, rank: Rank) -> None:
        for step in range(1, 6):
            loop.draw()
            set_weight(rank, step)
            time.sleep(0.001 if rank is host.ranks[0] else 0.01)
            loop.save("key")
            set_weight(rank, -1.0)  # what was copied stays

    loop = host.run(part_of(saves), body)
    loop.settle()
    assert [saved(tmp_path / f"ckpt-{number}") for number in (2, 4)] == [2.0, 4.0]
    assert (saves.calls, saves.last_step) == (5, 4)
    assert "raydist-loop" not in [thread.name for thread in threading.enumerate()]


def test_replicas_stop_at_the_same_draw_and_raise_after_the_commit(
    host: Host, saves: ManagerSaves, tmp_path: Path
) -> None:
    watch, drawn, there = ManagerWatch(saves, 42), dict[int, int](), dict[int, bool]()
    watch_steps(watch)

    def body(loop: ReplicaLoop, rank: Rank) -> None:
        place = host.ranks.index(rank)
        try:
            for step in range(1, 10_000):
                loop.draw()
                set_weight(rank, step)
                drawn[place] = step
                time.sleep(0.001 * (1 + 5 * place))
        except rd.Preempted:
            there[place] = (tmp_path / "ckpt-0").exists()
            raise

    loop = host.run(part_of(saves), body)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(rd.Preempted, match="What it reached is in .*ckpt-0"):
        loop.settle()
    unwatch_steps(watch)
    assert there == {0: True, 1: True}
    assert drawn[0] == drawn[1]
    assert saved(tmp_path / "ckpt-0") == drawn[0]


def test_a_run_that_has_ended_before_is_not_left(host: Host, saves: ManagerSaves) -> None:
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
    assert "could not be saved" not in str(watch.save_to_leave("why", undone=None))
    unwatch_steps(watch)


def test_what_a_replica_raises_is_raised_where_the_run_is_waited_for(host: Host, saves: ManagerSaves) -> None:
    def body(loop: ReplicaLoop, rank: Rank) -> None:
        raise ValueError("bad row")

    with pytest.raises(ValueError, match="bad row"):
        host.run(part_of(saves), body).settle()


def test_a_driver_whose_replicas_are_gone_stops_asking(
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
    """One that has not begun, and needs nobody."""
    job: Any = SimpleNamespace(state=None, label="nothing")
    nobody: Any = None
    return DistributedIterator(nobody, job, find_spec=lambda: None, drain=lambda: None)


def test_only_runs_that_are_given_iterators_while_somebody_watches(tmp_path: Path) -> None:
    host, iterator = Host(1, dict, []), distributed_iterator()
    assert begin_loop(((iterator,), {}), host) is None
    with rd.CheckpointManager(rd.Checkpoint(state=rd.State()), tmp_path, 1) as manager:
        manager.watch()
        assert begin_loop(((1, "text"), {}), host) is None
        with undivided_run():
            assert begin_loop(((iterator,), {}), host) is None
        loop = begin_loop(((1, {"nested": iterator}), {}), host)
        assert loop is not None
        assert [each.directory for each in loop.command().managers] == [str(tmp_path)]
    host.close()
