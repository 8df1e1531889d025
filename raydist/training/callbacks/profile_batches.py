"""The callback behind `fit(profile=)`: it records some batches on every replica."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from raydist.strategies.profile_steps import profile_steps
from raydist.training.callbacks.callback import Callback


@final
class ProfileBatches(Callback):
    """Records a few executions of the first epoch that runs, after the slow first ones, into `trace.json.gz`.

    Args:
        directory: The folder of the trace.
        skip: Number of executions before the first recorded one.
        count: Number of recorded executions.
    """

    def __init__(self, directory: str | os.PathLike[str], skip: int = 3, count: int = 5) -> None:
        self._path = Path(directory) / "trace.json.gz"
        self._skip, self._count = skip, count
        self._num_begun = 0
        self._recording = contextlib.ExitStack()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Start recording before the first execution that is recorded."""
        if self._num_begun == self._skip:
            self._recording.enter_context(profile_steps(self.model.strategy, self._path))
        self._num_begun += 1

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Write the trace after the last execution that is recorded."""
        if self._num_begun == self._skip + self._count:
            self._recording.close()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Write what was recorded of an epoch that was shorter."""
        self._recording.close()

    def close(self) -> None:
        """Write what was recorded of a training that failed, so that the replicas record no further."""
        self._recording.close()
