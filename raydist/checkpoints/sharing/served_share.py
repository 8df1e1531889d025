"""A worker's half of saving values on parameter servers: the worker tells each server its slices.

Runs while no other worker does anything, so that the servers' values are consistent. Small objects, and tensors that no
server has (a tensor that a module computes for its state), go to one of the servers along with the order.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final

import torch
from torch import nn

from raydist.actors.portable_errors import pack_error
from raydist.checkpoints.capture import CapturedObject, captured_object
from raydist.checkpoints.manifest import SavedObject
from raydist.checkpoints.optimizer_names import parameter_names
from raydist.checkpoints.saved_kinds import class_of_state, kind_of_state, state_of
from raydist.checkpoints.sharing.shares import Share, ShareRequest
from raydist.checkpoints.sharing.slice_orders import SliceOrders
from raydist.parameter_servers.optimizers import remembered_share
from raydist.parameter_servers.requests import BeginSave
from raydist.parameter_servers.rows.sharded_embedding import SavedRows
from raydist.parameter_servers.slices import ServedSlice
from raydist.parameter_servers.worker.client import Ask

__all__ = ["ServedShares", "SliceDirectory", "begin_served_share"]


class SliceDirectory(Protocol):
    """A worker's view of the servers, implemented by `HeldSlices`."""

    @property
    def num_servers(self) -> int:
        """Number of servers."""

    def places(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[ServedSlice, ...]]:
        """Return the slices of those tensors that are variables, by name."""

    def handle_of(self, obj: torch.optim.Optimizer | torch.Tensor) -> int:
        """Return the servers' handle of an optimizer, or of the table that a parameter represents."""

    def read_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the optimizer's state from the servers into the optimizer."""

    def exchange(self, asks: Mapping[int, Ask]) -> Any:
        """Send requests to servers, by number, and block until all have answered."""


@final
class ServedShares:
    """The saves that a worker starts. Used by the worker's single thread.

    Args:
        held: The worker's view of the servers.
    """

    def __init__(self, held: SliceDirectory) -> None:
        self._held = held

    def begin(self, request: ShareRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> bytes:
        """Make every server copy its part and begin to write it. Blocks until the servers have begun.

        Args:
            request: The save.
            objects: The objects to save, as they are on the worker, with current values.
            modules: Modules that name the parameters of optimizers.

        Returns:
            A pickled `Share` without files: the values that are not tensors.
        """
        began = time.perf_counter()
        orders = SliceOrders(request, self._held.num_servers)
        saved: dict[str, SavedObject] = {}
        for name, obj in objects.items():
            if isinstance(obj, SavedRows):
                tables = obj.tables()
                orders.add_rows(name, {path: self._held.handle_of(table.weight) for path, table in tables.items()})
                found = CapturedObject(SavedObject(kind_of_state(obj), values={}))
            elif kind_of_state(obj) == "optimizer":
                found = self._add_optimizer(orders, name, obj, modules, request.small_bytes)
            else:
                found = self._add(orders, name, obj, modules, request.small_bytes)
            saved[name] = found.saved
        asks = {}
        for server in range(self._held.num_servers):
            order, tensors = orders.of(server)
            asks[server] = Ask(BeginSave(order), tensors)
        self._held.exchange(asks)
        return pickle.dumps(Share({}, saved, copy_s=time.perf_counter() - began))

    def _add(
        self, orders: SliceOrders, name: str, obj: Any, modules: Mapping[str, nn.Module], small_bytes: int
    ) -> CapturedObject:
        found = _captured(name, obj, modules)
        is_small = sum(tensor.nbytes for tensor in found.tensors.values()) <= small_bytes
        places = {} if is_small else self._held.places(found.tensors)
        orders.add(name, places, {key: each for key, each in found.tensors.items() if key not in places})
        return found

    def _add_optimizer(
        self,
        orders: SliceOrders,
        name: str,
        optimizer: torch.optim.Optimizer,
        modules: Mapping[str, nn.Module],
        small_bytes: int,
    ) -> CapturedObject:
        named = dict(zip(parameter_names(optimizer, modules), _parameters(optimizer), strict=True))
        share = max(remembered_share(type(optimizer), group) for group in optimizer.param_groups)
        try:
            if sum(tensor.nbytes for tensor in named.values()) * share <= small_bytes:
                self._held.read_states(optimizer)
                return self._add(orders, name, optimizer, modules, small_bytes)
            places = self._held.places(named)
            orders.add(name, places, {}, optimizer=self._held.handle_of(optimizer), share=share)
            return _captured(name, optimizer, modules)
        finally:
            optimizer.state.clear()  # optimizers have no state on a worker


def _captured(name: str, obj: Any, modules: Mapping[str, nn.Module]) -> CapturedObject:
    return captured_object(name, kind_of_state(obj), class_of_state(obj), state_of(obj, modules), copy=False)


def _parameters(optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def begin_served_share(
    shares: ServedShares, request: ShareRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
) -> bytes:
    """Begin a save on a worker while no other runs anything; return a pickled `Share` or `PortableError`.

    An error fails only the save: closures scheduled after it continue.
    """
    try:
        return shares.begin(request, objects, modules)
    except Exception as error:
        return pickle.dumps(pack_error(error))
