"""A run on one replica: when it saves, and what it tells the driver."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.actors.portable_errors import pack_error
from raydist.checkpoints.loops.orders import LoopCount, LoopOrder, ManagerOrder, SaveOutcome
from raydist.checkpoints.loops.replica_loop import ReplicaLoop
from raydist.checkpoints.save_interval import SaveInterval
from tests.checkpoints.loops.in_process import Rank


def loop(limit_s: float = 0.05, **options: Any) -> ReplicaLoop:
    settings: dict[str, Any] = {"interval": SaveInterval(2), "count": LoopCount(1, 0), **options}
    counter = torch.tensor(7)
    side = Rank(0, 1, {1: torch.nn.Linear(1, 1), 2: counter})
    return ReplicaLoop(3, LoopOrder((ManagerOrder("key", "/runs", "ckpt", **settings),), limit_s), side)


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
