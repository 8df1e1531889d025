"""The part of a restore that replicas or servers perform: they read and verify first, and change objects at the end."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final

from torch import nn

from raydist.checkpoints.differences import Difference
from raydist.checkpoints.saved_checkpoint import SavedCheckpoint
from raydist.checkpoints.saved_kinds import kind_of_state
from raydist.checkpoints.sharing.restore_request import PreparedShare, RestoreRequest
from raydist.parameter_servers.rows.sharded_embedding import SavedRows

__all__ = ["ShareRestorer", "SharedRestore", "shared_restore"]


class ShareRestorer(Protocol):
    """A strategy whose replicas, or servers, read the states that they hold.

    `prepare`, `commit` and `discard` block for dispatched steps and for their own end.
    """

    def holds(self, obj: Any) -> bool:
        """Return True if replicas hold an object, or can be sent it. Does not block."""

    def can_restore(self, obj: Any) -> bool:
        """Return True if replicas can restore an object that they hold, all alike and without the driver."""

    def prepare(
        self, request: RestoreRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
    ) -> Sequence[PreparedShare] | None:
        """Make replicas compare and read; return None if they cannot be sent the objects. Raise a replica's error.

        The first replica's report has all differences of the objects that replicas restore.
        """

    def commit(self, token: str, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        """Make replicas change the objects. Raise an error only if no replica has changed any."""

    def discard(self) -> None:
        """Make replicas drop the values that they have read."""


@final
class SharedRestore:
    """One restore by replicas. Used once, by one thread.

    Args:
        restorer: Calls the replicas.
        objects: Objects that replicas hold.
        modules: Modules that name the parameters of optimizers.
    """

    def __init__(self, restorer: ShareRestorer, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        self._restorer = restorer
        self.objects = objects
        self._modules = modules
        self._token = uuid.uuid4().hex

    def prepare(
        self, checkpoint: SavedCheckpoint, saved: Mapping[str, str], strict: bool
    ) -> dict[str, list[Difference]] | None:
        """Make replicas read and verify all values without changing objects. Blocks.

        Args:
            checkpoint: The checkpoint.
            saved: Name in the checkpoint, by name of the object.
            strict: Require that all entries exist, and no others.

        Returns:
            Differences by name of the object, for the objects that replicas restore; None if replicas cannot open the
            files or be sent the objects.
        """
        request = RestoreRequest(self._token, checkpoint.part(tuple(saved.values())), saved, strict)
        shares = self._restorer.prepare(request, {name: self.objects[name] for name in saved}, self._modules)
        if shares is None:
            return None
        if not all(share.sees_files for share in shares):
            self.discard()
            return None
        return {name: list(found) for name, found in shares[0].differences.items()}

    def commit(self, names: Sequence[str]) -> None:
        """Change these objects. Nothing is changed if an error is raised."""
        self._restorer.commit(self._token, {name: self.objects[name] for name in names}, self._modules)

    def discard(self) -> None:
        """Make replicas drop the values that they have read."""
        self._restorer.discard()


def shared_restore(
    objects: Mapping[str, Any],
    modules: Mapping[str, nn.Module],
    checkpoint: SavedCheckpoint,
    restorers: Sequence[ShareRestorer],
) -> SharedRestore | None:
    """Return the part of a restore that replicas perform, or None.

    Args:
        objects: Objects to restore, each once.
        modules: All modules of the checkpoint.
        checkpoint: The checkpoint.
        restorers: Restorers of strategies; the first that holds an object is used.
    """
    if checkpoint.directory.only_here:
        return None
    kinds = {name: kind for name, obj in objects.items() if (kind := _kind(obj)) in ("module", "optimizer", "rows")}
    restorer = next((each for each in restorers if any(each.holds(objects[name]) for name in kinds)), None)
    if restorer is None:
        return None
    naming = {name: module for name, module in modules.items() if next(module.parameters(), None) is not None}
    theirs = {name: module for name, module in naming.items() if restorer.holds(module)}
    remote = {
        name: objects[name]
        for name, kind in kinds.items()
        if restorer.holds(objects[name])
        and (kind != "optimizer" or len(theirs) == len(naming))  # needs the modules that name its parameters
        and restorer.can_restore(objects[name])
    }
    return SharedRestore(restorer, remote, theirs) if remote else None


def _kind(obj: Any) -> str:
    return "rows" if isinstance(obj, SavedRows) else kind_of_state(obj)
