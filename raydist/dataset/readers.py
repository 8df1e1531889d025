"""Datasets of the records in files, named as in tf.data."""

from __future__ import annotations

from typing import Any

from raydist.dataset import Dataset
from raydist.dataset.base import named
from raydist.pipelines.formats.byte_streams import check_compression
from raydist.pipelines.formats.tfrecord import MAX_RECORD_BYTES
from raydist.pipelines.ops.record_files import RecordFilesOp
from raydist.pipelines.sources.file_format import FixedLengthFormat, TextLineFormat, TFRecordFormat


def TFRecordDataset(
    filenames: Any,
    compression_type: str | None = None,
    num_parallel_reads: int | None = None,
    *,
    max_record_bytes: int | None = None,
    name: str | None = None,
) -> Dataset:
    """Return the records of TFRecord files, as bytes.

    Checksums are always verified. A damaged record is an error in its place: if only its data is damaged, reading
    continues with the next record, otherwise (as after a file that cannot be opened) with the next file.

    A plain file that was truncated exactly between two records looks complete, and so does a file in which whole
    records were doubled or swapped: the format does not store the number of records. If you know the number,
    `assert_cardinality` detects this; a truncated "GZIP" or "ZLIB" file is detected unless it is empty.

    The state of an iterator is a file number and an offset for each open file. Resuming opens these files at the
    offsets; a compressed file is decompressed up to the offset.

    Args:
        filenames: A path, a list of paths, or a dataset of str. Local, or URIs that fsspec or pyarrow.fs can open.
        compression_type: None (or ""), "GZIP" or "ZLIB"; of all files.
        num_parallel_reads: None reads one file after the other, on demand. k > 1 takes records in turn from k files, as
            `interleave` with a block length of 1 does; one thread per file reads up to about 3 MiB ahead. AUTOTUNE
            reads ahead, too, in the order of None.
        max_record_bytes: A longer record counts as damage. None: 1 GiB; for a compressed file 32 MiB, or 4 times the
            file's size if that is larger.
        name: Name of the operation in `explain` and `stats`.

    Raises:
        InvalidArgumentError: An unknown compression, `num_parallel_reads` < 1, an empty list; at iteration: a
            directory, a FIFO or an unknown URI scheme.
        SpecError: A file name is not a path.
        NotFoundError: A file does not exist (at iteration, in its place).
        DataLossError: Damage: corrupt, truncated, or of another compression (at iteration; has `path` and `offset`).
            For compressed files the offset counts decompressed bytes.
        FailedPreconditionError: A file is not readable (at iteration).

    Source: tf.data.TFRecordDataset.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "two.tfrecord")
    >>> with rd.TFRecordWriter(path) as writer:
    ...     writer.write(b"first")
    ...     writer.write(b"second")
    >>> list(rd.TFRecordDataset(path))
    [b'first', b'second']
    """
    given = max_record_bytes is not None
    limit = MAX_RECORD_BYTES if max_record_bytes is None else max_record_bytes
    record_format = TFRecordFormat(check_compression(compression_type), limit, given)
    return Dataset(named(RecordFilesOp.of(_names(filenames), record_format, num_parallel_reads), name))


def TextLineDataset(
    filenames: Any,
    compression_type: str | None = None,
    num_parallel_reads: int | None = None,
    name: str | None = None,
    *,
    max_line_bytes: int | None = None,
) -> Dataset:
    """Return the lines of text files, as bytes without their line ends (\\n or \\r\\n).

    Blank lines are kept, and so is a last line without a line end. The state of an iterator is a file number and an
    offset, as for :func:`TFRecordDataset`.

    Args:
        filenames: A path, a list of paths, or a dataset of str. Local, or URIs that fsspec or pyarrow.fs can open.
        compression_type: None (or ""), "GZIP" or "ZLIB"; of all files.
        num_parallel_reads: As for :func:`TFRecordDataset`: k > 1 takes lines in turn from k files at a time.
        name: Name of the operation in `explain` and `stats`.
        max_line_bytes: A longer line counts as damage. None: 1 GiB; for a compressed file 32 MiB, or 4 times the file's
            size if that is larger.

    Raises:
        InvalidArgumentError: As for :func:`TFRecordDataset`.
        SpecError: A file name is not a path.
        NotFoundError: A file does not exist (at iteration, in its place).
        DataLossError: Compressed data is damaged or truncated, the file has another compression, or a line is longer
            than `max_line_bytes` (at iteration; has `path` and `offset`).
        FailedPreconditionError: A file is not readable (at iteration).

    Source: tf.data.TextLineDataset.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "poem.txt")
    >>> with open(path, "wb") as file:
    ...     _ = file.write(b"first\\r\\n\\nthird")
    >>> list(rd.TextLineDataset(path))
    [b'first', b'', b'third']
    """
    record_format = TextLineFormat(check_compression(compression_type), max_line_bytes)
    return Dataset(named(RecordFilesOp.of(_names(filenames), record_format, num_parallel_reads), name))


def FixedLengthRecordDataset(
    filenames: Any,
    record_bytes: int,
    header_bytes: int | None = None,
    footer_bytes: int | None = None,
    compression_type: str | None = None,
    num_parallel_reads: int | None = None,
    name: str | None = None,
) -> Dataset:
    """Return the consecutive records of `record_bytes` bytes each in files, between a header and a footer.

    A file that does not end with a whole record and the footer is an error after its last whole record. The state
    of an iterator is a file number and an offset, as for :func:`TFRecordDataset`.

    Args:
        filenames: A path, a list of paths, or a dataset of str. Local, or URIs that fsspec or pyarrow.fs can open.
        record_bytes: Bytes of one record, >= 1.
        header_bytes: Bytes before the first record; None for 0.
        footer_bytes: Bytes after the last record; None for 0.
        compression_type: None (or ""), "GZIP" or "ZLIB"; of all files. Sizes count decompressed bytes.
        num_parallel_reads: As for :func:`TFRecordDataset`: k > 1 takes records in turn from k files at a time.
        name: Name of the operation in `explain` and `stats`.

    Raises:
        InvalidArgumentError: A size is out of range; otherwise as for :func:`TFRecordDataset`.
        SpecError: A file name is not a path.
        NotFoundError: A file does not exist (at iteration, in its place).
        DataLossError: A file has another size; compressed data is damaged (at iteration; has `path` and `offset`).
        FailedPreconditionError: A file is not readable (at iteration).

    Source: tf.data.FixedLengthRecordDataset.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "pairs.bin")
    >>> with open(path, "wb") as file:
    ...     _ = file.write(b"#aabbcc")
    >>> list(rd.FixedLengthRecordDataset(path, record_bytes=2, header_bytes=1))
    [b'aa', b'bb', b'cc']
    """
    sizes = (record_bytes, header_bytes or 0, footer_bytes or 0)
    record_format = FixedLengthFormat(check_compression(compression_type), *sizes)
    return Dataset(named(RecordFilesOp.of(_names(filenames), record_format, num_parallel_reads), name))


def _names(filenames: Any) -> Any:
    return filenames._op if isinstance(filenames, Dataset) else filenames
