"""Count of the calls that seed torch in this process, at each of which replicas restart their random streams.

The state of the driver's generator cannot show a call with the same seed, because the driver draws no numbers.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, final

import torch


@final
class _CountedGenerator:
    """A generator that counts the calls that seed it."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._lock = threading.Lock()
        self.num_calls = 0

    def manual_seed(self, seed: int) -> torch.Generator:
        self._count()
        return self._generator.manual_seed(seed)

    def seed(self) -> int:
        self._count()
        return self._generator.seed()

    def _count(self) -> None:
        with self._lock:
            self.num_calls += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


@functools.cache
def _counted_generator() -> _CountedGenerator:
    # `torch.manual_seed` and `torch.seed` call the generator of this module, however a program has imported them.
    module: Any = torch.random
    module.default_generator = _CountedGenerator(module.default_generator)
    found: _CountedGenerator = module.default_generator
    return found


def num_seed_calls() -> int:
    """Return the number of times that the program has seeded torch since the first call of this function.

    >>> before = num_seed_calls()
    >>> _ = torch.manual_seed(torch.initial_seed())
    >>> num_seed_calls() - before
    1
    """
    return _counted_generator().num_calls
