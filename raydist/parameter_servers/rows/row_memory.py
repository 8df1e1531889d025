"""What an optimizer remembers of rows, and what that is before it has seen one: found by trial. Pure."""

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
    """What one kind of optimizer remembers.

    Attributes:
        rows: Of each value of a row, and what that is at first: by name a tensor without dimensions.
        scalars: Of the parameter as a whole, and what that is at first.
        sparse: It takes sparse gradients only.

    >>> memory = RowMemory.of(torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}, torch.float32)
    >>> memory.rows, list(memory.scalars)
    ({'sum': tensor(0.5000)}, ['step'])
    """

    rows: Mapping[str, torch.Tensor]
    scalars: Mapping[str, Any]
    sparse: bool

    @staticmethod
    def of(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], dtype: torch.dtype) -> RowMemory:
        """Try it out on two rows.

        Args:
            kind: Class of the optimizer.
            options: Of its group.
            dtype: Of the rows.

        Raises:
            InvalidArgumentError: Its step on some rows is not the same step, whatever the other rows do.
        """
        causes: list[Exception] = []
        for sparse in (False, True):  # some refuse, each in its own way, what is not sparse
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
    """An optimizer of one parameter with the options of a group, those that its constructor does not know included."""
    known = inspect.signature(kind).parameters
    arguments = {name: value for name, value in options.items() if name in known and name != "params"}
    return kind([{"params": [parameter], **options}], **arguments)


def sparse_gradient(gradients: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter of which every row has one, as a sparse tensor."""
    rows = torch.arange(len(gradients)).unsqueeze(0)
    return torch.sparse_coo_tensor(rows, gradients, gradients.shape, is_coalesced=True, check_invariants=False)


@final
class _Noting(dict[str, Any]):
    """The state of a parameter; `first` is what an optimizer set a name to for the first time."""

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
    """Two rows without a gradient show what is there at first; then one row alone must step as it does with another."""
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
    """Values after one step, and the optimizer's state."""
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
    """Tell what is remembered of each value from what is remembered once."""
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
