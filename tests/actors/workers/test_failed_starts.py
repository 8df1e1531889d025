from __future__ import annotations

import pytest

from raydist.actors.workers.handle import FailedStarts
from raydist.core.errors import UnavailableError


def test_some_may_be_killed_while_they_start() -> None:
    starts = FailedStarts()
    for _ in range(3):
        for number in range(19):
            starts.add(f"worker-{number}", RuntimeError("The worker was killed."))
        starts.end()


def test_too_many_in_a_row_are_an_error_that_names_the_last() -> None:
    starts = FailedStarts()
    for number in range(19):
        starts.add(f"worker-{number}", RuntimeError("The worker was killed."))
    message = r"worker-19 is gone while starting, as were the 19 before it: The worker was killed\."
    with pytest.raises(UnavailableError, match=message) as caught:
        starts.add("worker-19", RuntimeError("The worker was killed."))
    assert caught.value.actor == "worker-19"


def test_what_raises_by_itself_is_not_tried_so_often() -> None:
    starts = FailedStarts()
    error = RuntimeError("The actor died because of an error raised in its creation task.")
    for _ in range(2):
        starts.add("worker", error)
    with pytest.raises(UnavailableError, match="as were the 2 before it"):
        starts.add("worker", error)
