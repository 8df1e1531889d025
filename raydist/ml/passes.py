"""Passes over a dataset: each replica folds its pieces of all batches into a few tensors, the driver joins these.

An estimator describes a pass by a function of one batch (`Rows`) and a state (the present model), which returns a dict
of float64 tensors, and by a function that joins two such dicts: by default, addition. A pass needs the memory of a
batch, the state and the totals. Results do not depend on the number of replicas, except for rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from raydist.context.strategy import Strategy
from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.nest import leaves_in, map_structure
from raydist.core.values import INFINITE_CARDINALITY
from raydist.dataset import Dataset
from raydist.options import RunOptions
from raydist.pipelines.elements.small_floats import dtype_kind
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.sources.torch_datasets import is_torch_loader
from raydist.strategies.functions import get_replica_context, get_strategy
from raydist.strategies.parameter_server import ParameterServerStrategy

Totals = dict[str, torch.Tensor]
State = dict[str, torch.Tensor]

_KEEP_ALL = RunOptions(empty_batch="zero_rows")  # a replica whose last piece is empty still has totals of the others


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """A piece of a batch in float64: inputs (n, d), targets (n,) or (n, t) if there are any, weights (n,)."""

    x: torch.Tensor
    y: torch.Tensor | None
    weight: torch.Tensor

    @staticmethod
    def of(element: Any, device: torch.device) -> Rows:
        """Return an element x, (x,), (x, y) or (x, y, sample_weight) of a dataset of batches.

        >>> Rows.of((torch.ones(2, 3), torch.tensor([0, 1])), torch.device("cpu")).weight
        tensor([1., 1.], dtype=torch.float64)
        """
        parts = element if isinstance(element, tuple) else (element,)
        x, *others = (torch.as_tensor(part, device=device).to(torch.float64) for part in parts)
        weight = others[1] if len(others) > 1 else torch.ones(len(x), dtype=torch.float64, device=device)
        return Rows(x, others[0] if others else None, weight)

    @property
    def targets(self) -> torch.Tensor:
        """The targets, which must be there."""
        assert self.y is not None  # noqa: S101 - `batches_of` has checked the elements
        return self.y

    def is_valid(self) -> bool:
        """Return False if an input, target or weight is NaN or infinite, or a weight is negative."""
        parts = (self.x, self.weight) if self.y is None else (self.x, self.y, self.weight)
        return all(bool(part.sum().isfinite()) for part in parts) and bool((self.weight >= 0).all())


def added(a: Totals, b: Totals) -> Totals:
    """Add totals.

    >>> added({"n": torch.tensor(1)}, {"n": torch.tensor(2)})
    {'n': tensor(3)}
    """
    return {key: value + b[key] for key, value in a.items()}


@final
class Reader:
    """Reads the rows of a dataset of batches on a strategy, once for each call. The constructor starts nothing."""

    def __init__(self, strategy: Strategy, dataset: Dataset) -> None:
        self._strategy = strategy
        self._data = strategy.distribute_dataset(dataset)
        self._calls: dict[Any, Callable[..., Any]] = {}  # results of one function object have one structure

    def fold(
        self,
        of: Callable[[Rows, State], Totals],
        state: State | None = None,
        merge: Callable[[Totals, Totals], Totals] = added,
    ) -> Totals:
        """Return the `merge` of `of(rows, state)` over all rows, on the CPU. Blocks.

        `of` and `merge` are functions that can be pickled. `of` must accept zero rows.
        """
        call = self._calls.setdefault((of, merge), functools.partial(_fold, of, merge))
        _, parts = self.run(call, state or {})
        if not all(bool(valid) for _, valid in parts):
            raise InvalidArgumentError(
                "Inputs, targets and weights must be finite numbers, and weights >= 0, got others. Fill missing values "
                "in a map."
            )
        totals: Totals = functools.reduce(merge, (part for part, _ in parts))
        return totals

    def run(self, call: Callable[..., Any], *args: Any) -> tuple[Any, list[Any]]:
        """Call `call(iterator, *args)` on all replicas. Blocks until they are done.

        Returns:
            The result as `Strategy.run` returns it, and that of each replica in rank order, on the CPU.
        """
        iterator = iter(self._data)
        try:
            result = self._strategy.run(call, args=(iterator, *args), options=_KEEP_ALL)
            return result, [on_device(part, torch.device("cpu")) for part in self._strategy.local_results(result)]
        finally:
            iterator.close()

    def outputs(self, of: Callable[[torch.Tensor, State], torch.Tensor], state: State) -> torch.Tensor:
        """Return `of(x, state)` for all rows, in their order. Blocks."""
        _, results = self.run(functools.partial(_outputs, of), state)
        pieces = [outputs.split(sizes.tolist()) for outputs, sizes in results]
        return torch.cat([piece for batch in zip(*pieces, strict=True) for piece in batch])


def _fold(
    of: Callable[[Rows, State], Totals],
    merge: Callable[[Totals, Totals], Totals],
    iterator: Iterator[Any],
    state: State,
) -> tuple[Totals, torch.Tensor]:
    device = get_replica_context().device
    state = on_device(state, device)
    total: Totals | None = None
    valid = True
    for element in iterator:
        rows = Rows.of(element, device)
        valid = valid and rows.is_valid()
        part = of(rows, state)
        total = part if total is None else merge(total, part)
    if total is None:
        raise InvalidArgumentError(_NO_ROWS)
    return total, torch.tensor(valid)


def _outputs(
    of: Callable[[torch.Tensor, State], torch.Tensor], iterator: Iterator[Any], state: State
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of all rows of a replica, and the number of rows of each of its batches."""
    device = get_replica_context().device
    state = on_device(state, device)
    found = [of(Rows.of(element, device).x, state) for element in iterator]
    if not found:
        raise InvalidArgumentError(_NO_ROWS)
    return torch.cat(found), torch.tensor([len(each) for each in found])


