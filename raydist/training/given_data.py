"""Data arguments of fit, evaluate and predict: datasets, arrays, torch DataLoaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.nest import map_structure
from raydist.dataset import Dataset
from raydist.distributed_dataset import DistributedDataset
from raydist.options import Options
from raydist.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from raydist.context.strategy import Strategy

BATCH_SIZE = 32
"""Default rows of a global batch of arrays; Keras's default."""


def distributed(
    strategy: Strategy,
    x: Any,
    y: Any = None,
    batch_size: Any = None,
    dataset: Any = None,
    *,
    what: str = "fit",
    own_loss: bool = False,
    shuffle: bool = False,
) -> DistributedDataset:
    """Return the data arguments of `fit`, `evaluate` or `predict`, called `what` in messages, as a distributed dataset.

    With `own_loss` the module computes its loss: arrays x need no y, because their dict contains the targets. Arrays
    are shuffled with `shuffle`. `dataset` is the former name of `x`.
    """
    if (x is None) == (dataset is None):
        raise InvalidArgumentError(f"{what} takes its data once, as x, got {x!r:.80} and {dataset!r:.80}.")
    _require_kinds(y, batch_size, what)
    given = x if dataset is None else dataset
    if isinstance(given, Dataset | DistributedDataset | DataLoader):
        _require_no_arrays(given, y, batch_size)
    if isinstance(given, DistributedDataset):
        return given
    if isinstance(given, DataLoader):
        given = Dataset.from_torch(given)
    elif not isinstance(given, Dataset):
        given = _batched(_element(given, y, what, own_loss=own_loss), batch_size or BATCH_SIZE, shuffle=shuffle)
    view: DistributedDataset = strategy.distribute_dataset(given)
    return view


def held_out_data(
    strategy: Strategy, validation_data: Any, batch_size: Any, *, own_loss: bool = False
) -> DistributedDataset | None:
    """Return `validation_data` of `fit`, data or a tuple (x, y) of arrays, as a distributed dataset, or None."""
    if validation_data is None:
        return None
    if not isinstance(validation_data, tuple):
        size = batch_size if own_loss and isinstance(validation_data, Mapping) else None
        return distributed(strategy, validation_data, batch_size=size, what="validation", own_loss=own_loss)
    if len(validation_data) == 2:
        return distributed(strategy, *validation_data, batch_size=batch_size, what="validation")
    raise InvalidArgumentError(
        f"validation_data must be a dataset or arrays (x, y), got a tuple of {len(validation_data)}. With weights: "
        "Dataset.from_tensor_slices((x, y, weights)).batch(n)."
    )


def _batched(element: Any, batch_size: int, *, shuffle: bool) -> Dataset:
    rows = Dataset.from_tensor_slices(element)
    if not shuffle:
        return rows.batch(batch_size)
    # A seed of the options, not of the shuffle, because a checkpoint's position includes the options' seed.
    seed = int(torch.empty((), dtype=torch.int64).random_())  # follows torch.manual_seed
    return rows.global_shuffle().batch(batch_size).with_options(Options(seed=seed))


def _element(x: Any, y: Any, what: str, *, own_loss: bool) -> Any:
    x = _arrays(x, "x")
    if own_loss and y is None:
        return x
    if y is not None:
        return x, _arrays(y, "y")
    if what == "predict":
        return (x,)
    raise InvalidArgumentError(
        f"{what} needs targets beside an array x, got none: {what}(x, y). A dataset's elements hold them."
    )


def _require_kinds(y: Any, batch_size: Any, what: str) -> None:
    if isinstance(y, int):
        raise InvalidArgumentError(
            f"y must be the targets that belong to x, got {y!r}. Give a number of epochs by its name: epochs={y!r}."
        )
    if _holds_callbacks(y) or _holds_callbacks(batch_size):
        raise InvalidArgumentError(f"{what} takes callbacks by their name: callbacks=[...].")
    if batch_size is not None and not (isinstance(batch_size, int) and batch_size >= 1):
        raise InvalidArgumentError(f"batch_size must be a number of rows >= 1, got {batch_size!r}.")


def _require_no_arrays(given: Any, y: Any, batch_size: Any) -> None:
    for name, value, then in [
        ("y", y, "Its elements are (x, y)."),
        ("batch_size", batch_size, "It is batched already, by the global batch size."),
    ]:
        if value is not None:
            raise InvalidArgumentError(
                f"{name} belongs to arrays, and a {type(given).__name__} comes without it, got "
                f"{name}={value!r:.60}. {then}"
            )


def _holds_callbacks(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and isinstance(next(iter(value), None), Callback)


def _arrays(nest: Any, name: str) -> Any:
    """Return the nest with arrays detached from autograd. Raise SpecError unless all leaves are arrays."""

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().cpu()
        if hasattr(leaf, "__array__") and np.ndim(leaf):
            return np.asarray(leaf)
        raise SpecError(
            f"{name} must be a raydist.Dataset of global batches, a torch DataLoader, or arrays or tensors of rows, "
            f"got {type(leaf).__name__}. A torch Dataset: rd.Dataset.from_torch(dataset).batch({BATCH_SIZE})."
        )

    return map_structure(plain, nest)
