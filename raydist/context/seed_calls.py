"""Count of the calls that seed torch in this process, at each of which replicas restart their random streams.

The state of the driver's generator cannot show a call with the same seed, because the driver draws no numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, final

import torch


@final
class _SeedCalls:
    """A counter of calls of `torch.manual_seed` and `torch.seed` in this process since the first `count`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._installed = False

    def count(self) -> int:
        with self._lock:
            if not self._installed:
                self._install()
                self._installed = True
            return self._count

    def _install(self) -> None:
        # Both functions call the generator of this module, however a program has imported them.
        module: Any = torch.random
        module.default_generator = _Counted(module.default_generator, self._count_one)

    def _count_one(self) -> None:
        with self._lock:
            self._count += 1


@final
class _Counted:
    """A wrapper of a generator that reports when it is seeded."""

    def __init__(self, generator: torch.Generator, tell: Callable[[], None]) -> None:
        self._generator = generator
        self._tell = tell

    def manual_seed(self, seed: int) -> torch.Generator:
        self._tell()
        return self._generator.manual_seed(seed)

    def seed(self) -> int:
        self._tell()
        return self._generator.seed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


# One per process, because torch has one CPU generator.
_CALLS = _SeedCalls()


def num_seed_calls() -> int:
    """Return the number of times that the program has seeded torch since the first call of this function.

    >>> before = num_seed_calls()
    >>> _ = torch.manual_seed(torch.initial_seed())
    >>> num_seed_calls() - before
    1
    """
    return _CALLS.count()
