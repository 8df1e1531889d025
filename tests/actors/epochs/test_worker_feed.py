from __future__ import annotations

import pytest

from raydist.actors.epochs.merged_epoch import WorkerFeed
from raydist.core.errors import FailedPreconditionError
from tests.actors.epochs.entries import end_entry, error_entry, group_entry


def test_places_are_used_one_by_one() -> None:
    feed = WorkerFeed({"at": 0})
    assert feed.waits
    feed.add([group_entry(0, [[[1], [2]], [[3], []]]), end_entry(2)])
    assert (feed.place, feed.num_steps, feed.asks_from, feed.holds_last) == (0, 2, 3, True)
    assert feed.state_after(2) == {"at": 2, "step": 2}
    feed.use(1)
    assert (feed.place, feed.num_steps, feed.state, feed.used) == (1, 1, {"at": 1, "step": 1}, 1)
    feed.use(1)
    assert feed.entry.last
    feed.use(1)
    assert (feed.ended, feed.state["at"], feed.waits) == (True, "end", False)


def test_what_it_waits_for_is_asked_from_there() -> None:
    feed = WorkerFeed({})
    feed.add([group_entry(0, [[[1]]])])
    feed.use(1)
    assert (feed.waits, feed.asks_from, feed.holds_last) == (True, 1, False)
    with pytest.raises(FailedPreconditionError, match="must have sent place 1"):
        _ = feed.entry


def test_an_error_is_no_end_and_no_step() -> None:
    feed = WorkerFeed({"at": 0})
    feed.add([error_entry(0, ValueError(), last=True)])
    with pytest.raises(FailedPreconditionError, match="must be a step"):
        _ = feed.group
    feed.use(1)
    assert not feed.ended
