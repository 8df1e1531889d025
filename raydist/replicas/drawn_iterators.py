"""What a run draws batches from itself: iterators among its arguments, told of their replica while it goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, final

from torch import nn

from raydist.actors.readers.replica_iterator import ReplicaIterator
from raydist.checkpoints.loops.orders import IteratorPlace
from raydist.checkpoints.loops.replica_loops import ReplicaLoops
from raydist.checkpoints.sharing.share_writer import ShareWriter
from raydist.checkpoints.sharing.shares import ShareTerms
from raydist.mirroring.on_replica.replica import MirrorReplica
from raydist.nest import flatten
from raydist.replicas.connected import Connected
from raydist.replicas.device_copies import DeviceCopies
from raydist.replicas.step import StepHeader

__all__ = ["DrawnIterators", "LoopSide"]


@final
class DrawnIterators:
    """Those of one replica.

    Args:
        mirror: Its objects.
        saves: Writes its shares.
        loops: Runs that draw; each of their draws is a boundary between steps.
        copies: Brings batches to its device.
        launch: Has the device do what was noted for later.
    """

    def __init__(
        self,
        mirror: MirrorReplica,
        saves: ShareWriter,
        loops: ReplicaLoops,
        copies: DeviceCopies,
        launch: Callable[[], None],
    ) -> None:
        self._mirror, self._saves, self._loops, self._copies, self._launch = mirror, saves, loops, copies, launch

    @contextlib.contextmanager
    def bound(self, arguments: Any, header: StepHeader, peers: Connected) -> Iterator[None]:
        """Within it iterators among the arguments draw this replica's pieces, and tell of how many rows each batch is.

        Args:
            arguments: A nest of what the step function is given.
            header: Of the step.
            peers: The other replicas, as long as the run goes on.
        """
        leaves, _ = flatten(arguments)
        iterators = [leaf for leaf in leaves if isinstance(leaf, ReplicaIterator)]
        with contextlib.ExitStack() as stack:
            if iterators and header.loop is not None:
                side = LoopSide(self._mirror, peers, self._saves, iterators, self._launch)
                peers.loop = stack.enter_context(self._loops.running(header.step, header.loop, side))
                stack.callback(setattr, peers, "loop", None)
            for iterator in iterators:
                stack.callback(iterator.release)
                self._bind(iterator, header, peers)
            yield

    def _bind(self, iterator: ReplicaIterator, header: StepHeader, peers: Connected) -> None:
        empty: Literal["stand_in", "zero_rows"] = "stand_in" if header.stand_in else "zero_rows"
        iterator.bind(
            peers.rank,
            begin=self._copies.begin,
            place=self._copies.finish,
            on_batch=lambda batch: peers.next_batch(batch.rows),
            empty_batch=empty,
            before_draw=self._loops.draw,
        )


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
