from __future__ import annotations

import pytest

from raydist.collectives.wires.handshake import (
    ANSWER_BYTES,
    INTRODUCTION_BYTES,
    Caller,
    Credentials,
    Introduction,
    Listener,
)

MINE = Credentials("g/0", b"secret")
STRANGERS = [Credentials("g/0", b"other"), Credentials("g/1", b"secret"), Credentials("h/0", b"secret")]
HELLO = Introduction(source=2, destination=1, topic=0)


def test_members_know_each_other() -> None:
    caller, listener = Caller(MINE), Listener(MINE)
    answer = listener.answer(caller.greeting)
    said = caller.introduce(answer, HELLO)
    assert said is not None
    assert (len(answer), len(said)) == (ANSWER_BYTES, INTRODUCTION_BYTES)
    assert listener.introduced(said) == HELLO


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_is_found_out_by_both_sides(stranger: Credentials) -> None:
    caller = Caller(MINE)
    assert caller.introduce(Listener(stranger).answer(caller.greeting), HELLO) is None
    listener, impostor = Listener(MINE), Caller(stranger)
    listener.answer(impostor.greeting)
    claimed = Caller(stranger).introduce(Listener(stranger).answer(impostor.greeting), HELLO)
    assert listener.introduced(claimed or bytes(INTRODUCTION_BYTES)) is None


def test_what_was_said_once_proves_nothing_again() -> None:
    caller, listener = Caller(MINE), Listener(MINE)
    said = caller.introduce(listener.answer(caller.greeting), HELLO)
    assert said is not None
    assert Listener(MINE).introduced(said) is None


def test_an_introduction_cannot_be_changed() -> None:
    caller, listener = Caller(MINE), Listener(MINE)
    said = caller.introduce(listener.answer(caller.greeting), HELLO)
    assert said is not None
    assert listener.introduced(bytes([said[0] ^ 1]) + said[1:]) is None
