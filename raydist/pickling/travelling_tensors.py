"""Tensors that a step returned, as they travel: without graph and device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from raydist.host_copy import begin_host_copy
from raydist.pickling.by_fields import by_fields
from raydist.pipelines.elements.small_floats import array_of_tensor, tensor_of_array

__all__ = ["ArrivingTensor", "Travelling", "TravellingNumber", "TravellingTensor", "begin_packing", "pack_tensor"]

# Whose values Python's numbers hold exactly, and give back.
_EXACT = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    }
)


@final
@dataclass(frozen=True, slots=True)
class TravellingTensor:
    """A tensor as a numpy array, whose bytes the object store maps instead of copying."""

    array: np.ndarray[Any, np.dtype[Any]]

    __reduce__ = by_fields

    @property
    def plain(self) -> Any:
        """What of it travels, without the classes of this package."""
        return self.array

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def unpack(self) -> torch.Tensor:
        # The mapping is read-only and shared; the user's tensor is neither.
        tensor: torch.Tensor = tensor_of_array(self.array.copy(), torch.from_numpy)
        return tensor


@final
@dataclass(slots=True)  # not frozen, though nobody changes one: that takes twice as long to be read, in every step
class TravellingNumber:
    """A tensor of one number and no dimension, a loss most often: an array costs pickle ten times as much.

    Attributes:
        value: The number.
        dtype: The tensor's.
    """

    value: float
    dtype: torch.dtype

    __reduce__ = by_fields

    @property
    def plain(self) -> Any:
        """What of it travels, without the classes of this package."""
        return self.value

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize

    def unpack(self) -> torch.Tensor:
        return torch.tensor(self.value, dtype=self.dtype)


Travelling = TravellingTensor | TravellingNumber


@final
class ArrivingTensor:
    """A tensor of a GPU that is on its way to the host.

    Args:
        read: Waits for it.
    """

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read

    def arrived(self) -> Travelling | torch.Tensor:
        """Return the tensor, fit to travel. Waits for the device."""
        return pack_tensor(self._read())


def begin_packing(tensor: torch.Tensor) -> Travelling | torch.Tensor | ArrivingTensor:
    """Return a tensor fit to travel, as `pack_tensor` does; one of a GPU as a tensor that arrives later."""
    if tensor.is_cuda and tensor.layout is torch.strided:
        return ArrivingTensor(begin_host_copy(tensor))
    return pack_tensor(tensor)


def pack_tensor(tensor: torch.Tensor) -> Travelling | torch.Tensor:
    """A tensor fit to travel, detached and on the CPU (waits for a GPU); a copy where numpy has no word for it.

    >>> pack_tensor(torch.tensor(0.5, requires_grad=True)).unpack()
    tensor(0.5000)
    """
    if tensor.dim() == 0 and tensor.dtype in _EXACT and tensor.layout is torch.strided:
        return TravellingNumber(tensor.item(), tensor.dtype)
    plain = tensor.detach().cpu()
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    try:
        return TravellingTensor(array_of_tensor(plain).copy())
    except (TypeError, RuntimeError):  # sparse, quantised, ...
        return plain.clone()