_NO_ROWS = "The dataset must have rows, got none. Check its filters, take / skip and files."


def on_device(nest: Any, device: torch.device) -> Any:
    """Return the tensors of a nest on a device."""
    return map_structure(lambda tensor: tensor.to(device), nest)


def strategy_of(given: Strategy | None) -> Strategy:
    """Return the strategy of an estimator: the given one, else that of the open scope, else one device."""
    strategy = get_strategy() if given is None else given
    if isinstance(strategy, ParameterServerStrategy) or not isinstance(strategy, Strategy):
        raise InvalidArgumentError(
            f"Estimators need a synchronous strategy, got {type(strategy).__name__}. Use rd.MirroredStrategy, "
            "rd.MultiWorkerMirroredStrategy or rd.OneDeviceStrategy."
        )
    return strategy


def is_dataset(x: Any) -> bool:
    """Return True for a Dataset or a torch DataLoader, False for arrays."""
    return isinstance(x, Dataset) or is_torch_loader(x)


def batches_of(
    x: Any, y: Any = None, sample_weight: Any = None, *, batch_size: int, supervised: bool = False
) -> Dataset:
    """Return the data arguments of `fit` or `score` as a dataset of batches, with targets if `supervised`.

    >>> batches_of(np.ones((5, 2)), batch_size=3).cardinality()
    2
    """
    if is_dataset(x):
        if y is not None or sample_weight is not None:
            raise InvalidArgumentError(
                "y and sample_weight belong to arrays. The elements of a dataset are x, (x, y) or (x, y, "
                "sample_weight)."
            )
        return _batched(x if isinstance(x, Dataset) else Dataset.from_torch(x), batch_size, supervised=supervised)
    if supervised and y is None:
        raise InvalidArgumentError("Targets must be given beside an array X, got none: fit(X, y).")
    columns = [array_of(x, "X", 2)]
    if y is not None or sample_weight is not None:
        columns.append(np.zeros(len(columns[0])) if y is None else array_of(y, "y", 1, 2))
    if sample_weight is not None:
        columns.append(array_of(sample_weight, "sample_weight", 1))
    return Dataset.from_tensor_slices(tuple(columns)).batch(batch_size)


def _batched(dataset: Dataset, batch_size: int, *, supervised: bool) -> Dataset:
    if dataset.cardinality() == INFINITE_CARDINALITY:
        raise InvalidArgumentError("The dataset must end, got an infinite one. Add .take(num_batches).")
    spec = dataset.element_spec
    parts = spec if isinstance(spec, tuple) else (spec,)
    are_numbers = all(isinstance(part, TensorSpec) and dtype_kind(part.dtype) in "biuf" for part in leaves_in(parts))
    if not 1 <= len(parts) <= 3 or len(leaves_in(parts)) != len(parts) or not are_numbers:
        raise SpecError(
            "Elements must be x, (x,), (x, y) or (x, y, sample_weight) with one tensor of numbers each, got "
            f"{spec}. Bring them into this form with dataset.map: several features are the columns of x."
        )
    if supervised and len(parts) < 2:
        raise SpecError(f"Elements must hold targets, (x, y) or (x, y, sample_weight), got {spec}.")
    shape = parts[0].shape
    if shape is None or len(shape) not in (1, 2):
        raise SpecError(f"The inputs of a row must be a vector, and those of a batch (rows, features), got {parts[0]}.")
    return dataset.batch(batch_size) if len(shape) == 1 else dataset


def array_of(values: Any, name: str, *num_dims: int) -> np.ndarray:
    """Return values as a numpy array with one of these numbers of dimensions; raise SpecError for others."""
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.ndim not in num_dims or array.dtype.kind not in "biuf":
        raise SpecError(
            f"{name} must be a dense array of numbers with {' or '.join(map(str, num_dims))} dimensions, or the data a "
            f"raydist.Dataset, got {type(values).__name__} of shape {array.shape} and dtype {array.dtype}."
        )
    return array
