"""`rd.Checkpoint`: save and restore the states of several objects together."""

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
    """A set of objects whose states are saved together: modules, optimizers, schedulers, metrics, datasets, `rd.State`.

    A checkpoint is a directory: a safetensors file for each object, with keys as in its `state_dict` (for optimizers:
    `<parameter>.<state>`), and `manifest.json` with all other values, sizes and checksums. Restoring unpickles and
    imports nothing. A checkpoint restores on any strategy, number of replicas and device. The random states of torch,
    Python and numpy are part of a checkpoint.

    Args:
        gradients: Also save pending gradients (`.grad` of parameters).
        objects: Objects by name: any object with `state_dict` and `load_state_dict`, and dicts and lists of such
            objects. An `rd.Model` named "model" is saved as "model" (the module) and, once compiled, as
            "model.optimizer", "model.scheduler" and "model.metrics.<name>". Parameters of a module that torch.compile
            wraps keep their original names.

    Raises:
        InvalidArgumentError: An object is none of these; the message names the object.

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
        self._contents.named()  # raises for an object without state

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(self._contents.named())})"

    def save(self, path: str | os.PathLike[str]) -> str:
        """Save the current states. Blocks for dispatched steps, and until all files are safely on disk.

        A checkpoint that exists at the path stays until the new checkpoint is complete.

        Args:
            path: A directory, which is created if needed; or a URI that fsspec supports.

        Returns:
            The path.

        Raises:
            InvalidArgumentError: An entry of a state is neither tensor, array, number, text, bytes, None, nor a tuple,
                list or dict of such; the message names the entry.
            FailedPreconditionError: Called inside `strategy.run`, or the directory must not be written to.

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
        """Load saved states into the objects. Reads and compares everything before any object changes.

        Replicas read the modules and optimizers that they hold or will hold: each replica reads a share of the bytes if
        it can open the files. Parameter servers read their own variables. Blocks for dispatched steps, at most
        `Timeouts.step_s` for each half.

        Args:
            path: Path of the checkpoint.
            strict: Require that the checkpoint has all entries of the objects and no others. An entry with another
                shape or type is always an error.
            only: Names of objects to restore; random states then stay unchanged. Default: all objects.

        Returns:
            The missing and unexpected entries, with `strict=False`.

        Raises:
            InvalidArgumentError: States do not fit (the message lists up to 20 entries), a name in `only` is unknown,
                or a newer version of raydist wrote the checkpoint.
            NotFoundError: The checkpoint does not exist.
            DataLossError: The checkpoint is damaged; the message names the file and the tensor.
            FailedPreconditionError: Called inside `strategy.run`.

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
    """Return the contents of a checkpoint, for code that saves them in another way.

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
