"""Tensors whose values lie in a shard: where each lies, and the views through which its process works on it."""

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
    """Where a tensor lies in a shard: the same for every process.

    Attributes:
        number: The variable of the shard; tensors that share memory have one together.
        dtype: The tensor's.
        size: Its shape.
        stride: Its strides.
        offset: Of its first element in the variable, in elements.
    """

    number: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in the bytes of its variable."""
        whole = len(memory) // self.dtype.itemsize * self.dtype.itemsize
        return memory[:whole].view(self.dtype).as_strided(self.size, self.stride, self.offset)


@final
@dataclass(frozen=True, slots=True, eq=False)
class PlacedTensor:
    """One tensor of this process whose values are a shard's.

    Attributes:
        tensor: The tensor, the same object all the time.
        place: Where it lies.
        shared: A view of the one copy.
        own: What `tensor` shows between updates: the shard's own view, or a copy on another device.
        mapped: Whether `own` is the shard's own view.
    """

    tensor: torch.Tensor
    place: TensorPlace
    shared: torch.Tensor
    own: torch.Tensor
    mapped: bool

    @staticmethod
    def bind(tensor: torch.Tensor, place: TensorPlace, shard: VariableShard, *, mapped: bool) -> PlacedTensor:
        """Let `tensor` show the shard's values; `mapped` in the shard's memory, else as a copy where it is."""
        shared = place.within(shard.shared(place.number))
        own = place.within(shard.own(place.number)) if mapped else shared.to(tensor.device, copy=True)
        tensor.data = own
        return PlacedTensor(tensor, place, shared, own, mapped)

    @property
    def in_place(self) -> bool:
        """Whether the tensor still lies where it was bound, and nobody has given it other memory."""
        return self.tensor.is_set_to(self.own)

    def show_shared(self) -> None:
        """Let the tensor be the one copy itself: who writes it now writes it for all."""
        self.tensor.data = self.shared

    def show_own(self) -> None:
        """Undo :meth:`show_shared`."""
        self.tensor.data = self.own

    def fetch(self) -> None:
        """Bring a copy on another device up to date."""
        if not self.mapped:
            self.own.copy_(self.shared)  # waits: the next update must not meet a copy that is still under way


def distance_of(value: torch.Tensor, other: torch.Tensor) -> float:
    """How far apart two tensors are, relative to the largest value of the other; inf where no number tells.

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
    """Whether a value is a tensor with memory that a shard can hold."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_meta
        and value.numel() > 0
        and value.untyped_storage().nbytes() > 0
    )


def places_of(tensors: Sequence[torch.Tensor]) -> tuple[list[TensorPlace], list[torch.Tensor]]:
    """Where tensors would lie in a shard of theirs, and one tensor for each of its variables.

    Tensors that share memory go on sharing it.
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
    """All bytes of the memory in which a tensor lies."""
    held = tensor.detach()
    return torch.empty(0, dtype=torch.uint8, device=held.device).set_(held.untyped_storage())
