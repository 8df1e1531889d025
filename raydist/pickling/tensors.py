"""Pickling of tensors as bytes: each storage is sent once, so that views and tied tensors still share memory."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch

from raydist.compat.torch_internals import plain_tensors
from raydist.parameter_servers.rows.row_gradient import RowGradient

__all__ = ["ReplicaDevice", "StorageBytes", "TensorReducer"]


@final
class StorageBytes:
    """The storage of one or more tensors as a numpy byte array, which pickles without torch."""

    def __init__(self, array: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._array = array
        self._tensor: torch.Tensor | None = None

    def bytes_tensor(self) -> torch.Tensor:
        """Return the memory as a uint8 tensor; every call returns the same memory."""
        if self._tensor is None:
            array = self._array if self._array.flags.writeable else self._array.copy()
            self._tensor = torch.from_numpy(array)
        return self._tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return StorageBytes, (self._array,)


def _rebuild_view(
    storage: StorageBytes, dtype: torch.dtype, geometry: tuple[int, tuple[int, ...], tuple[int, ...]]
) -> torch.Tensor:
    offset, size, stride = geometry
    empty = torch.empty(0, dtype=dtype)
    return empty.set_(storage.bytes_tensor().untyped_storage(), offset, size, stride)


def _rebuild_tensor(values: torch.Tensor, device: str, requires_grad: bool) -> torch.Tensor:
    return values.to(device).requires_grad_(requires_grad)


def _rebuild_parameter(values: torch.Tensor, device: str, requires_grad: bool) -> torch.nn.Parameter:
    return torch.nn.Parameter(values.to(device), requires_grad)


@final
class ReplicaDevice:
    """A placeholder that unpickles as the device of the reading replica (see `pickler.HandlePickler`)."""


@final
class TensorReducer:
    """The reductions of the tensors in one pickle.

    Args:
        to_replica: Move tensors to the device of the replica that unpickles them, except CPU scalars that are not
            parameters (optimizers' step counts). If False, CPU tensors stay on the CPU. GPU tensors always move.
    """

    def __init__(self, *, to_replica: bool) -> None:
        self._to_replica = to_replica
        self._replica_device = ReplicaDevice()
        self._storages: dict[tuple[int, int], StorageBytes] = {}
        self._copies: list[torch.Tensor] = []  # kept alive because storages are told apart by address

    def reduce(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """Return the reduction of `tensor`; None to use torch's own (sparse, quantised, ...)."""
        with plain_tensors():
            if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
                return None
            if tensor.is_conj() or tensor.is_neg():  # the memory does not hold the values
                return None
            if isinstance(tensor, RowGradient):
                return None
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            moves = tensor.device.type != "cpu" or (self._to_replica and (tensor.dim() > 0 or is_parameter))
            device = self._replica_device if moves else "cpu"
            arguments = (_Values(self, self._readable(tensor.detach())), device, tensor.requires_grad)
            return _rebuild_parameter if is_parameter else _rebuild_tensor, arguments

    def _readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a CPU copy of an XLA tensor, whose storage has no bytes."""
        if tensor.device.type != "xla":
            return tensor
        self._copies.append(tensor.cpu())
        return self._copies[-1]

    def storage_of(self, tensor: torch.Tensor) -> StorageBytes:
        """Return the one `StorageBytes` in this pickle for the memory of `tensor`."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if key not in self._storages:
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._storages[key] = StorageBytes(memory.cpu().numpy())
        return self._storages[key]


@final
class _Values:
    """A detached tensor that pickles as a view of its storage."""

    def __init__(self, owner: TensorReducer, tensor: torch.Tensor) -> None:
        self._owner = owner
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        tensor = self._tensor
        geometry = (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
        return _rebuild_view, (self._owner.storage_of(tensor), tensor.dtype, geometry)
