"""A prefetch that nobody asked for, and that an executor may switch on and off while a pipeline runs."""

from __future__ import annotations

from abc import ABC, abstractmethod

from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.prefetch_thread import PrefetchThread

__all__ = ["OptionalPrefetch"]


class OptionalPrefetch(ABC):
    """Decides whether a thread reads a pipeline ahead; the iterator that reads the pipeline asks before each block."""

    @property
    @abstractmethod
    def is_on(self) -> bool:
        """Whether a thread is to read ahead now."""

    @abstractmethod
    def look(self) -> None:
        """Now may be the time to decide. Whoever reads a block through the prefetch calls this before."""

    @abstractmethod
    def read_ahead(self, source: OpIterator, rows: int) -> PrefetchThread:
        """A thread for `source`, not yet started, that keeps `rows` elements ready, or more where that helps."""

    @abstractmethod
    def made(self, seconds: float) -> None:
        """A block was made in so many seconds, in whatever thread."""

    @abstractmethod
    def handed_out(self, rows: int, num_bytes: int) -> None:
        """The consumer has got a block."""
