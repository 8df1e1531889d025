from __future__ import annotations

from typing import Any

import pytest

from raydist.core.exception_utils import (
    Carried,
    annotate,
    as_exception,
    collect_errors,
    message_of,
    shown,
    what_was_raised,
)


class Mute(Exception):
    """Says nothing of itself."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Closed(Exception):
    """Allows no notes."""

    @property
    def __notes__(self) -> Any:  # type: ignore[override]  # what users do
        raise RuntimeError("no notes")


class Stiff(Exception):
    """Cannot be written to, and has a method of its own in the place of Python's."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)

    def add_note(self, note: str) -> None:
        raise TypeError("not now")


class Departure(BaseException):
    """No Exception."""


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        (None, ["new"]),
        ("old", ["old", "new"]),
        (("a", "b"), ["a", "b", "new"]),
        ([1, "b"], [1, "b", "new"]),
        ({"a": 1}, ["{'a': 1}", "new"]),
        (["new"], ["new"]),
    ],
)
def test_any_notes_take_one_more(notes: Any, expected: list[Any]) -> None:
    error = ValueError("bad")
    error.__notes__ = notes
    annotate(error, "new")
    assert error.__notes__ == expected


def test_a_class_that_takes_no_notes_is_left_alone() -> None:
    annotate(Closed(), "new")
    error = Stiff()
    annotate(error, "new")
    assert error.__notes__ == ["new"]


def test_notes_reach_what_is_carried() -> None:
    error = Departure("left")
    carried = as_exception(error)
    assert isinstance(carried, Carried)
    annotate(carried, "new")
    assert what_was_raised(carried) is error
    assert error.__notes__ == ["new"]


def test_an_exception_carries_itself() -> None:
    error = ValueError("bad")
    assert what_was_raised(as_exception(error)) is as_exception(error) is error


def test_what_cannot_say_its_message_is_described() -> None:
    assert message_of(ValueError("bad")) == "bad"
    assert "its __str__ raised RuntimeError" in message_of(Mute(3))
    assert "(3,)" in message_of(Mute(3))
    assert shown(Mute()) == "<Mute>"


def test_every_call_is_made_in_order_and_the_first_error_is_raised() -> None:
    made: list[int] = []

    def fail(number: int) -> None:
        made.append(number)
        raise ValueError(f"call {number}")

    with pytest.raises(ValueError, match="call 1"):
        collect_errors([lambda: fail(1), lambda: fail(2), lambda: made.append(3)])
    assert made == [1, 2, 3]
