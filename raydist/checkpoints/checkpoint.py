"""`rd.Checkpoint`: objects whose states are saved together, and restored together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, final

from raydist.checkpoints.contents import CheckpointContents
from raydist.checkpoints.restoring.restored_objects import RestoreReport
from raydist.checkpoints.sharing.started_save import start_save
from raydist.context.current import has_strategy, in_cross_replica_context
from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.pipelines.formats.files import path_text
from raydist.pipelines.stored.directory_files import directory_files

__all__ = ["Checkpoint", "contents_of"]


@final
class Checkpoint:
    """Objects whose states are saved together: modules, optimizers, schedulers, metrics, datasets, an `rd.State`, ...

    A checkpoint is a directory: a safetensors file for each object, with keys as in its `state_dict` (of optimizers:
    `<parameter>.<state>`), and `manifest.json` with all else, sizes and checksums. Nothing in it is unpickled or
    imported. It restores on any strategy, number of replicas and device. The random states of torch, Python and numpy
    are part of it.

    Args:
        gradients: Whether pending gradients (`.grad` of parameters) are saved, too.
        objects: Whatever has `state_dict` and `load_state_dict`, and dicts and lists of such, by name. Of an `rd.Model`
            under the name "model": its module as "model", and once it is compiled "model.optimizer", "model.scheduler"
            and "model.metrics.<name>". Parameters of a module that is compiled by torch.compile have their own names.

    Raises:
        InvalidArgumentError: Something is neither. Names it.

    >>> import os, tempfile, torch
    >>> model, progress = torch.nn.Linear(2, 1), rd.State(epoch=3)
    >>> checkpoint = rd.Checkpoint(model=model, progress=progress)
    >>> path = checkpoint.save(os.path.join(tempfile.mkdtemp(), "ckpt-1"))
    >>> sorted(os.listdir(path))
    ['manifest.json', 'model.safetensors']
    >>> progress.epoch = 0
    >>> checkpoint.restore(path)
    RestoreReport(missing=(), unexpected=())
    >>> progress.epoch
    3

    Source: tf.train.Checkpoint.
    """

    def __init__(self, *, gradients: bool = False, **objects: Any) -> None:
        if not objects:
            raise InvalidArgumentError("A checkpoint must have at least one object, got none: Checkpoint(model=model).")
        self._contents = CheckpointContents(objects, gradients)
        self._contents.named()  # says at once what is none

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(self._contents.named())})"

    def save(self, path: str | os.PathLike[str]) -> str:
        """Save the states as they are now. Waits for dispatched steps, and until all is safe on the disk.

        A checkpoint that is there already stays until the new one is whole.

        Args:
            path: A directory, which is made; or a URI that fsspec knows.

        Returns:
            The path.

        Raises:
            InvalidArgumentError: An entry of a state is neither tensor, array, number, text, bytes, None, nor a tuple,
                list or dict of such. Names it.
            FailedPreconditionError: It was called in `strategy.run`, or nothing may be written there.

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "ckpt-1")
        >>> rd.Checkpoint(progress=rd.State(epoch=3)).save(path) == path
        True

        Source: tf.train.Checkpoint.write.
        """
        _require_driver("saved")
        name = path_text(path)
        start_save(self._contents, directory_files(name), {}).write()
        return name

    def restore(
        self, path: str | os.PathLike[str], strict: bool = True, only: Sequence[str] | str | None = None
    ) -> RestoreReport:
        """Have the objects go on from saved states. All is read and compared before anything is changed.

        Modules and optimizers that replicas hold, or will, they read themselves, a share of the bytes each, where they
        can open the files; parameter servers read what they have. Waits for dispatched steps, at most `Timeouts.step_s`
        for each half.

        Args:
            path: Of the checkpoint.
            strict: Whether the checkpoint must have all entries of the objects, and no others. Entries of another shape
                or type are always an error.
            only: Names of objects to restore; then random states stay as they are. All by default.

        Returns:
            What was missing or unexpected, with `strict=False`.

        Raises:
            InvalidArgumentError: States do not fit (lists up to 20 entries), a name in `only` is unknown, or the
                checkpoint is of a newer version.
            NotFoundError: There is no checkpoint.
            DataLossError: It is damaged; names the file and the tensor.
            FailedPreconditionError: It was called in `strategy.run`.

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "ckpt-1")
        >>> _ = rd.Checkpoint(progress=rd.State(epoch=3)).save(path)
        >>> rd.Checkpoint(progress=rd.State(epoch=0, best=1.0)).restore(path, strict=False)
        RestoreReport(missing=('progress.best',), unexpected=())

        Source: tf.train.Checkpoint.restore.
        """
        _require_driver("restored")
        return self._contents.restore(directory_files(path_text(path)), strict, only)


def contents_of(checkpoint: Checkpoint) -> CheckpointContents:
    """What a checkpoint holds, for whoever saves it in another way.

    >>> list(contents_of(Checkpoint(progress=rd.State())).named())
    ['progress']
    """
    return checkpoint._contents


def _require_driver(done: str) -> None:
    if has_strategy() and not in_cross_replica_context():
        raise FailedPreconditionError(
            f"A checkpoint must be {done} by the driver, but this code runs inside of strategy.run. Do it between "
            "steps."
        )
