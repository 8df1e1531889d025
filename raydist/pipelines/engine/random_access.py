"""Random access to elements by index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from raydist.pipelines.elements.blocks import Block


class RandomAccess(ABC):
    """Stateless, picklable access to the elements of an operation by index."""

    cheap: ClassVar[bool] = False
    """True if making an element costs no more than moving its index."""

    portable: ClassVar[bool] = False
    """True if the pickle is small, so that workers may read the elements themselves."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(self, indices: Any) -> Block:
        """Return the elements at `indices` (int64 array), in that order."""

    def read(self, start: int, stop: int) -> Block:
        """Return the elements `start` .. `stop` - 1."""
        return self.gather(np.arange(start, stop))
