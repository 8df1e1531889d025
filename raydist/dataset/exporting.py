"""Datasets as those of other libraries."""

from __future__ import annotations

from typing import Any

from raydist.dataset.running import Running

__all__ = ["Exporting"]


class Exporting(Running):
    """Datasets as those of other libraries."""

    def to_torch(self) -> Any:
        """This dataset as a `torch.utils.data.IterableDataset`, for a plain `DataLoader`.

        With n workers each gives every n-th element, so that nothing comes twice. But each runs the whole pipeline to
        find them: prefer `num_workers=0` and raydist's own parallelism. Every pass is a new epoch, the
        same one with workers as without.

        Source: torch.utils.data.IterableDataset.

        >>> from torch.utils.data import DataLoader
        >>> [x.tolist() for x in DataLoader(rd.Dataset.range(5).to_torch(), batch_size=2)]
        [[0, 1], [2, 3], [4]]
        """
        # The class inherits from one of torch's: building and pickling pipelines needs no torch.
        from raydist.dataset.torch_dataset import TorchDataset

        return TorchDataset(self)

    def to_ray(self) -> Any:
        """One new epoch of this dataset as a `ray.data.Dataset`, in order. Joins or starts Ray; reads nothing yet.

        Elements that are dicts are rows as they are, other elements have a column `item` (`item_0`, `item_1`, ... for
        tuples). One task of Ray Data runs the pipeline, each time Ray executes the dataset: the same epoch again.
        Repartition the result (`.repartition(n)`) for more parallelism behind it.

        Source: ray.data.from_torch, ray.data.Dataset.

        >>> rows = rd.Dataset.range(3).map(lambda x: {"x": x, "y": x * x}).to_ray()  # doctest: +SKIP
        >>> rows.take_all()  # doctest: +SKIP
        [{'x': 0, 'y': 0}, {'x': 1, 'y': 1}, {'x': 2, 'y': 4}]
        """
        from raydist.actors.ray_data_sink import ray_dataset  # loads Ray Data

        return ray_dataset(self._op, self.options(), self._root_seed(), next(self._epochs))
