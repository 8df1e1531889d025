"""The rows of an embedding table on one server, and their restoration from saved states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, final

import numpy as np
import torch

from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.row_index import GrowingRows, index_for
from raydist.parameter_servers.row_optimizer import LazyUpdate, optimizer_name
from raydist.parameter_servers.table_spec import EmbeddingTableSpec, first_values


class RowColumn(Protocol):
    """A column of a state's rows that is not a tensor in memory, for example in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole column."""

    def pieces(self) -> Iterator[torch.Tensor]:
        """Return the rows piece by piece, in order. Raises, at the latest at the end, if the saved data is damaged."""


@final
@dataclass(frozen=True, slots=True)
class OwnRows:
    """One server's part of one state."""

    state: Mapping[str, Any]  # a result of `RowTable.state`; `RowColumn`s may stand for its tensors
    places: torch.Tensor  # positions of the server's rows in the state's columns, rising
    numbers: torch.Tensor  # row numbers of these rows

    def taken(self, column: torch.Tensor | RowColumn) -> Iterator[torch.Tensor]:
        """Return a column's values of these rows, piece by piece. Reads the whole column, which checks it all."""
        if tuple(column.shape) != tuple(self.state["values"].shape):
            raise InvalidArgumentError(
                f"What is remembered of rows must have the shape of their values, {tuple(self.state['values'].shape)}, "
                f"got {tuple(column.shape)}. Give what export_rows() returned."
            )
        begin = 0
        for piece in _pieces(column):
            first, last = torch.searchsorted(self.places, torch.tensor([begin, begin + len(piece)])).tolist()
            yield piece[self.places[first:last] - begin]
            begin += len(piece)


def own_rows(state: Mapping[str, Any], spec: EmbeddingTableSpec, server: int, num_servers: int) -> OwnRows:
    """Find a server's part of a state.

    Args:
        num_servers: Number of servers that have rows of the table now.

    >>> state = {"rows": torch.tensor([5, 1, 3]), "values": torch.zeros(3, 4), "optimizers": {}}
    >>> own_rows(state, EmbeddingTableSpec(8, 4), 0, 2).numbers.tolist()
    [5, 3]
    """
    _require_fitting(state, spec)
    places, numbers, begin = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)], 0
    for rows in _pieces(state["rows"]):
        _require_in_range(rows, spec)
        own = torch.nonzero(spec.servers_of(rows, num_servers) == server).reshape(-1)
        places.append(own + begin)
        numbers.append(rows[own])
        begin += len(rows)
    return OwnRows(state, torch.cat(places), torch.cat(numbers))


def _pieces(column: torch.Tensor | RowColumn) -> Iterator[torch.Tensor]:
    return iter((column,)) if isinstance(column, torch.Tensor) else column.pieces()


def _require_fitting(state: Mapping[str, Any], spec: EmbeddingTableSpec) -> None:
    rows, values = tuple(state["rows"].shape), tuple(state["values"].shape)
    if len(rows) != 1 or values != (rows[0], spec.dim):
        raise _refusal(spec, f"{math.prod(rows)} rows and values of shape {values}")


def _require_in_range(rows: torch.Tensor, spec: EmbeddingTableSpec) -> None:
    if rows.dtype != torch.int64:
        raise _refusal(spec, f"their numbers as {rows.dtype}")
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < spec.num_rows:
        raise _refusal(spec, f"{len(rows)} rows up to {int(rows.max())} from {int(rows.min())} on")


def _refusal(spec: EmbeddingTableSpec, found: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"Rows of table {spec.name!r} must be below {spec.num_rows} and have {spec.dim} values each, got {found}. Give "
        "what export_rows() of the same embedding returned."
    )


