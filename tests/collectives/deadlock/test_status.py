from __future__ import annotations

import torch

from raydist.collectives.deadlock import Progress


def test_what_a_rank_does_can_be_seen_and_read() -> None:
    progress = Progress()
    assert str(progress.look()) == "has run no step yet"
    progress.begin_step(4)
    assert str(progress.look()) == "is at work in step 4"
    number = progress.call("values")
    progress.wait("values", number, "all_reduce(SUM)", torch.ones(2, dtype=torch.float64))
    assert str(progress.look()) == "waits in all_reduce(SUM) of torch.float64 (2,) (values, call 0) in step 4"
    progress.go_on()
    progress.end_step()
    assert str(progress.look()) == "has ended step 4"


def test_every_move_changes_the_number_of_events_and_a_look_does_not() -> None:
    progress = Progress()
    seen = [progress.look()]
    for move in (
        lambda: progress.begin_step(0),
        lambda: progress.call("g"),
        lambda: progress.wait("g", 0, "barrier", None),
        progress.go_on,
        progress.end_step,
        progress.restart,
    ):
        move()
        seen.append(progress.look())
    assert len({status.events for status in seen}) == len(seen)
    assert progress.look().events == seen[-1].events
    assert [status.look for status in seen] == list(range(1, len(seen) + 1))


def test_a_new_generation_counts_anew() -> None:
    progress = Progress()
    progress.begin_step(4)
    progress.call("g")
    progress.restart()
    assert progress.look().calls == {}
    assert progress.call("g") == 0
