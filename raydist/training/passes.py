"""One iteration over a dataset, seen from the driver: executions with hooks around them."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from raydist.dataset import Dataset
from raydist.distributed_dataset import DistributedDataset
from raydist.errors import InvalidArgumentError, SpecError
from raydist.training.executions import Executions
from raydist.values import INFINITE_CARDINALITY

if TYPE_CHECKING:
    from raydist.context.strategy import Strategy

__all__ = [
    "distributed",
    "in_evaluation_mode",
    "num_batches",
    "num_steps",
    "opened",
    "require_at_least",
    "require_finite",
    "require_steps",
    "run_pass",
    "warn_out_of_data",
]


def run_pass(
    calls: Executions,
    *,
    begin: Callable[[int], None],
    end: Callable[[int], None],
    limit: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
    start: int = 0,
) -> int:
    """Execute until `limit` steps, the end of the data or `stopped()`.

    Args:
        calls: Calls to execute.
        begin: Called with the index of the next step, before its execution.
        end: Called with the number of steps done, after an execution.
        limit: Maximum number of steps; None for all.
        stopped: Called before each execution; True ends the iteration.
        start: Number of steps done before.

    Returns:
        The number of steps done, including `start`.
    """
    done = start
    while (limit is None or done < limit) and not stopped() and calls.ready():
        begin(done)
        steps = calls.execute(None if limit is None else limit - done)
        if steps == 0:
            break
        done += steps
        end(done)
    return done


def distributed(strategy: Strategy, dataset: Any) -> DistributedDataset:
    """Return a DistributedDataset: distribute a Dataset, or return a DistributedDataset unchanged."""
    if isinstance(dataset, DistributedDataset):
        return dataset
    if isinstance(dataset, Dataset):
        view: DistributedDataset = strategy.distribute_dataset(dataset)
        return view
    raise SpecError(
        f"Data must be a raydist.Dataset batched by the global batch size, got {type(dataset).__name__}. "
        "Arrays: Dataset.from_tensor_slices((x, y)).batch(32). A torch Dataset: Dataset.from_torch(dataset).batch(32)."
    )


@contextlib.contextmanager
def opened(data: DistributedDataset) -> Iterator[Iterator[Any]]:
    """Open an iterator over `data`, and close it at the end of the `with` block."""
    iterator: Any = iter(data)
    try:
        yield iterator
    finally:
        iterator.close()


def num_batches(data: DistributedDataset) -> int | None:
    """Return the number of batches of one iteration over the data, if known."""
    known = data.cardinality()
    return known if known >= 0 else None


def num_steps(data: DistributedDataset, limit: int | None) -> int | None:
    """Return the number of steps of an iteration over at most `limit` batches, if known."""
    known = num_batches(data)
    return known if limit is None or (known is not None and known < limit) else limit


def warn_out_of_data(name: str, wanted: int, steps: int, then: str) -> None:
    """Warn once, at the user's line, that data ended before the number of steps requested by argument `name`."""
    level = 1
    while sys._getframe(level).f_globals.get("__name__", "").startswith("raydist."):
        level += 1
    warnings.warn(
        f"The dataset ran out of batches: {name}={wanted}, but only {steps} were left {then} "
        f"Leave {name} out for whole passes, or add .repeat() to the dataset.",
        stacklevel=level + 1,
    )


def require_at_least(name: str, value: int | None, least: int = 1) -> None:
    """Raise InvalidArgumentError unless `value` is a number >= `least`, or None."""
    if value is not None and value < least:
        raise InvalidArgumentError(f"{name} must be >= {least}, got {value!r}.")


def require_finite(data: DistributedDataset, what: str, steps: int | None = None) -> None:
    """Raise InvalidArgumentError for an infinite dataset without a number of steps."""
    if steps is None and data.cardinality() == INFINITE_CARDINALITY:
        raise InvalidArgumentError(f"{what} needs a dataset that ends, got an infinite one. Add .take(num_batches).")


def require_steps(steps: int, what: str) -> None:
    """Raise InvalidArgumentError for a dataset without batches."""
    if steps == 0:
        raise InvalidArgumentError(
            f"The dataset for {what} must have at least one batch, got none. "
            "Check its filters, take / skip, drop_remainder, and that its files are not empty."
        )


@contextlib.contextmanager
def in_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put the module into evaluation mode for the `with` block; then restore every submodule's training flag."""
    flags = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, flag in flags:
            part.training = flag
