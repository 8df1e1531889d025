"""rd.Dataset: the fluent facade of the input engine, one method per operation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import cloudpickle
import numpy as np

from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.nest import flatten
from raydist.options import Options
from raydist.pipelines.arguments import whole_number
from raydist.pipelines.arrow import arrow_batches
from raydist.pipelines.blocks import Block
from raydist.pipelines.carried import fold
from raydist.pipelines.convert import numpy_rows, torch_rows
from raydist.pipelines.explain import explain
from raydist.pipelines.formats.saved import save_blocks
from raydist.pipelines.iterator import DatasetIterator, Optional
from raydist.pipelines.merged import merged_options
from raydist.pipelines.op import DatasetOp
from raydist.pipelines.ops.assert_cardinality import AssertCardinalityOp
from raydist.pipelines.ops.batch import BatchOp
from raydist.pipelines.ops.cache import CacheOp
from raydist.pipelines.ops.choose import ChooseOp
from raydist.pipelines.ops.concatenate import ConcatenateOp
from raydist.pipelines.ops.enumerate import EnumerateOp
from raydist.pipelines.ops.filter import FilterOp
from raydist.pipelines.ops.gather import GatherOp
from raydist.pipelines.ops.ignore_errors import IgnoreErrorsOp
from raydist.pipelines.ops.interleave import InterleaveOp
from raydist.pipelines.ops.map import MapOp
from raydist.pipelines.ops.padded_batch import PaddedBatchOp
from raydist.pipelines.ops.padding import Padding
from raydist.pipelines.ops.prefetch import PrefetchOp
from raydist.pipelines.ops.rebatch import RebatchOp
from raydist.pipelines.ops.repeat import RepeatOp
from raydist.pipelines.ops.scan import ScanOp
from raydist.pipelines.ops.shard import ShardOp
from raydist.pipelines.ops.shuffle import ShuffleOp
from raydist.pipelines.ops.skip import SkipOp
from raydist.pipelines.ops.take import TakeOp
from raydist.pipelines.ops.take_while import TakeWhileOp
from raydist.pipelines.ops.unbatch import UnbatchOp
from raydist.pipelines.ops.unique import UniqueOp
from raydist.pipelines.ops.window import WindowOp
from raydist.pipelines.ops.with_options import WithOptionsOp
from raydist.pipelines.ops.zip import ZipOp
from raydist.pipelines.outputs import DeclaredOutput
from raydist.pipelines.plan import make_plan
from raydist.pipelines.rows import block_of_rows
from raydist.pipelines.seeds import draw_seed
from raydist.pipelines.sources.arrow_table import ArrowTableOp
from raydist.pipelines.sources.counter import CounterOp
from raydist.pipelines.sources.csv_files import csv_op
from raydist.pipelines.sources.draws import DrawsOp
from raydist.pipelines.sources.generator import GeneratorOp
from raydist.pipelines.sources.json_files import json_op
from raydist.pipelines.sources.list_files import list_files_op
from raydist.pipelines.sources.memory import MemoryOp
from raydist.pipelines.sources.numpy_files import numpy_op
from raydist.pipelines.sources.parquet import parquet_op
from raydist.pipelines.sources.permutation import PermutationOp
from raydist.pipelines.sources.random_numbers import RandomOp
from raydist.pipelines.sources.range import RangeOp
from raydist.pipelines.sources.saved import load_op
from raydist.pipelines.sources.torch_datasets import torch_op
from raydist.pipelines.spec import as_dtype
from raydist.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

__all__ = ["Dataset", "DatasetIterator", "Optional"]


@final
class Dataset:
    """A pipeline of elements: an immutable, picklable graph that runs when it is iterated (tf.data.Dataset).

    Elements are nests (tuple, dict, namedtuple, dataclass) of numbers, arrays, torch tensors, bytes and str. Iterating
    gives torch tensors; every `iter()` is a new epoch of this object, counted from 0.

    >>> [x.tolist() for x in Dataset.range(5).map(lambda x: x * x).batch(2)]
    [[0, 1], [4, 9], [16]]
    """

    def __init__(self, op: DatasetOp) -> None:
        self._op = op
        self._epochs = itertools.count()
        self._drawn_seed: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle, because the functions of a pipeline are often lambdas. Epochs are counted anew.
        return _unpickle, (cloudpickle.dumps(self._op),)

    # ---- sources

    @staticmethod
    def range(*args: int, output_type: Any = np.int64) -> Dataset:
        """The numbers of `range([start,] stop[, step])`, int64 unless `output_type` says otherwise.

        Raises:
            InvalidArgumentError: No or more than three arguments, or a step of 0.

        >>> [int(x) for x in Dataset.range(1, 7, 2)]
        [1, 3, 5]
        """
        numbers = tuple(whole_number("Each of start, stop and step", arg) for arg in args)
        return Dataset(RangeOp.of(numbers, as_dtype(output_type)))

    @staticmethod
    def counter(start: int = 0, step: int = 1, dtype: Any = np.int64) -> Dataset:
        """`start`, `start + step`, ... without an end.

        >>> [int(x) for x in Dataset.counter(start=2, step=3).take(3)]
        [2, 5, 8]
        """
        return Dataset(CounterOp(whole_number("start", start), whole_number("step", step), as_dtype(dtype)))

    @staticmethod
    def random(seed: int | None = None, rerandomize_each_iteration: bool = False) -> Dataset:
        """Random int64 numbers in [0, 2^32) without an end.

        Args:
            seed: With a seed, the same numbers in every process.
            rerandomize_each_iteration: Other numbers in every epoch; False keeps those of the first.

        >>> len({int(x) for x in Dataset.random(seed=4).take(10)})
        10
        """
        return Dataset(RandomOp(seed, rerandomize_each_iteration))

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """One element per entry of the first dimension of every leaf of `tensors`. Arrays are not copied.

        Raises:
            InvalidArgumentError: A leaf is a scalar, or first dimensions differ.

        >>> list(Dataset.from_tensor_slices({"x": [1, 2], "y": [b"a", b"b"]}).as_numpy_iterator())[1]
        {'x': np.int64(2), 'y': b'b'}
        """
        return Dataset(MemoryOp.of_slices(tensors))

    @staticmethod
    def from_tensors(tensors: Any) -> Dataset:
        """One element: `tensors`.

        >>> [x.tolist() for x in Dataset.from_tensors([1, 2])]
        [[1, 2]]
        """
        return Dataset(MemoryOp.of_tensors(tensors))

    @staticmethod
    def zip(*datasets: Any) -> Dataset:
        """Element k of every dataset in one tuple; `zip((a, {"b": b}))` takes any nest. Ends with the shortest.

        Raises:
            TypeError: An argument is not a dataset or a nest of them.

        >>> list(Dataset.zip(Dataset.range(3), Dataset.range(5, 9)).as_numpy_iterator())[-1]
        (np.int64(2), np.int64(7))
        """
        leaves, structure = flatten(datasets[0] if len(datasets) == 1 else datasets)
        wrong = [leaf for leaf in leaves if not isinstance(leaf, Dataset)]
        if wrong or not leaves:
            raise TypeError(f"zip takes datasets, or one nest of them, got {wrong[0] if wrong else datasets!r:.100}.")
        return Dataset(ZipOp(tuple(leaf._op for leaf in leaves), structure))

    @staticmethod
    def sample_from_datasets(
        datasets: Sequence[Dataset],
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool = False,
    ) -> Dataset:
        """Every element from one of `datasets`, drawn at random.

        Args:
            datasets: At least one, of one structure and dtypes.
            weights: One number per dataset, in any unit; 0 or less: never drawn. None: all alike.
            seed: With a seed, the same choices in every process.
            stop_on_empty_dataset: End when an empty dataset is drawn; False goes on with the others.
            rerandomize_each_iteration: Other choices in every epoch; False keeps those of the first.

        Raises:
            InvalidArgumentError: No dataset, another number of weights, or no weight > 0.
            TypeError: An argument is no dataset.
            SpecError: Structures or dtypes differ, as in `concatenate`.

        >>> a, b = Dataset.range(0, 5), Dataset.range(10, 15)
        >>> sorted(int(x) for x in Dataset.sample_from_datasets([a, b], weights=[0.2, 0.8], seed=1))
        [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
        """
        ops = _graphs(datasets, "sample_from_datasets")
        draws = DrawsOp.of(weights, len(ops), seed, rerandomize_each_iteration)
        kept = [number for number, weight in enumerate(draws.weights) if weight > 0]
        if len(kept) < len(ops):
            weights = [draws.weights[number] for number in kept]
            draws = DrawsOp.of(weights, len(kept), seed, rerandomize_each_iteration)
        chosen = tuple(ops[number] for number in kept)
        return Dataset(ChooseOp(chosen, draws, stop_on_empty_dataset, "sample_from_datasets", meets_all=True))

    @staticmethod
    def choose_from_datasets(
        datasets: Sequence[Dataset], choice_dataset: Dataset, stop_on_empty_dataset: bool = True
    ) -> Dataset:
        """For each number in `choice_dataset` the next element of the dataset with that number.

        Args:
            datasets: At least one, of one structure and dtypes.
            choice_dataset: Single whole numbers below `len(datasets)`; ends the iteration when it ends.
            stop_on_empty_dataset: End when an empty dataset is chosen; False passes over that choice.

        Raises:
            InvalidArgumentError: No dataset; a choice that is no number of one (at iteration, in its place).
            TypeError: An argument is no dataset.
            SpecError: Structures or dtypes differ, as in `concatenate`.

        >>> parts = [Dataset.range(3), Dataset.range(10, 13)]
        >>> choices = Dataset.from_tensor_slices([0, 1, 1, 0])
        >>> [int(x) for x in Dataset.choose_from_datasets(parts, choices)]
        [0, 10, 11, 1]
        """
        ops = _graphs(datasets, "choose_from_datasets")
        (choices,) = _graphs([choice_dataset], "choose_from_datasets")
        return Dataset(ChooseOp(ops, choices, stop_on_empty_dataset, "choose_from_datasets"))

    @staticmethod
    def from_generator(generator: Callable[..., Any], output_signature: Any = None, args: Any = ()) -> Dataset:
        """The values that `generator(*args)` yields. Called afresh for every iteration and every pass of a repeat.

        An exception in the generator comes out with its type, after the values before it, and ends the iteration.
        The state of an iterator is a count: resuming calls the generator again and drops that many values, so that it
        costs the time of making them, and needs a generator that yields the same values again.

        Args:
            generator: Returns an iterator: a generator function, or any function or class that returns an iterable.
            output_signature: Nest of `rd.TensorSpec` of one element, None for dimensions that vary. Values are
                converted to its dtypes where nothing is lost (integers that fit, any number to a float).
            args: Arguments for `generator`, handed over as numpy arrays and scalars, bytes and str. Bind other objects
                with `functools.partial`.

        Raises:
            SpecError: No signature, or nothing that can be called; a value of another structure, dtype or shape (at
                iteration, in the place of that value).

        Source: tf.data.Dataset.from_generator (TensorFlow 2.x API).

        >>> import raydist as rd
        >>> ds = Dataset.from_generator(range, output_signature=rd.TensorSpec((), "int64"), args=(3,))
        >>> [int(x) for x in ds]
        [0, 1, 2]
        """
        return Dataset(GeneratorOp.of(generator, output_signature, args))

    @staticmethod
    def from_numpy(source: Any) -> Dataset:
        """The rows of a .npy or .npz file, or of arrays in memory.

        A .npy file gives its rows, a .npz file a dict with one row of each of its arrays. Files are mapped into memory:
        only what is read is loaded, and every process maps the file itself. The arrays of a compressed .npz (made by
        `np.savez_compressed`) are loaded whole, once in every process that reads them.

        Args:
            source: A local path that ends in .npy or .npz, or a nest of arrays with equal first dimensions.

        Raises:
            NotFoundError: There is no such file.
            DataLossError: The file is truncated or damaged. (Numpy's uncompressed formats have no checksum that could
                be tested without reading all of the file.)
            SpecError: The file holds Python objects (pickles are never loaded) or records with fields.
            InvalidArgumentError: The first dimensions differ, or an array has none.

        >>> [row.tolist() for row in Dataset.from_numpy(np.arange(4).reshape(2, 2))]
        [[0, 1], [2, 3]]
        """
        return Dataset(numpy_op(source))

    @staticmethod
    def list_files(pattern: Any, shuffle: bool = True, seed: int | None = None) -> Dataset:
        """The names (str) of the files that match a pattern when this is called.

        Args:
            pattern: A path or URI with `*`, `?` and `[...]`, none of which matches a slash, or a list of them.
            shuffle: Another order every epoch; False gives sorted names.
            seed: Seed of the order, as for :meth:`shuffle`.

        Raises:
            NotFoundError: No file matches.
            InvalidArgumentError: An empty list, or a URI scheme that fsspec does not know.
            SpecError: A pattern that is no path.

        Source: tf.data.Dataset.list_files (TensorFlow 2.x API).

        >>> import os, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> for name in ("b.txt", "a.txt"):
        ...     open(os.path.join(folder, name), "w").close()
        >>> [os.path.basename(name) for name in Dataset.list_files(f"{folder}/*.txt", shuffle=False)]
        ['a.txt', 'b.txt']
        """
        return Dataset(list_files_op(pattern, shuffle=shuffle, seed=seed))

    @staticmethod
    def from_arrow(source: Any) -> Dataset:
        """The rows of an Arrow table: dicts of its columns, with a dict inside for every struct.

        Numbers keep their types, strings are str and binary values bytes. `fixed_shape_tensor` and fixed-size lists are
        tensors of that shape, other lists tensors of shape (None, ...). Numbers are not copied before they are handed
        out. A reader, which can be read only once, is read into memory whole.

        Args:
            source: A `pyarrow.Table`, `RecordBatch` or `RecordBatchReader`, or a table of another library that has
                Arrow's C stream interface.

        Raises:
            InvalidArgumentError: There are nulls.
            SpecError: A column of another type (dates, decimals, maps, ...), or no table.

        >>> import pyarrow as pa
        >>> list(Dataset.from_arrow(pa.table({"x": [1, 2], "y": ["a", "b"]})).as_numpy_iterator())[1]
        {'x': np.int64(2), 'y': 'b'}
        """
        return Dataset(ArrowTableOp.of(source))

    @staticmethod
    def from_parquet(paths: Any, columns: Sequence[str] | None = None, filters: Any = None) -> Dataset:
        """The rows of Parquet files: dicts of their columns, see :meth:`from_arrow` for the types.

        Row groups are read one by one, and only the columns that are needed. The footers of all files are read at
        once: they tell the columns and the number of rows. Pages are checked wherever the file has checksums
        (`write_page_checksum=True` of pyarrow's writer). One error stands for the rows that damage takes, up to the end
        of the row group, and reading goes on behind it. The footer has no checksum in this format.

        The state of an iterator is the number of a file, of a row group and of its rows. Resuming reads that row group
        again.

        Args:
            paths: A path or several, local or URIs that fsspec or pyarrow.fs can open.
            columns: Columns to read; None for all.
            filters: Rows to keep: conditions `[("label", ">=", 3), ...]` that must all hold, a list of such lists of
                which one must hold, or a `pyarrow.compute.Expression`. Row groups whose statistics rule it out are not
                read. The number of rows is unknown then.

        Raises:
            NotFoundError: A file does not exist.
            DataLossError: A footer is damaged; at iteration: a row group is, or a file has changed.
            SpecError: Files with different columns, a column of a type that :meth:`from_arrow` does not take; at
                iteration, in its place: a row with a null.
            InvalidArgumentError: A directory, an unknown column, or filters that do not fit.

        >>> import os, tempfile
        >>> import pyarrow as pa, pyarrow.parquet as pq
        >>> path = os.path.join(tempfile.mkdtemp(), "x.parquet")
        >>> pq.write_table(pa.table({"x": [1, 2, 3], "y": ["a", "b", "c"]}), path, write_page_checksum=True)
        >>> list(Dataset.from_parquet(path, columns=["y"], filters=[("x", ">", 1)]))
        [{'y': 'b'}, {'y': 'c'}]
        """
        return Dataset(parquet_op(paths, columns, filters))

    @staticmethod
    def from_csv(
        paths: Any,
        columns: Sequence[str] | None = None,
        *,
        column_types: Mapping[str, Any] | None = None,
        column_defaults: Mapping[str, Any] | None = None,
        column_names: Sequence[str] | None = None,
        delimiter: str = ",",
        compression_type: str | None = None,
    ) -> Dataset:
        """The rows of CSV files: dicts of their columns.

        One line is one row; blank lines are passed over. Fields may be quoted with `"`, but must end on their line.
        Types that are not given are learned from the first 1000 lines of the first file: int64, float64, bool or str. A
        line that does not fit is an error in its place. The state of an iterator is a file number and an offset.

        Args:
            paths: A path or several, local or URIs that fsspec or pyarrow.fs can open.
            columns: Columns to keep, None for all; the others are not converted.
            column_types: dtypes of columns (numpy, torch or text; `bytes` and `str` too).
            column_defaults: Values for empty fields. An empty field of another column of numbers is an error.
            column_names: Names of all columns, for files without a header line.
            delimiter: What stands between fields.
            compression_type: None (or ""), "GZIP" or "ZLIB"; of all files.

        Raises:
            InvalidArgumentError: A directory, an unknown column, a default that does not fit, no columns.
            NotFoundError: A file does not exist (the first one at once, others at iteration).
            DataLossError: The first lines cannot be parsed; at iteration, in its place: a wrong line (has `path` and
                `offset`).
            SpecError: At iteration, in its place: an empty field, a file with another header.

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "x.csv")
        >>> with open(path, "w") as file:
        ...     _ = file.write("id,name,score\\n1,Ann,0.5\\n2,Bob,\\n")
        >>> ds = Dataset.from_csv(path, columns=["id", "score"], column_defaults={"score": 0.0})
        >>> list(ds.as_numpy_iterator())[1]
        {'id': np.int64(2), 'score': np.float64(0.0)}
        """
        return Dataset(csv_op(paths, columns, column_types, column_defaults, column_names, delimiter, compression_type))

    @staticmethod
    def from_json(paths: Any, columns: Sequence[str] | None = None, *, compression_type: str | None = None) -> Dataset:
        """The objects of files of JSON lines: dicts, with a dict inside for every object.

        One line is one object; blank lines are passed over. Fields and types are learned from the first 1000 lines of
        the first file: int64, float64, bool, str, and lists of them with shape (None,). A line that does not fit is an
        error in its place. The state of an iterator is a file number and an offset.

        Args:
            paths: A path or several, local or URIs that fsspec or pyarrow.fs can open.
            columns: Fields to keep, further ones are allowed; None for all, a further one is an error.
            compression_type: None (or ""), "GZIP" or "ZLIB"; of all files.

        Raises:
            InvalidArgumentError: A directory, an unknown field, an empty first file.
            NotFoundError: A file does not exist (the first one at once, others at iteration).
            DataLossError: The first lines cannot be parsed; at iteration, in its place: a wrong line (has `path` and
                `offset`).
            SpecError: A field that no tensor can hold; at iteration, in its place: an object without one of the fields.

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "x.jsonl")
        >>> with open(path, "w") as file:
        ...     _ = file.write('{"id": 1, "tags": ["a", "b"]}')
        >>> list(Dataset.from_json(path).as_numpy_iterator())
        [{'id': np.int64(1), 'tags': array(['a', 'b'], dtype=object)}]
        """
        return Dataset(json_op(paths, columns, compression_type))

    @staticmethod
    def from_torch(dataset: Any, output_signature: Any = None, *, num_parallel_calls: int | None = 1) -> Dataset:
        """The samples of a `torch.utils.data.Dataset`, or of anything with its methods.

        A map-style dataset (`__getitem__` and `__len__`) is read by index: resuming and sharding cost nothing. An
        iterable-style one (`__iter__`) is iterated afresh for every pass, its samples copied; resuming iterates it
        again and drops what was handed out. An error of a sample stands in its place; that of an iterator ends the
        iteration.
        Random numbers that a dataset draws by itself are not raydist's: draw them in a `map` with `rng` instead.

        Args:
            dataset: The dataset. Its samples are nests of what an element may hold.
            output_signature: Nest of `rd.TensorSpec` of one sample. Without it `element_spec` is that of the first
                sample, and all samples of an iterable-style dataset must have its shapes.
            num_parallel_calls: Samples of a map-style dataset read at a time, as for :meth:`map`; more than 1 only
                where it may be read by several threads or processes.

        Raises:
            SpecError: It is no dataset; a sample that does not fit (at iteration, in its place).

        >>> [int(x) for x in Dataset.from_torch([3, 1, 2]).map(lambda x: x + 1)]
        [4, 2, 3]
        """
        return Dataset(torch_op(dataset, output_signature, num_parallel_calls))

    @staticmethod
    def load(path: Any) -> Dataset:
        """The elements that :meth:`save` wrote, in their order.

        Every batch is compared with its checksum; one error stands for the elements of a damaged one. The state of an
        iterator is an offset in the file.

        Args:
            path: The directory.

        Raises:
            NotFoundError: There is no saved dataset.
            DataLossError: Its manifest is damaged; at iteration: its data is.
        """
        return Dataset(load_op(path))

    # ---- element by element

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        seed: int | None = None,
        output_spec: Any = None,
    ) -> Dataset:
        """`map_func` of every element.

        Args:
            map_func: Gets numpy arrays, numpy scalars, bytes and str; a tuple is unpacked into arguments. May return
                numpy, torch or Python values. A keyword-only parameter `rng` receives a `numpy.random.Generator` that
                depends on (seed, operation, epoch, index of the element) alone.
            num_parallel_calls: Calls at a time; 1 means in order in one thread; None or AUTOTUNE leaves it to raydist.
            deterministic: False allows any order (None: `Options.deterministic` decides). The order is kept all the
                same: in raydist it is what makes a state exact.
            seed: Seed of `rng`; None for that of the iteration.
            output_spec: Nest of `rd.TensorSpec` that every result must match. Without it `element_spec` is found by
                one call on the first element.

        Raises:
            InvalidArgumentError: `num_parallel_calls` is 0 or below AUTOTUNE.

        >>> [int(x) for x in Dataset.range(3).map(lambda x: x + 1)]
        [1, 2, 3]
        """
        declared = DeclaredOutput.parse(output_spec)
        if deterministic is not None and not isinstance(deterministic, bool):
            raise TypeError(f"deterministic must be a bool or None, got {deterministic!r}.")
        return Dataset(MapOp(self._op, map_func, num_parallel_calls, seed, declared))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """The elements for which `predicate` returns True. It gets what a map function gets, and must return one bool.

        >>> [int(x) for x in Dataset.range(5).filter(lambda x: x % 2 == 0)]
        [0, 2, 4]
        """
        return Dataset(FilterOp(self._op, predicate))

    def map_batches(self, fn: Callable[..., Any], batch_size: int, num_parallel_calls: int | None = None) -> Dataset:
        """`fn` of up to `batch_size` consecutive elements at once, as a structure of arrays.

        Every leaf gains a first dimension; `fn` returns leaves that share a first dimension, whose entries are the new
        elements (more or fewer if it likes). Much faster than `map` where `fn` is vectorised.

        >>> [int(x) for x in Dataset.range(4).map_batches(lambda x: x * 10, batch_size=3)]
        [0, 10, 20, 30]
        """
        return Dataset(UnbatchOp(MapOp(BatchOp(self._op, batch_size), fn, num_parallel_calls)))

    def flat_map(self, map_func: Callable[..., Any]) -> Dataset:
        """The elements of the datasets that `map_func` makes of the elements, one dataset after the other.

        Runs in the consumer's thread. The state of an iterator is that of the input and of the open dataset. An error
        of `map_func` stands in the place of its dataset's elements.

        Args:
            map_func: Gets what a map function gets and returns a Dataset.

        Raises:
            SpecError: `map_func` returns something else, or elements differ in structure or dtype (at iteration).

        >>> [int(x) for x in Dataset.range(4).flat_map(lambda n: Dataset.range(n))]
        [0, 0, 1, 0, 1, 2]
        """
        return Dataset(InterleaveOp.flat_map(self._op, map_func))

    def interleave(
        self,
        map_func: Callable[..., Any],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """The elements of the datasets that `map_func` makes of the elements, several of these read in turn.

        Each of `cycle_length` slots hands out up to `block_length` elements at a visit. A slot whose dataset ends gives
        its turn away and takes the next input when it is visited again. The order depends on nothing else.

        Args:
            map_func: Gets what a map function gets and returns a Dataset.
            cycle_length: Datasets open at a time; None or AUTOTUNE: 4, or `num_parallel_calls` if that is more. (The
                default of TensorFlow is the number of cores: the order would change with the machine.)
            block_length: Elements a turn, 1 by default.
            num_parallel_calls: How many of the open datasets are read ahead, in a thread each; AUTOTUNE: all. None:
                every dataset is read in the consumer's thread.
            deterministic: As for `map`: the order is kept all the same.

        Raises:
            InvalidArgumentError: A length below 1, or `num_parallel_calls` above `cycle_length`.
            SpecError: `map_func` returns no dataset, or elements differ in structure or dtype (at iteration).

        >>> ds = Dataset.range(1, 4).interleave(lambda x: Dataset.from_tensors(x).repeat(3), cycle_length=2)
        >>> [int(x) for x in ds]
        [1, 2, 1, 2, 1, 2, 3, 3, 3]
        """
        if deterministic is not None and not isinstance(deterministic, bool):
            raise TypeError(f"deterministic must be a bool or None, got {deterministic!r}.")
        return Dataset(InterleaveOp.of(self._op, map_func, cycle_length, block_length, num_parallel_calls))

    def scan(self, initial_state: Any, scan_func: Callable[..., Any]) -> Dataset:
        """The outputs of `scan_func(state, element)`, which returns the next state and an output.

        Runs in order in the consumer's thread. An element on which the function fails is an error in its place and
        leaves the state as it was. The state of an *iterator* is a count: resuming reads the input and calls the
        function again from the beginning.

        Args:
            initial_state: Nest of tensors; every next state must have its structure and dtypes.
            scan_func: Gets the state and the element (a tuple as one argument), both as a map function gets them.

        Raises:
            SpecError: The function returns no pair, or a state of another type (in the place of the element).

        >>> [int(x) for x in Dataset.range(5).scan(0, lambda total, x: (total + x, total + x))]
        [0, 1, 3, 6, 10]
        """
        return Dataset(ScanOp(self._op, initial_state, scan_func))

    def reduce(self, initial_state: Any, reduce_func: Callable[..., Any]) -> Any:
        """The last state: `reduce_func(state, element)` gives the next one. Reads an epoch, and blocks until its end.

        Args:
            initial_state: Nest of tensors; every next state must have its structure and dtypes.
            reduce_func: Gets the state and the element (a tuple as one argument), both as a map function gets them.

        Returns:
            The nest with torch tensors (scalar bytes and str as Python objects), like an element.

        Raises:
            SpecError: A state has another structure or dtype.
            Exception: The first error of an element or of the function.

        >>> int(Dataset.range(5).reduce(0, lambda total, x: total + x))
        10
        """
        from torch import from_numpy  # as in __iter__: where the first tensors are handed out

        last = fold(reduce_func, initial_state, self.as_numpy_iterator(), "reduce")
        return torch_rows(block_of_rows([last]), from_numpy)[0]

    # ---- groups

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Stack consecutive elements along a new first dimension: (...) -> (batch_size, ...).

        The last batch is short unless `drop_remainder`. A batch with a bad element is lost whole: the error is raised
        in its place.

        Args:
            batch_size: Elements per batch, >= 1; of the global batch where a strategy distributes the dataset.
            drop_remainder: Leave out a short last batch; the first dimension is then static.

        Raises:
            InvalidArgumentError: `batch_size` < 1.
            SpecError: The elements of one batch differ in shape or dtype (at iteration).

        >>> [b.tolist() for b in Dataset.range(5).batch(2)]
        [[0, 1], [2, 3], [4]]
        """
        return Dataset(BatchOp(self._op, whole_number("batch_size", batch_size), drop_remainder))

    def unbatch(self) -> Dataset:
        """The entries of the first dimension of every element, one by one.

        >>> [int(x) for x in Dataset.range(4).batch(3).unbatch()]
        [0, 1, 2, 3]
        """
        return Dataset(UnbatchOp(self._op))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Batches of elements whose leaves differ in shape (not in rank), filled up at their ends.

        Args:
            batch_size: Elements per batch, >= 1.
            padded_shapes: Nest like the element with the shape of each padded leaf; None in a shape, for a leaf or for
                all of them: as long as the longest of each batch.
            padding_values: Nest like the element with one scalar for each leaf; None: 0, or empty text.
            drop_remainder: Leave out a short last batch.

        Raises:
            InvalidArgumentError: `batch_size` < 1; shapes or values that do not fit the element (at iteration).
            DataLossError: An element is longer than its padded shape (at iteration).
            SpecError: A padding value has another type than its leaf (at iteration).

        >>> ds = Dataset.range(1, 4).map(lambda n: np.full(n, n))
        >>> [batch.tolist() for batch in ds.padded_batch(2)]
        [[[1, 0], [2, 2]], [[3, 3, 3]]]
        """
        padding = Padding(padded_shapes, padding_values)
        return Dataset(PaddedBatchOp(self._op, whole_number("batch_size", batch_size), padding, drop_remainder))

    def rebatch(self, batch_size: int | Sequence[int], drop_remainder: bool = False) -> Dataset:
        """The rows of batches in batches of other sizes, across the borders of the batches that come in.

        Args:
            batch_size: Rows per batch, or a list of sizes to be used in turn, again and again; a 0 in the list gives
                an empty batch.
            drop_remainder: Leave out a short last batch.

        Raises:
            InvalidArgumentError: A size < 0, or no size > 0. Rows that do not share a first dimension (at iteration).

        >>> [batch.tolist() for batch in Dataset.range(8).batch(4).rebatch([2, 1, 1])]
        [[0, 1], [2], [3], [4, 5], [6], [7]]
        """
        sizes = batch_size if isinstance(batch_size, Sequence) else (batch_size,)
        return Dataset(
            RebatchOp(UnbatchOp(self._op), tuple(whole_number("batch_size", size) for size in sizes), drop_remainder)
        )

    def window(self, size: int, shift: int | None = None, stride: int = 1, drop_remainder: bool = False) -> Dataset:
        """Datasets of `size` elements that lie `stride` apart, one beginning every `shift` elements.

        Every leaf of an element becomes a dataset of that leaf: windows of (x, y) are pairs of datasets. Use them in
        `flat_map` (`lambda w: w.batch(3)`), or iterate over them. Windows at the end are shorter unless
        `drop_remainder`. A window with a bad element is lost whole: the error is raised in its place.

        The state of an iterator is that of the input near the window's beginning; restoring reads a window again.

        Args:
            size: Elements per window, >= 1.
            shift: Elements from the beginning of one window to that of the next, >= 1; None for `size`.
            stride: Distance of a window's elements, >= 1.
            drop_remainder: Leave out windows with fewer than `size` elements.

        Raises:
            InvalidArgumentError: A number is below 1.

        >>> [[int(x) for x in window] for window in Dataset.range(5).window(3, shift=2)]
        [[0, 1, 2], [2, 3, 4], [4]]
        >>> [x.tolist() for x in Dataset.range(4).window(2, 1, drop_remainder=True).flat_map(lambda w: w.batch(2))]
        [[0, 1], [1, 2], [2, 3]]
        """
        size, stride = whole_number("size", size), whole_number("stride", stride)
        shift = size if shift is None else whole_number("shift", shift)
        return Dataset(WindowOp(self._op, size, shift, stride, drop_remainder, Dataset))

    # ---- order and count

    def shuffle(self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True) -> Dataset:
        """Random order: each output is drawn from a buffer of `buffer_size` elements, refilled from the input.

        The state of an iterator holds the position alone; restoring it reads the input again up to there.

        Args:
            buffer_size: >= 1, or UNKNOWN_CARDINALITY for the whole input. As large as the dataset: a perfect shuffle.
            seed: With a seed, every epoch's order is the same in every process.
            reshuffle_each_iteration: A new order every epoch; False keeps one order, even without a seed.

        Raises:
            InvalidArgumentError: `buffer_size` is out of range.

        >>> ds = Dataset.range(10).shuffle(10, seed=1)
        >>> sorted(int(x) for x in ds) == list(range(10))
        True
        """
        return Dataset(ShuffleOp(self._op, whole_number("buffer_size", buffer_size), seed, reshuffle_each_iteration))

    def global_shuffle(self, seed: int | None = None, reshuffle_each_iteration: bool = True) -> Dataset:
        """All elements in random order, without a buffer: every element is read by its index, where it lies.

        A full permutation in constant memory, and a state that is one number. Use it right behind a source whose
        elements can be read by their index: `range`, `from_tensor_slices`, `from_numpy`.

        Args:
            seed: With a seed, every epoch's order is the same in every process.
            reshuffle_each_iteration: A new order every epoch; False keeps that of the first.

        Raises:
            FailedPreconditionError: The elements cannot be read by their index.

        >>> ds = Dataset.range(1000).global_shuffle(seed=1)
        >>> sorted(int(x) for x in ds) == list(range(1000))
        True
        """
        access = self._op.random_access()
        if access is None:
            raise FailedPreconditionError(
                f"global_shuffle needs a source whose elements can be read by their index, got {self._op.label}. "
                "Put it right behind range, from_tensor_slices or from_numpy, or use shuffle(buffer_size)."
            )
        order = PermutationOp(len(access), seed, reshuffle_each_iteration)
        return Dataset(GatherOp(order, self._op))

    def repeat(self, count: int | None = None) -> Dataset:
        """`count` passes, each an epoch of what is before; None or a negative count: for ever. An empty dataset ends.

        >>> [int(x) for x in Dataset.range(2).repeat(2)]
        [0, 1, 0, 1]
        """
        return Dataset(RepeatOp(self._op, None if count is None else whole_number("count", count)))

    def take(self, count: int) -> Dataset:
        """The first `count` elements; all for a negative count.

        >>> [int(x) for x in Dataset.range(5).take(2)]
        [0, 1]
        """
        return Dataset(TakeOp(self._op, whole_number("count", count)))

    def skip(self, count: int) -> Dataset:
        """All but the first `count` elements; none for a negative count.

        >>> [int(x) for x in Dataset.range(5).skip(3)]
        [3, 4]
        """
        return Dataset(SkipOp(self._op, whole_number("count", count)))

    def take_while(self, predicate: Callable[..., Any]) -> Dataset:
        """The elements before the first for which `predicate` returns False. It must return one bool.

        An element for which the predicate fails is an error in its place, and what follows is still asked about.

        >>> [int(x) for x in Dataset.range(9).take_while(lambda x: x < 3)]
        [0, 1, 2]
        """
        return Dataset(TakeWhileOp(self._op, predicate))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Every element whose number leaves the remainder `index` when divided by `num_shards`.

        The shards 0 .. num_shards - 1 of a dataset hold each of its elements once, errors included.

        Raises:
            InvalidArgumentError: `num_shards` < 1, or `index` is not in 0 .. num_shards - 1.

        >>> [int(x) for x in Dataset.range(8).shard(3, 1)]
        [1, 4, 7]
        """
        return Dataset(ShardOp(self._op, whole_number("num_shards", num_shards), whole_number("index", index)))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """These elements, then those of `dataset`, which must have the same structure and dtypes.

        Raises:
            TypeError: `dataset` is no dataset.
            SpecError: Structures or dtypes differ: when `element_spec` is asked for, and in the place of each element.

        >>> [int(x) for x in Dataset.range(2).concatenate(Dataset.range(5, 7))]
        [0, 1, 5, 6]
        """
        if not isinstance(dataset, Dataset):
            raise TypeError(f"concatenate takes a Dataset, got {dataset!r:.100}.")
        return Dataset(ConcatenateOp(self._op, dataset._op))

    def enumerate(self, start: int = 0) -> Dataset:
        """(number, element) pairs; numbers are int64 and count from `start`. An error takes a number too.

        >>> [(int(number), text) for number, text in Dataset.from_tensor_slices(["a", "b"]).enumerate(start=5)]
        [(5, 'a'), (6, 'b')]
        """
        return Dataset(EnumerateOp(self._op, whole_number("start", start)))

    def unique(self) -> Dataset:
        """Every value once, at its first place. Elements are single integers, bools, bytes or str.

        Remembers every value. The state of an iterator is a count: resuming reads the input again from the beginning.

        Raises:
            SpecError: Elements of another kind, in the place of each.

        >>> [int(x) for x in Dataset.from_tensor_slices([1, 37, 2, 37, 2, 1]).unique()]
        [1, 37, 2]
        """
        return Dataset(UniqueOp(self._op))

    def ignore_errors(self, log_warning: bool = False) -> Dataset:
        """The elements without the errors among them; `log_warning` logs each. Does not save a batch made before.

        >>> [float(x) for x in Dataset.range(3).map(lambda x: 4.0 / int(x - 1)).ignore_errors()]
        [-4.0, 4.0]
        """
        return Dataset(IgnoreErrorsOp(self._op, log_warning))

    def assert_cardinality(self, expected_cardinality: int) -> Dataset:
        """Say how many elements there are, where raydist cannot know; checked while they are read.

        An error of an element counts as an element. The wrong number is one error, where the first element is missing
        or too many, and the end.

        Args:
            expected_cardinality: A number, INFINITE_CARDINALITY, or UNKNOWN_CARDINALITY (nothing is checked).

        Raises:
            InvalidArgumentError: The number is below UNKNOWN_CARDINALITY.
            FailedPreconditionError: There are more or fewer (at iteration).

        >>> len(Dataset.range(9).filter(lambda x: x % 2 == 0).assert_cardinality(5))
        5
        """
        return Dataset(AssertCardinalityOp(self._op, whole_number("expected_cardinality", expected_cardinality)))

    def cache(self) -> Dataset:
        """Keep the elements of a first whole pass in memory; later passes and epochs read them there.

        What is random before the cache is the same in every epoch. A pass that is left early, or has an error in it, is
        not kept. Each process keeps its own; datasets derived from this one share it if they have one `Options.seed`.
        The state of an iterator is a count: resuming in a new process reads the input again from the beginning.

        >>> ds = Dataset.range(3).map(lambda x: x * 2).cache()
        >>> [[int(x) for x in ds] for epoch in (0, 1)]
        [[0, 2, 4], [0, 2, 4]]
        """
        return Dataset(CacheOp(self._op))

    def prefetch(self, buffer_size: int | None = None) -> Dataset:
        """Let a background thread make up to `buffer_size` elements ahead; 0 does nothing, None or AUTOTUNE adapts.

        The state of an iterator is that of the elements handed out. The thread ends with the iterator.

        Raises:
            InvalidArgumentError: `buffer_size` is below AUTOTUNE.

        >>> [int(x) for x in Dataset.range(3).prefetch(2)]
        [0, 1, 2]
        """
        return Dataset(PrefetchOp(self._op, buffer_size))

    def apply(self, transformation: Callable[[Dataset], Dataset]) -> Dataset:
        """`transformation(self)`, which must be a dataset.

        Raises:
            TypeError: It is something else.

        >>> [int(x) for x in Dataset.range(3).apply(lambda ds: ds.skip(1))]
        [1, 2]
        """
        result = transformation(self)
        if not isinstance(result, Dataset):
            raise TypeError(f"The function given to apply must return a Dataset, got {result!r:.100}.")
        return result

    # ---- options and properties

    def with_options(self, options: Options) -> Dataset:
        """Set options for the whole pipeline; what is set explicitly wins over what was set before.

        >>> Dataset.range(3).with_options(Options(seed=7)).options().seed
        7
        """
        if not isinstance(options, Options):
            raise TypeError(f"with_options takes rd.Options, got {options!r:.100}.")
        return Dataset(WithOptionsOp(self._op, options.frozen()))

    def options(self) -> Options:
        """The options of the pipeline, merged over all inputs; they cannot be changed."""
        return merged_options(self._op).frozen()

    @property
    def element_spec(self) -> Any:
        """Nest of `rd.TensorSpec` of one element. May call a map function once, on the first element."""
        return self._op.element_spec()

    def cardinality(self) -> int:
        """Number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY. Runs nothing."""
        return self._op.cardinality()

    def __len__(self) -> int:
        count = self.cardinality()
        if count == INFINITE_CARDINALITY:
            raise TypeError("The dataset is infinite and has no length. Use take(n) or cardinality().")
        if count == UNKNOWN_CARDINALITY:
            raise TypeError("The dataset's length is unknown before it is read. Use cardinality().")
        return count

    def __bool__(self) -> bool:
        return True

    def explain(self) -> str:
        """The graph as written, as optimised, and where each stage runs, as text.

        >>> print(Dataset.range(3).take(-1).batch(2).explain())
        as written:
          batch-2: batch(2)
            take-1: take(-1)
              range-0: range(0, 3, 1)
        as optimised:
          batch-2: batch(2)
            range-0: range(0, 3, 1)
        stages:
          range-0: in the consumer's process
          batch-2: in the consumer's process
        """
        return explain(make_plan(self._op, self.options()))

    # ---- iteration

    def __iter__(self) -> DatasetIterator[Any]:
        """A new epoch; elements are nests of torch tensors (scalar bytes and str as Python objects)."""
        # Torch is imported by the first iteration that hands out tensors: building and pickling pipelines needs none.
        from torch import from_numpy

        return self._iterate(functools.partial(torch_rows, from_numpy=from_numpy))

    def as_numpy_iterator(self) -> DatasetIterator[Any]:
        """A new epoch; elements are nests of numpy arrays and scalars, bytes and str.

        >>> list(Dataset.range(2).as_numpy_iterator())
        [np.int64(0), np.int64(1)]
        """
        return self._iterate(numpy_rows)

    def arrow_batches(self) -> DatasetIterator[Any]:
        """A new epoch; each element (a batch) as a `pyarrow.RecordBatch` with one row per entry of its first dimension.

        Raises:
            InvalidArgumentError: The leaves of an element have no common first dimension (at iteration): use `batch`.

        >>> [batch.num_rows for batch in Dataset.range(5).batch(2).arrow_batches()]
        [2, 2, 1]
        """
        return self._iterate(arrow_batches)

    def save(self, path: Any) -> None:
        """Write the elements of one new epoch into a new directory, for :meth:`load`.

        Returns when everything has reached the disk. The directory appears at the end, in one step: a crash leaves
        no half of it under this name.

        Args:
            path: A local path that does not exist yet.

        Raises:
            FailedPreconditionError: The path exists.
            NotFoundError: Its parent does not.
            InvalidArgumentError: A URI; elements of named tuples or dataclasses (map them to dicts).
            Exception: The error of an element: nothing is saved.

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "squares")
        >>> Dataset.range(4).map(lambda x: x * x).save(path)
        >>> [int(x) for x in Dataset.load(path)]
        [0, 1, 4, 9]
        """
        blocks = self._iterate(lambda block: [block])
        try:
            save_blocks(path, self.element_spec, blocks)
        finally:
            blocks.close()

    def to_torch(self) -> Any:
        """This dataset as a `torch.utils.data.IterableDataset`, for a plain `DataLoader`.

        With n workers each gives every n-th element, so that nothing comes twice. But each runs the whole pipeline to
        find them: prefer `num_workers=0` and raydist's own parallelism. Every pass is a new epoch; with workers its
        order follows torch's seed (`torch.manual_seed`) too.

        >>> from torch.utils.data import DataLoader
        >>> [x.tolist() for x in DataLoader(Dataset.range(5).to_torch(), batch_size=2)]
        [[0, 1], [2, 3], [4]]
        """
        # The class inherits from one of torch's: building and pickling pipelines needs no torch.
        from raydist.torch_dataset import TorchDataset

        return TorchDataset(self)

    def _iterate(self, convert: Callable[[Block], Sequence[Any]]) -> DatasetIterator[Any]:
        options = self.options()
        seed = options.seed
        if seed is None:
            if self._drawn_seed is None:
                self._drawn_seed = draw_seed()
            seed = self._drawn_seed
        return DatasetIterator(self._op, options=options, seed=seed, epoch=next(self._epochs), convert=convert)

    def __repr__(self) -> str:
        return f"<Dataset {self._op.label}, cardinality {self.cardinality()}>"


def _graphs(datasets: Sequence[Dataset], caller: str) -> tuple[DatasetOp, ...]:
    """The operations of one or more datasets."""
    for dataset in datasets:
        if not isinstance(dataset, Dataset):
            raise TypeError(f"{caller} takes datasets, got {dataset!r:.100}.")
    if not datasets:
        raise InvalidArgumentError(f"{caller} needs at least one dataset, got none.")
    return tuple(dataset._op for dataset in datasets)


def _unpickle(op: bytes) -> Dataset:
    return Dataset(cloudpickle.loads(op))
