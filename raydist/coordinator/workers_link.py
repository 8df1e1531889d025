"""How the driver's half of the mirrored variables reaches them where each worker pulls what it needs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, cast, final

from raydist.coordinator.coordinator import Coordinator
from raydist.mirroring.calls import MirrorCalls
from raydist.replicas.runner import ReplicaRunner

__all__ = ["WorkersLink"]

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

_NO_CHANGES = pickle.dumps(({}, {}))  # of attributes, and of `requires_grad`


@final
class WorkersLink:
    """A `ReplicaLink`: any worker has all variables, after a pull.

    Of several workers none can say what settings are: those are the driver's, and who steps a scheduler between two
    runs waits for nobody.

    Args:
        num_workers: How many there are.
        coordinator: Reaches them. Asked only when somebody calls.
        note_steps_elsewhere: Told where an optimizer may have stepped and nobody asks.
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
        """See `ReplicaLink`."""
        if method.__name__ == MirrorCalls.collect_control.__name__ and self._num_workers() > 1:
            self._note_steps_elsewhere()
            return cast("_T", _NO_CHANGES)
        found: _T = self._coordinator().read(ReplicaRunner.mirror.__name__, method, *args)
        return found

    def call_all(self, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> list[_T]:
        """See `ReplicaLink`."""
        if method is MirrorCalls.collect_metrics:  # each worker has counted what it has seen
            return self._coordinator().read_all(ReplicaRunner.mirror.__name__, method, *args)
        return [self.call(0, method, *args)]
