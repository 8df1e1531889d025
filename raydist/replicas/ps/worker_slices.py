"""A worker's slices of variables on servers: reads, pushes of gradients, and values that the program wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.client import Ask, ServerClient, rows_by_server
from raydist.parameter_servers.connection import Targets
from raydist.parameter_servers.local_rows import pending_rows, spec_of
from raydist.parameter_servers.requests import Assign, CreateSlices, Push, PushKey, ServerAnswer
from raydist.parameter_servers.slices import PsSlice
from raydist.parameter_servers.slicing import (
    Form,
    GradientCut,
    ReadVersions,
    SlicesByHandle,
    add_slices,
    cut_gradients,
    form_of,
    rows_and_values,
)
from raydist.parameter_servers.worker_copies import HostGradients, WorkerCopies

_PLANS_KEPT = 64
NO_CUT = GradientCut((), (), ())


def group_options(optimizer: torch.optim.Optimizer) -> tuple[Mapping[str, Any], ...]:
    """Return the options of each group: everything but its parameters.

    >>> group_options(torch.optim.SGD([torch.zeros(1)], lr=0.5))[0]["lr"]
    0.5
    """
    return tuple({key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups)


def note_answer(read: ReadVersions, numbers: Sequence[int], answer: ServerAnswer) -> None:
    """Record that the worker holds these slices in the version of the answer to a change."""
    if answer.verdict == "applied":
        read.note_change(numbers, answer.version)
    else:
        read.note(numbers, answer.version)


@final
@dataclass(frozen=True, slots=True, eq=False)
class PushPlan:
    """The layout of a push; valid as long as the same parameters have gradients, in the same forms."""

    optimizer: int
    handles: tuple[int, ...]  # handles of the variables that have gradients
    tables: tuple[int, ...]  # handles of the embedding tables whose rows have gradients
    cuts: Mapping[int, GradientCut]  # by server, its part of the gradients
    targets: Mapping[int, Mapping[int, torch.Tensor]]  # by server, where the returned values are written


@final
@dataclass(frozen=True, slots=True, eq=False)
class Pushed:
    """A plan and the gradients of one step."""

    plan: PushPlan  # the layout
    gradients: Sequence[Any]  # gradients of `plan.handles`, on the host
    rows: Sequence[Sequence[torch.Tensor]]  # by server, rows and their gradients, two tensors for each of `plan.tables`
    options: tuple[Mapping[str, Any], ...]  # see `Push.options`


@final
class PushPlans:
    """A cache of push plans."""

    def __init__(self, staging: HostGradients) -> None:
        self._staging = staging
        self._plans: dict[tuple[Any, ...], PushPlan] = {}

    def forget(self) -> None:
        """Drop all plans, because slices or groups have changed."""
        self._plans.clear()

    def plan_of(
        self,
        handle: int,
        optimizer: torch.optim.Optimizer,
        membership: Sequence[Sequence[int]],
        table: SlicesByHandle,
        targets: Sequence[Mapping[int, torch.Tensor]],
    ) -> Pushed | None:
        """Return the push for an optimizer's present gradients; None if no parameter has one."""
        found = [
            (parameter, member)
            for group, members in zip(optimizer.param_groups, membership, strict=True)
            for parameter, member in zip(group["params"], members, strict=True)
            if parameter.grad is not None
        ]
        tables = {member: parameter for parameter, member in found if spec_of(parameter) is not None}
        variables = {member: parameter.grad for parameter, member in found if member in table}
        if not variables and not tables:
            return None
        gradients = list(variables.values())
        key = handle, tuple(variables), tuple(map(form_of, gradients)), tuple(tables)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            plan = self._plans[key] = _planned(*key, table, targets)
        rows = self._rows(list(tables.values()), len(targets)) if tables else [()] * len(targets)
        return Pushed(plan, self._on_host(gradients), rows, group_options(optimizer))

    def _rows(self, weights: Sequence[torch.Tensor], num_servers: int) -> list[list[torch.Tensor]]:
        """Return, by server, the gradients of its rows of each table."""
        found: list[list[torch.Tensor]] = [[] for _ in range(num_servers)]
        for weight in weights:
            spec, pending = spec_of(weight), pending_rows(weight)
            if spec is None or pending is None:
                raise InvalidArgumentError(
                    "The gradient of a ShardedEmbedding must be what backward() gave it, some rows, but its .grad was "
                    "replaced by an ordinary tensor. Change it in place."
                )
            rows, values = pending[0].cpu(), pending[1].detach().to("cpu", spec.dtype)
            for server, places in rows_by_server(spec, rows, num_servers, all_servers=True).items():
                found[server] += [rows[places], values[places]]
        return found

    def _on_host(self, gradients: Sequence[torch.Tensor]) -> list[Any]:
        if all(each.layout is torch.strided for each in gradients):
            return self._staging.bring(gradients)
        parts = [rows_and_values(each) for each in gradients]
        flat = [part for each in parts for part in ((each,) if isinstance(each, torch.Tensor) else each)]
        brought = iter(self._staging.bring(flat))
        return [next(brought) if isinstance(each, torch.Tensor) else (next(brought), next(brought)) for each in parts]


