"""A worker's optimizers on the servers: their groups, their states, and the pushes of their steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, final

import torch

from raydist.actors.class_tracking import cloudpickle
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.parameter_servers.client import Ask, ServerClient
from raydist.parameter_servers.requests import (
    AddOptimizer,
    OptimizerGroup,
    OptimizerState,
    PushKey,
    SetOptimizerState,
    WriteStates,
)
from raydist.parameter_servers.slices import PsSlice
from raydist.parameter_servers.slicing import cut_state, joined_state
from raydist.parameter_servers.worker_copies import HostGradients
from raydist.replicas.ps.worker_slices import Pushed, PushPlans, WorkerSlices, group_options
from raydist.replicas.rules import VariablesView


@final
class KnownObjects:
    """A snapshot of one worker's objects, refreshed by `look`."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._handles: dict[int, int] = {}
        self._looked_at = -1

    def look(self, variables: VariablesView) -> bool:
        """Refresh the snapshot; return True if objects were added or removed."""
        if variables.changes == self._looked_at:
            return False
        self._looked_at = variables.changes
        self._objects = dict(variables.items())
        self._handles = {id(obj): handle for handle, obj in self._objects.items()}
        return True

    def __contains__(self, handle: int) -> bool:
        return handle in self._objects

    def get(self, handle: int) -> Any:
        """Return the object with a handle, or None if it is gone."""
        return self._objects.get(handle)

    def objects(self) -> Iterable[Any]:
        """Return all objects."""
        return self._objects.values()

    def tensors(self) -> list[tuple[int, torch.Tensor]]:
        """Return handles and tensors: parameters, buffers, weights of embedding tables."""
        return [(handle, obj) for handle, obj in self._objects.items() if isinstance(obj, torch.Tensor)]

    def handle_of(self, obj: Any) -> int | None:
        """Return the handle of an object, or None if it has none."""
        return self._handles.get(id(obj))

    def membership(self, optimizer: torch.optim.Optimizer) -> tuple[tuple[int, ...], ...]:
        """Return the handles of the parameters of each of an optimizer's groups; 0 for an unknown parameter."""
        return tuple(self._handles_of(group["params"]) for group in optimizer.param_groups)

    def _handles_of(self, parameters: Sequence[torch.Tensor]) -> tuple[int, ...]:
        return tuple(self._handles.get(id(each), 0) for each in parameters)


