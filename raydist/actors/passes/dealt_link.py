"""A worker's way to a pass whose splits are dealt: to those that read, a pass of this worker's own."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from raydist.actors.passes.batch_queues import Position

if TYPE_CHECKING:
    from raydist.actors.passes.batch_queues import QueueEntry
    from raydist.actors.passes.dealt_splits import DealtSplit, Reader
    from raydist.actors.passes.link import PipelineLink
    from raydist.actors.passes.served_pass import Poll

__all__ = ["DealtLink"]


@final
class DealtLink:
    """What readers use of a `PipelineLink`; places are numbered as they come to this worker.

    Args:
        link: The pass.
        reader: Who this is.

    Attributes:
        used: How many batches the driver knows to be used for good.
    """

    def __init__(self, link: PipelineLink, reader: Reader) -> None:
        self._link = link
        self._reader = reader
        self._next = 0
        self.used = 0
        self.timeouts = link.timeouts
        self.on_host = link.on_host

    def ask(self, poll: Poll) -> Any:
        """See `PipelineLink.ask`."""
        return self._link.claim(self._reader, self.used)

    def receive(self, asked: Any) -> tuple[QueueEntry, ...]:
        """See `PipelineLink.receive`."""
        split: DealtSplit | None = self._link.receive_split(asked)
        if split is None:
            return ()
        entry = replace(split.entry, number=self._next - split.begin)
        if not entry.last:
            self._next = entry.end
        return (entry,)

    def is_answered(self, asked: Any, stop: Future[None]) -> bool:
        """See `PipelineLink.is_answered`."""
        return self._link.is_answered(asked, stop)

    def acknowledge(self, asked: Any, rank: int | None, done: int) -> None:
        """The driver tells what is done."""

    def call(self, method: str, *args: Any) -> Any:
        """The calls of a pass that belongs to its readers: where this one is, and that it stops."""
        return Position(self._next, {}) if method == "position_of" else None

    def fetch(self, ref: Any) -> Any:
        """See `PipelineLink.fetch`."""
        return self._link.fetch(ref)

    def leaves(self, piece: Any, place: int, num_leaves: int) -> list[Any]:
        """See `PipelineLink.leaves`."""
        return self._link.leaves(piece, place, num_leaves)

    def close(self) -> None:
        """The pass is the driver's."""
