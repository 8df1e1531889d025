"""A replica's side of a run that draws batches itself: draws, saves, and stopping at the same draw."""

from __future__ import annotations

import pickle
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.actors.portable_errors import pack_error
from raydist.checkpoints.listing import SaveInterval
from raydist.checkpoints.loop_commands import (
    IteratorPlace,
    LoopCommand,
    LoopCount,
    LoopNews,
    ManagerCommand,
    SaveOutcome,
    WantedSave,
)
from raydist.checkpoints.replica_loop import DrawGate, ManagerProxy, ReplicaLoop, ReplicaLoops, sending_managers
from raydist.checkpoints.shards import ShardWriter
from raydist.context.current import enter_replica
from raydist.context.replica_context import NoPeers, ReplicaContext
from raydist.core.errors import DeadlineExceededError
from raydist.strategies.one_device import OneDeviceStrategy
from tests.checkpoints.loops.in_process import Rank


def test_orders_and_answers_travel() -> None:
    manager = ManagerCommand("key", "/runs", "ckpt", SaveInterval(3), LoopCount(2, None), objects={"model": 4})
    command = LoopCommand((manager,), 10.0)
    wanted = WantedSave("t", "key", 3, 4, {"loss": 1.0}, (IteratorPlace({"at": 1}, False),))
    outcome = SaveOutcome(pack_error(ValueError("full")), 1, rd.Preempted(3, "why"))
    assert pickle.loads(pickle.dumps((command, wanted))) == (command, wanted)
    again = pickle.loads(pickle.dumps(outcome))
    assert (str(again.left), again.left.code, again.failures) == ("why", 3, 1)


@pytest.mark.parametrize("seed", range(5))
def test_whoever_is_behind_catches_up_and_all_have_drawn_the_same(seed: int) -> None:
    pace = random.Random(seed)
    gates, drawn = [DrawGate(20.0) for _ in range(4)], [0] * 4

    def draw(rank: int, pause_s: float) -> None:
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
    assert gates[0].draw(), "it stays shut"


def test_who_is_held_waits_and_may_go_on() -> None:
    gate = DrawGate(20.0)
    assert not gate.draw()
    assert gate.hold() == 1
    drew = threading.Event()

    def draw() -> None:
        gate.draw()
        drew.set()

    thread = threading.Thread(target=draw)
    thread.start()
    assert not drew.wait(0.05)
    gate.go_on()
    assert drew.wait(20)
    thread.join()
    assert gate.hold() == 2


def test_a_driver_that_says_nothing_is_an_error() -> None:
    gate = DrawGate(0.01)
    gate.hold()
    with pytest.raises(DeadlineExceededError, match=r"within 0\.01 s \(Timeouts\.step_s\) at which batch"):
        gate.draw()


def loop(limit_s: float = 0.05, **options: Any) -> ReplicaLoop:
    settings: dict[str, Any] = {"interval": SaveInterval(2), "count": LoopCount(1, 0), **options}
    counter = torch.tensor(7)
    side = Rank(0, 1, {1: torch.nn.Linear(1, 1), 2: counter})
    return ReplicaLoop(3, LoopCommand((ManagerCommand("key", "/runs", "ckpt", **settings),), limit_s), side)


def test_counts_go_on_where_the_drivers_were() -> None:
    one = loop(objects={"model": 1})
    saved = [one.save("key") for _ in range(3)]
    assert [each is not None for each in saved] == [True, False, True]
    assert [each.path for each in saved if each] == ["/runs/ckpt-2", "/runs/ckpt-4"]
    news = one.news(ended=False)
    assert [(wanted.number, wanted.calls) for wanted in news.wanted] == [(2, 2), (4, 4)]
    assert news.counts == {"key": LoopCount(4, 4)}


def test_a_variable_counts_and_what_is_no_variable_cannot() -> None:
    saved = loop(counts_calls=False, counter=2).save("key")
    assert saved is not None
    assert saved.path == "/runs/ckpt-7"
    with pytest.raises(rd.FailedPreconditionError, match=r"step_counter=rd\.get_global_step\(\)"):
        loop(counts_calls=False).save("key")


@pytest.mark.parametrize(
    ("options", "number"),
    [({"counts_calls": False, "counter": 2}, 7), ({"counts_calls": False, "step": 5}, 5), ({"step": 5}, 1)],
)
def test_a_process_is_left_whatever_counts_the_steps(options: dict[str, Any], number: int) -> None:
    one, left = loop(20.0, **options), rd.Preempted(message="why")
    one.gate.hold()
    one.gate.stop_after(0)
    with ThreadPoolExecutor(1) as thread:
        drawing = thread.submit(one.draw)
        while not (wanted := one.news(ended=False).wanted):
            assert not drawing.done()
        assert (wanted[0].number, wanted[0].leaving) == (number, True)
        one.end_save(wanted[0].token, SaveOutcome(left=left))
        with pytest.raises(rd.Preempted, match="why"):
            drawing.result(20)
    with pytest.raises(rd.Preempted, match="why"):
        one.draw()  # that ends what catches it, too
    assert one._side.num_left == 1  # type: ignore[attr-defined]  # a Rank of tests


