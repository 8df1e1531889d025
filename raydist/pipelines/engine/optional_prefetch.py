"""The interface of an automatic prefetch, which an executor switches on and off while a pipeline runs."""

from __future__ import annotations

from abc import ABC, abstractmethod

from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.prefetch_thread import PrefetchThread

__all__ = ["OptionalPrefetch"]


class OptionalPrefetch(ABC):
    """A policy that decides if a thread prefetches a pipeline. The iterator asks it before each block."""

    @property
    @abstractmethod
    def is_on(self) -> bool:
        """Return True if a thread is to prefetch now."""

    @abstractmethod
    def look(self) -> None:
        """Decide again if it is time. The reader calls this before each block."""

    @abstractmethod
    def read_ahead(self, source: OpIterator, rows: int) -> PrefetchThread:
        """Return a thread for `source`, not yet started, that keeps `rows` elements ready, or more where that helps."""

    @abstractmethod
    def made(self, seconds: float) -> None:
        """Note that a block was made in `seconds`, in any thread."""

    @abstractmethod
    def handed_out(self, rows: int, num_bytes: int) -> None:
        """Note that the consumer received a block."""
