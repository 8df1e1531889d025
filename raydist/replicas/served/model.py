"""A worker's objects whose variables live on servers: placing new ones, and following other workers' placements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from raydist.parameter_servers.optimizers import require_elementwise
from raydist.parameter_servers.rows.local_rows import spec_of, take_held_rows
from raydist.parameter_servers.slices import ServedSlice, VariableSpec
from raydist.parameter_servers.worker.client import HeldSlices, ServedRows, ServerClient
from raydist.replicas.rules import VariablesView
from raydist.replicas.served.known_objects import KnownObjects
from raydist.replicas.served.servable import names_of_variables, require_servable
from raydist.replicas.served.served_optimizers import ServedOptimizers
from raydist.replicas.served.states_in_steps import StatesInSteps
from raydist.replicas.served.worker_slices import WorkerSlices

__all__ = ["ServedModel", "Settled"]


@final
@dataclass(frozen=True, slots=True)
class Settled:
    """The description of new variables from which the driver plans their placement.

    Attributes:
        specs: The new variables.
    """

    specs: tuple[VariableSpec, ...]


@final
class ServedModel:
    """All variables, optimizers and tables of one worker.

    Args:
        client: The connection to the servers.

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
        self.optimizers = ServedOptimizers(client, self._known, self.slices, self._tables)
        self.states = StatesInSteps(self.optimizers)
        self.rows = ServedRows(client, self._known.handle_of)
        self.held = HeldSlices(
            client, self.slices.table, self._known.get, self._known.handle_of, self.optimizers.read_states
        )

    def look(self, variables: VariablesView) -> None:
        """Follow objects that were added or removed."""
        if self._known.look(variables):
            self.optimizers.forget_members()
            for handle in [known for known in self.slices.table.handles() if known not in self._known]:
                self.slices.forget(handle)

    def settle(self, variables: VariablesView) -> Settled:
        """Describe the variables that have no slices yet.

        Raises:
            InvalidArgumentError: Servers cannot hold a new variable or apply a new optimizer.
        """
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
        return Settled(
            tuple(
                VariableSpec(
                    handle,
                    names.get(id(tensor), f"variable_{handle}"),
                    tuple(tensor.shape),
                    tensor.dtype,
                    partitioned=isinstance(tensor, torch.nn.Parameter),
                )
                for handle, tensor in new.items()
            )
        )

    def place(self, variables: VariablesView, slices: Sequence[ServedSlice]) -> None:
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

    def follow(self, variables: VariablesView, slices: Sequence[ServedSlice]) -> None:
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

    def _adopt(self, slices: Sequence[ServedSlice]) -> list[int]:
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
