"""Embedding tables whose rows are divided among replicas: the part of one replica.

A hash of its number says which replica holds a row, as on parameter servers. A forward pass asks the holders for the
rows of its numbers; when a backward pass ends, the holders get the weighted gradients of their rows, and add them up.
Optimizers then step on the rows that the replica holds. All replicas make all exchanges, also those without rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from raydist.collectives.base import Communicator
from raydist.collectives.checked import Call, CallLog, exchange
from raydist.collectives.reducer.nonfinite import NonfinitePolicy, fault_of
from raydist.core.errors import FailedPreconditionError
from raydist.core.values import ReduceOp
from raydist.parameter_servers.local_rows import (
    LocalRows,
    add_exchanged,
    hold_in,
    mark_of,
    take_held_rows,
    take_local_pieces,
)
from raydist.parameter_servers.row_table import RowTable, added_up

_NO_ROW = torch.tensor([-1])  # a row that no replica holds
_Lengths = Sequence[Sequence[int]]


@final
class DividedTables:
    """The tables of one replica, which holds some rows of each (a `RowExchange`). Used by the replica's thread.

    Attributes:
        weight: The weight of this replica's gradients in the backward passes that follow.
        holds_local_gradients: True if gradients of `no_sync` wait to be exchanged.
    """

    def __init__(self, rank: int, world_size: int, policy: NonfinitePolicy) -> None:
        self._rank, self._world_size = rank, world_size
        self._policy = policy
        self._weights: dict[int, torch.nn.Parameter] = {}  # the parameters that stand for tables, by handle
        self._group: Communicator | None = None
        self._calls = CallLog()
        self.holds_local_gradients = False
        self.weight = 1.0

    def join(self, group: Communicator, calls: CallLog) -> None:
        """Use the communicator of a new generation, in which no gradients wait to be exchanged."""
        self._group, self._calls, self.holds_local_gradients = group, calls, False
        for weight in self._weights.values():
            take_local_pieces(weight)

    def divide(self, items: Sequence[tuple[int, Any]]) -> None:
        """Hold this replica's rows of the tables among new objects. Known tables keep their rows and gradients."""
        for handle, obj in items:
            mark = mark_of(obj) if isinstance(obj, torch.nn.Parameter) else None
            if mark is None:
                continue
            known = self._weights.get(handle)
            before = None if known is None else mark_of(known)
            if known is not None and before is not None and isinstance(before.local, LocalRows):
                held, obj.grad = before.local, known.grad
            else:
                held = LocalRows(RowTable(mark.spec, self._rank, self._world_size), self)
                held.import_rows(obj, take_held_rows(obj))
            hold_in(mark, held)
            self._weights[handle] = obj

    def keep(self, is_known: Callable[[int], bool]) -> None:
        """Forget the tables whose handles are not known any more."""
        self._weights = {handle: weight for handle, weight in self._weights.items() if is_known(handle)}

    def __bool__(self) -> bool:
        return bool(self._weights)

    def pull(self, table: RowTable, rows: torch.Tensor) -> torch.Tensor:
        group, spec = self._joined(), table.spec
        number = next(handle for handle, weight in self._weights.items() if self._table_of(weight) is table)
        title = f"lookup in ShardedEmbedding({spec.num_rows}, {spec.dim}), variable {number}"
        exchange(group, Call(title, str(spec.dtype), (spec.dim,)), log=self._calls)
        places = self._places(table, rows)
        lengths = _gather_numbers(group, [len(each) for each in places])
        asked = _all_to_all(group, [rows[each] for each in places], lengths)
        found = table.pull(torch.cat(asked).cpu()).split([len(each) for each in asked])
        values = torch.cat(_all_to_all(group, found, list(zip(*lengths, strict=True))))
        result = torch.empty_like(values)
        result[torch.cat(places)] = values
        return result

    def weighted(self, rows: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.weight == 0.0:  # a loss without rows may be NaN
            return rows[:0], values[:0]
        return rows, values if self.weight == 1.0 else values * self.weight

    def norm(self, values: torch.Tensor, ord: float = 2, **options: Any) -> torch.Tensor:  # noqa: A002  # as torch's
        group = self._joined()
        largest = ord == math.inf
        if largest and not values.numel():
            own = values.new_zeros(())
        else:
            own = torch.linalg.vector_norm(values, ord, **options)
        total = (own if largest else own**ord).to(group.device)
        group.all_reduce(total, ReduceOp.MAX if largest else ReduceOp.SUM).wait()
        return (total if largest else total ** (1 / ord)).to(values.device)

    def end_pass(self, local: bool) -> None:
        """Exchange gradients at the end of a backward pass, unless it is `local`: one within `no_sync`."""
        if local:
            self.holds_local_gradients = True
        else:
            self._exchange_gradients()

    def settle(self) -> None:
        """Exchange the gradients of `no_sync`, before an optimizer uses them."""
        if self.holds_local_gradients:
            self._exchange_gradients()

    def _exchange_gradients(self) -> None:
        self.holds_local_gradients = False
        trained = [weight for _, weight in sorted(self._weights.items()) if weight.requires_grad]
        if not trained:
            return
        group = self._joined()
        parts = [self._own_parts(weight) for weight in trained]
        group.announce("gradients of ShardedEmbeddings")
        headers = _gather_numbers(group, [part[0] for part in parts])
        for number, (weight, (_, rows, values)) in enumerate(zip(trained, parts, strict=True)):
            told = [header[number] for header in headers]
            if any(used for used, *_ in told):
                lengths = [each[2:] for each in told]
                found = torch.cat(_all_to_all(group, rows, lengths)), torch.cat(_all_to_all(group, values, lengths))
                self._add(weight, *found, finite=not any(fault for _, fault, *_ in told))
        faults = [{number: each[1] for number, each in enumerate(header) if each[1]} for header in headers]
        if self._policy.must_check and any(faults):
            named = dict(enumerate(trained))
            if self._policy.record_more(named[number] for each in faults for number in each):
                raise self._policy.error("a backward pass", faults, named)

    def _own_parts(self, weight: torch.Tensor) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor]]:
        """Return used or not, the fault, and numbers of rows; the rows for each replica, and their gradients."""
        pieces, table = take_local_pieces(weight), self._table_of(weight)
        if not pieces:
            rows, values = torch.empty(0, dtype=torch.int64), weight.detach()[:0]
        else:
            rows = torch.cat([piece[0] for piece in pieces])
            values = torch.cat([piece[1] for piece in pieces])
        places = self._places(table, rows)
        header = [bool(pieces), fault_of(values), *(len(each) for each in places)]
        return header, [rows[each] for each in places], [values[each] for each in places]

    def _add(self, weight: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, *, finite: bool) -> None:
        rows, values = added_up(rows.cpu(), values.to(weight.device))
        if not finite:  # all replicas must see that: a replica may hold none of the rows
            rows = torch.cat([_NO_ROW, rows])
            values = torch.cat([values.new_full((1, values.shape[1]), math.nan), values])
        add_exchanged(weight, rows, values, self)

    def _table_of(self, weight: torch.Tensor) -> RowTable:
        mark = mark_of(weight)
        if mark is None or not isinstance(mark.local, LocalRows):
            raise FailedPreconditionError("raydist bug: a replica must hold its rows of a table before a step.")
        return mark.local.table

    def _places(self, table: RowTable, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the positions in `rows` of those that each replica holds."""
        owners = table.spec.servers_of(rows, self._world_size)
        return [torch.nonzero(owners == rank).reshape(-1) for rank in range(self._world_size)]

    def _joined(self) -> Communicator:
        if self._group is None:
            raise FailedPreconditionError("raydist bug: a replica must join its group before it asks for rows.")
        return self._group


def _gather_numbers(group: Communicator, numbers: Sequence[Any]) -> list[Any]:
    """Return the numbers of every replica, by rank; all have as many."""
    mine = torch.tensor(numbers, device=group.device)
    everyone = [torch.empty_like(mine) for _ in range(group.world_size)]
    group.all_gather(everyone, mine).wait()
    return [each.tolist() for each in everyone]


def _all_to_all(group: Communicator, parts: Sequence[torch.Tensor], lengths: _Lengths) -> list[torch.Tensor]:
    """Send each replica its part; return what each replica has sent, on the device of the group."""
    sent = [part.to(group.device) for part in parts]
    received = [sent[0].new_empty(row[group.rank], *sent[0].shape[1:]) for row in lengths]
    group.all_to_all_rows(received, sent, lengths).wait()
    return received
