"""Sources that read local or remote files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from raydist.core.errors import InvalidArgumentError
from raydist.dataset.base import DatasetBase, named
from raydist.pipelines.elements.arguments import whole_number
from raydist.pipelines.elements.arrow_fields import Conversion
from raydist.pipelines.elements.declared_output import DeclaredOutput
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.formats.tar_samples import SampleMembers
from raydist.pipelines.ops.batch import BatchOp
from raydist.pipelines.ops.map import MapOp, split_label
from raydist.pipelines.ops.nested import graph_of
from raydist.pipelines.ops.record_files import RecordFilesOp, list_files_op
from raydist.pipelines.ops.shuffle import ShuffleOp
from raydist.pipelines.sources.columnar_files import parquet_op
from raydist.pipelines.sources.csv_files import csv_op
from raydist.pipelines.sources.file_format import TarFormat
from raydist.pipelines.sources.json_files import json_op
from raydist.pipelines.sources.numpy_files import numpy_op
from raydist.pipelines.stored.read import checked_manifest, saved_op, shards_op

_BYTES = TensorSpec((), bytes)


class FileSources(DatasetBase):
    """The class methods that read local or remote files."""

    @classmethod
    def list_files(cls, pattern: Any, shuffle: bool = True, seed: int | None = None, name: str | None = None) -> Self:
        """Return the names (str) of the files that match a pattern at the time of the call.

        Args:
            pattern: A path or URI with `*`, `?` and `[...]`, none of which matches a slash, or a list of patterns.
            shuffle: A new order every epoch; False returns sorted names.
            seed: Seed of the order, as for :meth:`shuffle`.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            NotFoundError: No file matches.
            InvalidArgumentError: An empty list, or a URI scheme that fsspec does not support.
            SpecError: A pattern is not a path.

        Source: tf.data.Dataset.list_files (where no match is an InvalidArgumentError).

        >>> import os, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> for name in ("b.txt", "a.txt"):
        ...     open(os.path.join(folder, name), "w").close()
        >>> [os.path.basename(name) for name in rd.Dataset.list_files(f"{folder}/*.txt", shuffle=False)]
        ['a.txt', 'b.txt']
        """
        names = list_files_op(pattern)
        return cls(named(ShuffleOp(names, names.cardinality(), seed) if shuffle else names, name))

    @classmethod
    def from_numpy(cls, source: Any, verify: bool = True, *, max_array_bytes: int | None = None) -> Self:
        """Read the rows of a .npy or .npz file, or of arrays in memory.

        A .npy file contains rows; from a .npz file, an element is a dict with one row of each array. Files are mapped
        into memory, by each process separately: only rows that are read are loaded. The arrays of a compressed .npz
        (`np.savez_compressed`) are loaded whole, once in every process that reads them.

        Args:
            source: A local path that ends in .npy or .npz, or a nest of arrays with equal first dimensions.
            verify: Make every process that reads a .npz verify its checksums before the first row, for which it reads
                the whole file (1 s per GB). Compressed arrays are always verified; a .npy has no checksum.
            max_array_bytes: Maximum size of a compressed array in memory, whatever the file claims. None: 256 MiB, or
                64 times its size in the file if that is larger.

        Raises:
            NotFoundError: The file does not exist.
            DataLossError: The file is truncated or damaged; with the first row: a checksum does not match.
            SpecError: The file contains Python objects (pickles are never loaded) or records with fields.
            InvalidArgumentError: The first dimensions differ, an array has none, the path is not a local .npy or .npz,
                or a compressed array is larger than `max_array_bytes`.

        Source: numpy.load(mmap_mode="r").

        >>> import numpy as np
        >>> [row.tolist() for row in rd.Dataset.from_numpy(np.arange(4).reshape(2, 2))]
        [[0, 1], [2, 3]]
        """
        return cls(numpy_op(source, verify, max_array_bytes))

    @classmethod
    def from_parquet(
        cls,
        paths: Any,
        columns: Sequence[str] | None = None,
        filters: Any = None,
        *,
        fill_null: Any = None,
        null_masks: bool | Sequence[str] = False,
        decimals: str = "float64",
    ) -> Self:
        """Read the rows of Parquet files: dicts of columns, see :meth:`from_arrow` for types and nulls.

        Row groups are units of work for the pipeline's threads or input workers; rows come in order, and only needed
        columns are read. (Row groups of more than 64 MiB of these columns are read in batches, one after the other.)
        The footers of all files are read at once, for the columns and the number of rows.

        Pages are verified if the file has checksums (`write_page_checksum=True` of pyarrow's writer). One error takes
        the place of damaged rows, up to the end of the row group, and reading continues after it. The footer has no
        checksum in this format, and a page has at most 2 GiB, however small it is in the file.

        The state of an iterator is the number of a row group and of its rows; resuming reads that row group again. A
        file that was removed or changed since is an error for each unit of work.

        Args:
            paths: One or several paths, local or URIs that fsspec or pyarrow.fs can open.
            columns: Columns to read; None for all.
            filters: Rows to keep: conditions `[("label", ">=", 3), ...]` that must all hold, a list of such lists of
                which one must hold, or a `pyarrow.compute.Expression`. Row groups whose statistics exclude them are not
                read. The number of rows is then unknown.
            fill_null: A value for nulls, or a dict `{column: value}`; see :meth:`from_arrow`.
            null_masks: True adds a boolean leaf for the nulls of each column; or a list of column names.
            decimals: "float64", which may round, or "text": str, exact.

        Raises:
            NotFoundError: A file does not exist.
            DataLossError: A footer is damaged; at iteration: a row group is damaged, or a file has changed.
            SpecError: Files differ in columns, or :meth:`from_arrow` does not support a column's type; at iteration, in
                its place: a row has a null without a fill value or mask.
            InvalidArgumentError: A directory, an unknown column, filters or a fill value that do not fit.

        Source: pyarrow.parquet.read_table, whose `columns` and `filters` these are.

        >>> import os, tempfile
        >>> import pyarrow as pa, pyarrow.parquet as pq
        >>> path = os.path.join(tempfile.mkdtemp(), "x.parquet")
        >>> pq.write_table(pa.table({"x": [1, 2, 3], "y": ["a", "b", "c"]}), path, write_page_checksum=True)
        >>> list(rd.Dataset.from_parquet(path, columns=["y"], filters=[("x", ">", 1)]))
        [{'y': 'b'}, {'y': 'c'}]
        """
        return cls(parquet_op(paths, columns, filters, Conversion.of(fill_null, null_masks, decimals)))

    @classmethod
    def from_tar(
        cls,
        paths: Any,
        members: Sequence[str] | None = None,
        num_parallel_reads: int | None = None,
        *,
        max_sample_bytes: int | None = None,
    ) -> Self:
        """Read the samples of tar files (WebDataset shards): dicts of bytes, with the key of the sample as "__key__".

        Neighbouring members whose names agree up to the first dot of the file name, including folders, form one sample:
        `a/001.jpg` and `a/001.seg.png` are "jpg" and "seg.png" of "a/001". Names after the dot become lower case.
        Members that are not plain files, have no dot, or are named `__...__` are skipped. Files that end in .gz or .tgz
        are decompressed. All samples must have the same members: a sample with other members is an error in its place,
        unless `members` names the members that all samples have.

        Files are read in sequence. Damage ends a file, with an error in the place of the sample. The state of an
        iterator is a file number and an offset for each open file; a compressed file is decompressed up to the offset.

        Args:
            paths: A path, a list of paths, or a dataset of str. Local, or URIs that fsspec or pyarrow.fs can open.
            members: Names of the members to keep, such as `["jpg", "cls"]`; None for all.
            num_parallel_reads: As for :func:`rd.TFRecordDataset`: k > 1 takes samples in turn from k files at a time.
            max_sample_bytes: A larger sample counts as damage. None: 1 GiB; for a compressed file 32 MiB, or 4 times
                the file's size if that is larger.

        Raises:
            InvalidArgumentError: `num_parallel_reads` < 1, an empty list, `members` is not a list; at iteration: a
                directory.
            NotFoundError: A file does not exist (at iteration, in its place).
            DataLossError: Damage: a broken header, a truncated file, two members of one name in a sample, members of a
                sample that are not neighbours (at iteration; has `path` and `offset`).
            SpecError: A sample lacks one of the members (at iteration, in its place).

        Source: webdataset.WebDataset.

        >>> import io, os, tarfile, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "shard-0.tar")
        >>> with tarfile.open(path, "w") as tar:
        ...     for name, data in [("001.txt", b"one"), ("001.cls", b"1"), ("002.txt", b"two"), ("002.cls", b"2")]:
        ...         info = tarfile.TarInfo(name)
        ...         info.size = len(data)
        ...         tar.addfile(info, io.BytesIO(data))
        >>> list(rd.Dataset.from_tar(path, members=["txt"]))
        [{'__key__': '001', 'txt': b'one'}, {'__key__': '002', 'txt': b'two'}]
        """
        names = paths._op if isinstance(paths, DatasetBase) else paths
        if members is not None and (isinstance(members, str) or not all(isinstance(name, str) for name in members)):
            raise InvalidArgumentError(f"members must be a list of names such as ['jpg', 'cls'], got {members!r}.")
        spec = None if members is None else {"__key__": TensorSpec((), str), **dict.fromkeys(members, _BYTES)}
        records = RecordFilesOp.of(names, TarFormat(max_sample_bytes), num_parallel_reads)
        kept = None if members is None else tuple(members)
        return cls(MapOp(records, SampleMembers(kept), None, None, DeclaredOutput.parse(spec)))

    @classmethod
    def from_csv(
        cls,
        paths: Any,
        columns: Sequence[str | int] | None = None,
        *,
        column_types: Mapping[str, Any] | None = None,
        column_defaults: Mapping[str, Any] | Sequence[Any] | None = None,
        column_names: Sequence[str] | None = None,
        delimiter: str = ",",
        compression_type: str | None = None,
        batch_size: int | None = None,
        label_name: str | None = None,
        select_columns: Sequence[str | int] | None = None,
        max_line_bytes: int | None = None,
    ) -> Self:
        """Read the rows of CSV files: dicts of columns; once, and in order (`shuffle` and `repeat` change that).

        One line is one row; blank lines are skipped. Fields may be quoted with `"`, but must end on their line. Types
        that are not given are inferred from the first 1000 lines of the first file that has rows: int64, float64, bool
        or str. A line that does not fit is an error in its place. The state of an iterator is a file number and an
        offset.

        Args:
            paths: One or several paths, local or URIs that fsspec or pyarrow.fs can open.
            columns: Columns to keep, by name or number, None for all; the others are not converted.
            column_types: dtypes of columns (numpy, torch or text; also `bytes` and `str`).
            column_defaults: Values for empty fields. An empty field of another numeric column is an error. A dict, or a
                list with one value for each of the columns, which then have the values' types. A dtype (numpy or torch)
                instead of a value: a column of that type, without a default.
            column_names: Names of all columns, for files without a header line.
            delimiter: Character between fields.
            compression_type: None (or ""), "GZIP" or "ZLIB"; of all files.
            batch_size: Rows of one element, as for :meth:`batch`; None: each row is one.
            label_name: A column: elements are (dict of the other columns, this column).
            select_columns: Alias of `columns`.
            max_line_bytes: See :meth:`from_json`.

        Raises:
            InvalidArgumentError: A directory, an unknown column, a default that does not fit, no columns; both
                `columns` and its alias.
            NotFoundError: A file does not exist (the first one at once, others at iteration).
            DataLossError: The first lines cannot be parsed; at iteration, in its place: a wrong line (has `path` and
                `offset`).
            SpecError: Two columns of one name; at iteration, in its place: an empty field, a file with another header.

        Source: tf.data.experimental.CsvDataset, make_csv_dataset.

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "x.csv")
        >>> with open(path, "w") as file:
        ...     _ = file.write("id,name,score\\n1,Ann,0.5\\n2,Bob,\\n")
        >>> ds = rd.Dataset.from_csv(path, columns=["id", "score"], column_defaults={"score": 0.0})
        >>> list(ds.as_numpy_iterator())[1]
        {'id': np.int64(2), 'score': np.float64(0.0)}
        >>> for features, names in rd.Dataset.from_csv(path, ["id", "name"], batch_size=2, label_name="name"):
        ...     print(features["id"].tolist(), names.tolist())
        [1, 2] ['Ann', 'Bob']
        """
        if select_columns is not None and columns is not None:
            raise InvalidArgumentError(
                f"Give columns or select_columns, got {columns!r:.200} and {select_columns!r:.200}."
            )
        kept = columns if select_columns is None else select_columns
        settings = (column_types, column_defaults, column_names, delimiter, compression_type, max_line_bytes)
        op: DatasetOp = csv_op(paths, kept, *settings)
        op = op if batch_size is None else BatchOp(op, whole_number("batch_size", batch_size))
        return cls(op if label_name is None else split_label(op, label_name))

    @classmethod
    def from_json(
        cls,
        paths: Any,
        columns: Sequence[str] | None = None,
        *,
        compression_type: str | None = None,
        max_line_bytes: int | None = None,
        fill_null: Any = None,
        null_masks: bool | Sequence[str] = False,
    ) -> Self:
        """Read the objects of files of JSON lines: dicts, with a nested dict for every nested object.

        One line is one object; blank lines are skipped. Fields and types are inferred from the first 1000 lines of the
        first file that has any: int64, float64, bool, str, and lists of these with shape (None,). A line that does not
        fit is an error in its place. The state of an iterator is a file number and an offset.

        Args:
            paths: One or several paths, local or URIs that fsspec or pyarrow.fs can open.
            columns: Fields to keep; other fields are allowed. None for all; then other fields are an error.
            compression_type: None (or ""), "GZIP" or "ZLIB"; of all files.
            max_line_bytes: A longer line counts as damage. None: 1 GiB; for a compressed file 32 MiB, or 4 times the
                file's size if that is larger. Lists and objects may be nested 100 deep.
            fill_null: A value for null and for missing fields of an object, or a dict `{field: value}`; see
                :meth:`from_arrow`.
            null_masks: True adds a boolean leaf for the nulls of each field; or a list of field names.

        Raises:
            InvalidArgumentError: A directory, an unknown field, no line in any file, a fill value that does not fit.
            NotFoundError: A file does not exist (the first one at once, others at iteration).
            DataLossError: The first lines cannot be parsed; at iteration, in its place: a wrong line (has `path` and
                `offset`).
            SpecError: A field that no tensor can hold; at iteration, in its place: an object with a missing or null
                field that has neither a fill value nor a mask.

        Source: pyarrow.json.read_json.

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "x.jsonl")
        >>> with open(path, "w") as file:
        ...     _ = file.write('{"id": 1, "tags": ["a", "b"]}')
        >>> list(rd.Dataset.from_json(path).as_numpy_iterator())
        [{'id': np.int64(1), 'tags': array(['a', 'b'], dtype=object)}]
        """
        conversion = Conversion.of(fill_null, null_masks, "float64")
        return cls(json_op(paths, columns, compression_type, max_line_bytes, conversion))

    @classmethod
    def load(
        cls,
        path: Any,
        compression: str | None = None,
        reader_func: Callable[[Self], Self] | None = None,
        *,
        max_chunk_bytes: int | None = None,
    ) -> Self:
        """Read the elements that :meth:`save` wrote, in order; of several shards one after the other.

        The checksum of every chunk is verified; one error takes the place of a damaged chunk's elements. The state of
        an iterator is the number of a chunk and a position in it.

        Args:
            path: The directory: a local path or a URI.
            compression: Compression of the saved dataset; None: as in its manifest.
            reader_func: Receives a dataset of datasets, one for each shard, and returns the dataset of elements, such
                as `lambda shards: shards.interleave(lambda shard: shard)`.
            max_chunk_bytes: Maximum size of a compressed chunk (some elements, or a large one) in memory, whatever the
                manifest claims. None: 32 MiB, or 64 times the chunk's size in its file.

        Raises:
            NotFoundError: There is no saved dataset.
            DataLossError: The manifest is damaged, or has another compression; at iteration: the data is damaged.
            InvalidArgumentError: A file is a link that leads out of the directory.
            SpecError: `reader_func` returns no dataset.

        Source: tf.data.Dataset.load.

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "numbers")
        >>> rd.Dataset.range(4).save(path, shard_func=lambda x: x % 2)
        >>> [int(x) for x in rd.Dataset.load(path)]
        [0, 2, 1, 3]
        >>> [int(x) for x in rd.Dataset.load(path, reader_func=lambda shards: shards.interleave(lambda shard: shard))]
        [0, 1, 2, 3]
        """
        manifest = checked_manifest(path, compression)
        if reader_func is None:
            return cls(saved_op(path, manifest, manifest.parts, max_chunk_bytes))
        return cls(graph_of(reader_func(cls(shards_op(path, manifest, cls, max_chunk_bytes))), "load"))
