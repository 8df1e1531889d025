"""Functions applied to elements."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Self

from raydist.core.errors import InvalidArgumentError
from raydist.dataset.base import named
from raydist.dataset.running import Running
from raydist.pipelines.elements.arguments import require_choice
from raydist.pipelines.elements.convert import torch_rows
from raydist.pipelines.elements.declared_output import DeclaredOutput
from raydist.pipelines.elements.fold import fold
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.ops.batch import BatchOp, UnbatchOp
from raydist.pipelines.ops.interleave import InterleaveOp
from raydist.pipelines.ops.map import MapOp, ScanOp
from raydist.pipelines.ops.selection import FilterOp, TakeWhileOp


class Elementwise(Running):
    """The methods that apply functions to elements."""

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        seed: int | None = None,
        output_spec: Any = None,
        name: str | None = None,
    ) -> Self:
        """Apply `map_func` to every element, in order. If the function fails, the error takes the element's place.

        Args:
            map_func: Receives numpy arrays, numpy scalars, bytes and str; a tuple is unpacked into arguments. A
                `torch.nn.Module`, or a function wrapped in `rd.with_tensors`, receives torch tensors instead. May
                return numpy, torch or Python values. A keyword-only parameter `rng` receives a `numpy.random.Generator`
                that depends on (seed, operation, epoch, index of the element) only. May take, transform and return
                datasets, alone or in a nest: the datasets' random choices depend on the same values as `rng`.
            num_parallel_calls: Number of concurrent calls; 1: in order in one thread. None or AUTOTUNE: raydist begins
                in the iterating thread, and moves functions to other threads if measurements show a gain. (Thread-local
                settings, such as `torch.no_grad`, do not apply in other threads.)
            deterministic: False returns results of concurrent calls as they complete, so that a slow call does not
                delay others. None: `Options.deterministic` decides. No element is lost or repeated, even after a
                resume. The order is kept before operations with large state (`shuffle`, `scan`, `window`, ...).
            seed: Seed of `rng`; None for the seed of the iteration.
            output_spec: Nest of `rd.TensorSpec` that every result must match. Without a spec, `element_spec` calls the
                function on up to the first three elements, and later results may differ.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: `map_func` is not a function, or `num_parallel_calls` is 0 or below AUTOTUNE.
            TypeError: `deterministic` is not a bool.
            SpecError: `output_spec` contains something other than specs; a result does not match the spec, or is not a
                valid element (at iteration, in the element's place).

        Source: tf.data.Dataset.map.

        >>> [int(x) for x in rd.Dataset.range(3).map(lambda x: x + 1)]
        [1, 2, 3]
        """
        declared = DeclaredOutput.parse(output_spec)
        require_choice(deterministic)
        return type(self)(named(MapOp(self._op, map_func, num_parallel_calls, seed, declared, deterministic), name))

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> Self:
        """Keep the elements for which `predicate` returns True, in order. Cardinality is unknown.

        If the predicate fails for an element, the error takes the element's place.

        Args:
            predicate: Receives the arguments of a map function, and returns one bool.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: `predicate` is not a function.
            SpecError: `predicate` does not return a bool (at iteration, in the element's place).

        Source: tf.data.Dataset.filter.

        >>> [int(x) for x in rd.Dataset.range(5).filter(lambda x: x % 2 == 0)]
        [0, 2, 4]
        """
        return type(self)(named(FilterOp(self._op, predicate), name))

    def map_batches(self, fn: Callable[..., Any], batch_size: int, num_parallel_calls: int | None = None) -> Self:
        """Apply `fn` to batches of up to `batch_size` consecutive elements, and split the results into rows.

        Much faster than `map` if `fn` works on arrays. Every leaf gains a first dimension: (...) -> (n, ...), with
        n <= `batch_size`. The results may have more or fewer rows than the batch, or none. Cardinality is unknown. If
        `fn` fails, the error takes the place of all elements of the batch.

        Args:
            fn: Receives arrays as a map function receives elements; returns leaves that share their first dimension.
            batch_size: Elements per call, >= 1; the last call may have fewer.
            num_parallel_calls: Number of concurrent calls, as for :meth:`map`.

        Raises:
            InvalidArgumentError: `batch_size` or `num_parallel_calls` is out of range; the results have no common first
                dimension (at iteration).
            SpecError: The elements of one batch differ in shape or dtype (at iteration).

        Source: ray.data.Dataset.map_batches; in tf.data, `batch(n).map(fn).unbatch()`.

        >>> [int(x) for x in rd.Dataset.range(4).map_batches(lambda x: x * 10, batch_size=3)]
        [0, 10, 20, 30]
        """
        return type(self)(UnbatchOp(MapOp(BatchOp(self._op, batch_size), fn, num_parallel_calls)))

    def flat_map(self, map_func: Callable[..., Any], name: str | None = None) -> Self:
        """Map each element to a dataset by `map_func`, and return the elements of one dataset after the other.

        Runs in the consumer's thread. An iterator's state contains the states of the input and of the open dataset. If
        `map_func` fails, the error takes the place of the dataset's elements.

        Args:
            map_func: Receives the arguments of a map function and returns a Dataset.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: `map_func` is not a function.
            SpecError: `map_func` does not return a dataset, or elements differ in structure or dtype (at iteration).

        Source: tf.data.Dataset.flat_map.

        >>> [int(x) for x in rd.Dataset.range(4).flat_map(lambda n: rd.Dataset.range(n))]
        [0, 0, 1, 0, 1, 2]
        """
        return type(self)(named(InterleaveOp.flat_map(self._op, map_func), name))

    def interleave(
        self,
        map_func: Callable[..., Any],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Self:
        """Map each element to a dataset by `map_func`, and return the elements of several open datasets in turn.

        Each of `cycle_length` slots returns up to `block_length` elements per turn. A slot whose dataset ends skips its
        turn and takes the next input at its next turn. The order depends only on the datasets and these two numbers.

        Args:
            map_func: Receives the arguments of a map function and returns a Dataset.
            cycle_length: Number of open datasets; None or AUTOTUNE: 4, or `num_parallel_calls` if that is larger. (With
                TensorFlow's default, the number of cores, the order would depend on the machine.)
            block_length: Elements per turn, 1 by default.
            num_parallel_calls: Number of open datasets that are read ahead, in one thread each. AUTOTUNE: all, if
                reading blocks or a trial was faster. None: the consumer's thread reads every dataset.
            deterministic: False returns elements of the datasets that are read ahead as they become available, so that
                a slow dataset does not delay others. None: `Options.deterministic` decides. Otherwise as for `map`.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: A length < 1, `num_parallel_calls` > `cycle_length`, or `map_func` is not a function.
            TypeError: `deterministic` is not a bool.
            SpecError: `map_func` does not return a dataset, or elements differ in structure or dtype (at iteration).

        Source: tf.data.Dataset.interleave; the order is the same for equal lengths.

        >>> ds = rd.Dataset.range(1, 4).interleave(lambda x: rd.Dataset.from_tensors(x).repeat(3), cycle_length=2)
        >>> [int(x) for x in ds]
        [1, 2, 1, 2, 1, 2, 3, 3, 3]
        """
        require_choice(deterministic)
        return type(self)(
            named(
                InterleaveOp.of(self._op, map_func, cycle_length, block_length, num_parallel_calls, deterministic), name
            )
        )

    def scan(self, initial_state: Any, scan_func: Callable[..., Any], name: str | None = None) -> Self:
        """Return the outputs of `scan_func(state, element)`, which returns the next state and an output.

        Runs in order in the consumer's thread. If the function fails for an element, the error takes the element's
        place and the state does not change. An *iterator* saves only a count: resuming reads the input and calls the
        function again from the beginning.

        Args:
            initial_state: Nest of tensors; every next state must have its structure and dtypes.
            scan_func: Receives state and element (a tuple as one argument), both as a map function receives them.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: `scan_func` is not a function.
            SpecError: The function does not return a pair, or returns a state of another type (in the element's place).

        Source: tf.data.Dataset.scan.

        >>> [int(x) for x in rd.Dataset.range(5).scan(0, lambda total, x: (total + x, total + x))]
        [0, 1, 3, 6, 10]
        """
        return type(self)(named(ScanOp(self._op, initial_state, scan_func), name))

    def reduce(self, initial_state: Any, reduce_func: Callable[..., Any], name: str | None = None) -> Any:
        """Return the last state: `reduce_func(state, element)` returns the next one. Blocks until the epoch ends.

        Args:
            initial_state: Nest of tensors; every next state must have its structure and dtypes.
            reduce_func: Receives state and element (a tuple as one argument), both as a map function receives them.
            name: Name of the operation in error messages.

        Returns:
            The nest with torch tensors (scalar bytes and str as Python objects), like an element.

        Raises:
            SpecError: A state has another structure or dtype.
            Exception: The first error of an element or of the function.

        Source: tf.data.Dataset.reduce.

        >>> int(rd.Dataset.range(5).reduce(0, lambda total, x: total + x))
        10
        """
        from torch import from_numpy  # as in __iter__: where the first tensors are handed out

        last = fold(reduce_func, initial_state, self.as_numpy_iterator(), "reduce" if name is None else name)
        return torch_rows(block_of_rows([last]), from_numpy)[0]

    def get_single_element(self, name: str | None = None) -> Any:
        """Return the only element. Begins an epoch; blocks until the element and the end have been read.

        Args:
            name: Name of the operation in error messages.

        Returns:
            The nest with torch tensors (scalar bytes and str as Python objects), as in iteration.

        Raises:
            InvalidArgumentError: There is no element, or more than one.
            Exception: The error of the element.

        Source: tf.data.Dataset.get_single_element.

        >>> rd.Dataset.range(3).batch(3).get_single_element()
        tensor([0, 1, 2])
        """
        what = "get_single_element" if name is None else name
        with contextlib.closing(iter(self)) as iterator:
            first = iterator.get_next_as_optional()
            if not first.has_value():
                raise InvalidArgumentError(f"{what} needs a dataset of one element, got one without any: {self!r}.")
            if iterator.get_next_as_optional().has_value():
                raise InvalidArgumentError(
                    f"{what} needs a dataset of one element, got more: {self!r}. Take one, or batch all of them."
                )
        return first.get_value()

    def take_while(self, predicate: Callable[..., Any], name: str | None = None) -> Self:
        """Return the elements before the first one for which `predicate` returns False. Cardinality is unknown.

        If the predicate fails for an element, the error takes the element's place, and iteration continues.

        Args:
            predicate: Receives the arguments of a map function, and returns one bool.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: `predicate` is not a function.
            SpecError: `predicate` does not return a bool (at iteration, in the element's place).

        Source: tf.data.Dataset.take_while.

        >>> [int(x) for x in rd.Dataset.range(9).take_while(lambda x: x < 3)]
        [0, 1, 2]
        """
        return type(self)(named(TakeWhileOp(self._op, predicate), name))

    def apply(self, transformation: Callable[[Self], Self]) -> Self:
        """Return `transformation(self)`, to use a function of datasets in a chain of methods.

        Args:
            transformation: Receives this dataset and returns a dataset.

        Raises:
            TypeError: `transformation` does not return a dataset.

        Source: tf.data.Dataset.apply.

        >>> [int(x) for x in rd.Dataset.range(3).apply(lambda ds: ds.skip(1))]
        [1, 2]
        """
        result = transformation(self)
        if not isinstance(result, type(self)):
            raise TypeError(f"The function given to apply must return a Dataset, got {result!r:.100}.")
        return result
