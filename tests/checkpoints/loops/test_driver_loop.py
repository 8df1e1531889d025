"""Both halves of a run that draws batches itself: replicas are threads here."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import raydist as rd
from raydist.checkpoints.checkpoint import contents_of
from raydist.checkpoints.loops.managed_loop import ManagedLoop
from raydist.checkpoints.loops.replica_loop import ReplicaLoop
from raydist.checkpoints.managing.saves import ManagedSaves
from raydist.checkpoints.managing.watch import ManagerWatch
from raydist.checkpoints.retention import Retention
from raydist.checkpoints.run_directory import RunDirectory
from raydist.checkpoints.save_interval import SaveInterval
from raydist.preemption.boundaries import unwatch_steps, watch_steps
from tests.checkpoints.loops.in_process import Host, Rank

MODEL = torch.nn.Linear(1, 1, bias=False)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(2, lambda: {1: torch.nn.Linear(1, 1, bias=False)}, [(MODEL, 1)])
    yield made
    made.close()


@pytest.fixture
def saves(tmp_path: Path) -> Iterator[ManagedSaves]:
    run = RunDirectory(str(tmp_path), "ckpt", Retention(None))
    run.take()
    made = ManagedSaves(contents_of(rd.Checkpoint(model=MODEL)), run, SaveInterval(2), None)
    yield made
    run.give_back()


def part_of(saves: ManagedSaves) -> ManagedLoop:
    return ManagedLoop("key", saves, 42, [], asynchronous=True)


def set_weight(rank: Rank, value: float) -> None:
    with torch.no_grad():
        rank.objects[1].weight.fill_(value)


def saved(path: Path) -> float:
    return float(load_file(path / "model.safetensors")["weight"])


def test_saves_have_the_state_of_their_call_and_count_once(host: Host, saves: ManagedSaves, tmp_path: Path) -> None:
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
    host: Host, saves: ManagedSaves, tmp_path: Path
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


def test_a_run_that_has_ended_before_is_not_left(host: Host, saves: ManagedSaves) -> None:
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


def test_what_a_replica_raises_is_raised_where_the_run_is_waited_for(host: Host, saves: ManagedSaves) -> None:
    def body(loop: ReplicaLoop, rank: Rank) -> None:
        raise ValueError("bad row")

    with pytest.raises(ValueError, match="bad row"):
        host.run(part_of(saves), body).settle()


def test_a_driver_whose_replicas_are_gone_stops_asking(
    host: Host, saves: ManagedSaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = host.run(part_of(saves), lambda own, rank: None)

    def gone(*args: Any) -> Any:
        raise rd.UnavailableError("gone")

    monkeypatch.setattr(host, "ask", gone)
    loop.close()
    loop.close()
    assert "raydist-loop" not in [thread.name for thread in threading.enumerate()]
