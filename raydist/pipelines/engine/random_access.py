"""Reading any element by its index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from raydist.pipelines.elements.blocks import Block

__all__ = ["RandomAccess"]


class RandomAccess(ABC):
    """Reads any elements of an operation by their indices, without state. Picklable."""

    cheap: ClassVar[bool] = False
    """Whether an element costs no more to make than its index costs to move."""

    portable: ClassVar[bool] = False
    """Whether its pickle is small, so that workers may read the elements themselves."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(self, indices: Any) -> Block:
        """The elements at `indices` (int64 array), in that order."""

    def read(self, start: int, stop: int) -> Block:
        """The elements `start` .. `stop` - 1."""
        return self.gather(np.arange(start, stop))
