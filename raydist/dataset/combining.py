"""Combinations of several datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from raydist.core.nest import flatten
from raydist.dataset.base import DatasetBase, graphs, named
from raydist.pipelines.ops.combine import ChooseOp, ConcatenateOp, ZipOp
from raydist.pipelines.sources.range import DrawsOp


class Combining(DatasetBase):
    """The methods that combine datasets."""

    @classmethod
    def zip(cls, *datasets: Any, name: str | None = None) -> Self:
        """Combine element k of every dataset into one nest. Ends with the shortest dataset.

        Cardinality is the smallest, unknown if one is unknown. An error of one dataset takes the place of the element.

        Args:
            datasets: Datasets, whose elements are combined into tuples; or one nest of datasets, `zip((a, {"b": b}))`,
                whose elements are combined into nests of that structure.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            TypeError: An argument is not a dataset or a nest of datasets.

        Source: tf.data.Dataset.zip.

        >>> list(rd.Dataset.zip(rd.Dataset.range(3), rd.Dataset.range(5, 9)).as_numpy_iterator())[-1]
        (np.int64(2), np.int64(7))
        """
        leaves, structure = flatten(datasets[0] if len(datasets) == 1 else datasets, classes=False)
        wrong = [leaf for leaf in leaves if not isinstance(leaf, DatasetBase)]
        if wrong or not leaves:
            raise TypeError(
                f"zip takes datasets, or one nest of them, got {wrong[0] if wrong else datasets!r:.100}. Write "
                "zip(a, b), zip((a, b)) or zip({'a': a, 'b': b}); a list is no nest."
            )
        return cls(named(ZipOp(tuple(leaf._op for leaf in leaves), structure), name))

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: Sequence[DatasetBase],
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool = False,
    ) -> Self:
        """Draw every element from one of `datasets`, chosen at random.

        Args:
            datasets: At least one dataset; all of one structure and dtypes.
            weights: One number per dataset, in any unit; 0 or less: never drawn. None: equal weights.
            seed: With a seed, the same choices in every process. None: the seed of the iteration (`Options.seed`).
            stop_on_empty_dataset: End when an empty dataset is drawn; False continues with the others.
            rerandomize_each_iteration: New choices in every epoch; False repeats the choices of the first.

        Raises:
            InvalidArgumentError: No dataset, a wrong number of weights, a weight that is not finite, or none > 0.
            TypeError: An argument is not a dataset.
            SpecError: Structures or dtypes differ, as in `concatenate`.

        Source: tf.data.Dataset.sample_from_datasets (which is empty where no weight is > 0).

        >>> a, b = rd.Dataset.range(0, 5), rd.Dataset.range(10, 15)
        >>> sorted(int(x) for x in rd.Dataset.sample_from_datasets([a, b], weights=[0.2, 0.8], seed=1))
        [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
        """
        ops = graphs(datasets, "sample_from_datasets")
        draws = DrawsOp.of(weights, len(ops), seed, rerandomize_each_iteration)
        kept = [number for number, weight in enumerate(draws.weights) if weight > 0]
        if len(kept) < len(ops):
            weights = [draws.weights[number] for number in kept]
            draws = DrawsOp.of(weights, len(kept), seed, rerandomize_each_iteration)
        chosen = tuple(ops[number] for number in kept)
        return cls(ChooseOp(chosen, draws, stop_on_empty_dataset, "sample_from_datasets", meets_all=True))

    @classmethod
    def choose_from_datasets(
        cls, datasets: Sequence[DatasetBase], choice_dataset: DatasetBase, stop_on_empty_dataset: bool = True
    ) -> Self:
        """Return the next element of the dataset whose number `choice_dataset` gives, for each number.

        Args:
            datasets: At least one dataset; all of one structure and dtypes.
            choice_dataset: Single whole numbers below `len(datasets)`; the iteration ends with this dataset.
            stop_on_empty_dataset: End when an empty dataset is chosen; False skips that choice.

        Raises:
            InvalidArgumentError: No dataset; a choice that is not the number of one (at iteration, in its place).
            TypeError: An argument is not a dataset.
            SpecError: Structures or dtypes differ, as in `concatenate`.

        Source: tf.data.Dataset.choose_from_datasets.

        >>> parts = [rd.Dataset.range(3), rd.Dataset.range(10, 13)]
        >>> choices = rd.Dataset.from_tensor_slices([0, 1, 1, 0])
        >>> [int(x) for x in rd.Dataset.choose_from_datasets(parts, choices)]
        [0, 10, 11, 1]
        """
        ops = graphs(datasets, "choose_from_datasets")
        (choices,) = graphs([choice_dataset], "choose_from_datasets")
        return cls(ChooseOp(ops, choices, stop_on_empty_dataset, "choose_from_datasets"))

    def concatenate(self, dataset: DatasetBase, name: str | None = None) -> Self:
        """Append the elements of `dataset`. Shapes may differ: `element_spec` has None for dimensions that do.

        Args:
            dataset: A dataset whose elements have the same structure and dtypes.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            TypeError: `dataset` is not a dataset.
            SpecError: Structures or dtypes differ: raised by `element_spec`, and in the place of each element.

        Source: tf.data.Dataset.concatenate.

        >>> [int(x) for x in rd.Dataset.range(2).concatenate(rd.Dataset.range(5, 7))]
        [0, 1, 5, 6]
        """
        if not isinstance(dataset, DatasetBase):
            raise TypeError(f"concatenate takes a Dataset, got {dataset!r:.100}.")
        return type(self)(named(ConcatenateOp(self._op, dataset._op), name))
