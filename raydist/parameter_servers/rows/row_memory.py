"""The per-row state of an optimizer, and its initial values, found by trial."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.errors import InvalidArgumentError

__all__ = ["RowMemory", "make_optimizer", "sparse_gradient"]


@final
@dataclass(frozen=True, slots=True)
class RowMemory:
    """The layout of one optimizer's state.

    Attributes:
        rows: State of each value of a row, and its initial value: by name a tensor without dimensions.
        scalars: State of the whole parameter, and its initial value.
        sparse: The optimizer takes sparse gradients only.

    >>> memory = RowMemory.of(torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}, torch.float32)
    >>> memory.rows, list(memory.scalars)
    ({'sum': tensor(0.5000)}, ['step'])
    """

    rows: Mapping[str, torch.Tensor]
    scalars: Mapping[str, Any]
    sparse: bool

    @staticmethod
    def of(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], dtype: torch.dtype) -> RowMemory:
        """Find the layout by a trial on two rows.

        Args:
            kind: Class of the optimizer.
            options: Options of the optimizer's group.
            dtype: Dtype of the rows.

        Raises:
            InvalidArgumentError: The step on some rows depends on the other rows.
        """
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
