"""A training of one tensor, saved by a manager, for tests whose disk or store fails."""

from __future__ import annotations

from pathlib import Path

import torch

import raydist as rd


class Training:
    """A tensor that each step changes; `safe` is the last step that was saved for sure."""

    def __init__(self, folder: str | Path, size: int = 100) -> None:
        self.module, self.progress = torch.nn.Linear(size, size), rd.State(step=0)
        self.checkpoint = rd.Checkpoint(module=self.module, progress=self.progress)
        self.manager = rd.CheckpointManager(self.checkpoint, str(folder), max_to_keep=2)
        self.safe = 0

    def step(self) -> rd.SaveHandle:
        """Change the tensor and begin to save it."""
        with torch.no_grad():
            self.module.weight.fill_(self.progress.step + 1)
        self.progress.step += 1
        handle = self.manager.save()
        assert handle is not None
        return handle

    def saves(self, kind: type[Exception] = OSError) -> bool:
        """Make a step; return False if the save fails with an error of this kind."""
        try:
            self.step().wait()
        except kind:
            return False
        self.safe = self.progress.step
        return True


def resumed(folder: str | Path, size: int = 100) -> int:
    """Return the step at which another process would go on."""
    training = Training(folder, size)
    training.manager.restore_or_initialize()
    assert training.module.weight.unique().tolist() == [training.progress.step]
    training.manager.close()
    return int(training.progress.step)
