"""`rd.Checkpoint`: save and restore the states of several objects together.

A save copies the driver's states, and replicas copy theirs between two steps; then all write and the driver commits.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, final

from torch import nn

from raydist.checkpoints.capture import Capture, StagingBuffers, commit, file_stems, write_capture
from raydist.checkpoints.contents import CheckpointContents
from raydist.checkpoints.entries import pack_state
from raydist.checkpoints.manifest import CheckpointManifest, SavedObject
from raydist.checkpoints.object_state import OWNER, aliases_of, kind_of_state
from raydist.checkpoints.random_state import REPLICAS
from raydist.checkpoints.restore import RestoreReport
from raydist.checkpoints.shards import DispatchedSave, Shard, ShardRequest, ShardTerms, join_shards
from raydist.checkpoints.tensor_file import NewFiles, TensorFile, new_files, write_index
from raydist.context.current import StepCounter, has_strategy, in_cross_replica_context
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.parameter_servers.sharded_embedding import SavedRows
from raydist.pipelines.formats.files import path_text
from raydist.pipelines.stored.directory_files import directory_files
from raydist.pipelines.stored.file_directory import DirectoryFiles
from raydist.summary.writer import pending_summaries


class ShardSaver(Protocol):
    """A strategy whose replicas write the states that they hold."""

    def save_mode(self, obj: Any) -> Literal["divided", "whole"] | None:
        """Return how replicas save an object: each a part, or the first the whole; None if the driver must read it."""

    def begin(
        self, request: ShardRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
    ) -> DispatchedSave:
        """Dispatch a save to the replicas, in the order of dispatched steps."""

    def nodes(self) -> Collection[str]:
        """Return the ids of the replicas' nodes. Thread-safe."""


@final
@dataclass(frozen=True, slots=True)
class StartedSave:
    """A save whose states are captured, to be written."""

    directory: DirectoryFiles  # directory of the checkpoint
    names: tuple[str, ...]  # names of all objects, in order
    capture: Capture  # states that the driver writes
    new: NewFiles | None = None  # names of the files, if replicas are writing already
    shards: DispatchedSave | None = None  # save dispatched to replicas
    flush_summaries: Callable[[], None] = lambda: None  # flushes what summary writers were given before the save

    def write(self) -> CheckpointManifest:
        """Write the capture, wait for the replicas, and commit. No checkpoint exists if this raises."""
        new = new_files(self.directory) if self.new is None else self.new
        try:
            stems = file_stems(dict.fromkeys(self.names), new)
            manifest = write_capture(self.capture, new, stems)
            if self.shards is not None:
                manifest = self._joined(manifest, self.shards.wait(), new, stems)
            self.flush_summaries()
            commit(new, manifest)
        except BaseException:
            new.abandon()
            raise
        return manifest

    def _joined(
        self, manifest: CheckpointManifest, shards: Sequence[Shard], new: NewFiles, stems: Mapping[str, str]
    ) -> CheckpointManifest:
        objects: dict[str, SavedObject] = dict(manifest.objects)
        files: list[TensorFile] = list(manifest.files)
        for name, (saved, own) in join_shards(shards).items():
            if len(own) > 1:
                own.append(write_index(new, stems[name], tuple(own)))
            files += own
            objects[name] = replace(saved, files=tuple(file.name for file in own))
        drawn = [list(shard.random) for shard in shards if shard.random]
        random = {**(manifest.random or {}), **(pack_state({REPLICAS: drawn}).values if drawn else {})}
        ordered = {name: objects[name] for name in self.names}
        return replace(manifest, objects=ordered, files=tuple(files), random=random)


def start_save(
    contents: CheckpointContents,
    directory: DirectoryFiles,
    details: Mapping[str, Any],
    *,
    staging: StagingBuffers | None = None,
) -> StartedSave:
    """Begin to save the current states."""
    summaries = pending_summaries()
    named = contents.named()
    saver, remote = (None, {}) if directory.only_here else _remote_objects(named)
    capture = contents.capture(copy=False, details=details, skip=remote)
    if staging is not None:
        capture = staging.copy_capture(capture)
    if saver is None:
        return StartedSave(directory, tuple(named), capture, flush_summaries=summaries)
    new = new_files(directory)
    stems = file_stems(named, new)
    whole = frozenset(name for name, obj in remote.items() if saver.save_mode(obj) == "whole")
    request = ShardRequest(uuid.uuid4().hex, new, stems, ShardTerms(whole))
    theirs = {name: obj for name, obj in named.items() if isinstance(obj, nn.Module) and _saver_of(obj) is saver}
    shards = saver.begin(request, remote, theirs)
    return StartedSave(directory, tuple(named), capture, new, shards, summaries)


def _remote_objects(named: Mapping[str, Any]) -> tuple[ShardSaver | None, dict[str, Any]]:
    """Return the objects that replicas of one strategy save, and the saver that reaches these replicas."""
    aliases = aliases_of(named)
    savers = {name: saver for name, obj in named.items() if (saver := _saver_of(obj)) is not None}
    saver = next(iter(savers.values()), None)
    if saver is None:
        return None, {}
    homes = [obj for obj in named.values() if isinstance(obj, nn.Module) and not isinstance(obj, StepCounter)]
    modules_known = all(_saver_of(obj) is saver for obj in homes)
    remote = {
        name: named[name]
        for name, found in savers.items()
        if found is saver
        and name not in aliases
        and saver.save_mode(named[name]) is not None
        and (modules_known or kind_of_state(named[name]) != "optimizer")  # modules name its parameters
    }
    return (saver, remote) if remote else (None, {})


def nodes_of(contents: CheckpointContents) -> set[str]:
    """Return the ids of the nodes of all replicas that hold objects of the checkpoint. Thread-safe."""
    savers = [_saver_of(obj) for obj in contents.named().values()]
    return {node for saver in savers if saver is not None for node in saver.nodes()}


def _saver_of(obj: Any) -> ShardSaver | None:
    owner = vars(type(obj.module if isinstance(obj, SavedRows) else obj)).get(OWNER)
    saver: ShardSaver | None = getattr(owner, "shard_saver", None)
    return saver


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

        Replicas read the modules and optimizers that they hold or will hold: each replica reads a shard of the bytes if
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
    """Return the contents of a checkpoint, for code that saves them in another way."""
    return checkpoint._contents


def _require_driver(done: str) -> None:
    if has_strategy() and not in_cross_replica_context():
        raise FailedPreconditionError(
            f"A checkpoint must be {done} by the driver, but this code runs inside of strategy.run. Do it between "
            "steps."
        )
