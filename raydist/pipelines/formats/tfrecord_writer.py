"""Writing of TFRecord files."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from types import TracebackType
from typing import Any, final

from raydist.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.pipelines.formats.byte_streams import check_compression, window_bits
from raydist.pipelines.formats.files import path_text
from raydist.pipelines.formats.opening import create_file
from raydist.pipelines.formats.tfrecord import frame

__all__ = ["TFRecordOptions", "TFRecordWriter"]


@final
@dataclass(frozen=True, slots=True)
class TFRecordOptions:
    """Compression of a TFRecord file (tf.io.TFRecordOptions).

    Attributes:
        compression_type: None (or ""), "GZIP" or "ZLIB". Readers need the same value.
        compression_level: 0 (none) to 9 (smallest), or None for zlib's default (6).

    Raises:
        InvalidArgumentError: Another compression, or a level out of range.

    Source: tf.io.TFRecordOptions (TensorFlow 2.x API).

    >>> TFRecordOptions("GZIP", compression_level=9)
    TFRecordOptions(compression_type='GZIP', compression_level=9)
    """

    compression_type: str | None = None
    compression_level: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "compression_type", check_compression(self.compression_type))
        level = self.compression_level
        if level is not None and not 0 <= level <= 9:
            raise InvalidArgumentError(f"compression_level must be 0 .. 9 or None, got {level!r}.")


@final
class TFRecordWriter:
    """A writer of files that TensorFlow can also read (tf.io.TFRecordWriter).

    An existing file is replaced. Close the writer with `with` or `close()`: an unclosed file may lack its last records.

    Args:
        path: A local path or a URI that fsspec can write.
        options: A TFRecordOptions, or the name of the compression: None, "GZIP" or "ZLIB".

    Raises:
        NotFoundError: The directory does not exist.
        FailedPreconditionError: The file is not writable.
        InvalidArgumentError: `path` is a directory, or the compression is unknown.

    Source: tf.io.TFRecordWriter (TensorFlow 2.x API).

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "two.tfrecord")
    >>> with TFRecordWriter(path) as writer:
    ...     writer.write(b"first")
    ...     writer.write(b"second")
    >>> os.path.getsize(path)
    43
    """

    def __init__(self, path: Any, options: TFRecordOptions | str | None = None) -> None:
        chosen = options if isinstance(options, TFRecordOptions) else TFRecordOptions(options)
        self._path = path_text(path)
        self._deflater = _deflater(chosen)
        self._file = create_file(self._path)

    def write(self, record: bytes | bytearray | memoryview) -> None:
        """Append one record, which takes 16 bytes more than its data. It may stay in memory until `flush` or `close`.

        Args:
            record: Bytes of the record, any number; copied before this returns.

        Raises:
            SpecError: `record` has another type.
            FailedPreconditionError: The writer is closed.

        Source: tf.io.TFRecordWriter.write (TensorFlow 2.x API).

        >>> import os, tempfile
        >>> with TFRecordWriter(os.path.join(tempfile.mkdtemp(), "x.tfrecord")) as writer:
        ...     writer.write("text")
        Traceback (most recent call last):
        ...
        raydist.errors.SpecError: A record must be bytes, got str. Encode text, serialize messages.
        """
        if not isinstance(record, bytes | bytearray | memoryview):
            raise SpecError(f"A record must be bytes, got {type(record).__name__}. Encode text, serialize messages.")
        self._require_open()
        framed = frame(bytes(record))
        self._file.write(framed if self._deflater is None else self._deflater.compress(framed))

    def flush(self) -> None:
        """Pass all records written so far to the operating system: another process can then read them.

        Does not wait for the disk. In a compressed file each call adds some bytes.

        Raises:
            FailedPreconditionError: The writer is closed.

        Source: tf.io.TFRecordWriter.flush (TensorFlow 2.x API).

        >>> import os, tempfile
        >>> import raydist as rd
        >>> path = os.path.join(tempfile.mkdtemp(), "x.tfrecord")
        >>> with TFRecordWriter(path) as writer:
        ...     writer.write(b"first")
        ...     writer.flush()
        ...     list(rd.TFRecordDataset(path))
        [b'first']
        """
        self._require_open()
        if self._deflater is not None:
            self._file.write(self._deflater.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()

    def close(self) -> None:
        """Write all remaining data and close the file. May be called twice.

        Source: tf.io.TFRecordWriter.close (TensorFlow 2.x API).

        >>> import os, tempfile
        >>> writer = TFRecordWriter(os.path.join(tempfile.mkdtemp(), "x.tfrecord"))
        >>> writer.close()
        >>> writer.write(b"more")
        Traceback (most recent call last):
        ...
        raydist.errors.FailedPreconditionError: A TFRecordWriter must be open to write, but that of ... is closed. ...
        """
        if self._file.closed:
            return
        try:
            if self._deflater is not None:
                self._file.write(self._deflater.flush(zlib.Z_FINISH))
        finally:
            self._file.close()

    def __enter__(self) -> TFRecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._file.closed:
            raise FailedPreconditionError(
                f"A TFRecordWriter must be open to write, but that of {self._path!r} is closed. Open another file: one "
                "that is finished cannot be continued."
            )


def _deflater(options: TFRecordOptions) -> Any:
    if options.compression_type is None:
        return None
    level = -1 if options.compression_level is None else options.compression_level
    return zlib.compressobj(level, zlib.DEFLATED, window_bits(options.compression_type))
