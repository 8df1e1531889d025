"""Where something was at boundaries."""

from __future__ import annotations

from raydist.preemption.marks import PlaceMarks


def test_only_so_many_places_are_kept() -> None:
    marks = PlaceMarks()
    for boundary in range(1000):
        marks.note(boundary, boundary // 2)
    assert (marks.num_forgotten, marks.first, marks.last_change) == (244, 488, 998)
    assert (marks.before(488), marks.before(489), marks.before(491)) == (None, 244, 245)


def test_an_unknown_place_is_one_of_its_own() -> None:
    marks = PlaceMarks()
    assert (marks.first, marks.last_change) == (None, -1)
    for boundary in range(3):
        marks.note(boundary, None)
    assert (marks.first, marks.last_change, marks.before(3)) == (0, 2, None)
