"""A worker's link to a pass with dynamic sharding; to a reader it looks like a pass of this worker alone."""

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
    """The part of `PipelineLink` that readers use; places are numbered in the order in which this worker gets them.

    Args:
        link: Link to the pass.
        reader: This worker.

    Attributes:
        used: Number of batches that need not be repeated if this worker dies.
    """

    def __init__(self, link: PipelineLink, reader: Reader) -> None:
        self._link = link
        self._reader = reader
        self._next = 0
        self.used = 0
        self.timeouts = link.timeouts
        self.on_host = link.on_host

    def ask(self, poll: Poll) -> Any:
        """Claim the next split, without waiting; see `PipelineLink.ask`."""
        return self._link.claim(self._reader, self.used)

    def receive(self, asked: Any) -> tuple[QueueEntry, ...]:
        """Return the claimed split as an entry; see `PipelineLink.receive`."""
        split: DealtSplit | None = self._link.receive_split(asked)
        if split is None:
            return ()
        entry = replace(split.entry, number=self._next - split.begin)
        if not entry.last:
            self._next = entry.end
        return (entry,)

    def is_answered(self, asked: Any, stop: Future[None] | None = None, timeout_s: float | None = None) -> bool:
        """Wait for the answer; see `PipelineLink.is_answered`."""
        return self._link.is_answered(asked, stop, timeout_s)

    def acknowledge(self, asked: Any, rank: int | None, done: int) -> None:
        """Do nothing: the driver reports the used batches."""

    def call(self, method: str, *args: Any) -> Any:
        """Return this worker's position for "position_of"; do nothing for other calls."""
        return Position(self._next, {}) if method == "position_of" else None

    def fetch(self, ref: Any) -> Any:
        """Fetch the pieces of a group; see `PipelineLink.fetch`."""
        return self._link.fetch(ref)

    def leaves(self, piece: Any, place: int, num_leaves: int) -> list[Any]:
        """Return the leaves of a piece; see `PipelineLink.leaves`."""
        return self._link.leaves(piece, place, num_leaves)

    def close(self) -> None:
        """Do nothing: the driver closes the pass."""
