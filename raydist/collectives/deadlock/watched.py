"""A communicator that notes what its rank waits for, and says why where the group was ended for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, final

import torch

from raydist.collectives.base import Communicator, Work
from raydist.collectives.deadlock.status import Progress
from raydist.collectives.delegating import DelegatingCommunicator
from raydist.errors import CancelledError, CollectiveMismatchError

__all__ = ["WatchedCommunicator"]

_T = TypeVar("_T")
_Verdict = Callable[[], CollectiveMismatchError | None]


@final
class WatchedCommunicator(DelegatingCommunicator):
    """Another communicator whose waits a `DeadlockDetector` can see. Messages between two ranks are not watched.

    Args:
        inner: Does the work; it belongs to this object from now on.
        name: The group's name for messages, unlike that of the rank's other groups.
        progress: Where it is noted.
        verdict: Why the group was ended, where a detector has ended it.
    """

    def __init__(self, inner: Communicator, name: str, progress: Progress, verdict: _Verdict) -> None:
        super().__init__(inner, inner.device)
        self._name = name
        self._progress = progress
        self._verdict = verdict
        self._about = ""

    def announce(self, what: str) -> None:
        self._about = what
        self._inner.announce(what)

    def exchange_on_host(self, data: bytes, what: str) -> list[bytes]:
        number = self._progress.call(self._name)
        return self.watch(lambda: self._inner.exchange_on_host(data, what), number, what, None)

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        number = self._progress.call(self._name)
        return self.watch(lambda: self._inner.allocate(sizes), number, f"allocate({len(sizes)} tensors)", None)

    def around(self, what: str, tensor: torch.Tensor | None, start: Callable[[], Work]) -> Work:
        number = self._progress.call(self._name)
        about, self._about = self._about, ""
        return _WatchedWork(self, number, about or what, None if about else tensor, start())

    def barrier(self) -> None:
        self.watch(self._inner.barrier, self._progress.call(self._name), "barrier", None)

    def watch(self, wait: Callable[[], _T], number: int, name: str, tensor: torch.Tensor | None) -> _T:
        """Call `wait`, in which the rank waits for its collective `number`."""
        self._progress.wait(self._name, number, name, tensor)
        try:
            return wait()
        except CancelledError as error:
            verdict = self._verdict()
            if verdict is None:
                raise
            raise verdict from error
        finally:
            self._progress.go_on()


@final
class _WatchedWork(Work):
    """A collective under way."""

    def __init__(
        self, communicator: WatchedCommunicator, number: int, name: str, tensor: torch.Tensor | None, work: Work
    ) -> None:
        self._communicator = communicator
        self._number = number
        self._name = name
        self._tensor = tensor
        self._work = work

    def wait(self, timeout_s: float | None = None) -> None:
        wait = self._work.wait if timeout_s is None else partial(self._work.wait, timeout_s)
        self._communicator.watch(wait, self._number, self._name, self._tensor)
