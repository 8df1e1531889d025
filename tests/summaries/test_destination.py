from __future__ import annotations

from raydist.summaries.destination import (
    Destination,
    as_destination,
    as_taker,
    condition,
    destination,
    note,
    noting,
    only_if,
    taker,
)
from raydist.summaries.step_recorder import StepRecorder


def test_the_innermost_counts_and_ends_with_its_block() -> None:
    recorder = StepRecorder(lambda: 1.0)
    place = Destination("writer", recorder)
    with as_destination(place), as_taker(recorder), only_if(False):
        assert (destination(), taker(), condition()) == (place, recorder, False)
        with as_destination(None), only_if(lambda: True):
            assert (destination(), condition()) == (None, True)
    assert (destination(), taker(), condition()) == (None, None, True)


def test_writers_are_noted_while_a_step_is_pickled() -> None:
    noted: list[object] = []
    with noting(noted.append):
        assert note("writer")
    assert noted == ["writer"]
    assert not note("writer")
