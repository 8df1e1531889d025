"""The `ReplicaLink` of mirrored variables under parameter servers, where each worker pulls the values that it needs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, cast, final

from raydist.coordinator.coordinator import Coordinator
from raydist.mirroring.messages import MirrorCalls
from raydist.replicas.runner import ReplicaRunner

__all__ = ["WorkersLink"]

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

_NO_CHANGES = pickle.dumps(({}, {}))  # of attributes, and of `requires_grad`


@final
class WorkersLink:
    """A `ReplicaLink`: any worker has all variables, after a pull.

    No single one of several workers can report the settings: settings belong to the driver, and stepping a scheduler
    between two runs does not block.

    Args:
        num_workers: Returns the number of workers.
        coordinator: Returns the coordinator. Called only by the methods below.
        note_steps_elsewhere: Called when an optimizer may have stepped and no worker is asked.
    """

    def __init__(
        self,
        num_workers: Callable[[], int],
        coordinator: Callable[[], Coordinator],
        note_steps_elsewhere: Callable[[], None],
    ) -> None:
        self._num_workers = num_workers
        self._coordinator = coordinator
        self._note_steps_elsewhere = note_steps_elsewhere

    def call(self, rank: int, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> _T:
        """Implement `ReplicaLink.call`."""
        if method.__name__ == MirrorCalls.collect_control.__name__ and self._num_workers() > 1:
            self._note_steps_elsewhere()
            return cast("_T", _NO_CHANGES)
        found: _T = self._coordinator().read(ReplicaRunner.mirror.__name__, method, *args)
        return found

    def call_all(self, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> list[_T]:
        """Implement `ReplicaLink.call_all`."""
        if method is MirrorCalls.collect_metrics:  # each worker has counted its own batches
            return self._coordinator().read_all(ReplicaRunner.mirror.__name__, method, *args)
        return [self.call(0, method, *args)]
