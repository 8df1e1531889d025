"""Datasets over files of records, named as in tf.data."""

from __future__ import annotations

from typing import Any

from raydist.dataset import Dataset
from raydist.pipelines.formats.tfrecord import MAX_RECORD_BYTES
from raydist.pipelines.sources.tfrecord import TFRecordOp

__all__ = ["TFRecordDataset"]


def TFRecordDataset(
    filenames: Any,
    compression_type: str | None = None,
    num_parallel_reads: int | None = None,
    *,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Dataset:
    """The records of TFRecord files, as bytes.

    Checksums are always compared. A damaged record is an error in its place: where only its data is damaged, reading
    goes on with the next record, else (as after a file that cannot be opened) with the next file. A file that was cut
    off between two records looks whole: the format says nowhere how many there are.

    The state of an iterator is a file number and an offset. Resuming opens that file there; a compressed one is
    decompressed up to there.

    Args:
        filenames: A path, a list of paths, or a dataset of str. Local, or URIs that fsspec or pyarrow.fs can open.
        compression_type: None (or ""), "GZIP" or "ZLIB"; of all files.
        num_parallel_reads: None reads one file after the other. k > 1 takes records in turn from k files at a time, as
            `interleave` with a block length of 1 does. AUTOTUNE keeps the order of None.
        max_record_bytes: A longer record is taken for damage.

    Raises:
        InvalidArgumentError: An unknown compression, `num_parallel_reads` < 1, an empty list; at iteration: a
            directory, a FIFO or an unknown URI scheme.
        SpecError: A file name that is no path.
        NotFoundError: A file does not exist (at iteration, in its place).
        DataLossError: Damage: corrupt, truncated, or compressed otherwise (at iteration; has `path` and `offset`). For
            compressed files the offset of a record counts decompressed bytes.
        FailedPreconditionError: A file may not be read (at iteration).

    Source: tf.data.TFRecordDataset (TensorFlow 2.x API).

    >>> import os, tempfile
    >>> import raydist as rd
    >>> path = os.path.join(tempfile.mkdtemp(), "two.tfrecord")
    >>> with rd.TFRecordWriter(path) as writer:
    ...     writer.write(b"first")
    ...     writer.write(b"second")
    >>> list(TFRecordDataset(path))
    [b'first', b'second']
    """
    names = filenames._op if isinstance(filenames, Dataset) else filenames
    return Dataset(TFRecordOp.of(names, compression_type, num_parallel_reads, max_record_bytes))
