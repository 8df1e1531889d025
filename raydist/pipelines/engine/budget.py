"""Hard budgets: what is not granted is not used."""

from __future__ import annotations

import functools
import threading
from typing import final

from raydist.options import AutotuneOptions
from raydist.pipelines.engine.machine import free_memory, num_cores

__all__ = ["Budget", "Budgets"]


@final
class Budget:
    """So many of something; whoever uses some takes it first and gives it back. May be used by several threads.

    Args:
        limit: All there is.
    """

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._taken = 0.0

    @property
    def free(self) -> float:
        """What nobody has taken."""
        return self.limit - self._taken

    def take(self, wanted: int) -> int:
        """As much of `wanted` as there is."""
        with self._lock:
            granted = int(max(0, min(wanted, self.limit - self._taken)))
            self._taken += granted
            return granted

    def charge(self, amount: int) -> None:
        """Count what is there already, even where it is more than was free; negative to give it back."""
        with self._lock:
            self._taken += amount

    def give(self, amount: int = 1) -> None:
        """Give back what was taken."""
        self.charge(-amount)


@final
class Budgets:
    """What one iteration may use.

    Attributes:
        threads: Threads for functions, whoever chose their number; no limit unless `cpu_budget` is set.
        tuned_threads: The number that the autotuner may use: `cpu_budget`, or the cores of this process.
    """

    def __init__(self, options: AutotuneOptions | None = None) -> None:
        options = options or AutotuneOptions()
        self.threads = Budget(options.cpu_budget or float("inf"))
        self.tuned_threads = options.cpu_budget or num_cores()
        self._ram_budget = options.ram_budget

    @functools.cached_property
    def ram(self) -> Budget:
        """Bytes in the buffers of all prefetches: `ram_budget`, or half of the memory that is free when it is asked."""
        free = free_memory()
        return Budget(self._ram_budget or (float("inf") if free is None else free / 2))
