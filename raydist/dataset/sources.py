"""Sources that read memory, functions and other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from raydist.core.errors import InvalidArgumentError
from raydist.dataset.base import DatasetBase, named
from raydist.pipelines.elements.arguments import whole_number
from raydist.pipelines.elements.arrow_fields import Conversion
from raydist.pipelines.elements.declared_output import DeclaredOutput
from raydist.pipelines.elements.spec import as_dtype
from raydist.pipelines.ops.map import MapOp
from raydist.pipelines.sources.columnar_files import arrow_files_op, is_paths
from raydist.pipelines.sources.generator import GeneratorOp
from raydist.pipelines.sources.hub_datasets import hub_op
from raydist.pipelines.sources.memory import ArrowTableOp, MemoryOp
from raydist.pipelines.sources.range import CounterOp, RandomOp, RangeOp
from raydist.pipelines.sources.torch_datasets import is_torch_loader, iterable_samples_op, read_sample


class Sources(DatasetBase):
    """The class methods that create datasets from memory, functions and other libraries."""

    @classmethod
    def range(cls, *args: int, output_type: Any = np.int64, name: str | None = None) -> Self:
        """Return the numbers of `range([start,] stop[, step])`, as scalars.

        Args:
            args: `stop`, or `start` and `stop`, or `start`, `stop` and `step`: whole numbers, as for Python's `range`.
            output_type: dtype of the numbers (numpy, torch or text).
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: No or more than three arguments, one that is not a whole number, or a step of 0.

        Source: tf.data.Dataset.range.

        >>> [int(x) for x in rd.Dataset.range(1, 7, 2)]
        [1, 3, 5]
        """
        numbers = tuple(whole_number("Each of start, stop and step", arg) for arg in args)
        return cls(named(RangeOp.of(numbers, as_dtype(output_type)), name))

    @classmethod
    def counter(cls, start: int = 0, step: int = 1, dtype: Any = np.int64, name: str | None = None) -> Self:
        """Return the endless sequence `start`, `start + step`, ..., as scalars.

        Args:
            start: The first number.
            step: The increment; may be negative.
            dtype: dtype of the numbers (numpy, torch or text).
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: `start` or `step` is not a whole number.

        Source: tf.data.Dataset.counter.

        >>> [int(x) for x in rd.Dataset.counter(start=2, step=3).take(3)]
        [2, 5, 8]
        """
        return cls(named(CounterOp(whole_number("start", start), whole_number("step", step), as_dtype(dtype)), name))

    @classmethod
    def random(cls, seed: int | None = None, rerandomize_each_iteration: bool = False, name: str | None = None) -> Self:
        """Return endless random int64 numbers in [0, 2^32).

        Args:
            seed: With a seed, the same numbers in every process. None: the seed of the iteration (`Options.seed`).
            rerandomize_each_iteration: New numbers in every epoch; False repeats the numbers of the first.
            name: Name of the operation in `explain` and `stats`.

        Source: tf.data.Dataset.random.

        >>> len({int(x) for x in rd.Dataset.random(seed=4).take(10)})
        10
        """
        return cls(named(RandomOp(seed, rerandomize_each_iteration), name))

    @classmethod
    def from_tensor_slices(cls, tensors: Any, name: str | None = None) -> Self:
        """Return one element per entry of the first dimension of every leaf: (n, ...) -> n times (...).

        Arrays and tensors are not copied, which saves memory for large ones: values written into an array, or into its
        base array, show in later elements. Pass a copy (`x.copy()`) if the array changes and the dataset must not. A
        pickled dataset contains the values.

        Args:
            tensors: Nest of arrays, torch tensors or lists, which share their first dimension. A list is one leaf.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: There is no leaf, a leaf is a scalar, or first dimensions differ.

        Source: tf.data.Dataset.from_tensor_slices.

        >>> list(rd.Dataset.from_tensor_slices({"x": [1, 2], "y": [b"a", b"b"]}).as_numpy_iterator())[1]
        {'x': np.int64(2), 'y': b'b'}
        """
        return cls(named(MemoryOp.of_slices(tensors), name))

    @classmethod
    def from_tensors(cls, tensors: Any, name: str | None = None) -> Self:
        """Return a dataset of one element: a copy of `tensors`.

        Args:
            tensors: Nest of numbers, arrays, torch tensors, lists, bytes and str.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            SpecError: A leaf is something else.

        Source: tf.data.Dataset.from_tensors.

        >>> [x.tolist() for x in rd.Dataset.from_tensors([1, 2])]
        [[1, 2]]
        """
        return cls(named(MemoryOp.of_tensors(tensors), name))

    @classmethod
    def from_generator(
        cls,
        generator: Callable[..., Any],
        output_signature: Any = None,
        args: Any = (),
        output_types: Any = None,
        output_shapes: Any = None,
        name: str | None = None,
    ) -> Self:
        """Return the values that `generator(*args)` yields. Called anew for every iteration and every pass of a repeat.

        An exception in the generator is raised with its type, after the values before it, and ends the iteration. The
        generator runs in one thread, never on an input worker. Cardinality is unknown.

        The state of an iterator is a count: resuming calls the generator again and drops that many values. This takes
        the time to produce them, and requires a generator that yields the same values again.

        Args:
            generator: Returns an iterator: a generator function, or any function or class that returns an iterable.
            output_signature: Nest of `rd.TensorSpec` of one element, None for dimensions that vary. Values are
                converted to its dtypes if the conversion is lossless (integers that fit, any number to a float).
            args: Arguments for `generator`, passed as numpy arrays and scalars, bytes and str. Bind other objects with
                `functools.partial`.
            output_types: Instead of a signature: a nest of dtypes (numpy, torch or text).
            output_shapes: With `output_types`: a nest of shapes like it; None in it, or for all of it: unknown.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            SpecError: No signature, or `generator` is not callable; a value of another structure, dtype or shape (at
                iteration, in the place of that value).
            InvalidArgumentError: Both a signature and types; shapes that are invalid, or not like the types.

        Source: tf.data.Dataset.from_generator.

        >>> ds = rd.Dataset.from_generator(range, output_signature=rd.TensorSpec((), "int64"), args=(3,))
        >>> [int(x) for x in ds]
        [0, 1, 2]
        """
        return cls(named(GeneratorOp.of(generator, output_signature, args, output_types, output_shapes), name))

    @classmethod
    def from_arrow(
        cls,
        source: Any,
        *,
        fill_null: Any = None,
        null_masks: bool | Sequence[str] = False,
        decimals: str = "float64",
        max_batch_bytes: int | None = None,
    ) -> Self:
        """Return the rows of an Arrow table: dicts of columns, with a nested dict for every struct.

        Numbers and bools keep their types, strings become str and binary values bytes. Dates and timestamps become
        `datetime64`, times of day (since midnight) and durations `timedelta64`, in the unit of the column: days for
        `date32`, milliseconds for `date64`; a timestamp with a time zone is the UTC instant. In torch tensors these are
        int64, in the unit that `element_spec` shows. `fixed_shape_tensor` and fixed-size lists become tensors of that
        shape, other lists tensors of shape (None, ...). A list of structs becomes a dict of such lists, a map a dict of
        the lists "keys" and "values". A list of lists becomes a dict of "values", all inner lists concatenated, and
        "lengths". Dictionaries, run-end encoded columns and extension types become their values. Numbers are not copied
        before they are returned. A reader, which can be read only once, is read into memory whole.

        **Nulls.** `fill_null` replaces them by a value. `null_masks` adds a boolean leaf for each value that may be
        null: `x_is_null` beside `x`, and `x_item_is_null` for the items of lists in `x`; the value itself is then 0,
        False, empty or NaT, unless `fill_null` gives one. A null with neither is an error.

        Files are Arrow IPC files, also known as Feather (version 2). Their record batches are units of work for the
        pipeline's threads or input workers; each is in memory as a whole. The format has no checksums: only damage that
        makes a file invalid is detected, and never more is read than the file contains.

        Args:
            source: A `pyarrow.Table`, `RecordBatch` or `RecordBatchReader`, or a table of another library with Arrow's
                C stream interface; or a path or a list of paths, local or URIs.
            fill_null: A value for the nulls of all columns (and fields of structs, items of lists) of the value's type,
                or a dict `{column: value}`. A null list becomes empty, unless the value is a list; a nested dict gives
                the values of a struct's fields.
            null_masks: True for all columns, or a list of column names.
            decimals: "float64", which may round, or "text": str, exact.
            max_batch_bytes: Maximum size of a compressed record batch of a file in memory, whatever the file claims.
                None: 64 MiB, or 64 times its size in the file.

        Raises:
            InvalidArgumentError: A path is a directory, a fill value fits no column, an unknown column.
            SpecError: A null in a table; at iteration, in its place: a row of a file with a null. A column of another
                type (unions, intervals), `source` is no table, files with different columns.
            NotFoundError: A file does not exist.
            DataLossError: A file is not an Arrow IPC file, or its footer is damaged; at iteration: a record batch is.

        Source: pyarrow.Table, pyarrow.ipc.open_file; the counterpart of tfio.arrow.

        >>> import pyarrow as pa
        >>> list(rd.Dataset.from_arrow(pa.table({"x": [1, 2], "y": ["a", "b"]})).as_numpy_iterator())[1]
        {'x': np.int64(2), 'y': 'b'}
        >>> table = pa.table({"x": [1, None], "y": [0.5, None]})
        >>> list(rd.Dataset.from_arrow(table, fill_null={"x": -1}, null_masks=["y"]).as_numpy_iterator())[1]
        {'x': np.int64(-1), 'y': np.float64(0.0), 'y_is_null': np.True_}
        """
        conversion = Conversion.of(fill_null, null_masks, decimals)
        if is_paths(source):
            return cls(arrow_files_op(source, conversion, max_batch_bytes))
        return cls(ArrowTableOp.of(source, conversion))

    @classmethod
    def from_huggingface(
        cls,
        source: Any,
        *,
        fill_null: Any = None,
        null_masks: bool | Sequence[str] = False,
        decimals: str = "float64",
    ) -> Self:
        """Return the rows of a Hugging Face `datasets.Dataset`: dicts of columns.

        Types and nulls are those of :meth:`from_arrow`. Every process that reads rows maps the Arrow files into memory:
        only rows that are read are loaded. Rows are read by index, so that resuming, sharding and `global_shuffle` cost
        nothing. The order of `select`, `shuffle` and `train_test_split` is kept, and so are the columns of
        `set_format`; with its types "torch" and "numpy" integers become int64 and floats float32, or the format's
        `dtype`. An in-memory dataset is pickled with its rows.

        `ClassLabel` becomes int64, `Array2D` ... `Array5D` a tensor of their shape. `Image` and `Audio` stay as stored,
        dicts of "bytes" and "path" (empty if one is missing): decode them in a `map`, for example by
        `rd.image.decode_image`.

        Args:
            source: The dataset, or the directory written by its `save_to_disk`, which needs no `datasets` package.
            fill_null: A value for nulls, or a dict `{column: value}`; see :meth:`from_arrow`.
            null_masks: True adds a boolean leaf for the nulls of each column; or a list of column names.
            decimals: "float64", which may round, or "text": str, exact.

        Raises:
            SpecError: `source` is no such dataset (a DatasetDict, an IterableDataset), or has a column that no tensor
                can hold; at iteration, in its place: a row with a null that has neither a fill value nor a mask.
            InvalidArgumentError: A directory of several splits, a dataset with a `set_transform` function, a fill value
                that does not fit, an unknown column.
            NotFoundError: The directory does not exist.
            DataLossError: A file is damaged or truncated; at iteration: a record batch is.

        Source: datasets.Dataset, load_from_disk.

        >>> from datasets import Dataset  # doctest: +SKIP
        >>> words = Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})  # doctest: +SKIP
        >>> list(rd.Dataset.from_huggingface(words).as_numpy_iterator())[1]  # doctest: +SKIP
        {'text': 'b', 'label': np.int64(1)}
        """
        return cls(hub_op(source, Conversion.of(fill_null, null_masks, decimals)))

    @classmethod
    def from_torch(cls, dataset: Any, output_signature: Any = None, *, num_parallel_calls: int | None = 1) -> Self:
        """Return the samples of a `torch.utils.data.Dataset`, or an object like it; or a DataLoader's batches.

        A map-style dataset (`__getitem__` and `__len__`) is read by index: resuming, sharding and `global_shuffle` cost
        nothing. An iterable-style dataset (`__iter__`) is iterated anew for every pass, and its samples are copied;
        resuming iterates it again and drops the samples returned before. The error of a sample is raised in its place;
        the error of an iterator ends the iteration.

        Random numbers that a dataset draws itself are not raydist's: draw them in a `map` with `rng` instead.

        The elements of a `DataLoader` are its batches, in its order, every epoch: the batches of its sampler or batch
        sampler, made by its `collate_fn`. A list of columns becomes a tuple. When an epoch begins, the sampler runs
        once in this process, so that its generator (torch's global one, without one of its own) advances as by a whole
        iteration of the loader. A state contains the generators as they were when the epoch began (4 KB each); resuming
        runs the sampler again, and reads no samples twice. A custom sampler must repeat itself from the same state.
        Samples are read in the process that makes the batches, or with `num_workers` in as many input workers; a
        process other than your own seeds the random numbers of torch, numpy and Python for every batch, and calls
        `worker_init_fn` once. In your own process samples draw from the process's generators while a thread reads
        ahead: set `num_workers=0` if these numbers must be the same after a resume. A loader of an iterable-style
        dataset is iterated itself, on a copy of the dataset.

        Args:
            dataset: The dataset, whose samples are valid elements; or a DataLoader.
            output_signature: Nest of `rd.TensorSpec` of one sample. Without it `element_spec` is that of the first
                samples, and all samples of an iterable-style dataset must have their structure and dtypes.
            num_parallel_calls: Samples of a map-style dataset read at a time, as for :meth:`map`; more than 1 only if
                several threads or processes may read the dataset.

        Raises:
            SpecError: `dataset` is not a dataset; a sample does not fit (at iteration, in its place).
            InvalidArgumentError: `num_parallel_calls` is 0 or below AUTOTUNE; a DataLoader has a DistributedSampler, or
                comes with an `output_signature`.

        Source: torch.utils.data.Dataset, IterableDataset and DataLoader.

        >>> [int(x) for x in rd.Dataset.from_torch([3, 1, 2]).map(lambda x: x + 1)]
        [4, 2, 3]
        """
        if is_torch_loader(dataset):
            if output_signature is not None:
                raise InvalidArgumentError(
                    f"output_signature belongs to a torch Dataset, and a DataLoader comes without, got "
                    f"{output_signature!r:.100}. Leave it out."
                )
            from raydist.dataset.torch_loader import loader_op  # imports torch, which a DataLoader has done already

            return cls(loader_op(dataset))
        read = read_sample(dataset)
        if read is None:
            return cls(iterable_samples_op(dataset, output_signature))
        declared = DeclaredOutput.parse(output_signature)
        return cls(MapOp(RangeOp(0, len(dataset)), read, num_parallel_calls, None, declared))

    @classmethod
    def from_ray(cls, dataset: Any) -> Self:
        """Return the rows of a `ray.data.Dataset`: dicts of columns, see :meth:`from_arrow` for the types.

        Ray executes the dataset once for every pass, block by block in order, while a thread in this process reads
        ahead. The state of an iterator is a count: resuming executes the dataset again and drops that many rows, so its
        own operations must return the same rows again (a `random_shuffle` needs a seed, or `materialize()` before it).

        Args:
            dataset: The dataset; tensors of one shape are leaves of that shape.

        Raises:
            SpecError: `dataset` is not a Ray dataset, or a column has a type that no tensor can hold.
            InvalidArgumentError: A null (at iteration, in its place).
            ray.exceptions.RayTaskError: A function of the Ray dataset failed (at iteration); this ends the pass.

        Source: ray.data.Dataset.iter_batches.

        >>> import ray.data  # doctest: +SKIP
        >>> [int(row["id"]) for row in rd.Dataset.from_ray(ray.data.range(3))]  # doctest: +SKIP
        [0, 1, 2]
        """
        from raydist.actors.ray_data import ray_data_op  # imports Ray Data

        return cls(ray_data_op(dataset))
