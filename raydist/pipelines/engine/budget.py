"""Hard limits on threads and memory: a user of a resource takes a share of its budget first."""

from __future__ import annotations

import functools
import threading
from typing import final

from raydist.core.machine import free_memory, num_cores
from raydist.options import AutotuneOptions


@final
class Budget:
    """A limited amount of a resource. Users take a share before use and give it back. Safe for several threads."""

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._taken = 0.0

    @property
    def free(self) -> float:
        """Return the amount that is not taken."""
        return self.limit - self._taken

    def take(self, wanted: int) -> int:
        """Take at most `wanted`, as far as the budget allows, and return the amount taken."""
        with self._lock:
            granted = int(max(0, min(wanted, self.limit - self._taken)))
            self._taken += granted
            return granted

    def charge(self, amount: int) -> None:
        """Count an amount that is already in use, even beyond the limit. A negative amount gives it back."""
        with self._lock:
            self._taken += amount

    def give(self, amount: int = 1) -> None:
        """Give back an amount that was taken."""
        self.charge(-amount)


@final
class Budgets:
    """The budgets of one iteration.

    Attributes:
        threads: Threads for functions of all stages; no limit unless `cpu_budget` is set.
        tuned_threads: Threads that the autotuner may use: `cpu_budget`, or the number of cores of this process.
        ram_limit: Bytes that the buffer of a shuffle may take in the object store: `ram_budget`, or infinity.
    """

    def __init__(self, options: AutotuneOptions | None = None) -> None:
        options = options or AutotuneOptions()
        self.threads = Budget(options.cpu_budget or float("inf"))
        self.tuned_threads = options.cpu_budget or num_cores()
        self.ram_limit = options.ram_budget or float("inf")

    @functools.cached_property
    def ram(self) -> Budget:
        """Bytes for the buffers of all prefetches: `ram_budget`, or half of the memory that is free at first access."""
        free = free_memory()
        return Budget(free / 2 if free is not None and self.ram_limit == float("inf") else self.ram_limit)
