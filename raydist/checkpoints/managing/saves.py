"""The saves of one manager: due dates, checkpoint numbers, and writing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, final

from raydist.actors.metric_counters import SaveMetrics
from raydist.checkpoints.background import BackgroundWriter, SaveHandle
from raydist.checkpoints.contents import CheckpointContents
from raydist.checkpoints.retention import KeptCheckpoint
from raydist.checkpoints.run_directory import RunDirectory
from raydist.checkpoints.save_interval import SaveInterval
from raydist.checkpoints.saved_ones import DETAILS, FoundCheckpoint, as_metrics
from raydist.checkpoints.sharing.staging import StagedStates
from raydist.checkpoints.sharing.started_save import StartedSave, start_save
from raydist.errors import InvalidArgumentError
from raydist.pipelines.formats.files import shown_uri

__all__ = ["ManagedSaves"]


@final
class ManagedSaves:
    """The sequence of one manager's saves. Used by the training thread, or by the thread that follows a run instead.

    Args:
        contents: Contents of the checkpoint.
        run: Directory of the run's checkpoints.
        interval: Interval of saves.
        counter: The step counter; None counts calls.

    Attributes:
        calls: Number of times the program has called `save`.
    """

    def __init__(self, contents: CheckpointContents, run: RunDirectory, interval: SaveInterval, counter: Any) -> None:
        self.contents, self.run, self.interval, self.counter = contents, run, interval, counter
        self.writer = BackgroundWriter()
        self._staging = StagedStates()
        self._metrics = SaveMetrics(shown_uri(run.path))
        self.calls = 0
        self.last_step: int | None = 0 if counter is None else None
        self.last_save = time.monotonic()

    def step(self) -> int:
        """Return the value of the step counter."""
        counter = self.counter
        if counter is None:
            return self.calls
        value = counter.item() if hasattr(counter, "item") else counter() if callable(counter) else counter
        return int(value)

    def is_due(self, step: int) -> bool:
        """Return True if the interval since the last save has passed at this step."""
        seconds = time.monotonic() - self.last_save
        return self.interval.is_due(step, since_step=self.last_step, seconds=seconds)

    def begin_anew(self) -> None:
        """Count intervals from the current step, because nothing was restored."""
        self.last_step = self.step()

    def go_on_from(self, found: FoundCheckpoint) -> None:
        """Count intervals from a restored checkpoint."""
        calls = found.details.get("calls", found.kept.number)
        self.calls = calls if type(calls) is int else found.kept.number
        self.last_step = self.step()
        self.last_save = time.monotonic()

    def save(self, number: int, metrics: Mapping[str, Any] | None, *, here: bool) -> SaveHandle:
        """Save the current state.

        Args:
            number: Number of the checkpoint.
            metrics: Metrics to store with the checkpoint.
            here: Write in the calling thread.

        Raises:
            InvalidArgumentError: The number is invalid, or the metrics lack the metric of `best`.
            Exception: An error before anything was written, or the third failed write in a row.
        """
        kept = self.kept(number, metrics)
        self.writer.wait()
        began = time.monotonic()
        staging = None if here else self._staging
        details = self.details_of(kept, self.calls)
        with self.contents.holding_again():
            started = start_save(self.contents, self.run.files_of(kept), details, staging=staging)
        self.note_begun(self.step(), time.monotonic() - began)
        return self.writer.submit(self.run.path_of(kept), lambda: self.write(started, kept), here=here)

    def kept(self, number: int, metrics: Mapping[str, Any] | None) -> KeptCheckpoint:
        """Return the description of the checkpoint that is about to be saved."""
        if type(number) is not int or not 0 <= number < 10**18:
            raise InvalidArgumentError(f"The number of a checkpoint must be an int >= 0, got {number!r:.50}.")
        return self.run.begin(number, self._checked(metrics))

    def _checked(self, metrics: Mapping[str, Any] | None) -> dict[str, float]:
        best = self.run.retention.best
        kept = as_metrics(metrics)
        if best is not None and metrics is not None and best.metric not in metrics:
            raise InvalidArgumentError(
                f"metrics must have {best.metric!r}, which `best` names, got {', '.join(map(str, metrics)) or 'none'}."
            )
        return kept

    def details_of(self, kept: KeptCheckpoint, calls: int) -> dict[str, Any]:
        """Return the details for the manifest, by which the checkpoint is found and resumed."""
        return {DETAILS: {**self.run.details_of(kept), "calls": calls}}

    def note_begun(self, step: int | None, pause_s: float) -> None:
        """Record that a save of this step has begun, and that training paused for `pause_s`."""
        self.last_step, self.last_save = step, time.monotonic()
        self._metrics.note_save(pause_s)

    def write(self, started: StartedSave, kept: KeptCheckpoint) -> None:
        """Write a save that has begun, and commit it."""
        self.run.save(kept, started.write)
