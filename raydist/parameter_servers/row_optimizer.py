"""An optimizer's step on some rows of a table, and the optimizer's state of each row.

The optimizer is torch's own, over one parameter that holds the rows of the step: their values and states are gathered,
the optimizer steps, and both are written back. Rows without a gradient are not touched, so nothing decays there:
"lazy", as in torch.optim.SparseAdam. A state that is one number (the count of steps) is kept once for the table.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.row_index import GrowingRows


@final
class RowAdam(torch.optim.Optimizer):
    """The steps of `torch.optim.SparseAdam`, with the same options and the same state."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is given to it
        """Do one step; the parameters have gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                _adam_step(parameter, self.state[parameter], group)


def _adam_step(parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
    state["step"] += 1
    gradient, (beta1, beta2) = parameter.grad, group["betas"]
    if gradient is None or not len(gradient):
        return
    if group["maximize"]:
        gradient = -gradient
    mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    size = float(group["lr"]) * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
    parameter.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-size)


def kind_for_rows(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a class with the same steps that cost less: for SparseAdam a seventh on 4,096 rows."""
    return RowAdam if kind is torch.optim.SparseAdam else kind


@final
@dataclass(frozen=True, slots=True)
class RowMemory:
    """The layout of one optimizer's state.

    >>> memory = RowMemory.of(torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}, torch.float32)
    >>> memory.rows, list(memory.scalars)
    ({'sum': tensor(0.5000)}, ['step'])
    """

    # state of each value of a row, and its initial value: by name a tensor without dimensions
    rows: Mapping[str, torch.Tensor]
    scalars: Mapping[str, Any]  # state of the whole parameter, and its initial value
    sparse: bool  # the optimizer takes sparse gradients only

    @staticmethod
    def of(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], dtype: torch.dtype) -> RowMemory:
        """Find the layout by a trial on two rows."""
        causes: list[Exception] = []
        for sparse in (False, True):  # some optimizers refuse dense gradients, each with its own error
            try:
                return _tried(kind, options, dtype, sparse=sparse)
            except InvalidArgumentError:
                raise
            except Exception as error:
                causes.append(error)
        raise _refusal(kind, f"it does not step on them: {causes[0]}") from causes[0]


def make_optimizer(
    kind: type[torch.optim.Optimizer], parameter: torch.nn.Parameter, options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Return an optimizer of one parameter with a group's options, including those unknown to its constructor."""
    known = inspect.signature(kind).parameters
    arguments = {name: value for name, value in options.items() if name in known and name != "params"}
    return kind([{"params": [parameter], **options}], **arguments)


def sparse_gradient(gradients: torch.Tensor) -> torch.Tensor:
    """Return the gradient as a sparse tensor that has every row."""
    rows = torch.arange(len(gradients)).unsqueeze(0)
    return torch.sparse_coo_tensor(rows, gradients, gradients.shape, is_coalesced=True, check_invariants=False)


@final
class _Noting(dict[str, Any]):
    """A parameter's state that records the first value of each name in `first`."""

    def __init__(self, present: Mapping[str, Any]) -> None:
        super().__init__(present)
        self.first: dict[str, Any] = copy.deepcopy(dict(present))

    def __setitem__(self, key: str, value: Any) -> None:
        self.first.setdefault(key, copy.deepcopy(value))
        super().__setitem__(key, value)

    def update(self, *others: Any, **named: Any) -> None:
        for key, value in dict(*others, **named).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]


def _tried(
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any], dtype: torch.dtype, *, sparse: bool
) -> RowMemory:
    """Find the initial state by zero gradients, then check that one row alone steps as it does beside another."""
    values = torch.tensor([[0.5, -1.0, 0.25], [1.5, -0.5, 0.75]], dtype=dtype)
    gradient = torch.tensor([[0.25, 0.5, -0.75], [-0.5, 1.0, 0.125]], dtype=dtype)
    _, noted = _step(kind, options, values, torch.zeros_like(gradient), sparse=sparse)
    memory = _sorted_out(kind, noted.first, values.shape, sparse=sparse)
    together, _ = _step(kind, options, values, gradient, sparse=sparse)
    given = {key: torch.full_like(values[:1], float(first), dtype=first.dtype) for key, first in memory.rows.items()}
    alone, _ = _step(kind, options, values[:1], gradient[:1], {**memory.scalars, **given}, sparse=sparse)
    if not torch.allclose(alone, together[:1]):
        raise _refusal(kind, "with these options a row's step depends on others, or its first step is of another kind")
    return memory


def _step(
    kind: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    values: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, Any] | None = None,
    *,
    sparse: bool,
) -> tuple[torch.Tensor, _Noting]:
    """Return the values after one step, and the optimizer's state."""
    parameter = torch.nn.Parameter(values.clone())
    optimizer = make_optimizer(kind, parameter, options)
    noted = _Noting(optimizer.state.get(parameter, {}) if state is None else copy.deepcopy(dict(state)))
    optimizer.state[parameter] = noted
    parameter.grad = sparse_gradient(gradient.clone()) if sparse else gradient.clone()
    optimizer.step()
    return parameter.data, noted


def _sorted_out(
    kind: type[torch.optim.Optimizer], first: Mapping[str, Any], shape: torch.Size, *, sparse: bool
) -> RowMemory:
    """Separate per-value state from state of the whole parameter."""
    rows: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    for key, value in first.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            scalars[key] = value
        elif value.shape == shape and bool((value == value.flatten()[0]).all()):
            rows[key] = value.flatten()[0].clone()
        else:
            raise _refusal(kind, f"its {key!r} is not one number for each value, the same for all of them at first")
    return RowMemory(rows, scalars, sparse)


def _refusal(kind: type[torch.optim.Optimizer], why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"The optimizer of an embedding table must be able to step on some of its rows alone; {kind.__name__} cannot: "
        f"{why}. Give the table an optimizer of its own: SGD, Adagrad, SparseAdam, Adam, RMSprop."
    )


def optimizer_name(kind: type[torch.optim.Optimizer]) -> str:
    """Return the name of an optimizer class in the state of a table.

    >>> optimizer_name(torch.optim.SGD)
    'torch.optim.sgd.SGD'
    """
    return f"{kind.__module__}.{kind.__qualname__}"


@final
class LazyUpdate:
    """One optimizer of one table."""

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
        """Return an optimizer of this kind with these options, made at the first call."""
        if self._optimizer is None or options != self._options:
            if self._optimizer is None or _form(options) != _form(self._options):
                self._memory = RowMemory.of(kind_for_rows(kind), options, self._values.values.dtype)
                self._optimizer = make_optimizer(kind_for_rows(kind), self._parameter, options)
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
