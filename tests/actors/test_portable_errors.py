"""Errors of any class keep type, message, notes and traceback between processes. And classes of the user's script."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
import threading
import traceback
from dataclasses import replace
from typing import Any

import pytest
from ray import cloudpickle as rays_copy

from raydist.actors.class_tracking import cloudpickle, share_classes
from raydist.actors.portable_errors import PortableError, pack_error
from raydist.core.errors import RaydistError
from raydist.core.exception_utils import what_was_raised
from tests.odd_errors import Departure, Mute


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


class Slotted(Exception):
    """Keeps its message where pickling does not look."""

    __slots__ = ("what",)

    def __init__(self, code: int) -> None:
        self.what = "unknown"

    def __str__(self) -> str:
        return self.what


class Hostile(Exception):
    """Raises from whatever pickling asks of it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("not to be pickled")

    def __getstate__(self) -> Any:
        raise RuntimeError("nor to be looked at")


def test_the_type_arrives_whatever_its_constructor_and_fields() -> None:
    for error, message in [(Odd(3, "odd"), r"^odd \(3\)"), (Holding(), "^holding a lock"), (Hostile("h", 3), "'h', 3")]:
        packed = pack_error(raised(error), "In worker 3.")
        assert isinstance(packed, PortableError)
        with pytest.raises(type(error), match=message) as caught:
            raise pickle.loads(pickle.dumps(packed)).restore()
        assert caught.value.__notes__ == ["In worker 3."]
        assert "in raised" in "".join(traceback.format_exception(caught.value))
    found = pack_error(raised(Holding())).restore()
    assert "unlocked _thread.lock" in found.lock, "a field that cannot travel is shown"  # type: ignore[attr-defined]


def test_messages_and_notes_that_cannot_travel_are_told_otherwise() -> None:
    error = Slotted(3)
    error.what = "lost on the way"
    found = pack_error(raised(error)).restore()
    assert type(found) is Slotted
    assert found.__notes__ == ["Its message was: lost on the way"]
    packed = pack_error(raised(Mute(7, 8)), "In worker 3.")
    assert "Mute: <its __str__ raised RuntimeError; its arguments: (7,)>" in packed.title
    found = packed.restore()
    assert (type(found), found.args, found.__notes__) == (Mute, (7,), ["odd", "In worker 3."])
    odd_notes: list[tuple[Any, list[str]]] = [(None, []), ("odd", ["odd"]), (("odd",), ["odd"]), (3, ["3"])]
    for notes, expected in odd_notes:
        noted = ValueError("bad")
        noted.__notes__ = notes
        assert pack_error(raised(noted), "In worker 3.").restore().__notes__ == [*expected, "In worker 3."]


def test_a_class_that_does_not_arrive_still_shows_itself() -> None:
    packed = replace(pack_error(raised(Odd(3, "odd")), "In worker 3."), pickled=b"no pickle")
    with pytest.raises(RaydistError, match=r"Odd: odd \(3\)") as caught:
        raise packed.restore()
    assert caught.value.__notes__ == ["In worker 3."]
    assert "in raised" in "".join(traceback.format_exception(caught.value))


def test_an_error_that_is_no_exception_does_not_end_the_receiver_and_is_there_for_who_asks() -> None:
    assert isinstance(pack_error(raised(SystemExit(3))).restore(), RaydistError)
    found = pack_error(raised(Departure("left")), "In worker 3.").restore()
    original = what_was_raised(found)
    assert (type(original), original.args, original.__notes__) == (Departure, ("left",), ["In worker 3."])
    assert type(what_was_raised(pack_error(found).restore())) is Departure


# --- classes of the user's script -------------------------------------------------------------------------------------

_COPIES: tuple[Any, ...] = (cloudpickle, rays_copy)

# What came by one copy before the two were made one, goes by the other afterwards.
_LATE = """
import pickle, sys
import cloudpickle
from ray import cloudpickle as rays_copy

data = bytes.fromhex(sys.argv[1])
one = pickle.loads(data)
from raydist.actors.class_tracking import share_classes
for copy in (cloudpickle, rays_copy):
    assert type(pickle.loads(copy.dumps(one))) is type(one), copy
    print(copy.dumps(one).hex())
"""


def made_here() -> Any:
    """An object whose class no other process can import."""
    return type("Cls", (), {"__module__": "__main__"})()


def test_a_class_that_comes_by_one_and_leaves_by_the_other_stays_the_same() -> None:
    share_classes()
    for goes in _COPIES:
        one = made_here()
        command = [sys.executable, "-c", _LATE, goes.dumps(one).hex()]
        there = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        for line, comes in itertools.product(there.stdout.split(), _COPIES):
            assert type(comes.loads(bytes.fromhex(line))) is type(one)
