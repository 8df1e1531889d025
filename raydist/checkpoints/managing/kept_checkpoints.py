"""What can be asked of the directory of one run: which checkpoints there are, the newest and the best."""

from __future__ import annotations

from raydist.checkpoints.run_directory import RunDirectory

__all__ = ["KeptCheckpoints"]


class KeptCheckpoints:
    """The checkpoints of one run."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    @property
    def directory(self) -> str:
        """Where it saves.

        Source: tf.train.CheckpointManager.directory.
        """
        return self._run.path

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
