"""Random choices as pure functions of (seed, operation, epoch, index).

Every random choice of a pipeline comes from a counter-based generator (Philox 4x64: Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011). The key names the seed, the operation and the epoch; the counter is the index of
the element. So threads, processes and restarts draw the same numbers, whatever their timing.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np

_DRAWS_PER_COUNTER = 4  # Philox 4x64 makes four 64-bit words from one counter value
_WORD = (1 << 64) - 1  # two elements are 2^128 counter values apart: an element may draw any number of words


def draw_seed() -> int:
    """Return a fresh seed (63 bits, from the operating system) for an iteration without a seed."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def trim_epoch(epoch: tuple[int, ...]) -> tuple[int, ...]:
    """Drop leading zeros, so that pass k of a first `repeat` is epoch k of the dataset inside it.

    >>> trim_epoch((0, 3)), trim_epoch((1, 0)), trim_epoch((0, 0))
    ((3,), (1, 0), ())
    """
    start = 0
    while start < len(epoch) and epoch[start] == 0:
        start += 1
    return epoch[start:]


@final
@dataclass(frozen=True, slots=True)
class RandomKey:
    """The key of one stream of random numbers.

    Attributes:
        seed: The user's seed, or the seed drawn when the iteration started.
        operation: Stable name of the operation in the pipeline as written.
        epoch: Epoch of the dataset object, then one pass number per enclosing `repeat`.
    """

    seed: int
    operation: str
    epoch: tuple[int, ...] = ()

    def _philox_key(self) -> np.ndarray:
        text = f"{self.seed}/{self.operation}/{','.join(map(str, trim_epoch(self.epoch)))}"
        return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), dtype=np.uint64)

    def generator(self, index: int) -> np.random.Generator:
        """Return the generator of element `index`, independent of the generators of all other elements.

        >>> key = RandomKey(seed=1, operation="map-2")
        >>> float(key.generator(5).random()) == float(key.generator(5).random())
        True
        """
        return next(self.generators(index))

    def generators(self, start: int) -> Iterator[np.random.Generator]:
        """Yield the generators of elements `start`, `start + 1`, ...

        All elements share one object, which is reset for each (2.5 us instead of 47 for a new one), unless the caller
        keeps a reference: a kept generator stays the generator of its element.
        """
        key = self._philox_key()
        bits = np.random.Philox(key=key)
        counter = np.zeros(_DRAWS_PER_COUNTER, np.uint64)
        state = bits.state | {"state": {"counter": counter, "key": key}}
        for index in itertools.count(start):
            counter[2:] = index & _WORD, index >> 64  # the counter is index * 2^128
            bits.state = state
            generator = _LentGenerator(bits)
            reference, kept = weakref.ref(generator), generator.kept
            yield generator
            del generator
            if kept or reference() is not None:
                bits = np.random.Philox(key=key)

    def permutation(self, count: int) -> np.ndarray:
        """Return the numbers 0 .. `count` - 1 in random order; draws none of the first 2^128 :meth:`words`."""
        return self.generator(1).permutation(count)

    def words(self, start: int, count: int) -> np.ndarray:
        """Return words `start` .. `start + count` - 1 of this stream of uint64, in any order of calls.

        >>> key = RandomKey(seed=1, operation="shuffle-1")
        >>> bool((key.words(0, 10)[4:] == key.words(4, 6)).all())
        True
        """
        skipped = start % _DRAWS_PER_COUNTER
        bits = np.random.Philox(key=self._philox_key(), counter=start // _DRAWS_PER_COUNTER)
        return np.asarray(bits.random_raw(count + skipped), dtype=np.uint64)[skipped:]

    def integers(self, start: int, count: int, bound: int) -> np.ndarray:
        """Return `count` int64 in [0, bound), from position `start` of this stream on.

        Each is a 64-bit word modulo `bound`: the bias is below bound / 2^64.
        """
        words = self.words(start, count)
        return (words % np.uint64(bound)).astype(np.int64)


class _LentGenerator(np.random.Generator):
    """The generator of one element, whose bit generator also serves the next element unless it was accessed."""

    def __init__(self, bits: np.random.BitGenerator) -> None:
        super().__init__(bits)
        self.kept: list[None] = []

    @property
    def bit_generator(self) -> np.random.BitGenerator:
        self.kept.append(None)
        return super().bit_generator
