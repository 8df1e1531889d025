"""Conversion of datasets to those of other libraries."""

from __future__ import annotations

from typing import Any

from raydist.dataset.running import Running


class Exporting(Running):
    """The methods that convert datasets to those of other libraries."""

    def to_torch(self) -> Any:
        """Return this dataset as a `torch.utils.data.IterableDataset`, for a plain `DataLoader`.

        With n workers each returns every n-th element, so that no element comes twice. But each worker runs the whole
        pipeline to find its elements: prefer `num_workers=0` and raydist's own parallelism. Every iteration is a new
        epoch, the same one with workers as without.

        Source: torch.utils.data.IterableDataset.

        >>> from torch.utils.data import DataLoader
        >>> [x.tolist() for x in DataLoader(rd.Dataset.range(5).to_torch(), batch_size=2)]
        [[0, 1], [2, 3], [4]]
        """
        # The class inherits from a torch class, but building and pickling pipelines must not import torch.
        from raydist.dataset.torch_dataset import TorchDataset

        return TorchDataset(self)

    def to_ray(self) -> Any:
        """Return one new epoch of this dataset as a `ray.data.Dataset`, in order. Connects to Ray; reads nothing yet.

        Dict elements become rows; other elements get a column `item` (`item_0`, `item_1`, ... for tuples). One Ray Data
        task runs the pipeline each time Ray executes the dataset: the same epoch again. Repartition the result
        (`.repartition(n)`) for more parallelism after it.

        Source: ray.data.from_torch, ray.data.Dataset.

        >>> rows = rd.Dataset.range(3).map(lambda x: {"x": x, "y": x * x}).to_ray()  # doctest: +SKIP
        >>> rows.take_all()  # doctest: +SKIP
        [{'x': 0, 'y': 0}, {'x': 1, 'y': 1}, {'x': 2, 'y': 4}]
        """
        from raydist.actors.ray_data import ray_dataset  # imports Ray Data

        return ray_dataset(self._op, self.options(), self._root_seed(), next(self._epochs))
