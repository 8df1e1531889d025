"""Data arguments of fit, evaluate and predict: datasets, arrays, torch DataLoaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch.utils.data import DataLoader

from raydist.dataset import Dataset
from raydist.distributed_dataset import DistributedDataset
from raydist.errors import InvalidArgumentError, SpecError
from raydist.nest import map_structure
from raydist.options import Options
from raydist.training.callbacks.callback import Callback
from raydist.training.passes import distributed

if TYPE_CHECKING:
    from raydist.context.strategy import Strategy

__all__ = ["GivenData", "held_out_data"]

BATCH_SIZE = 32
"""Default rows of a global batch of arrays; Keras's default."""


@final
@dataclass(frozen=True, slots=True)
class GivenData:
    """The data arguments of `fit`, `evaluate` or `predict`.

    Attributes:
        x: A Dataset or DistributedDataset of global batches, a DataLoader, or a nest of arrays.
        y: Targets for arrays: a nest of arrays.
        batch_size: Rows of a global batch of arrays.
        dataset: Former name of `x`.
        what: Name of the method, for messages.
        own_loss: The module computes its own loss: arrays x need no y, because their dict contains the targets.
    """

    x: Any
    y: Any = None
    batch_size: Any = None
    dataset: Any = None
    what: str = "fit"
    own_loss: bool = False

    def distributed(self, strategy: Strategy, *, shuffle: bool = False) -> DistributedDataset:
        """Return the data as a distributed dataset.

        Args:
            strategy: Strategy that distributes the data, unless it is distributed already.
            shuffle: Shuffle arrays.

        Raises:
            InvalidArgumentError: The arguments are incompatible; the message says what to write.
            SpecError: `x` or `y` has an unsupported type.
        """
        self._require_kinds()
        given = self.x if self.dataset is None else self.dataset
        if isinstance(given, Dataset | DistributedDataset | DataLoader):
            self._require_no_arrays(given)
        return distributed(strategy, self._batches(given, shuffle=shuffle))

    def _batches(self, given: Any, *, shuffle: bool) -> Dataset | DistributedDataset:
        if isinstance(given, Dataset | DistributedDataset):
            return given
        if isinstance(given, DataLoader):
            return Dataset.from_torch(given)
        rows = Dataset.from_tensor_slices(self._element(given))
        batch_size = self.batch_size or BATCH_SIZE
        if not shuffle:
            return rows.batch(batch_size)
        # A seed of the options, not of the shuffle, because a checkpoint's position includes the options' seed.
        seed = int(torch.empty((), dtype=torch.int64).random_())  # follows torch.manual_seed
        return rows.global_shuffle().batch(batch_size).with_options(Options(seed=seed))

    def _element(self, x: Any) -> Any:
        x = _arrays(x, "x")
        if self.own_loss and self.y is None:
            return x
        if self.y is not None:
            return x, _arrays(self.y, "y")
        if self.what == "predict":
            return (x,)
        raise InvalidArgumentError(
            f"{self.what} needs targets beside an array x, got none: {self.what}(x, y). A dataset's elements hold them."
        )

    def _require_kinds(self) -> None:
        if (self.x is None) == (self.dataset is None):
            raise InvalidArgumentError(
                f"{self.what} takes its data once, as x, got {self.x!r:.80} and {self.dataset!r:.80}."
            )
        if isinstance(self.y, int):
            raise InvalidArgumentError(
                f"y must be the targets that belong to x, got {self.y!r}. Give a number of epochs by its name: "
                f"epochs={self.y!r}."
            )
        if _holds_callbacks(self.y) or _holds_callbacks(self.batch_size):
            raise InvalidArgumentError(f"{self.what} takes callbacks by their name: callbacks=[...].")
        if self.batch_size is not None and not (isinstance(self.batch_size, int) and self.batch_size >= 1):
            raise InvalidArgumentError(f"batch_size must be a number of rows >= 1, got {self.batch_size!r}.")

    def _require_no_arrays(self, given: Any) -> None:
        for name, value, then in [
            ("y", self.y, "Its elements are (x, y)."),
            ("batch_size", self.batch_size, "It is batched already, by the global batch size."),
        ]:
            if value is not None:
                raise InvalidArgumentError(
                    f"{name} belongs to arrays, and a {type(given).__name__} comes without it, got "
                    f"{name}={value!r:.60}. {then}"
                )


def held_out_data(validation_data: Any, batch_size: Any, *, own_loss: bool = False) -> GivenData:
    """Return the data of `validation_data` of `fit`: data, or a tuple (x, y) of arrays."""
    if not isinstance(validation_data, tuple):
        size = batch_size if own_loss and isinstance(validation_data, Mapping) else None
        return GivenData(validation_data, batch_size=size, what="validation", own_loss=own_loss)
    if len(validation_data) == 2:
        return GivenData(*validation_data, batch_size=batch_size, what="validation")
    raise InvalidArgumentError(
        f"validation_data must be a dataset or arrays (x, y), got a tuple of {len(validation_data)}. With weights: "
        "Dataset.from_tensor_slices((x, y, weights)).batch(n)."
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
