"""Rows on workers that are played here; what Ray's workers do is in test_pool.py and test_hostile_functions.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from raydist.actors.workers.crash_bisection import CrashBisection
from raydist.actors.workers.handle import FailedStarts
from raydist.core.errors import CancelledError, UnavailableError


class Stillborn:
    """A worker that dies before it runs."""

    name = "worker-7"
    killed = 0

    def await_start(self, cancelled: Any) -> None:
        if cancelled():
            raise CancelledError("The pool was closed.")
        raise RayActorError

    def kill(self) -> None:
        self.killed += 1


def crash_bisection(worker: Stillborn) -> CrashBisection:
    return CrashBisection(lambda: worker, lambda spec: (b"", b""), 1.0, FailedStarts())  # type: ignore[arg-type,return-value]  # played


TASK: Any = SimpleNamespace(spec=None, block=SimpleNamespace(num_rows=1), starts=(0,))


def test_workers_that_die_while_they_start_are_no_elements_fault() -> None:
    with pytest.raises(UnavailableError, match="worker-7 is gone while starting, as were the 19 before"):
        crash_bisection(Stillborn()).run(TASK, lambda: False)


def test_closing_gives_up_the_wait_and_the_worker() -> None:
    worker = Stillborn()
    with pytest.raises(CancelledError, match="closed"):
        crash_bisection(worker).run(TASK, lambda: True)
    assert worker.killed == 1
