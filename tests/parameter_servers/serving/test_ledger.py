from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from raydist.parameter_servers.requests import PushKey, Sender
from raydist.parameter_servers.serving.changes import Ledger

CHANGES = [(closure, index) for closure in range(5) for index in range(2)]


@given(st.integers(0, 10**6), st.integers(1, 3))
def test_each_change_is_applied_once_however_often_it_comes(seed: int, times: int) -> None:
    draw = random.Random(seed)
    coming = CHANGES * times
    draw.shuffle(coming)
    ledger = Ledger()
    applied = []
    for closure, index in coming:
        sender = Sender(draw.randrange(3), draw.randrange(2))
        key = PushKey(closure, index)
        verdict = ledger.check(sender, key)
        assert ledger.enter(sender, key) == verdict
        applied += [(closure, index)] * (verdict == "applied")
    assert sorted(applied) == CHANGES


def test_what_has_ended_is_forgotten_and_counts_as_known() -> None:
    ledger, sender = Ledger(), Sender(0, 0)
    for closure in range(100):
        key = PushKey(closure, 0, finished_below=max(0, closure - 3))
        assert ledger.enter(sender, key) == "applied"
        assert ledger.num_known <= 4
    assert ledger.check(sender, PushKey(5, 0)) == "known"
    assert ledger.check(sender, PushKey(5, 7)) == "known"
    assert ledger.check(sender, PushKey(99, 1, finished_below=0)) == "applied"


def test_generations_up_to_the_fence_are_refused() -> None:
    ledger, key = Ledger(), PushKey(1, 0)
    ledger.fence(Sender(4, 2))
    ledger.fence(Sender(4, 1))  # told late
    for generation, verdict in ((0, "fenced"), (2, "fenced"), (3, "applied")):
        assert ledger.enter(Sender(4, generation), key) == verdict
    assert ledger.enter(Sender(5, 0), key) == "known"
    assert not ledger.is_fenced(Sender(-1, 0))
