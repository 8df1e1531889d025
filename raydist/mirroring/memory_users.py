"""Know whether something besides a tensor may write to the tensor's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch.multiprocessing.reductions import shared_cache, storage_from_cache

from raydist.compat.torch_internals import StorageWeakRef, plain_tensors

__all__ = ["MemoryUsers", "is_used_elsewhere"]


@final
class MemoryUsers:
    """Who else may write to the memory of one tensor: what was made of the tensor and still lives, or somebody unknown.

    What others had made before is found out once, when it is first asked for.
    """

    __slots__ = ("_are_unknown", "_known")

    def __init__(self) -> None:
        self._known: list[Callable[[], Any]] = []
        self._are_unknown: bool | None = None

    def add(self, user: Callable[[], Any]) -> None:
        """Note one more, which a weak reference gives for as long as it lives."""
        self._known.append(user)

    def lend(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return another storage of the same memory, and note it for as long as somebody has it."""
        memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        lent = torch.from_numpy(memory).untyped_storage()
        reference = StorageWeakRef(lent)
        self.add(lambda: None if reference.expired() else reference)
        return lent

    def note_unknown(self) -> None:
        """The memory was handed to something whose life cannot be followed: it counts for good."""
        self._are_unknown = True

    def are_there(self, tensor: torch.Tensor) -> bool:
        """Return True while somebody besides the tensor may write to its memory."""
        if self._are_unknown is None:
            with plain_tensors():
                self._are_unknown = is_used_elsewhere(tensor)
        return self.may_be_there()

    def may_be_there(self) -> bool:
        """Return the same without finding out what others had made before: until then they may have made something."""
        self._known = [user for user in self._known if user() is not None]
        return self._are_unknown is not False or bool(self._known)


def is_used_elsewhere(tensor: torch.Tensor) -> bool:
    """Return True where something besides this tensor holds its memory.

    The tensor moves to memory of its own; where the old storage outlives that, somebody holds it, and the tensor moves
    back. Memory that processes share is left alone: who else has it does not show.

    >>> tensor = torch.zeros(2)
    >>> is_used_elsewhere(tensor)
    False
    >>> view = tensor[1:]
    >>> is_used_elsewhere(tensor), tensor.data_ptr() + 4 == view.data_ptr()
    (True, True)
    """
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return False  # the memory of a sparse one is that of several others
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
