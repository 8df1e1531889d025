"""Errors keep type, message, notes and traceback on their way, whatever their class is like."""

from __future__ import annotations

import threading
import traceback

import pytest

from raydist.actors.portable_errors import PortableError, pack_error
from raydist.errors import DataLossError, RaydistError


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


@pytest.mark.parametrize(
    ("error", "title"), [(Odd(3, "odd"), r"Odd: odd \(3\)"), (Holding(), "Holding: holding a lock")]
)
def test_what_cannot_be_pickled_still_shows_itself(error: Exception, title: str) -> None:
    packed = pack_error(raised(error), "In worker 3.")
    assert isinstance(packed, PortableError)
    with pytest.raises(RaydistError, match=title) as caught:
        raise packed.restore()
    assert caught.value.__notes__ == ["In worker 3."]
    assert "in raised" in "".join(traceback.format_exception(caught.value))


def test_an_error_that_is_no_exception_does_not_end_the_receiver() -> None:
    assert isinstance(pack_error(raised(SystemExit(3))).restore(), RaydistError)


def test_two_borders_keep_the_first_traceback() -> None:
    first = pack_error(raised(ValueError("bad"))).restore()
    second = pack_error(first).restore()
    assert type(second) is ValueError
    assert "in raised" in "".join(traceback.format_exception(second))
