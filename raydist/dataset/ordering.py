"""Order and number of elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from raydist.core.errors import FailedPreconditionError
from raydist.dataset.base import DatasetBase, named
from raydist.pipelines.elements.arguments import whole_number
from raydist.pipelines.ops.gather import picked_op
from raydist.pipelines.ops.map import EnumerateOp
from raydist.pipelines.ops.rejection_resample import ClassBalance, RejectionResampleOp
from raydist.pipelines.ops.repeat import AssertCardinalityOp, RepeatOp
from raydist.pipelines.ops.selection import IgnoreErrorsOp, ShardOp, SkipOp, TakeOp, UniqueOp
from raydist.pipelines.ops.shuffle import ShuffleOp
from raydist.pipelines.sources.range import PermutationOp, WeightedIndicesOp


class Ordering(DatasetBase):
    """The methods that change order and number of elements."""

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True, name: str | None = None
    ) -> Self:
        """Shuffle: each output is drawn from a buffer of `buffer_size` elements, refilled from the input.

        The state of an iterator contains the position only; restoring reads the input again up to the position.

        Args:
            buffer_size: >= 1, or UNKNOWN_CARDINALITY for the whole input. As large as the dataset: a perfect shuffle.
            seed: With a seed, every epoch's order is the same in every process. None: the seed of the iteration
                (`Options.seed`, else one drawn for this object).
            reshuffle_each_iteration: A new order every epoch; False keeps one order, even without a seed.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: `buffer_size` is out of range.

        Source: tf.data.Dataset.shuffle.

        >>> ds = rd.Dataset.range(10).shuffle(10, seed=1)
        >>> sorted(int(x) for x in ds) == list(range(10))
        True
        """
        return type(self)(
            named(ShuffleOp(self._op, whole_number("buffer_size", buffer_size), seed, reshuffle_each_iteration), name)
        )

    def global_shuffle(self, seed: int | None = None, reshuffle_each_iteration: bool = True) -> Self:
        """Shuffle all elements without a buffer: every element is read by its index.

        A full permutation in constant memory, with one number as state. Use it directly after a source whose elements
        can be read by index: `range`, `from_tensor_slices`, `from_numpy`, `from_torch` of a map-style dataset.

        Args:
            seed: With a seed, every epoch's order is the same in every process. None: as for :meth:`shuffle`.
            reshuffle_each_iteration: A new order every epoch; False keeps the order of the first.

        Raises:
            FailedPreconditionError: The elements cannot be read by index.

        Source: tf.data's internal `_global_shuffle` and tf.random.experimental.index_shuffle.

        >>> ds = rd.Dataset.range(1000).global_shuffle(seed=1)
        >>> sorted(int(x) for x in ds) == list(range(1000))
        True
        """
        count = self._op.cardinality()
        picked = picked_op(PermutationOp(max(0, count), seed, reshuffle_each_iteration), self._op)
        if picked is None:
            raise FailedPreconditionError(
                f"global_shuffle needs a source whose elements can be read by their index, got {self._op.label}. Put "
                "it right behind range, from_tensor_slices, from_numpy or from_torch, or use shuffle(buffer_size)."
            )
        return type(self)(picked)

    def sample_by_weight(
        self, weights: Any, num_samples: int | None = None, replacement: bool = True, seed: int | None = None
    ) -> Self:
        """Draw elements at random, with probabilities in proportion to weights; a new draw every epoch.

        Every element is read by its index: call the method directly after a source, as :meth:`global_shuffle`. The
        state of an iterator is one number. Memory: 16 bytes per element.

        Args:
            weights: One number >= 0 for each element: a list, an array or a tensor of shape (n,).
            num_samples: Elements drawn in an epoch, >= 1; None: the number of elements.
            replacement: An element may be drawn more than once; False: at most once in an epoch.
            seed: With a seed, every epoch's draw is the same in every process. None: as for :meth:`shuffle`.

        Raises:
            FailedPreconditionError: The elements cannot be read by index, or their number is unknown.
            InvalidArgumentError: The number of weights differs from that of elements; a weight is negative, infinite or
                NaN; all are 0; without replacement, fewer weights are > 0 than elements are to be drawn.

        Source: torch.utils.data.WeightedRandomSampler.

        >>> labels = [0] * 90 + [1] * 10
        >>> weights = [1 if label == 0 else 9 for label in labels]
        >>> ds = rd.Dataset.from_tensor_slices(labels).sample_by_weight(weights, 1000, seed=1)
        >>> 400 < sum(int(y) for y in ds) < 600
        True
        """
        count = self._op.cardinality()
        if count < 0 or picked_op(self._op, self._op) is None:
            raise FailedPreconditionError(
                f"sample_by_weight needs a source whose elements can be read by their index, got {self._op.label}. Put "
                "it right behind range, from_tensor_slices, from_numpy or from_torch. Where elements come one after "
                "another, draw whole datasets by weight (sample_from_datasets), or leave elements out "
                "(rejection_resample)."
            )
        indices = WeightedIndicesOp.of(weights, num_samples, replacement, seed, count)
        return type(self)(picked_op(indices, self._op) or indices)

    def repeat(self, count: int | None = None, name: str | None = None) -> Self:
        """Iterate `count` times over the elements; each pass is an epoch of the input, so a shuffle draws a new order.

        Passes do not mix: a later operation sees the end of one pass before the next. A pass without elements ends an
        endless repeat, which would otherwise hang.

        Args:
            count: Number of passes; 0 for none; None or a negative count: endless.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: `count` is not a whole number.

        Source: tf.data.Dataset.repeat.

        >>> [int(x) for x in rd.Dataset.range(2).repeat(2)]
        [0, 1, 0, 1]
        """
        return type(self)(named(RepeatOp(self._op, None if count is None else whole_number("count", count)), name))

    def take(self, count: int, name: str | None = None) -> Self:
        """Return the first `count` elements; nothing is read after them. Errors before the end are raised, not counted.

        Args:
            count: Number of elements; negative: all.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: `count` is not a whole number.

        Source: tf.data.Dataset.take.

        >>> [int(x) for x in rd.Dataset.range(5).take(2)]
        [0, 1]
        """
        return type(self)(named(TakeOp(self._op, whole_number("count", count)), name))

    def skip(self, count: int, name: str | None = None) -> Self:
        """Return all but the first `count` elements. Errors among the skipped elements are raised, not counted.

        Skipped elements are read and processed, unless the source can be read by index.

        Args:
            count: Number of elements; negative: skips all.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: `count` is not a whole number.

        Source: tf.data.Dataset.skip.

        >>> [int(x) for x in rd.Dataset.range(5).skip(3)]
        [3, 4]
        """
        return type(self)(named(SkipOp(self._op, whole_number("count", count)), name))

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Self:
        """Return every element whose number has the remainder `index` when divided by `num_shards`.

        The shards 0 .. num_shards - 1 of a dataset contain each element once, including errors. An earlier map is
        called for the elements of this shard only (`Options.optimization.shard_pushdown`).

        Args:
            num_shards: Number of shards, >= 1. With more shards than elements some are empty.
            index: Index of this shard, from 0.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: `num_shards` < 1, or `index` is not in 0 .. num_shards - 1.

        Source: tf.data.Dataset.shard.

        >>> [int(x) for x in rd.Dataset.range(8).shard(3, 1)]
        [1, 4, 7]
        """
        return type(self)(
            named(ShardOp(self._op, whole_number("num_shards", num_shards), whole_number("index", index)), name)
        )

    def enumerate(self, start: int = 0, name: str | None = None) -> Self:
        """Return (number, element) pairs; numbers are int64 scalars. An error takes a number, too.

        Args:
            start: The first number.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: `start` is not a whole number.

        Source: tf.data.Dataset.enumerate.

        >>> [(int(number), text) for number, text in rd.Dataset.from_tensor_slices(["a", "b"]).enumerate(start=5)]
        [(5, 'a'), (6, 'b')]
        """
        return type(self)(named(EnumerateOp(self._op, whole_number("start", start)), name))

    def unique(self, name: str | None = None) -> Self:
        """Return every value once, at its first occurrence. Elements are single integers, bools, bytes or str.

        All values are kept in memory. The state of an iterator is a count: resuming reads the input from the beginning.

        Args:
            name: Name of the operation in `explain` and `stats`.

        Raises:
            SpecError: An element of another kind (in the element's place).

        Source: tf.data.Dataset.unique.

        >>> [int(x) for x in rd.Dataset.from_tensor_slices([1, 37, 2, 37, 2, 1]).unique()]
        [1, 37, 2]
        """
        return type(self)(named(UniqueOp(self._op), name))

    def ignore_errors(self, log_warning: bool = False, name: str | None = None) -> Self:
        """Skip errors of elements. Cardinality is unknown.

        Call it before a `batch`: a batch with a failed element is lost. Errors of the machinery (a dead machine, an
        exceeded time limit) are no errors of elements, and are still raised.

        Args:
            log_warning: Log each skipped error, by Python's `logging`.
            name: Name of the operation in `explain` and `stats`.

        Source: tf.data.Dataset.ignore_errors.

        >>> [float(x) for x in rd.Dataset.range(3).map(lambda x: 4.0 / int(x - 1)).ignore_errors()]
        [-4.0, 4.0]
        """
        return type(self)(named(IgnoreErrorsOp(self._op, log_warning), name))

    def assert_cardinality(self, expected_cardinality: int) -> Self:
        """Declare the number of elements if raydist cannot know it; checked during iteration.

        The error of an element counts as an element. A wrong number is one error, in the place of the first missing or
        surplus element, followed by the end.

        Args:
            expected_cardinality: A number, INFINITE_CARDINALITY, or UNKNOWN_CARDINALITY (nothing is checked).

        Raises:
            InvalidArgumentError: The number is below UNKNOWN_CARDINALITY.
            FailedPreconditionError: There are more or fewer elements (at iteration).

        Source: tf.data.experimental.assert_cardinality.

        >>> len(rd.Dataset.range(9).filter(lambda x: x % 2 == 0).assert_cardinality(5))
        5
        """
        return type(self)(AssertCardinalityOp(self._op, whole_number("expected_cardinality", expected_cardinality)))

    def rejection_resample(
        self,
        class_func: Callable[..., Any],
        target_dist: Any,
        initial_dist: Any = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Self:
        """Return pairs (class, element), dropping elements at random so that class frequencies match `target_dist`.

        Every element comes at most once; as many are kept as an elementwise choice can keep. (TensorFlow mixes two
        passes over the data, in which an element may come twice.) The choice depends on seed, epoch and index of the
        element only. With more than 256 classes and no `initial_dist`, restoring an iterator reads the input again.

        Args:
            class_func: Receives the arguments of a map function and returns the class as one whole number, from 0.
            target_dist: One weight for each class.
            initial_dist: The weights of the input, > 0 where the target is; None to estimate them while reading.
            seed: With a seed, every epoch's choice is the same in every process. None: as for :meth:`shuffle`.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: A distribution is invalid, or the lengths differ; a class is out of range (at
                iteration, in the element's place).
            SpecError: `class_func` returns no whole number (at iteration, in the element's place).

        Source: tf.data.Dataset.rejection_resample.

        >>> ds = rd.Dataset.range(1000).rejection_resample(lambda x: int(x % 10 == 0), [0.5, 0.5], [0.9, 0.1], seed=1)
        >>> counts = [0, 0]
        >>> for kind, _ in ds:
        ...     counts[kind] += 1
        >>> counts[1], 75 < counts[0] < 125
        (100, True)
        """
        balance = ClassBalance.of(target_dist, initial_dist)
        return type(self)(named(RejectionResampleOp(self._op, class_func, balance, seed), name))
