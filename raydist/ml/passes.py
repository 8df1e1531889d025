"""Passes over a dataset: each replica folds its pieces of all batches into a few tensors, the driver joins these.

An estimator describes a pass by a function of one batch (`Rows`) and a state (the present model), which returns a dict
of float64 tensors, and by a function that joins two such dicts: by default, addition. A pass needs the memory of a
batch, the state and the totals. Results do not depend on the number of replicas, except for rounding.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from raydist.context.strategy import Strategy
from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.nest import leaves_in
from raydist.core.values import INFINITE_CARDINALITY
from raydist.dataset import Dataset
from raydist.options import RunOptions
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.sources.torch_datasets import is_torch_loader
from raydist.strategies.functions import get_replica_context, get_strategy
from raydist.strategies.parameter_server import ParameterServerStrategy

Totals = dict[str, torch.Tensor]
State = dict[str, torch.Tensor]
MAX_UNREAD = 8
"""Batches whose outputs are not read yet: reading them late keeps the replicas busy."""

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

    def is_finite(self) -> bool:
        """Return False if an input, target or weight is NaN or infinite."""
        parts = (self.x, self.weight) if self.y is None else (self.x, self.y, self.weight)
        return all(bool(part.sum().isfinite()) for part in parts)


def added(a: Totals, b: Totals) -> Totals:
    """Add totals.

    >>> added({"n": torch.tensor(1)}, {"n": torch.tensor(2)})
    {'n': tensor(3)}
    """
    return {key: value + b[key] for key, value in a.items()}


@final
class Reader:
    """Reads the rows of a dataset on a strategy, once for each call of `fold`. The constructor starts nothing.

    Args:
        strategy: The strategy whose replicas read.
        dataset: Global batches, see `batches_of`.
    """

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
        _, parts = self.run(call, state)
        if not all(bool(finite) for _, finite in parts):
            raise InvalidArgumentError(
                "Inputs, targets and weights must be finite numbers, got NaN or infinity. Fill missing values in a map."
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
            return result, [_on(torch.device("cpu"), part) for part in self._strategy.local_results(result)]
        finally:
            iterator.close()


def _fold(
    of: Callable[[Rows, State], Totals],
    merge: Callable[[Totals, Totals], Totals],
    iterator: Iterator[Any],
    state: State | None,
) -> tuple[Totals, torch.Tensor]:
    device = get_replica_context().device
    state = _on(device, state or {})
    total: Totals | None = None
    finite = True
    for element in iterator:
        rows = Rows.of(element, device)
        finite = finite and rows.is_finite()
        part = of(rows, state)
        total = part if total is None else merge(total, part)
    if total is None:
        raise InvalidArgumentError("The dataset must have rows, got none. Check its filters, take / skip and files.")
    return total, torch.tensor(finite)


def _on(device: torch.device, nest: Any) -> Any:
    """Return a tensor, or a tuple or dict of tensors, on a device."""
    if isinstance(nest, dict):
        return {key: _on(device, value) for key, value in nest.items()}
    if isinstance(nest, tuple):
        return tuple(_on(device, value) for value in nest)
    return nest.to(device)


def outputs(
    strategy: Strategy, data: Any, batch_size: int, of: Callable[[torch.Tensor, State], torch.Tensor], state: State
) -> np.ndarray:
    """Return `of(x, state)` for all rows of arrays or of a dataset, in order. Arrays are computed in this process."""
    if not isinstance(data, Dataset) and not is_torch_loader(data):
        blocks = torch.as_tensor(array_of(data, "X", 2), dtype=torch.float64).split(batch_size)
        return torch.cat([of(block, state) for block in blocks]).numpy()
    found: list[torch.Tensor] = []
    unread: deque[Any] = deque()

    def read() -> None:
        found.append(strategy.gather(unread.popleft(), axis=0).cpu())

    step = functools.partial(_output, of)
    for batch in strategy.distribute_dataset(batches_of(data, batch_size=batch_size)):
        unread.append(strategy.run(step, args=(batch, state)))
        if len(unread) > MAX_UNREAD:
            read()
    while unread:
        read()
    if not found:
        raise InvalidArgumentError("The dataset must have rows, got none. Check its filters, take / skip and files.")
    return torch.cat(found).numpy()


def _output(of: Callable[[torch.Tensor, State], torch.Tensor], batch: Any, state: State) -> torch.Tensor:
    device = get_replica_context().device
    return of(Rows.of(batch, device).x, _on(device, state))


def strategy_of(given: Strategy | None) -> Strategy:
    """Return the strategy of an estimator: the given one, else that of the open scope, else one device."""
    strategy = get_strategy() if given is None else given
    if isinstance(strategy, ParameterServerStrategy) or not isinstance(strategy, Strategy):
        raise InvalidArgumentError(
            f"Estimators need a synchronous strategy, got {type(strategy).__name__}. Use rd.MirroredStrategy, "
            "rd.MultiWorkerMirroredStrategy or rd.OneDeviceStrategy."
        )
    return strategy


def batches_of(
    x: Any, y: Any = None, sample_weight: Any = None, *, batch_size: int, supervised: bool = False
) -> Dataset:
    """Return a dataset of batches for the data arguments of `fit` or `score`.

    Args:
        x: A dataset of rows or of batches, a torch DataLoader, or an array (n, d).
        y: Targets of an array (n,) or (n, t); elements of a dataset hold them.
        sample_weight: Weights of the rows of an array.
        batch_size: Rows of a batch, unless x is batched.
        supervised: True if targets are needed.

    Raises:
        SpecError: The data have another form.
        InvalidArgumentError: The dataset is infinite, the numbers of rows differ, or targets are missing or too many.

    >>> batches_of(np.ones((5, 2)), batch_size=3).cardinality()
    2
    """
    if is_torch_loader(x):
        x = Dataset.from_torch(x)
    if isinstance(x, Dataset):
        return _batched(x, y, sample_weight, batch_size, supervised=supervised)
    if supervised and y is None:
        raise InvalidArgumentError("Targets must be given beside an array X, got none: fit(X, y).")
    columns = [array_of(x, "X", 2)]
    if y is not None or sample_weight is not None:
        columns.append(np.zeros(len(columns[0])) if y is None else array_of(y, "y", 1, 2))
    if sample_weight is not None:
        columns.append(array_of(sample_weight, "sample_weight", 1))
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise InvalidArgumentError(f"X, y and sample_weight must have equally many rows, got {lengths}.")
    return Dataset.from_tensor_slices(tuple(columns)).batch(batch_size)


def _batched(dataset: Dataset, y: Any, sample_weight: Any, batch_size: int, *, supervised: bool) -> Dataset:
    if y is not None or sample_weight is not None:
        raise InvalidArgumentError(
            "y and sample_weight belong to arrays. The elements of a dataset are x, (x, y) or (x, y, sample_weight)."
        )
    if dataset.cardinality() == INFINITE_CARDINALITY:
        raise InvalidArgumentError("The dataset must end, got an infinite one. Add .take(num_batches).")
    spec = dataset.element_spec
    parts = spec if isinstance(spec, tuple) else (spec,)
    x = parts[0]
    if not 1 <= len(parts) <= 3 or len(leaves_in(parts)) != len(parts) or not isinstance(x, TensorSpec):
        raise SpecError(
            f"Elements must be x, (x,), (x, y) or (x, y, sample_weight) with one tensor each, got {spec}. Bring them "
            "into this form with dataset.map: several features are the columns of x."
        )
    if supervised and len(parts) < 2:
        raise SpecError(f"Elements must hold targets, (x, y) or (x, y, sample_weight), got {spec}.")
    if x.shape is None or len(x.shape) not in (1, 2):
        raise SpecError(f"The inputs of a row must be a vector, and those of a batch (rows, features), got {x}.")
    return dataset.batch(batch_size) if len(x.shape) == 1 else dataset


def array_of(values: Any, name: str, *num_dims: int) -> np.ndarray:
    """Return values as a numpy array with one of these numbers of dimensions; raise SpecError for others."""
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.ndim not in num_dims or array.dtype.kind not in "biuf":
        raise SpecError(
            f"{name} must be a dense array of numbers with {' or '.join(map(str, num_dims))} dimensions, or the data a "
            f"raydist.Dataset, got {type(values).__name__} of shape {array.shape} and dtype {array.dtype}."
        )
    return array
