"""Callbacks that write logs to a CSV file, or show progress on a stream."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO, final

import torch

from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.formats.files import local_file
from raydist.training.callbacks.callback import Callback


@final
class CSVLogger(Callback):
    """A callback that writes a line to a CSV file at the end of every epoch.

    The file is open only while a line is written. A `fit` that resumes from a checkpoint removes lines written after
    the checkpoint, so that each epoch has one line.

    Args:
        filename: Path of a local file; its folder is created if needed.
        separator: The character between values.
        append: Append to an existing file; False: replace it.

    Raises:
        InvalidArgumentError: `separator` is not one character, or `filename` is a URI of another file system.
        OSError: (in `fit`) the file cannot be written.

    >>> import pathlib, tempfile, torch
    >>> x = torch.zeros(4, 1)
    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     model = rd.Model(torch.nn.Linear(1, 1, bias=False))
    ...     model.compile("sgd", "mse")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = model.fit(x, x, epochs=2, callbacks=[rd.CSVLogger(f"{folder}/log.csv")], verbose=False)
    ...     print(pathlib.Path(folder, "log.csv").read_text())
    epoch,loss,val_loss
    0,0.0,NA
    1,0.0,NA
    <BLANKLINE>

    Source: keras.callbacks.CSVLogger.
    """

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False) -> None:
        if not isinstance(separator, str) or len(separator) != 1:
            raise InvalidArgumentError(f"separator must be one character, got {separator!r:.80}.")
        self._path = Path(local_file(filename, "The file of CSVLogger"))
        self._separator = separator
        self._append = append
        self._columns: Sequence[str] | None = None  # None until the first line of this fit

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Prepare for a new training. The logs of its first epoch determine the columns."""
        self._columns = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Write the line of an epoch, with "NA" for values that this epoch did not log."""
        if not logs:
            return
        if self._columns is None:
            self._columns = _columns(logs)
            self._start_file(self._columns)
        self._write([epoch, *(_text(logs.get(name, "NA")) for name in self._columns)])

    def _start_file(self, columns: Sequence[str]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._append:
            self._path.write_bytes(b"")
        if not self._num_bytes():
            self._write(["epoch", *columns])

    def _write(self, values: Iterable[Any]) -> None:
        with self._path.open("a", newline="") as file:
            csv.writer(file, delimiter=self._separator, lineterminator="\n").writerow(values)

    def _num_bytes(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def state_dict(self) -> dict[str, Any]:
        """Return the size of the file, and the columns."""
        columns = None if self._columns is None else list(self._columns)
        return {"columns": columns, "num_bytes": self._num_bytes()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remove lines that were written after `state` was saved, and continue the file.

        Raises:
            OSError: The file cannot be written.
        """
        self._columns = state["columns"]
        if not self._num_bytes():
            if self._columns is not None:  # the file is gone: another machine, or it was moved
                self._start_file(self._columns)
        elif self._num_bytes() > state["num_bytes"]:
            os.truncate(self._path, state["num_bytes"])


def _columns(logs: dict[str, Any]) -> list[str]:
    """Return the column names. They include "val_" columns, because the first validation may come in a later epoch."""
    names = sorted(logs)
    return names if any(name.startswith("val_") for name in names) else [*names, *(f"val_{name}" for name in names)]


def _text(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, Sequence) and not isinstance(value, str) else value


@final
class ProgressBar(Callback):
    """A callback that shows progress on a stream.

    `verbose=True` shows progress on standard output without this callback. With a ProgressBar in the list of callbacks,
    progress is shown once, independent of `verbose`.

    Args:
        stream: Stream to write to; None: standard output. A terminal shows a bar, a notebook one changing line, and
            any other stream plain lines.

    >>> import sys, torch
    >>> x = torch.zeros(4, 1)
    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     model = rd.Model(torch.nn.Linear(1, 1, bias=False))
    ...     model.compile("sgd", "mse")
    >>> _ = model.evaluate(x, x, callbacks=[rd.ProgressBar(sys.stdout)], verbose=False)  # doctest: +ELLIPSIS
    Evaluate  1/1 steps  ... examples/s  loss 0.0000  in ... s

    Source: keras.callbacks.ProgbarLogger.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream


def progress_stream(callbacks: Sequence[object], *, verbose: bool) -> tuple[bool, TextIO | None]:
    """Return True if progress is to be shown, and the stream for it. A stream of None is standard output."""
    bar = next((one for one in callbacks if isinstance(one, ProgressBar)), None)
    return (verbose, None) if bar is None else (True, bar.stream)
