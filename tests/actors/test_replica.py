"""The shell around a runner, called in this process; on a cluster it is run by `tests/strategies/test_mirrored.py`."""

from __future__ import annotations

import os
from typing import Any

import pytest

from raydist.actors.replica import ReplicaHost
from raydist.actors.supervision import RemoteFailure
from raydist.errors import RaydistError


class Runner:
    """Answers what it was asked."""

    def __init__(self, name: str) -> None:
        self.name = name

    def step(self, header: Any, objects: tuple[Any, ...]) -> Any:
        if isinstance(header, BaseException):
            raise header
        return self.name, header, objects

    def ping(self, value: int) -> int:
        return value


def test_passes_calls_on_to_its_runner() -> None:
    host = ReplicaHost()
    assert host.start(Runner, "first") == os.getpid()
    assert host.step("header", "a", "b") == ("first", "header", ("a", "b"))
    assert host.call("ping", 3) == 3
    assert host.control("ping", 4) == 4


@pytest.mark.parametrize(
    ("error", "restored"), [(KeyError("mine"), KeyError), (KeyboardInterrupt("mine"), RaydistError)]
)
def test_errors_leave_as_values_whatever_their_class(error: BaseException, restored: type[Exception]) -> None:
    host = ReplicaHost()
    host.start(Runner, "first")
    with pytest.raises(RemoteFailure) as failure:
        host.step(error)
    arrived = failure.value.portable.restore()
    assert type(arrived) is restored
    assert "mine" in str(arrived)
