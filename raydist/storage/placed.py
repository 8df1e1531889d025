"""Tensors whose values are stored in a shard: their positions, and their views in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from raydist.collectives.flat_bytes import flat_bytes
from raydist.storage.shard import VariableShard

__all__ = ["PlacedTensor", "TensorPlace", "can_be_placed", "distance_of", "places_of", "storage_bytes"]


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
        own: Memory of `tensor` between updates: the shard's private view, or a copy on another device.
        mapped: True if `own` is the shard's private view.
    """

    tensor: torch.Tensor
    place: TensorPlace
    shared: torch.Tensor
    own: torch.Tensor
    mapped: bool

    @staticmethod
    def bind(tensor: torch.Tensor, place: TensorPlace, shard: VariableShard, *, mapped: bool) -> PlacedTensor:
        """Make `tensor` show the shard's values: in the shard's memory if `mapped`, else as a copy on its device."""
        shared = place.within(shard.shared(place.number))
        own = place.within(shard.own(place.number)) if mapped else shared.to(tensor.device, copy=True)
        tensor.data = own
        return PlacedTensor(tensor, place, shared, own, mapped)

    @property
    def in_place(self) -> bool:
        """Return True if the tensor still uses the memory it was bound to."""
        return self.tensor.is_set_to(self.own)

    def show_shared(self) -> None:
        """Make the tensor use the shared copy: a write to the tensor is then visible to all processes."""
        self.tensor.data = self.shared

    def show_own(self) -> None:
        """Undo :meth:`show_shared`."""
        self.tensor.data = self.own

    def fetch(self) -> None:
        """Update a copy on another device."""
        if not self.mapped:
            self.own.copy_(self.shared)  # blocks: the next update must not overlap a running copy


def distance_of(value: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest value of `other`; inf if undefined.

    >>> distance_of(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    0.5
    """
    mine, theirs = value.detach().to("cpu"), other.detach().to("cpu")
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return torch.inf
    if torch.equal(flat_bytes(mine), flat_bytes(theirs)):
        return 0.0
    if not mine.is_floating_point():
        return torch.inf
    most = (mine - theirs).abs().max().double() / theirs.abs().max().double().clamp(min=1e-30)
    return torch.inf if torch.isnan(most) else float(most)


def can_be_placed(value: object) -> bool:
    """Return True for a tensor with memory that a shard can hold."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_meta
        and value.numel() > 0
        and value.untyped_storage().nbytes() > 0
    )


def places_of(tensors: Sequence[torch.Tensor]) -> tuple[list[TensorPlace], list[torch.Tensor]]:
    """Return the positions of tensors in a new shard, and one tensor for each variable of the shard.

    Tensors that share memory also share it in the shard.
    """
    numbers: dict[int, int] = {}
    firsts: list[torch.Tensor] = []
    places = []
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        if address not in numbers:
            numbers[address] = len(firsts)
            firsts.append(tensor)
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        places.append(TensorPlace(numbers[address], tensor.dtype, size, stride, int(tensor.storage_offset())))
    return places, firsts


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as bytes."""
    held = tensor.detach()
    return torch.empty(0, dtype=torch.uint8, device=held.device).set_(held.untyped_storage())
