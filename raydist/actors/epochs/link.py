"""The link from the driver and the replicas to an InputPipeline actor: every call has a limit, every error a name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import ray
from ray.exceptions import GetTimeoutError, OwnerDiedError, RayActorError, RayError, RayTaskError

from raydist.actors.epochs.piece import GroupPiece, Ref
from raydist.actors.epochs.served_epoch import Poll, Position
from raydist.actors.supervision import first_line
from raydist.cluster.ray_session import RaySession
from raydist.core.errors import DeadlineExceededError, UnavailableError
from raydist.core.fork_guard import OwningProcess

if TYPE_CHECKING:
    from raydist.actors.epochs.dynamic_sharding import InputSplit, Reader
    from raydist.actors.epochs.job import InputJob, MergedJob
    from raydist.actors.epochs.served_epoch import QueueEntry
    from raydist.options import Timeouts


@final
class PipelineLink:
    """A reader's link to one epoch on an InputPipeline actor. Picklable.

    Args:
        actor: Handle of the actor.
        name: Name of the actor, for messages.
        key: Key of the epoch.
        timeouts: Limits.
        on_host: Leave batches in the host's memory instead of moving them to the replica's device.

    Attributes:
        job: The job of the epoch; only on the driver that opened it.
    """

    def __init__(self, actor: Any, name: str, key: str, timeouts: Timeouts, *, on_host: bool = False) -> None:
        self._actor = actor
        self.name = name
        self.key = key
        self.timeouts = timeouts
        self.on_host = on_host
        self.job: InputJob | MergedJob | None = None
        self._process = OwningProcess("A distributed dataset with its batches")
        self._session = RaySession()

    @property
    def _is_reachable(self) -> bool:
        return self._session.is_open and self._process.is_this

    def _require_reachable(self) -> None:
        self._process.require("read")
        self._session.require(f"The input pipeline {self.name}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _link_again, (self._actor, self.name, self.key, self.timeouts, self.on_host)

    def keyed(self, key: str) -> PipelineLink:
        """Return a link to another epoch of the same actor, which may be opened later."""
        return PipelineLink(self._actor, self.name, key, self.timeouts, on_host=self.on_host)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the actor for this epoch. Blocks for at most `Timeouts.start_s`."""
        self._require_reachable()
        return self._answer(getattr(self._actor, method).remote(self.key, *args), self.timeouts.start_s, method)

    def ask(self, poll: Poll) -> Any:
        """Send a poll without waiting; :meth:`receive` returns the answer."""
        self._require_reachable()
        return self._actor.poll.remote(self.key, poll).future()

    def claim(self, reader: Reader, used: int) -> Any:
        """Ask for the next split of an epoch with dynamic sharding, without waiting; see `receive_split`."""
        self._require_reachable()
        return self._actor.claim.remote(self.key, reader, used).future()

    def receive_split(self, asked: Any) -> InputSplit | None:
        """Return the answer to a claim: None if there is no split yet."""
        split: InputSplit | None = self._guard(lambda: asked.result(self._answer_s), "claim")
        return split

    def give_back_splits(self, reader: Reader, used: int) -> None:
        """Return the splits of a dead reader, without its first `used` batches, to the epoch. Does not block."""
        if self._is_reachable:
            self._actor.give_back_splits.remote(self.key, reader, used)

    def acknowledge(self, asked: Any, rank: int | None, done: int) -> None:
        """Acknowledge places of replica `rank` while a poll is pending; else do nothing. Does not block."""
        if not asked.done():
            self._actor.acknowledge.remote(self.key, rank, done)

    def is_answered(self, asked: Any, stop: Future[None] | None = None, timeout_s: float | None = None) -> bool:
        """Block until :meth:`receive` returns or raises at once; return False if `stop` or `timeout_s` comes first."""
        futures = [asked] if stop is None else [asked, stop]
        wait(futures, timeout=self._answer_s if timeout_s is None else timeout_s, return_when=FIRST_COMPLETED)
        if timeout_s is None and (stop is None or not stop.done()):
            return True  # an answer that is late is an error of `receive`
        return bool(asked.done())

    def receive(self, asked: Any) -> tuple[QueueEntry, ...]:
        """Return the answer to a poll: empty if there is no entry yet."""
        entries: tuple[QueueEntry, ...] = self._guard(lambda: asked.result(self._answer_s), "poll")
        return entries

    @property
    def _answer_s(self) -> float:
        # The poll waits up to poll_s in the actor; `start_s` more means that the actor does not answer at all.
        return self.timeouts.poll_s + self.timeouts.start_s

    def fetch(self, ref: Ref) -> GroupPiece:
        """Return the pieces of a group, mapped from the object store; small pieces are in `ref` itself."""
        self._process.require("read")
        if isinstance(ref, GroupPiece):
            return ref
        piece: GroupPiece = self._guard(lambda: ray.get(ref, timeout=self.timeouts.input_s), "fetching a piece")
        return piece

    def is_lost(self) -> bool:
        """Return True if the actor is gone. Blocks until it answers, for at most `Timeouts.start_s`."""
        try:
            self.call("is_open")
        except (DeadlineExceededError, UnavailableError) as error:
            return isinstance(error.__cause__, RayActorError)
        return False

    def reclaim(self) -> Position:
        position: Position = self.call("reclaim")
        return position

    def close(self) -> None:
        """End the epoch. Does not block."""
        if self._is_reachable:
            self._actor.close.remote(self.key, self.timeouts.close_s)

    def abandon(self) -> None:
        """End the epoch once no replica reads it any more. Does not block. For finalizers."""
        # A finalizer may run during Ray's shutdown or in a later Ray session: then the actor is gone as well.
        if not self._is_reachable:
            return
        with contextlib.suppress(Exception):
            self._actor.abandon.remote(self.key, self.timeouts.close_s)

    def _answer(self, ref: Any, limit_s: float, doing: str) -> Any:
        return self._guard(lambda: ray.get(ref, timeout=limit_s), doing)

    def _guard(self, wait: Callable[[], Any], doing: str) -> Any:
        self._require_reachable()
        try:
            return wait()
        except (GetTimeoutError, TimeoutError):
            raise DeadlineExceededError(
                f"The input pipeline {self.name} did not answer ({doing}) within its limit. Its process may be "
                "stopped or its machine overloaded; if it is only slow, raise Timeouts.start_s and Timeouts.input_s."
            ) from None
        except RayTaskError as error:
            raise _cause_of(error) from None
        except (RayActorError, OwnerDiedError) as error:
            raise UnavailableError(
                f"The input pipeline {self.name} is gone, and with it the batches it had made: {first_line(error)} "
                "Iterate again, or load the last saved state into a new iterator."
            ) from error
        except RayError as error:
            raise UnavailableError(
                f"The input pipeline {self.name} failed ({doing}): {first_line(error)} Iterate again, or load the last "
                "saved state into a new iterator."
            ) from error


def _link_again(actor: Any, name: str, key: str, timeouts: Timeouts, on_host: bool) -> PipelineLink:
    return PipelineLink(actor, name, key, timeouts, on_host=on_host)


def _cause_of(error: RayTaskError) -> Exception:
    cause = error.cause
    return cause if isinstance(cause, Exception) and not isinstance(cause, RayError) else error


@final
class DynamicShardingLink:
    """The part of `PipelineLink` that readers use; places are numbered in the order in which this worker gets them.

    Args:
        link: Link to the epoch.
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
        split: InputSplit | None = self._link.receive_split(asked)
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

    def close(self) -> None:
        """Do nothing: the driver closes the epoch."""
