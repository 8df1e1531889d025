"""The push of one `optimizer.step()` to the servers, and the values that come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.client import rows_by_server
from raydist.parameter_servers.local_rows import pending_rows, spec_of
from raydist.parameter_servers.requests import ServerAnswer
from raydist.parameter_servers.slicing import (
    Form,
    GradientCut,
    ReadVersions,
    SliceTable,
    cut_gradients,
    form_of,
    rows_and_values,
)
from raydist.parameter_servers.worker_copies import HostGradients

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
    """The layout of a push; valid as long as the same parameters have gradients, in the same forms.

    Attributes:
        handles: Handles of the variables that have gradients.
        tables: Handles of the embedding tables whose rows have gradients.
        cuts: By server, its part of the gradients.
        targets: By server, where the returned values are written.
    """

    optimizer: int
    handles: tuple[int, ...]
    tables: tuple[int, ...]
    cuts: Mapping[int, GradientCut]
    targets: Mapping[int, Mapping[int, torch.Tensor]]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Pushed:
    """A plan and the gradients of one step.

    Attributes:
        plan: The layout.
        gradients: Gradients of `plan.handles`, on the host.
        rows: By server, rows and their gradients, two tensors for each of `plan.tables`.
        options: See `Push.options`.
    """

    plan: PushPlan
    gradients: Sequence[Any]
    rows: Sequence[Sequence[torch.Tensor]]
    options: tuple[Mapping[str, Any], ...]


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
        table: SliceTable,
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
        served = [(parameter.grad, member) for parameter, member in found if member in table]
        if not served and not tables:
            return None
        gradients = [gradient for gradient, _ in served]
        key = handle, tuple(served_by for _, served_by in served), tuple(map(form_of, gradients)), tuple(tables)
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
            for server, places in rows_by_server(spec, rows, num_servers, everybody=True).items():
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
    table: SliceTable,
    targets: Sequence[Mapping[int, torch.Tensor]],
) -> PushPlan:
    cuts = cut_gradients([table.of(variable) for variable in variables], forms)
    if tables:  # all servers have rows of a table, and count steps without gradients for their rows, too
        cuts = {server: cuts.get(server, NO_CUT) for server in range(len(targets))}
    back = {server: {number: targets[server][number] for number in cut.slices} for server, cut in cuts.items()}
    return PushPlan(optimizer, variables, tables, cuts, back)
