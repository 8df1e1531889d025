"""Loops in replicas, without actors: a replica is an object, or a thread."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.actors.portable_errors import pack_error
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
from raydist.checkpoints.replica_loop import DrawGate, ManagerProxy, ReplicaLoop
from raydist.checkpoints.run_directory import RunDirectory
from raydist.checkpoints.saves import ManagerSaves
from raydist.checkpoints.shards import ShardTerms
from raydist.cluster.preemption import ignore_draws
from raydist.core.errors import DeadlineExceededError
from raydist.distributed_dataset import DistributedIterator
from tests.refused import check_refused


class Rank:
    """A `ReplicaSide` with its own objects, by handle."""

    def __init__(self, objects: Mapping[int, Any]) -> None:
        self.objects = dict(objects)
        self.num_left = 0

    def object_of(self, handle: int) -> Any:
        return self.objects[handle]

    def settle(self) -> None:
        """Do nothing: there is nothing to settle."""

    def leave(self) -> None:
        self.num_left += 1

    def agree(self, number: float) -> float:
        return number

    def copy(self, token: str, terms: ShardTerms, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        """Do nothing: nothing is written."""

    def positions(self) -> tuple[IteratorPosition, ...]:
        return ()

    def take_records(self) -> tuple[Any, ...]:
        return ()


def host() -> Any:
    """A strategy whose replicas have the object "known" only."""
    return SimpleNamespace(
        limit_s=1.0, handle_of=lambda obj: 5 if obj == "known" else None, driver_items=lambda objects: {}
    )


def test_a_failed_last_save_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path), "ckpt", Retention(None))
    run.acquire()
    saves = ManagerSaves(contents_of(rd.Checkpoint(state=rd.State())), run, SaveInterval(), None)
    part = ManagedLoop("key", saves, 42, [], asynchronous=True)
    part.command(host())
    (tmp_path / "ckpt-4").write_text("in the way")
    begin: Any = None  # nothing is asked of replicas
    outcome = part.write(RequestedSave("t", "key", 4, 1, None, (), is_last=True), begin, "it received SIGTERM")
    assert outcome.failures == 1
    assert "it received SIGTERM. It could not be saved" in str(outcome.preempted)
    saves.writer.close()  # raises nothing: the error is already reported
    run.release()


def test_a_run_may_be_settled_again_while_it_is_settled() -> None:
    """For a preemption, waiting for the steps saves, which waits for the run as well."""

    depth = 0

    def drain() -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            loop.settle()
            raise rd.Preempted

    replicas: Any = SimpleNamespace(limit_s=1.0, drain=drain, ask=lambda *_: [LoopReport(ended=True)])
    loop = DriverLoop(replicas, [])
    loop.start(3)
    with pytest.raises(rd.Preempted):
        loop.settle()


def distributed_iterator() -> DistributedIterator:
    """Return an iterator that has not begun, without replicas."""
    job: Any = SimpleNamespace(state=None, label="nothing")
    nobody: Any = None
    return DistributedIterator(nobody, job, find_spec=lambda: None, drain=lambda: None)


def test_loops_need_an_iterator_and_a_watching_manager(tmp_path: Path) -> None:
    iterator = distributed_iterator()
    assert begin_loop(((iterator,), {}), host()) is None
    with rd.CheckpointManager(rd.Checkpoint(state=rd.State()), tmp_path, 1) as manager:
        manager.watch()
        assert begin_loop(((1, "text"), {}), host()) is None
        with ignore_draws():
            assert begin_loop(((iterator,), {}), host()) is None
        loop = begin_loop(((1, {"nested": iterator}), {}), host())
        assert loop is not None
        assert [each.directory for each in loop.command().managers] == [str(tmp_path)]


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
    side = Rank({1: torch.nn.Linear(1, 1), 2: counter})
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
