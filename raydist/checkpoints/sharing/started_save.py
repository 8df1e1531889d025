"""A save that has begun: the driver's states are copied, and replicas copy theirs between two steps."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, final

from torch import nn

from raydist.checkpoints.capture import Capture, commit, file_stems, write_capture
from raydist.checkpoints.contents import CheckpointContents
from raydist.checkpoints.entries import pack_state
from raydist.checkpoints.manifest import CheckpointManifest, SavedObject
from raydist.checkpoints.metric_shares import OWNER
from raydist.checkpoints.named_objects import other_names
from raydist.checkpoints.new_files import NewFiles, new_files
from raydist.checkpoints.random_state import REPLICAS
from raydist.checkpoints.saved_kinds import kind_of_state
from raydist.checkpoints.sharing.shares import UNDIVIDED_BYTES, Share, ShareRequest, join_shares, random_values
from raydist.checkpoints.sharing.staging import StagedStates
from raydist.checkpoints.tensor_file import TensorFile, write_index
from raydist.context.current import StepCounter
from raydist.parameter_servers.rows.sharded_embedding import SavedRows
from raydist.pipelines.stored.file_directory import DirectoryFiles
from raydist.summary.writer import pending_summaries

__all__ = ["DispatchedShares", "ShareSaver", "StartedSave", "nodes_of", "start_save"]


class DispatchedShares(Protocol):
    """A save dispatched to replicas."""

    def wait(self) -> Sequence[Share]:
        """Block until all replicas have written; return their shares in rank order. Raise errors. Thread-safe."""


class ShareSaver(Protocol):
    """A strategy whose replicas write the states that they hold."""

    def how(self, obj: Any) -> Literal["divided", "whole"] | None:
        """Return how replicas save an object: each a part, or the first the whole; None if the driver must read it."""

    def begin(
        self, request: ShareRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
    ) -> DispatchedShares:
        """Dispatch a save to the replicas, in the order of dispatched steps."""

    def nodes(self) -> Collection[str]:
        """Return the ids of the replicas' nodes. Thread-safe."""


@final
@dataclass(frozen=True, slots=True)
class StartedSave:
    """A save whose states are captured, to be written.

    Attributes:
        directory: Directory of the checkpoint.
        names: Names of all objects, in order.
        capture: States that the driver writes.
        new: Names of the files, if replicas are writing already.
        shares: Save dispatched to replicas.
        flush_summaries: Flushes what summary writers were given before the save.
    """

    directory: DirectoryFiles
    names: tuple[str, ...]
    capture: Capture
    new: NewFiles | None = None
    shares: DispatchedShares | None = None
    flush_summaries: Callable[[], None] = lambda: None

    def write(self) -> CheckpointManifest:
        """Write the capture, wait for the replicas, and commit. No checkpoint exists if this raises."""
        new = new_files(self.directory) if self.new is None else self.new
        try:
            stems = file_stems(dict.fromkeys(self.names), new)
            manifest = write_capture(self.capture, new, stems=stems)
            if self.shares is not None:
                manifest = self._joined(manifest, self.shares.wait(), new, stems)
            self.flush_summaries()
            commit(new, manifest)
        except BaseException:
            new.abandon()
            raise
        return manifest

    def _joined(
        self, manifest: CheckpointManifest, shares: Sequence[Share], new: NewFiles, stems: Mapping[str, str]
    ) -> CheckpointManifest:
        objects: dict[str, SavedObject] = dict(manifest.objects)
        files: list[TensorFile] = list(manifest.files)
        for name, (saved, own) in join_shares(shares).items():
            if len(own) > 1:
                own.append(write_index(new, stems[name], tuple(own)))
            files += own
            objects[name] = replace(saved, files=tuple(file.name for file in own))
        drawn = random_values(shares)
        random = {**(manifest.random or {}), **(pack_state({REPLICAS: drawn}).values if drawn else {})}
        ordered = {name: objects[name] for name in self.names}
        return replace(manifest, objects=ordered, files=tuple(files), random=random)


def start_save(
    contents: CheckpointContents,
    directory: DirectoryFiles,
    details: Mapping[str, Any],
    *,
    staging: StagedStates | None = None,
) -> StartedSave:
    """Begin to save the current states.

    Args:
        contents: Contents of the checkpoint.
        directory: Directory of the checkpoint.
        details: Details for the manifest.
        staging: Copies tensors, so that training may continue; None if the caller writes at once.
    """
    summaries = pending_summaries()
    named = contents.named()
    saver, remote = (None, {}) if directory.only_here else _remote_objects(named)
    capture = contents.capture(copy=False, details=details, skip=remote)
    if staging is not None:
        capture = staging.copied(capture)
    if saver is None:
        return StartedSave(directory, tuple(named), capture, flush_summaries=summaries)
    new = new_files(directory)
    stems = file_stems(named, new)
    whole = frozenset(name for name, obj in remote.items() if saver.how(obj) == "whole")
    request = ShareRequest(uuid.uuid4().hex, new, stems, whole, UNDIVIDED_BYTES)
    theirs = {name: obj for name, obj in named.items() if isinstance(obj, nn.Module) and _saver_of(obj) is saver}
    shares = saver.begin(request, remote, theirs)
    return StartedSave(directory, tuple(named), capture, new, shares, summaries)


def _remote_objects(named: Mapping[str, Any]) -> tuple[ShareSaver | None, dict[str, Any]]:
    """Return the objects that replicas of one strategy save, and the saver that reaches these replicas."""
    again = other_names(named)
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
        and name not in again
        and saver.how(named[name]) is not None
        and (modules_known or kind_of_state(named[name]) != "optimizer")  # modules name its parameters
    }
    return (saver, remote) if remote else (None, {})


def nodes_of(contents: CheckpointContents) -> set[str]:
    """Return the ids of the nodes of all replicas that hold objects of the checkpoint. Thread-safe."""
    savers = [_saver_of(obj) for obj in contents.named().values()]
    return {node for saver in savers if saver is not None for node in saver.nodes()}


def _saver_of(obj: Any) -> ShareSaver | None:
    owner = vars(type(obj.module if isinstance(obj, SavedRows) else obj)).get(OWNER)
    saver: ShareSaver | None = getattr(owner, "share_saver", None)
    return saver
