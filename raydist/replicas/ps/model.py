"""A worker's objects whose variables live on servers: placing new ones, and following other workers' placements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch

from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.client import HeldSlices, PsRows, ServerClient
from raydist.parameter_servers.local_rows import spec_of, take_held_rows
from raydist.parameter_servers.optimizers import require_elementwise
from raydist.parameter_servers.slices import PsSlice, VariableSpec
from raydist.replicas.ps.optimizer_states import ClosureStates
from raydist.replicas.ps.optimizers import KnownObjects, PsOptimizers
from raydist.replicas.ps.worker_slices import WorkerSlices
from raydist.replicas.rules import VariablesView


def names_of_variables(objects: Iterable[Any]) -> dict[int, str]:
    """Return the names of variables by identity, as in the outermost module that has them.

    >>> layer = torch.nn.Linear(1, 1)
    >>> names_of_variables([layer, torch.nn.Sequential(layer)])[id(layer.bias)]
    '0.bias'
    """
    names: dict[int, str] = {}
    modules = [obj for obj in objects if isinstance(obj, torch.nn.Module)]
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    for module in [each for each in modules if id(each) not in inner]:
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            names.setdefault(id(tensor), name)
    return names


def require_servable(tensors: Mapping[int, torch.Tensor], names: Mapping[int, str]) -> None:
    """Check that variables are dense, have values, and share no memory."""
    for handle, tensor in tensors.items():
        _require_dense(names.get(id(tensor), f"variable {handle}"), tensor)
    _require_apart(tensors, names)


def _require_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise InvalidArgumentError(
            f"Variables must be dense tensors with values to live on parameter servers, but {name} is of layout "
            f"{tensor.layout} on {tensor.device}. Keep it out of the scope, or store it as dense tensors."
        )


def _require_apart(tensors: Mapping[int, torch.Tensor], names: Mapping[int, str]) -> None:
    """Reject variables that share memory: on the servers each variable has values of its own."""
    held = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), id(tensor))
        for tensor in tensors.values()
        if tensor.numel()
    )
    for (_, end, one), (begin, _, other) in zip(held, held[1:], strict=False):
        if begin < end:
            raise InvalidArgumentError(
                f"Each variable must have memory of its own to live on parameter servers, but "
                f"{names.get(one, 'a variable')} and {names.get(other, 'another one')} overlap. Use one tensor in both "
                "places, or copy one of them."
            )


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    spanned = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (spanned + 1) * tensor.dtype.itemsize


@final
class PsModel:
    """All variables, optimizers and tables of one worker.

    Attributes:
        slices: Slices of the variables, and the values that the worker has read.
        optimizers: The worker's optimizers.
        states: States of the optimizers, for closures.
        rows: Rows of the embedding tables.
        held: Placement of all of these, for saving and restoring.
    """

    def __init__(self, client: ServerClient) -> None:
        self._known = KnownObjects()
        self._tables: set[int] = set()
        self.slices = WorkerSlices(client)
        self.optimizers = PsOptimizers(client, self._known, self.slices, self._tables)
        self.states = ClosureStates(self.optimizers)
        self.rows = PsRows(client, self._known.handle_of)
        self.held = HeldSlices(
            client, self.slices.table, self._known.get, self._known.handle_of, self.optimizers.read_states
        )

    def look(self, variables: VariablesView) -> None:
        """Follow objects that were added or removed."""
        if self._known.look(variables):
            self.optimizers.forget_members()
            for handle in [known for known in self.slices.table.handles() if known not in self._known]:
                self.slices.forget(handle)

    def settle(self, variables: VariablesView) -> tuple[VariableSpec, ...]:
        """Describe the variables that have no slices yet."""
        self.look(variables)
        for optimizer in variables.optimizers():
            if not self.optimizers.is_told(optimizer):
                require_elementwise(optimizer)
        new = {
            handle: tensor
            for handle, tensor in self._known.tensors()
            if handle not in self.slices.table and spec_of(tensor) is None
        }
        names = names_of_variables(self._known.objects())
        require_servable(new, names)
        return tuple(
            VariableSpec(
                handle,
                names.get(id(tensor), f"variable_{handle}"),
                tuple(tensor.shape),
                tensor.dtype,
                partitioned=isinstance(tensor, torch.nn.Parameter),
            )
            for handle, tensor in new.items()
        )

    def place(self, variables: VariablesView, slices: Sequence[PsSlice]) -> None:
        """Give the servers new variables, and variables that the driver wrote, with this worker's values."""
        self.look(variables)
        written = set(self.slices.written())
        new = self._adopt(slices)
        self.slices.create([*new, *(handle for handle in self.slices.table.handles() if handle in written)])
        self.slices.keep_written()
        self._create_tables()
        loaded = variables.take_loaded_states()
        for optimizer in variables.optimizers():
            fresh = not self.optimizers.is_told(optimizer)
            self.optimizers.tell(optimizer)
            if self._known.handle_of(optimizer) in loaded or (fresh and optimizer.state):
                self.optimizers.write_state(optimizer)

    def follow(self, variables: VariablesView, slices: Sequence[PsSlice]) -> None:
        """Adopt a placement by another worker: the servers have the values from there."""
        self.look(variables)
        self._adopt(slices)
        self.slices.discard_written()
        for handle, weight in self._new_tables():
            take_held_rows(weight)  # the servers have them
            self._tables.add(handle)
        variables.take_loaded_states()
        for optimizer in variables.optimizers():
            self.optimizers.follow(optimizer)

    def _adopt(self, slices: Sequence[PsSlice]) -> list[int]:
        """Adopt variables that have slices now; return their handles."""
        new = self.slices.adopt(slices, dict(self._known.tensors()))
        if new:
            self.optimizers.forget_plans()
        return new

    def _new_tables(self) -> list[tuple[int, torch.Tensor]]:
        tensors = self._known.tensors()
        return [each for each in tensors if each[0] not in self._tables and spec_of(each[1]) is not None]

    def _create_tables(self) -> None:
        for handle, weight in self._new_tables():
            self.rows.create(weight, take_held_rows(weight))
            self._tables.add(handle)
