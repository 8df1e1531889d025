"""The packed form of tensors that a step returned, without graph and device, and fast pickling of small dataclasses."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from raydist.host_copy import begin_host_copy
from raydist.pipelines.elements.small_floats import array_of_tensor, tensor_of_array

__all__ = [
    "PendingTensor",
    "Packed",
    "PackedNumber",
    "PackedTensor",
    "begin_packing",
    "by_fields",
    "pack_tensor",
]


def by_fields(self: Any) -> tuple[type, tuple[Any, ...]]:
    """Reduce a dataclass with slots and no base to one call of its class; the default loops over fields in Python.
    >>> import pickle
    >>> from dataclasses import dataclass
    >>> from raydist.replicas.step import PartSource
    >>> pickle.loads(pickle.dumps(PartSource(3, place=1)))
    PartSource(object_index=3, leaf_index=0, value=None, place=1, on_host=False, nest='')
    """
    cls: Any = type(self)
    return cls, _reader(cls)(self)


@functools.cache
def _reader(cls: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads all fields at once, in C."""
    names: tuple[str, ...] = cls.__slots__
    if len(names) == 1:
        return lambda value: (getattr(value, names[0]),)
    return operator.attrgetter(*names)


# The dtypes whose values Python numbers represent exactly.
_EXACT = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    }
)


@final
@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor as a numpy array, which the object store maps without a copy."""

    array: np.ndarray[Any, np.dtype[Any]]

    __reduce__ = by_fields

    @property
    def plain(self) -> Any:
        """The contents as a builtin or numpy object, without the classes of this package."""
        return self.array

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def unpack(self) -> torch.Tensor:
        # The mapping is read-only and shared; the user's tensor must be neither.
        tensor: torch.Tensor = tensor_of_array(self.array.copy(), torch.from_numpy)
        return tensor


@final
@dataclass(slots=True)  # immutable, but not frozen: unpickling a frozen one takes twice as long, in every step
class PackedNumber:
    """A zero-dimensional tensor, most often a loss: pickling an array takes ten times as long.

    Attributes:
        value: The number.
        dtype: dtype of the tensor.
    """

    value: float
    dtype: torch.dtype

    __reduce__ = by_fields

    @property
    def plain(self) -> Any:
        """The contents as a builtin or numpy object, without the classes of this package."""
        return self.value

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize

    def unpack(self) -> torch.Tensor:
        return torch.tensor(self.value, dtype=self.dtype)


Packed = PackedTensor | PackedNumber


@final
class PendingTensor:
    """A GPU tensor whose copy to the host is under way.

    Args:
        read: Waits for the copy and returns the tensor.
    """

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read

    def arrived(self) -> Packed | torch.Tensor:
        """Return the packed tensor. Waits for the device."""
        return pack_tensor(self._read())


def begin_packing(tensor: torch.Tensor) -> Packed | torch.Tensor | PendingTensor:
    """Pack a tensor as `pack_tensor` does; for a GPU tensor, start the copy to the host and return without waiting."""
    if tensor.is_cuda and tensor.layout is torch.strided:
        return PendingTensor(begin_host_copy(tensor))
    return pack_tensor(tensor)


def pack_tensor(tensor: torch.Tensor) -> Packed | torch.Tensor:
    """Pack a tensor, detached and on the CPU (waits for a GPU); return a plain copy if numpy lacks its layout.

    >>> pack_tensor(torch.tensor(0.5, requires_grad=True)).unpack()
    tensor(0.5000)
    """
    if tensor.dim() == 0 and tensor.dtype in _EXACT and tensor.layout is torch.strided:
        return PackedNumber(tensor.item(), tensor.dtype)
    plain = tensor.detach().cpu()
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    try:
        return PackedTensor(array_of_tensor(plain).copy())
    except (TypeError, RuntimeError):  # sparse, quantised, ...
        return plain.clone()
