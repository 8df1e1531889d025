"""The slices of a worker's tensors and optimizers on servers, for saving and restoring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from raydist.errors import FailedPreconditionError
from raydist.parameter_servers.slices import ServedSlice
from raydist.parameter_servers.worker.client import Answers, Ask, ServerClient
from raydist.parameter_servers.worker.slice_table import SliceTable

__all__ = ["HeldSlices"]


@final
class HeldSlices:
    """A worker's knowledge of the servers' slices, for the worker's thread.

    Args:
        client: The connection to the servers.
        table: All slices.
        get: Returns the worker's object with a handle; None if it is gone.
        handle_of: Returns the handle of an object.
        read_states: Reads the servers' states of optimizers into this worker's.
    """

    def __init__(
        self,
        client: ServerClient,
        table: SliceTable,
        get: Callable[[int], Any],
        handle_of: Callable[[Any], int | None],
        read_states: Callable[[list[torch.optim.Optimizer]], None],
    ) -> None:
        self._client = client
        self._table = table
        self._get = get
        self._handle_of = handle_of
        self._read_states = read_states

    @property
    def num_servers(self) -> int:
        """Number of servers."""
        return self._client.num_servers

    def places(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[ServedSlice, ...]]:
        """Return, by name, the slices of the tensors that are variables, in the order of their rows.

        A `state_dict` has detached variables, which are found by their memory: no two variables share memory. A
        variable without elements has no memory, and is found only as the variable itself: optimizers have states of it.
        """
        variables = {handle: obj for handle in self._table.handles() if (obj := self._get(handle)) is not None}
        held = {obj.data_ptr(): handle for handle, obj in variables.items()}
        known = {name: self._handle_in(tensor, held, variables) for name, tensor in tensors.items()}
        return {name: self._table.of(handle) for name, handle in known.items() if handle is not None}

    def _handle_in(
        self, tensor: torch.Tensor, held: Mapping[int, int], variables: Mapping[int, torch.Tensor]
    ) -> int | None:
        """Return the handle of the variable that a tensor is, or is detached from."""
        handle = self._handle_of(tensor)
        if handle is None:
            handle = held.get(tensor.data_ptr())
            return handle if handle is not None and _shows(tensor, variables[handle]) else None
        return handle if handle in variables else None

    def handle_of(self, obj: torch.optim.Optimizer | torch.Tensor) -> int:
        """Return the handle of an optimizer, or of the table that a parameter stands for."""
        handle = self._handle_of(obj)
        if handle is None:
            raise FailedPreconditionError(
                f"raydist bug: a {type(obj).__name__} must be mirrored to be saved by servers."
            )
        return handle

    def read_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the servers' state of an optimizer into this worker's."""
        self._read_states([optimizer])

    def exchange(self, asks: Mapping[int, Ask]) -> Answers:
        """Call `ServerClient.exchange`."""
        return self._client.exchange(asks)


def _shows(tensor: torch.Tensor, held: torch.Tensor) -> bool:
    same = tensor.data_ptr() == held.data_ptr() and tensor.dtype == held.dtype
    return same and tensor.numel() > 0 and tensor.shape == held.shape and tensor.stride() == held.stride()