def _planned(
    optimizer: int,
    variables: tuple[int, ...],
    forms: tuple[Form, ...],
    tables: tuple[int, ...],
    table: SlicesByHandle,
    targets: Sequence[Mapping[int, torch.Tensor]],
) -> PushPlan:
    cuts = cut_gradients([table[variable] for variable in variables], forms)
    if tables:  # all servers have rows of a table, and count steps without gradients for their rows, too
        cuts = {server: cuts.get(server, NO_CUT) for server in range(len(targets))}
    back = {server: {number: targets[server][number] for number in cut.slices} for server, cut in cuts.items()}
    return PushPlan(optimizer, variables, tables, cuts, back)


@final
class WorkerSlices:
    """All slices of one worker's variables."""

    def __init__(self, client: ServerClient) -> None:
        self.table: SlicesByHandle = {}  # the slices of each variable
        # by server and slice number, the memory into which its values are read
        self.targets: list[dict[int, torch.Tensor]] = [{} for _ in range(client.num_servers)]
        self._client = client
        self._copies = WorkerCopies()
        self._read = [ReadVersions() for _ in range(client.num_servers)]
        self._handle_of_slice: dict[int, int] = {}

    # --- variables that come and go -----------------------------------------------------------------------------------

    def adopt(self, slices: Sequence[PsSlice], variables: Mapping[int, torch.Tensor]) -> list[int]:
        """Adopt the variables that have slices now; return their handles."""
        new = [handle for handle in add_slices(self.table, slices) if handle in variables]
        self._copies.add([(handle, variables[handle]) for handle in new])
        for handle in new:
            target = self._copies.target(handle)
            for part in self.table[handle]:
                self.targets[part.server][part.number] = part.within(target)
                self._read[part.server].add([part.number])
                self._handle_of_slice[part.number] = handle
        return new

    def create(self, handles: Sequence[int]) -> None:
        """Create these variables on the servers, with this worker's values."""
        asks: dict[int, Ask] = {}
        for server, parts in self._by_server(handles).items():
            values = [part.within(self._copies.own(part.handle)) for part in parts]
            asks[server] = Ask(CreateSlices(tuple(parts)), values)
        for server, (answer, _) in self._client.exchange(asks).items():
            created: Any = asks[server].request
            self._read[server].note_change([part.number for part in created.slices], answer.version)

    def forget(self, handle: int) -> None:
        """Drop a variable that is gone."""
        for part in self.table.pop(handle, ()):
            self.targets[part.server].pop(part.number, None)
            self._read[part.server].drop([part.number])
            self._handle_of_slice.pop(part.number, None)
        self._copies.forget(handle)

    def numbers(self, handles: Iterable[int], server: int) -> tuple[int, ...]:
        """Return the numbers of the variables' slices that a server has."""
        known = [part for handle in handles if handle in self.table for part in self.table[handle]]
        return tuple(part.number for part in known if part.server == server)

    def _by_server(self, handles: Sequence[int]) -> dict[int, list[PsSlice]]:
        found: dict[int, list[PsSlice]] = {}
        for server in range(self._client.num_servers):
            parts = [part for handle in handles for part in self.table[handle] if part.server == server]
            if parts:
                found[server] = parts
        return found

    # --- reading ------------------------------------------------------------------------------------------------------

    def versions(self) -> tuple[int, ...]:
        """Return, by server, the newest known version."""
        return tuple(each.newest for each in self._read)

    def read_older(self, seen: Sequence[int] | None) -> None:
        """Read slices held in a version older than `seen` (by server); with None, read all that have changed."""
        wanted: dict[int, dict[int, torch.Tensor]] = {}
        unless: dict[int, int] = {}
        for server, read in enumerate(self._read):
            if seen is None:
                wanted[server], unless[server] = self.targets[server], read.oldest(self.targets[server])
            else:
                targets = self.targets[server]
                older = read.older_than(seen[server] if server < len(seen) else 0)
                wanted[server] = {number: targets[number] for number in older}
        if any(wanted.values()):
            self._copies.ready()
            self._note(wanted, self._client.read(wanted, unless))

    def read_step(self, at_least: int, *, parameters_only: bool = False) -> int:
        """Read all values, or those of parameters, of one synchronous step; return the step."""
        self._copies.ready()
        wanted = dict(enumerate(self.targets))
        if parameters_only:  # the closure may have written buffers
            wanted = {
                server: {
                    number: target
                    for number, target in targets.items()
                    if self._copies.is_parameter(self._handle_of_slice[number])
                }
                for server, targets in wanted.items()
            }
        answers = self._client.read_step(wanted, at_least)
        self._note(wanted, answers)
        return max(answer.step for answer in answers.values())

    def _note(self, wanted: Mapping[int, Mapping[int, torch.Tensor]], answers: Mapping[int, ServerAnswer]) -> None:
        """Record that values were copied to their targets."""
        changed: set[int] = set()
        for server, answer in answers.items():
            if not wanted.get(server):
                continue
            read = self._read[server]
            if answer.version != read.oldest(wanted[server]):
                changed.update(self._handle_of_slice[number] for number in wanted[server])
            read.note(list(wanted[server]), answer.version)
        self._copies.show(changed)

    # --- writing ------------------------------------------------------------------------------------------------------

    def push_and_read(self, pushed: Pushed, key: PushKey) -> None:
        """Push gradients, and read the new values of the variables. Blocks until all servers have answered."""
        self._copies.ready()
        plan = pushed.plan
        asks = {
            server: self._push(server, pushed, key, cut, into=plan.targets[server]) for server, cut in plan.cuts.items()
        }
        for server, (answer, _) in self._client.exchange(asks).items():
            note_answer(self._read[server], plan.cuts[server].slices, answer)
        self._copies.show(plan.handles)

    def push_step(self, pushed: Pushed, key: PushKey, *, step: int, completes: int) -> None:
        """Push to all servers for a synchronous step, also to those without gradients: each counts the arrivals."""
        cuts = {server: pushed.plan.cuts.get(server, NO_CUT) for server in range(self._client.num_servers)}
        self._client.exchange(
            {server: self._push(server, pushed, key, cut, step, completes) for server, cut in cuts.items()}
        )

    def _push(
        self,
        server: int,
        pushed: Pushed,
        key: PushKey,
        cut: GradientCut,
        step: int = -1,
        completes: int = 0,
        into: Targets | None = None,
    ) -> Ask:
        push = Push(
            self._client.sender,
            key,
            pushed.plan.optimizer,
            cut.slices,
            cut.forms,
            pushed.plan.tables,
            options=pushed.options,
            read_version=self._read[server].oldest(cut.slices),
            step=step,
            completes=completes,
            pull=() if into is None else cut.slices,
        )
        return Ask(push, [*cut.tensors(pushed.gradients), *pushed.rows[server]], into)

    def written(self, *, parameters_only: bool = False) -> list[int]:
        """Return the variables that the program wrote by hand."""
        return self._copies.written(parameters_only=parameters_only)

    def keep_written(self) -> None:
        """Take the values that the program wrote for the servers' values, which they are now."""
        self._copies.keep_written()

    def assign(self, handles: Sequence[int], key: PushKey, *, parameters_only: bool) -> None:
        """Send the servers the values that the program wrote (see `written`); of counters, the increments."""
        asks: dict[int, Ask] = {}
        for server, parts in self._by_server(handles).items():
            adds = tuple(_is_counter(part.dtype) for part in parts)
            values = [self._written(part) for part in parts]
            numbers = tuple(part.number for part in parts)
            asks[server] = Ask(Assign(self._client.sender, key, numbers, adds), values)
        answers = self._client.exchange(asks)
        self._copies.keep_written(parameters_only=parameters_only)
        for server, (answer, _) in answers.items():
            assigned: Any = asks[server].request
            _note_assigned(self._read[server], assigned, answer)

    def _written(self, part: PsSlice) -> torch.Tensor:
        own = part.within(self._copies.own(part.handle))
        return own - part.within(self._copies.target(part.handle)) if _is_counter(part.dtype) else own

    def discard_written(self) -> None:
        """Discard values that the driver wrote here: the servers have them, or they were not meant to last."""
        if self._copies.written():
            self.discard()

    def discard(self) -> None:
        """Discard all held values after a failed step: they are read again."""
        self._copies.drop_written()
        for read in self._read:
            read.forget()


def _note_assigned(read: ReadVersions, assigned: Assign, answer: ServerAnswer) -> None:
    """Update the held versions. Counters to which other workers have added since the last read are held no more."""
    if answer.verdict != "applied":  # an earlier run of the closure has assigned: its values are read again
        read.forget(assigned.slices)
        return
    held = [
        number
        for number, adds in zip(assigned.slices, assigned.adds, strict=True)
        if not adds or read.is_of(number, answer.version - 1)
    ]
    note_answer(read, held, answer)


def _is_counter(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
