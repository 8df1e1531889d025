"""Track the objects besides a tensor that may write to the tensor's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch.multiprocessing.reductions import shared_cache, storage_from_cache

from raydist.compat.torch_internals import StorageWeakRef, plain_tensors

__all__ = ["MemoryUsers", "is_used_elsewhere"]


@final
class MemoryUsers:
    """The living aliases of one tensor, which may write to the tensor's memory, and a flag for unknown users.

    Aliases from before this object was created are looked for once, when `are_there` is first called.
    """

    __slots__ = ("_are_unknown", "_known")

    def __init__(self) -> None:
        self._known: list[Callable[[], Any]] = []
        self._are_unknown: bool | None = None

    def add(self, user: Callable[[], Any]) -> None:
        """Add a user of the memory, given by a weak reference."""
        self._known.append(user)

    def lend(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return another storage of the same memory, which counts as a user while it lives."""
        memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        lent = torch.from_numpy(memory).untyped_storage()
        reference = StorageWeakRef(lent)
        self.add(lambda: None if reference.expired() else reference)
        return lent

    def note_unknown(self) -> None:
        """Record that an object without weak references got the memory; it counts as a user for good."""
        self._are_unknown = True

    def are_there(self, tensor: torch.Tensor) -> bool:
        """Return True while an object besides the tensor may write to the tensor's memory."""
        if self._are_unknown is None:
            with plain_tensors():
                self._are_unknown = is_used_elsewhere(tensor)
        return self.may_be_there()

    def may_be_there(self) -> bool:
        """Return the same without looking for aliases from before; True if nobody has looked for them yet."""
        self._known = [user for user in self._known if user() is not None]
        return self._are_unknown is not False or bool(self._known)


def is_used_elsewhere(tensor: torch.Tensor) -> bool:
    """Return True if an object besides this tensor holds the tensor's memory.

    The tensor moves to new memory; if the old storage then still lives, another object holds it, and the tensor moves
    back. Memory that is shared between processes is not checked: other processes do not show.

    >>> tensor = torch.zeros(2)
    >>> is_used_elsewhere(tensor)
    False
    >>> view = tensor[1:]
    >>> is_used_elsewhere(tensor), tensor.data_ptr() + 4 == view.data_ptr()
    (True, True)
    """
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return False  # a sparse tensor consists of several tensors
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.nbytes:
        return True
    copy = tensor.detach().clone()
    if not storage.nbytes() or storage.is_shared():
        return False
    if copy.stride() != tensor.stride() or tensor.is_inference():
        return True
    key = object()
    shared_cache[key] = StorageWeakRef(storage)
    del storage
    tensor.data = copy
    held: Any = storage_from_cache(torch.UntypedStorage, key)
    del shared_cache[key]
    if held is not None:
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(held, 0, copy.shape, copy.stride())
    return held is not None
