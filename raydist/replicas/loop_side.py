"""What a run that draws batches itself needs of its replica, so that it can save within it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch import nn

from raydist.actors.readers.replica_iterator import ReplicaIterator
from raydist.checkpoints.loops.orders import IteratorPlace
from raydist.checkpoints.sharing.share_writer import ShareWriter
from raydist.checkpoints.sharing.shares import ShareTerms
from raydist.mirroring.on_replica.replica import MirrorReplica
from raydist.replicas.connected import Connected

__all__ = ["LoopSide"]


@final
class LoopSide:
    """A `ReplicaSide`.

    Args:
        mirror: The replica's objects.
        peers: The others.
        writer: Of its shares.
        iterators: Those that the run draws from.
        launch: Has the device do what was noted for later.
    """

    def __init__(
        self,
        mirror: MirrorReplica,
        peers: Connected,
        writer: ShareWriter,
        iterators: Sequence[ReplicaIterator],
        launch: Callable[[], None],
    ) -> None:
        self._mirror, self._peers, self._writer, self._iterators = mirror, peers, writer, tuple(iterators)
        self._launch = launch

    def object_of(self, handle: int) -> Any:
        return self._mirror.object_of(handle)

    def settle(self) -> None:
        self._peers.settle_batch()
        self._mirror.settle()
        self._launch()

    def leave(self) -> None:
        self._peers.leave_run()
        self._mirror.settle()
        self._launch()

    def agree(self, number: float) -> float:
        return self._peers.largest(number)

    def copy(self, token: str, terms: ShareTerms, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        self._writer.copy(token, terms, objects, modules)

    def places(self) -> tuple[IteratorPlace, ...]:
        return tuple(IteratorPlace(each.state_dict(), each.has_ended) for each in self._iterators)
