"""Errors keep type, message, notes and traceback on their way, whatever their class is like."""

from __future__ import annotations

import pickle
import threading
import traceback
from dataclasses import replace
from typing import Any

import pytest

from raydist.actors.portable_errors import PortableError, pack_error
from raydist.core.errors import DataLossError, RaydistError
from raydist.core.exception_utils import what_was_raised


class Odd(Exception):
    """Pickles, but cannot be unpickled: its constructor wants two arguments."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{what} ({code})")


class Holding(Exception):
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holding a lock")
        self.lock = threading.Lock()


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_an_ordinary_error_arrives_as_it_was() -> None:
    error = raised(KeyError("label"))
    error.add_note("In map-1.")
    found = pack_error(error, "In worker 3.").restore()
    assert type(found) is KeyError
    assert found.args == ("label",)
    assert found.__notes__ == ["In map-1.", "In worker 3."]
    shown = "".join(traceback.format_exception(found))
    assert "in raised" in shown


def test_fields_arrive() -> None:
    found = pack_error(DataLossError("truncated", path="a", offset=7)).restore()
    assert isinstance(found, DataLossError)
    assert (found.path, found.offset) == ("a", 7)


class Slotted(Exception):
    """Keeps its message where pickling does not look."""

    __slots__ = ("what",)

    def __init__(self, code: int) -> None:
        self.what = "unknown"

    def __str__(self) -> str:
        return self.what


class Mute(Exception):
    """Says nothing of itself."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Hostile(Exception):
    """Raises from whatever pickling asks of it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("not to be pickled")

    def __getstate__(self) -> Any:
        raise RuntimeError("nor to be looked at")


class Departure(BaseException):
    """No Exception, and does not end its process."""


@pytest.mark.parametrize(
    ("error", "message"),
    [(Odd(3, "odd"), r"^odd \(3\)"), (Holding(), "^holding a lock"), (Hostile("h", 3), "'h', 3")],
)
def test_the_type_arrives_whatever_its_constructor_and_fields(error: Exception, message: str) -> None:
    packed = pack_error(raised(error), "In worker 3.")
    assert isinstance(packed, PortableError)
    with pytest.raises(type(error), match=message) as caught:
        raise pickle.loads(pickle.dumps(packed)).restore()
    assert caught.value.__notes__ == ["In worker 3."]
    assert "in raised" in "".join(traceback.format_exception(caught.value))


def test_fields_that_cannot_travel_are_shown_in_their_place() -> None:
    found = pack_error(raised(Holding())).restore()
    assert "unlocked _thread.lock" in found.lock  # type: ignore[attr-defined]  # its own


def test_a_message_that_stays_behind_is_a_note() -> None:
    error = Slotted(3)
    error.what = "lost on the way"
    found = pack_error(raised(error)).restore()
    assert type(found) is Slotted
    assert found.__notes__ == ["Its message was: lost on the way"]


def test_an_error_that_cannot_say_its_message_arrives() -> None:
    packed = pack_error(raised(Mute(7)), "In worker 3.")
    assert "Mute: <its __str__ raised RuntimeError; its arguments: (7,)>" in packed.title
    found = packed.restore()
    assert (type(found), found.args, found.__notes__) == (Mute, (7,), ["In worker 3."])


@pytest.mark.parametrize("notes", [None, "odd", ("odd",), 3])
def test_odd_notes_arrive_as_a_list(notes: Any) -> None:
    error = ValueError("bad")
    error.__notes__ = notes
    found = pack_error(raised(error), "In worker 3.").restore()
    assert found.__notes__ == ([] if notes is None else [str(notes if notes != ("odd",) else "odd")]) + ["In worker 3."]


def test_a_class_that_does_not_arrive_still_shows_itself() -> None:
    packed = replace(pack_error(raised(Odd(3, "odd")), "In worker 3."), pickled=b"no pickle")
    with pytest.raises(RaydistError, match=r"Odd: odd \(3\)") as caught:
        raise packed.restore()
    assert caught.value.__notes__ == ["In worker 3."]
    assert "in raised" in "".join(traceback.format_exception(caught.value))


def test_an_error_that_is_no_exception_does_not_end_the_receiver() -> None:
    assert isinstance(pack_error(raised(SystemExit(3))).restore(), RaydistError)


def test_what_ends_no_process_arrives_as_it_was_for_who_asks() -> None:
    found = pack_error(raised(Departure("left")), "In worker 3.").restore()
    original = what_was_raised(found)
    assert (type(original), original.args, original.__notes__) == (Departure, ("left",), ["In worker 3."])
    assert type(what_was_raised(pack_error(found).restore())) is Departure


def test_two_borders_keep_the_first_traceback() -> None:
    first = pack_error(raised(ValueError("bad"))).restore()
    second = pack_error(first).restore()
    assert type(second) is ValueError
    assert "in raised" in "".join(traceback.format_exception(second))