@final
class RowTable:
    """The rows of a table that one server has. A row exists, and takes memory, once it was touched.

    Args:
        num_servers: Number of servers that have rows of the table; see `EmbeddingTableSpec.servers_of`.
    """

    def __init__(self, spec: EmbeddingTableSpec, server: int = 0, num_servers: int = 1) -> None:
        self.spec = spec
        self._server, self._num_servers = server, num_servers
        self._clear()

    def _clear(self) -> None:
        self._index = index_for(self.spec.num_rows)
        self._values = GrowingRows(self.spec.dim, self.spec.dtype)
        self._updates: dict[str, LazyUpdate] = {}

    @property
    def num_rows(self) -> int:
        """Number of existing rows."""
        return self._values.count

    @property
    def num_bytes(self) -> int:
        """Size of the rows, of their optimizer states and of the index in bytes."""
        remembered = sum(update.num_bytes for update in self._updates.values())
        return self._values.num_bytes + self._index.num_bytes + remembered

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the positions of this server's rows among `rows`, rising; numbers below 0 are nobody's."""
        known = rows >= 0
        mine = (
            known if self._num_servers == 1 else known & (self.spec.servers_of(rows, self._num_servers) == self._server)
        )
        return torch.nonzero(mine).reshape(-1)

    def pull(self, rows: torch.Tensor) -> torch.Tensor:
        """Return copies of the present values of rows."""
        return self._values.take(self._places(rows))

    def push(
        self,
        rows: torch.Tensor,
        gradients: torch.Tensor,
        optimizer_kind: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
    ) -> None:
        """Apply an optimizer to some rows.

        A step whose rows all lie on other servers is pushed here, too, without rows, so that step counts agree.

        Args:
            rows: int64 numbers of rows of this server; gradients of a repeated row are added up.
            optimizer_kind: The optimizer's class; its state stays with the rows.
            options: Options of the optimizer's group: everything but `params`.
        """
        rows, gradients = added_up(rows, gradients.to(self.spec.dtype))
        update = self._update(optimizer_name(optimizer_kind))
        update.prepare(optimizer_kind, options)
        update.apply(self._places(rows), gradients, optimizer_kind, options)

    def require_optimizer(self, optimizer_kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
        """Raise InvalidArgumentError unless `push` accepts this optimizer."""
        self._update(optimizer_name(optimizer_kind)).prepare(optimizer_kind, options)

    def _update(self, name: str) -> LazyUpdate:
        if name not in self._updates:
            self._updates[name] = LazyUpdate(self._values)
        return self._updates[name]

    def _places(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the positions of rows; missing rows are made."""
        numbers = rows.numpy()
        places = self._index.find(numbers)
        absent = np.flatnonzero(places < 0)
        if len(absent):
            new, which = np.unique(numbers[absent], return_inverse=True)
            made = self._index.add(new)
            self._values.append(first_values(self.spec, torch.from_numpy(new)))
            places[absent] = made[which]
        return torch.from_numpy(places)

    def state(self) -> dict[str, Any]:
        """Return copies of all existing rows, and of optimizer states: numbers, strings, tensors and dicts.

        Returns:
            "rows" (numbers), "values", and "optimizers": by name "rows" (by name one tensor, in the order of the
            rows) and "scalars".
        """
        optimizers = {name: update.state() for name, update in self._updates.items()}
        rows = torch.from_numpy(self._index.rows().copy())
        return {"rows": rows, "values": self._values.values.clone(), "optimizers": optimizers}

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Replace all rows by this server's rows of these states.

        Args:
            states: Results of `state` on every server, of any number of servers. Columns may be `RowColumn`s.
        """
        found = [own_rows(state, self.spec, self._server, self._num_servers) for state in states]
        self._clear()
        for own in found:
            self._take(own)
        for name in {name for state in states for name in state["optimizers"]}:
            self._remember(name, found)

    def anew(self) -> RowTable:
        """Return an empty table for the same rows."""
        return RowTable(self.spec, self._server, self._num_servers)

    def _take(self, own: OwnRows) -> None:
        rows = own.numbers.numpy()
        if not len(rows):  # the server that has these rows reads them
            return
        if len(np.unique(rows)) < len(rows) or bool((self._index.find(rows) >= 0).any()):
            raise InvalidArgumentError(
                f"Each row of table {self.spec.name!r} must be in one of the states, some are in several. Give what "
                "export_rows() returned, once."
            )
        self._index.add(rows)
        for values in own.taken(own.state["values"]):
            self._values.append(values)

    def _remember(self, name: str, found: Sequence[OwnRows]) -> None:
        """Load the rows' optimizer states; of the table's, the one with the most steps."""
        held = [(own.state["optimizers"].get(name), own) for own in found if len(own.numbers)]
        everyone = [own.state["optimizers"][name] for own in found if name in own.state["optimizers"]]
        keys = {key for remembered in everyone for key in remembered["rows"]}
        if any(remembered is None or remembered["rows"].keys() != keys for remembered, _ in held):
            raise InvalidArgumentError(
                f"All states of table {self.spec.name!r} must hold what {name} remembers, some do not. Give what "
                "export_rows() returned, whole."
            )
        rows = {key: _taken(key, held) for key in keys}
        furthest = max(everyone, key=lambda remembered: float(remembered["scalars"].get("step", 0)))
        self._update(name).load(rows, furthest["scalars"])


def _taken(key: str, held: Sequence[tuple[Any, OwnRows]]) -> Iterator[torch.Tensor]:
    """Return the optimizer state of rows, one saved state's after the other's."""
    return chain.from_iterable(own.taken(remembered["rows"][key]) for remembered, own in held)


def added_up(rows: torch.Tensor, gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row once, with the sum of its gradients."""
    if len(rows) < 2 or bool((rows[1:] > rows[:-1]).all()):
        return rows, gradients
    unique, places = torch.unique(rows, return_inverse=True)
    return unique, gradients.new_zeros((len(unique), gradients.shape[1])).index_add_(0, places, gradients)
