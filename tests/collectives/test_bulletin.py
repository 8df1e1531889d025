from __future__ import annotations

import functools
import threading

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from raydist.collectives.base import Membership
from raydist.collectives.rendezvous import Bulletin
from raydist.errors import CancelledError, DeadlineExceededError, RaydistError, UnavailableError
from tests.collectives.threads import begin_threads


def bulletins(world_size: int) -> list[Bulletin]:
    store = PrefixStore("g/0", HashStore())
    return [Bulletin(store, Membership("g", 0, rank, world_size)) for rank in range(world_size)]


def test_data_is_exchanged_again_and_again() -> None:
    members = bulletins(2)
    for number in range(5):
        calls = {
            rank: functools.partial(member.exchange, b"x" * number * rank, "a test", 10.0)
            for rank, member in enumerate(members)
        }
        assert begin_threads(calls)() == dict.fromkeys(range(2), [b"", b"x" * number])


def test_who_does_not_arrive_is_named() -> None:
    with pytest.raises(DeadlineExceededError, match=r"a test by rank 0 of 3 .* ranks 1, 2 did not arrive"):
        bulletins(3)[0].exchange(b"", "a test", 0.0)


def test_waiting_can_be_given_up() -> None:
    waiting, other = bulletins(2)
    other.fail(CancelledError("aborted"))
    with pytest.raises(CancelledError):
        waiting.exchange(b"", "a test", 60.0)


@pytest.mark.parametrize("kind", [CancelledError, DeadlineExceededError, UnavailableError])
def test_the_first_failure_stays(kind: type[RaydistError]) -> None:
    first, second = bulletins(2)
    assert not second.listen()
    second.check("a test")
    first.fail(kind("rank 0: two\nlines"))
    first.fail(CancelledError("later"))
    assert second.listen()
    assert not second.listen()
    for member in (first, second):
        with pytest.raises(kind, match="a test by rank . of 2 .* was given up: rank 0: two\nlines Open the group anew"):
            member.check("a test")


def test_a_failure_names_the_ranks_that_do_not_answer() -> None:
    first, _ = bulletins(2)
    first.fail(UnavailableError("Connection closed."))
    assert str(first.named()) == "Connection closed. No sign of rank 1."
    aborted, _ = bulletins(2)
    aborted.fail(CancelledError("rank 0 aborted"))
    assert str(aborted.named()) == "rank 0 aborted"


def test_roll_call() -> None:
    first, second, third = bulletins(3)
    assert first.roll_call(0.0) == (1, 2)
    assert third.roll_call(0.0) == (1,)
    assert second.roll_call(60.0) == ()


def test_the_last_living_rank_to_report_is_not_missing() -> None:
    first, second = bulletins(2)
    later = threading.Timer(0.01, second.roll_call, [0.0])
    later.start()
    assert first.roll_call(5.0) == ()
    later.join()
