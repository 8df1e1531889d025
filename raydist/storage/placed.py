"""Tensors whose values are stored in a shard: their positions, and their views in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from raydist.storage.shard import VariableShard

__all__ = ["PlacedTensor", "TensorPlace"]


@final
@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The position of a tensor in a shard, the same for every process.

    Attributes:
        number: Number of the variable in the shard; tensors that share memory have the same number.
        dtype: dtype of the tensor.
        size: Shape of the tensor.
        stride: Strides of the tensor.
        offset: Offset of the tensor's first element in the variable, in elements.
    """

    number: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a view of the tensor in `memory`, the bytes of its variable."""
        whole = len(memory) // self.dtype.itemsize * self.dtype.itemsize
        return memory[:whole].view(self.dtype).as_strided(self.size, self.stride, self.offset)


@final
@dataclass(frozen=True, slots=True, eq=False)
class PlacedTensor:
    """One tensor of this process whose values are stored in a shard.

    Attributes:
        tensor: The tensor; always the same object.
        place: Position of the tensor in the shard.
        shared: View of the shared copy.
        own: Memory of `tensor`: the shard's private view, or a copy on another device.
    """

    tensor: torch.Tensor
    place: TensorPlace
    shared: torch.Tensor
    own: torch.Tensor

    @staticmethod
    def bind(tensor: torch.Tensor, place: TensorPlace, shard: VariableShard) -> PlacedTensor:
        """Make `tensor` show the shard's values, in the shard's memory."""
        own = place.within(shard.own(place.number))
        tensor.data = own
        return PlacedTensor(tensor, place, place.within(shard.shared(place.number)), own)

    @property
    def in_place(self) -> bool:
        """Return True if the tensor still uses the memory it was bound to."""
        return self.tensor.is_set_to(self.own)

    def show_own(self) -> None:
        """Undo `tensor.data = ...`."""
        self.tensor.data = self.own
