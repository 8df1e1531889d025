"""The part of a restore that replicas or servers have: they read and check, and change what they hold at the end."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final

from torch import nn

from raydist.checkpoints.differences import Difference
from raydist.checkpoints.saved_checkpoint import SavedCheckpoint
from raydist.checkpoints.saved_kinds import kind_of_state
from raydist.checkpoints.sharing.restore_request import PreparedShare, RestoreRequest
from raydist.parameter_servers.rows.saved_rows import SavedRows

__all__ = ["ShareRestorer", "SharedRestore", "shared_restore"]


class ShareRestorer(Protocol):
    """A strategy whose replicas, or servers, read what they hold.

    What they are asked waits for dispatched steps, and its end.
    """

    def holds(self, obj: Any) -> bool:
        """Whether replicas hold an object, or can be sent it. Waits for nothing."""

    def can_restore(self, obj: Any) -> bool:
        """Whether they can restore an object that they hold: all of them the same, without the driver."""

    def prepare(
        self, request: RestoreRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
    ) -> Sequence[PreparedShare] | None:
        """Have them compare and read; None where they cannot be sent the objects. Raises what went wrong on one.

        What the first one says has all that does not fit, of those objects that they restore.
        """

    def commit(self, token: str, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        """Have them change the objects. Raises what went wrong; then none has changed them."""

    def discard(self) -> None:
        """Have them forget what they have read."""


@final
class SharedRestore:
    """Used once, by one thread.

    Args:
        restorer: Reaches the replicas.
        objects: Those that replicas hold.
        modules: Those that name the parameters of optimizers.
    """

    def __init__(self, restorer: ShareRestorer, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        self._restorer = restorer
        self.objects = objects
        self._modules = modules
        self._token = uuid.uuid4().hex

    def prepare(
        self, checkpoint: SavedCheckpoint, saved: Mapping[str, str], strict: bool
    ) -> dict[str, list[Difference]] | None:
        """Have all read and checked, and nothing changed.

        Args:
            checkpoint: The one that has the states.
            saved: By name of an object, the name that the checkpoint has for it.
            strict: Whether all entries must be there, and no others.

        Returns:
            By name of an object that they restore, what does not fit; None where replicas cannot open the files, or be
            sent the objects.
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
        """Change these objects; nothing is changed if this raises."""
        self._restorer.commit(self._token, {name: self.objects[name] for name in names}, self._modules)

    def discard(self) -> None:
        """Have replicas forget what they have read."""
        self._restorer.discard()


def shared_restore(
    objects: Mapping[str, Any],
    modules: Mapping[str, nn.Module],
    checkpoint: SavedCheckpoint,
    restorers: Sequence[ShareRestorer],
) -> SharedRestore | None:
    """What replicas restore themselves, if anything.

    Args:
        objects: Those that are to be restored, each once.
        modules: All modules of the checkpoint.
        checkpoint: The one that has the states.
        restorers: Of strategies that may hold objects; those of one of them do.
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
        and (kind != "optimizer" or len(theirs) == len(naming))  # which modules name the parameters of optimizers
        and restorer.can_restore(objects[name])
    }
    return SharedRestore(restorer, remote, theirs) if remote else None


def _kind(obj: Any) -> str:
    return "rows" if isinstance(obj, SavedRows) else kind_of_state(obj)