def test_pending_gradients_are_copied_as_they_are_at_the_save() -> None:
    one = loop(interval=SaveInterval(), objects={"model": 1}, gradients={"gradients.model": 1})
    rank: Any = one._side
    model = rank.objects[1]
    model(torch.ones(1)).backward()
    assert one.save("key") is not None
    model.weight.grad.zero_()
    (copied,) = rank.writer._copies.values()
    found = {file.owner: tensors for file, tensors in copied.files}
    assert found["gradients.model"]["weight"].tolist() == [[1.0]]


def test_seconds_are_an_interval_too() -> None:
    one = loop(interval=SaveInterval(None, 60.0), seconds=61.0)
    assert one.save("key") is not None
    assert one.save("key") is None
    assert one.save("key", check_interval=False) is not None


def test_a_handle_tells_what_has_become_of_it_and_the_third_failure_is_raised() -> None:
    one = loop(interval=SaveInterval())
    for number in range(3):
        handle = one.save("key", 9)
        assert handle is not None
        assert not handle.done()
        with pytest.raises(rd.DeadlineExceededError, match="must be written in time"):
            handle.wait(0.0)
        (wanted,) = one.news(ended=False).wanted
        one.end_save(wanted.token, SaveOutcome(pack_error(OSError("full")), number + 1))
        with pytest.raises(OSError, match="full"):
            handle.wait()
    with pytest.raises(OSError, match="full"):
        one.save("key")


@pytest.mark.parametrize(
    ("asked", "options", "said"),
    [
        ({"key": "other"}, {}, "must be open and watching"),
        ({"number": -1}, {}, "must be an int >= 0, got -1"),
        ({"metrics": {"a": 1.0}}, {"metric": "loss"}, "must have 'loss', which `best` names, got a"),
    ],
)
def test_bad_input(asked: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(rd.RaydistError, match=said):
        loop(**options).save(**{"key": "key", "check_interval": False, **asked})


def test_a_run_is_unknown_then_under_way_then_over() -> None:
    loops = ReplicaLoops(ShardWriter(0, 1, torch.device("cpu")))
    assert loops.news(4) is None
    assert loops.hold(4) is None
    loops.draw()
    with loops.running(4, LoopCommand((), 1.0), Rank(0, 1, {})):
        loops.draw()
        assert loops.news(4) == LoopNews()
        assert loops.hold(4) == 1
        loops.stop_after(4, None)
        loops.draw()
        assert loops.hold(4) == 2
    assert loops.news(4) == LoopNews(ended=True)
    assert loops.hold(4) is None


def test_a_run_that_was_refused_is_over() -> None:
    loops = ReplicaLoops(ShardWriter(0, 1, torch.device("cpu")))
    loops.pass_by(7)
    assert loops.news(7) == LoopNews(ended=True)
    loops.stop_after(7, 1)
    loops.end_save(7, "token", SaveOutcome())


def test_a_manager_travels_only_to_who_draws_batches_itself(tmp_path: Path) -> None:
    manager = rd.CheckpointManager(rd.Checkpoint(state=rd.State()), tmp_path, 1)
    with sending_managers():
        assert isinstance(pickle.loads(pickle.dumps(manager)), ManagerProxy)
    with pytest.raises(rd.FailedPreconditionError, match="must stay in the process"):
        pickle.dumps(manager)


def test_a_step_that_is_given_its_batch_cannot_save() -> None:
    with pytest.raises(rd.FailedPreconditionError, match="after a draw from a distributed iterator"):
        ManagerProxy("key").save()


def test_it_saves_by_the_run_that_it_is_in() -> None:
    class Loop:
        """Notes what it is asked for."""

        def save(self, *asked: object) -> tuple[object, ...]:
            return asked

    strategy = OneDeviceStrategy("cpu")
    peers = NoPeers(strategy.run(rd.get_replica_context).device)
    peers.loop = Loop()
    with enter_replica(ReplicaContext(strategy, peers)):
        assert ManagerProxy("key").save(3, False, {"loss": 1.0}) == ("key", 3, False, {"loss": 1.0})


def test_all_else_is_the_drivers() -> None:
    with pytest.raises(rd.FailedPreconditionError, match="'checkpoints' was asked for"):
        _ = ManagerProxy("key").checkpoints
    assert not hasattr(ManagerProxy("key"), "_missing")
