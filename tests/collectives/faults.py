"""What the ranks of a test's group do where one of them is to fail: how long the others take to notice, and what."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Protocol

import pytest

from raydist.collectives.base import Communicator
from raydist.core.errors import RaydistError


class Begun(Protocol):
    """An operation under way; a `Work`, say."""

    def wait(self) -> object: ...


class Failing:
    """Seconds until an operation failed, and how."""

    def __init__(self, operation: Callable[[Communicator], Begun]) -> None:
        self.operation = operation

    def __call__(self, communicator: Communicator) -> tuple[float, RaydistError]:
        start = time.monotonic()
        with pytest.raises(RaydistError) as caught:
            self.begin(communicator).wait()
        return time.monotonic() - start, caught.value

    def begin(self, communicator: Communicator) -> Begun:
        return self.operation(communicator)


class AbortingSoon(Failing):
    """Give up from another thread, in the middle of the operation."""

    def begin(self, communicator: Communicator) -> Begun:
        begun = super().begin(communicator)
        self.timer = threading.Timer(0.1, communicator.abort)
        self.timer.start()
        return begun

    def __call__(self, communicator: Communicator) -> tuple[float, RaydistError]:
        outcome = super().__call__(communicator)
        self.timer.join()
        return outcome


def stop_myself(communicator: Communicator) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
