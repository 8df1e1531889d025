"""What can be asked of a run: which checkpoints its directory has, the newest and the best, and how often one comes."""

from __future__ import annotations

from raydist.checkpoints.run_directory import RunDirectory
from raydist.checkpoints.save_interval import SaveInterval

__all__ = ["KeptCheckpoints"]


class KeptCheckpoints:
    """The checkpoints of one run: which there are, and how much lies between two."""

    def __init__(self, run: RunDirectory, interval: SaveInterval) -> None:
        self._run, self._interval = run, interval

    @property
    def directory(self) -> str:
        """Where it saves.

        Source: tf.train.CheckpointManager.directory.
        """
        return self._run.path

    @property
    def checkpoint_interval(self) -> int | None:
        """Steps between two saves.

        Source: tf.train.CheckpointManager.checkpoint_interval.
        """
        return self._interval.steps

    @property
    def interval_s(self) -> float | None:
        """Seconds between two saves.

        Source: raydist's own.
        """
        return self._interval.seconds

    @property
    def best_metric(self) -> str | None:
        """The metric that says which checkpoint is best; None where nobody asked for one.

        Source: raydist's own.
        """
        best = self._run.retention.best
        return None if best is None else best.metric

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the newest checkpoints, at most `max_to_keep`, oldest first. Reads the directory.

        Those that stay for good or as the best are listed while they are among the newest only.

        Source: tf.train.CheckpointManager.checkpoints.
        """
        return self._run.newest()

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the newest checkpoint; None where there is none. Reads the directory.

        Source: tf.train.CheckpointManager.latest_checkpoint.
        """
        return next(reversed(self.checkpoints), None)

    @property
    def best_checkpoint(self) -> str | None:
        """Path of the checkpoint with the best value of the metric of `best`; None where there is none.

        Source: raydist's own; `best` of Orbax's CheckpointManager.
        """
        return self._run.best()
