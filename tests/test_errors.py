"""Errors: pickling, notes, messages."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import cloudpickle
import pytest

from raydist.core import errors
from raydist.core.errors import RaydistError
from raydist.core.exception_utils import (
    Carried,
    annotate,
    as_exception,
    collect_errors,
    message_of,
    shown,
    what_was_raised,
)
from tests.odd_errors import Departure

CLASSES = [cls for cls in (getattr(errors, name) for name in errors.__all__) if cls is not errors.Preempted]


def test_all_survive_pickling_and_show_their_message() -> None:
    for cls in CLASSES:
        error = cls("what must hold, what was got")
        error.add_note("map-2 (train.py:7), element 5, worker input-1")
        for dumps in (pickle.dumps, cloudpickle.dumps):
            copy = pickle.loads(dumps(error))
            assert (type(copy), str(copy)) == (cls, "what must hold, what was got")
            assert copy.__notes__ == error.__notes__
        shown = "".join(traceback.format_exception_only(cls("got 0")))
        assert issubclass(cls, RaydistError)
        assert shown.strip() == f"raydist.core.errors.{cls.__name__}: got 0"


def test_the_end_of_a_process_is_no_error_and_keeps_its_code() -> None:
    ended = errors.Preempted(7, "saved in ckpt-3")
    ended.add_note("replica 1")
    copy = pickle.loads(pickle.dumps(ended))
    assert isinstance(copy, SystemExit)
    assert not isinstance(copy, RaydistError | Exception)
    assert (copy.code, str(copy), copy.__notes__) == (7, "saved in ckpt-3", ["replica 1"])


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


def test_any_notes_take_one_more() -> None:
    cases: list[tuple[Any, list[Any]]] = [
        (None, ["new"]),
        ("old", ["old", "new"]),
        (("a", "b"), ["a", "b", "new"]),
        ([1, "b"], [1, "b", "new"]),
        ({"a": 1}, ["{'a': 1}", "new"]),
        (["new"], ["new"]),
    ]
    for notes, expected in cases:
        error = ValueError("bad")
        error.__notes__ = notes
        annotate(error, "new")
        assert error.__notes__ == expected
    annotate(Closed(), "new")  # takes none, and is left alone
    stiff = Stiff()
    annotate(stiff, "new")
    assert stiff.__notes__ == ["new"]


def test_notes_reach_what_is_carried() -> None:
    error = Departure("left")
    carried = as_exception(error)
    assert isinstance(carried, Carried)
    annotate(carried, "new")
    assert what_was_raised(carried) is error
    assert error.__notes__ == ["new"]


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
