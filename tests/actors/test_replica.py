"""The shell around a runner, called in this process; on a cluster it is run by `tests/strategies/test_mirrored.py`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest

from raydist.actors.replica import ReplicaHost
from raydist.actors.supervision import RemoteFailure
from raydist.core.errors import RaydistError


@dataclass(frozen=True)
class Answer:
    results: tuple[Any, ...]
    error: BaseException | None = None


class Runner:
    """Answers what it was asked."""

    def __init__(self, name: str) -> None:
        self.name = name

    def steps(self, group: Any, objects: tuple[Any, ...]) -> Answer:
        if isinstance(group, BaseException):
            return Answer((self.name,), group)
        return Answer((self.name, group, objects))

    def ping(self, value: int) -> int:
        return value


def test_passes_calls_on_to_the_runner_of_a_place() -> None:
    host = ReplicaHost({})
    assert [host.start(place, Runner, name) for place, name in enumerate(("first", "second"))] == [os.getpid()] * 2
    assert host.steps(1, "group", "a", "b").results == ("second", "group", ("a", "b"))
    assert host.steps(0, "group").results == ("first", "group", ())
    assert host.call(1, "ping", 3) == 3
    assert host.control(0, "ping", 4) == 4


@pytest.mark.parametrize(
    ("error", "restored"), [(KeyError("mine"), KeyError), (KeyboardInterrupt("mine"), RaydistError)]
)
def test_errors_leave_as_values_whatever_their_class(error: BaseException, restored: type[Exception]) -> None:
    host = ReplicaHost()
    host.start(0, Runner, "first")
    with pytest.raises(RemoteFailure) as failure:
        host.steps(0, error)
    assert failure.value.before == Answer(("first",))
    arrived = failure.value.portable.restore()
    assert type(arrived) is restored
    assert "mine" in str(arrived)


def test_variables_are_set_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDIST_TEST_VARIABLE", "before")
    ReplicaHost({"RAYDIST_TEST_VARIABLE": "3"})
    assert os.environ["RAYDIST_TEST_VARIABLE"] == "3"