@final
class PsOptimizers:
    """All optimizers of one worker."""

    def __init__(
        self, client: ServerClient, known: KnownObjects, slices: WorkerSlices, tables: Collection[int]
    ) -> None:
        self._client = client
        self._known = known
        self._slices = slices
        self._tables = tables
        self._plans = PushPlans(HostGradients())
        self._told: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._seen_members: dict[int, list[list[int]]] = {}

    def forget_plans(self) -> None:
        """Drop the push plans, because slices have changed."""
        self._plans.forget()

    def forget_members(self) -> None:
        """Recheck the groups of all optimizers, because objects were added or removed."""
        self._seen_members.clear()

    def is_told(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the servers have the optimizer."""
        return self._handle_of(optimizer) in self._told

    def tell(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the servers an optimizer with its present groups, unless they have these already."""
        handle = self._handle_of(optimizer)
        members = [list(map(id, group["params"])) for group in optimizer.param_groups]
        if self._seen_members.get(handle) == members:
            return
        self._seen_members[handle] = members
        membership = self._known.membership(optimizer)
        if self._told.get(handle) == membership:
            return
        self._told[handle] = membership
        self._plans.forget()
        kind = cloudpickle.dumps(type(optimizer))
        asks = {}
        for server in range(self._client.num_servers):
            groups = tuple(
                OptimizerGroup(
                    options,
                    self._slices.numbers(members, server),
                    tuple(member for member in members if member in self._tables),
                )
                for options, members in zip(group_options(optimizer), membership, strict=True)
            )
            asks[server] = Ask(AddOptimizer(handle, kind, groups))
        self._client.exchange(asks)

    def tell_again(self) -> None:
        """Give all optimizers to servers that have started again."""
        told = self.everyone()
        self._told.clear()
        self._seen_members.clear()
        for optimizer in told:
            self.tell(optimizer)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that another worker has given the servers the optimizer."""
        if not self.is_told(optimizer):
            self._told[self._handle_of(optimizer)] = self._known.membership(optimizer)
        optimizer.state.clear()  # the servers have the state; some optimizers begin with large zeros

    def push_of(self, optimizer: torch.optim.Optimizer) -> Pushed | None:
        """Return the push of an optimizer's present gradients; None if no parameter has one."""
        self.tell(optimizer)
        handle = self._handle_of(optimizer)
        return self._plans.plan_of(handle, optimizer, self._told[handle], self._slices.table, self._slices.targets)

    def write_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer's state on the servers by this worker's."""
        states = self._by_server(optimizer.state)
        handle = self._handle_of(optimizer)
        self._client.exchange({server: Ask(SetOptimizerState(handle, state)) for server, state in enumerate(states)})

    def write_states(
        self, changed: Mapping[torch.optim.Optimizer, Mapping[torch.Tensor, Mapping[str, Any]]], key: PushKey
    ) -> None:
        """Write states of some optimizers' parameters to the servers; all other states stay."""
        states: list[dict[int, Mapping[int, Any]]] = [{} for _ in range(self._client.num_servers)]
        for optimizer, mine in changed.items():
            self.tell(optimizer)
            for server, found in enumerate(self._by_server(mine)):
                states[server][self._handle_of(optimizer)] = found
        writes = [WriteStates(self._client.sender, key, each) for each in states]
        self._client.exchange({server: Ask(write) for server, write in enumerate(writes)})

    def _by_server(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> list[dict[int, dict[str, Any]]]:
        found: list[dict[int, dict[str, Any]]] = [{} for _ in range(self._client.num_servers)]
        for parameter, state in states.items():
            self._require_known(parameter)
            for part in self._slices_of(parameter):
                found[part.server] |= cut_state(state, tuple(parameter.shape), [part])
        return found

    def _require_known(self, key: Any) -> None:
        if self._known.handle_of(key) is None:
            shown = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
            raise InvalidArgumentError(
                "What an optimizer remembers must belong to a parameter that was made under the scope, because servers "
                f"keep it beside that parameter, but its state was given the key {shown}. Delete that, and write to "
                "state[parameter][name] or to a buffer of a module."
            )

    def read_states(self, optimizers: Iterable[torch.optim.Optimizer] | None = None) -> None:
        """Replace the state of this worker's optimizers by the servers': of these optimizers, or of all."""
        for optimizer in self.everyone() if optimizers is None else filter(self.is_told, optimizers):
            found = self.states_of(optimizer)
            optimizer.state.clear()
            optimizer.state.update(found)

    def everyone(self) -> list[torch.optim.Optimizer]:
        """Return all optimizers that the servers and the program have."""
        return [each for handle in self._told if (each := self._known.get(handle)) is not None]

    def states_of(self, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the servers' state of each parameter, including parameters that are in no group any more."""
        states: dict[int, Mapping[str, Any]] = {}
        for answer in self._client.ask_all(OptimizerState(self._handle_of(optimizer))):
            states |= answer.value
        members = [each for group in optimizer.param_groups for each in group["params"]]
        others = [each for _, each in self._known.tensors()]
        found = {}
        for parameter in dict.fromkeys([*members, *others]):
            state = joined_state(states, tuple(parameter.shape), self._slices_of(parameter))
            if state:
                found[parameter] = state
        return found

    def _slices_of(self, parameter: torch.Tensor) -> tuple[PsSlice, ...]:
        handle = self._known.handle_of(parameter) or 0
        return self._slices.table.get(handle, ())

    def _handle_of(self, optimizer: torch.optim.Optimizer) -> int:
        handle = self._known.handle_of(optimizer)
        if handle is None:
            raise FailedPreconditionError(
                f"raydist bug: {type(optimizer).__name__} must be mirrored to step on servers."
            )
        return handle
