"""An optimizer's step on some rows of a table, and the optimizer's state of each row.

The optimizer is torch's own, over one parameter that holds the rows of the step: their values and states are gathered,
the optimizer steps, and both are written back. Rows without a gradient are not touched, so nothing decays there:
"lazy", as in torch.optim.SparseAdam. A state that is one number (the count of steps) is kept once for the table.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch

from raydist.parameter_servers.rows.row_adam import stand_in_for
from raydist.parameter_servers.rows.row_index import GrowingRows
from raydist.parameter_servers.rows.row_memory import RowMemory, make_optimizer, sparse_gradient

__all__ = ["LazyUpdate", "optimizer_name"]


def optimizer_name(kind: type[torch.optim.Optimizer]) -> str:
    """Return the name of an optimizer class in the state of a table.

    >>> optimizer_name(torch.optim.SGD)
    'torch.optim.sgd.SGD'
    """
    return f"{kind.__module__}.{kind.__qualname__}"


@final
class LazyUpdate:
    """One optimizer of one table.

    Args:
        values: Values of the table's rows.
    """

    def __init__(self, values: GrowingRows) -> None:
        self._values = values
        self._parameter = torch.nn.Parameter(values.values[:0])
        self._optimizer: torch.optim.Optimizer | None = None
        self._options: dict[str, Any] = {}
        self._memory = RowMemory({}, {}, sparse=False)
        self._rows: dict[str, GrowingRows] = {}
        self._scalars: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        """Size of the state in bytes."""
        return sum(held.num_bytes for held in self._rows.values())

    def prepare(self, kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Return an optimizer of this kind with these options, made at the first call.

        Raises:
            InvalidArgumentError: The optimizer cannot step on some rows of a table.
        """
        if self._optimizer is None or options != self._options:
            if self._optimizer is None or _form(options) != _form(self._options):
                self._memory = RowMemory.of(stand_in_for(kind), options, self._values.values.dtype)
                self._optimizer = make_optimizer(stand_in_for(kind), self._parameter, options)
            self._optimizer.param_groups[0].update(options)
            self._options = dict(options)
        return self._optimizer

    def apply(
        self,
        places: torch.Tensor,
        gradients: torch.Tensor,
        kind: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
    ) -> None:
        """Step on the rows at these positions, all different."""
        optimizer, parameter = self.prepare(kind, options), self._parameter
        remembered = self._remembered()
        state = {key: rows.take(places) for key, rows in remembered.items()}
        state.update(self._scalars)
        parameter.data = self._values.take(places)
        parameter.grad = sparse_gradient(gradients) if self._memory.sparse else gradients
        optimizer.state[parameter] = state
        optimizer.step()
        parameter.grad = None  # the gradient may lie in memory that the next request overwrites
        self._values.put(places, parameter.data)
        for key, rows in remembered.items():
            rows.put(places, state[key])
        self._scalars = {key: state[key] for key in self._scalars}

    def _remembered(self) -> dict[str, GrowingRows]:
        """Return the present optimizer's state of every row; new rows get the initial state."""
        for key, first in self._memory.rows.items():
            if key not in self._rows:
                self._rows[key] = GrowingRows(self._values.width, first.dtype)
            self._rows[key].extend(self._values.count, float(first))
        for key, scalar in self._memory.scalars.items():
            if key not in self._scalars:
                self._scalars[key] = copy.deepcopy(scalar)
        return {key: self._rows[key] for key in self._memory.rows}

    def state(self) -> dict[str, Any]:
        """Return copies of the state: of the rows, by position, and of the table."""
        self._remembered()
        rows = {key: _padded(held.values, self._values.count) for key, held in self._rows.items()}
        return {"rows": rows, "scalars": copy.deepcopy(self._scalars)}

    def load(self, rows: Mapping[str, Iterable[torch.Tensor]], scalars: Mapping[str, Any]) -> None:
        """Replace the state: of the rows by position, piece after piece, and of the table."""
        for key, pieces in rows.items():
            self._rows.pop(key, None)
            for values in pieces:
                if key not in self._rows:
                    self._rows[key] = GrowingRows(self._values.width, values.dtype)
                self._rows[key].append(values)
        self._scalars = copy.deepcopy(dict(scalars))


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return a copy with zeros for further rows: state that present options do not use has not grown with the rows."""
    return torch.cat([rows, rows.new_zeros((count - len(rows), rows.shape[1]))])


def _form(options: Mapping[str, Any]) -> object:
    """Return the part of the options that decides the state's entries: of a number only whether it is 0."""
    return {key: bool(value) if isinstance(value, int | float) else value for key, value in options.items()}
