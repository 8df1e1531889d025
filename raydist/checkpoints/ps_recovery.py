"""Find the checkpoint to which parameter servers go back after one of them was lost."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from raydist.checkpoints.manifest import open_checkpoint
from raydist.checkpoints.object_state import aliases_of, kind_of_state
from raydist.checkpoints.ps_restore import HandledRestore
from raydist.checkpoints.restore import RestoreRequest, saved_name
from raydist.checkpoints.saves import ManagerSaves
from raydist.checkpoints.watch import ManagerWatch
from raydist.cluster.preemption import registered_watchers
from raydist.core.errors import FailedPreconditionError
from raydist.parameter_servers.sharded_embedding import SavedRows
from raydist.pipelines.formats.files import shown_uri


@final
@dataclass(frozen=True, slots=True)
class LastCheckpoint:
    """The last complete checkpoint of a manager."""

    path: str  # path of the checkpoint, for messages
    saved_at: float  # time of the save
    restore: HandledRestore  # the restore of all objects that the servers hold


def find_last_checkpoint(handle_of: Callable[[Any], int | None]) -> LastCheckpoint:
    """Return the last checkpoint with objects of a strategy, of all managers that are watching. Reads its manifest.

    Args:
        handle_of: Returns the handle of an object of the strategy; None for other objects. Must not block.

    Raises:
        FailedPreconditionError: There is none.
        DataLossError: The checkpoint is damaged.
    """
    watches = [each for each in registered_watchers() if isinstance(each, ManagerWatch)]
    saving = [(saves, _objects_of(saves, handle_of)) for each in watches if (saves := each.saves) is not None]
    holding = [(saves, objects) for saves, objects in saving if objects]
    if not holding:
        raise FailedPreconditionError("no rd.CheckpointManager with the variables of this strategy is watching")
    found = [(kept, saves, objects) for saves, objects in holding if (kept := saves.run.last()) is not None]
    if not found:
        raise FailedPreconditionError("the rd.CheckpointManager has not saved a checkpoint yet")
    kept, saves, objects = max(found, key=lambda each: each[0].saved_at)
    checkpoint = open_checkpoint(saves.run.files_of(kept))
    if checkpoint.directory.only_here:
        raise FailedPreconditionError("parameter servers cannot read the directory of the rd.CheckpointManager")
    saved = {name: each for name, obj in objects.items() if (each := saved_name(obj, objects, checkpoint)) is not None}
    request = RestoreRequest(uuid.uuid4().hex, checkpoint.part(tuple(saved.values())), saved, strict=True)
    rows = frozenset(name for name in saved if isinstance(objects[name], SavedRows))
    restore = HandledRestore(request, {name: handle_of(_holder(objects[name])) for name in saved}, rows)
    return LastCheckpoint(shown_uri(saves.run.path_of(kept)), kept.saved_at, restore)


def _objects_of(saves: ManagerSaves, handle_of: Callable[[Any], int | None]) -> dict[str, Any]:
    """Return the objects of a manager that the servers hold, each under one name."""
    named = saves.contents.named()
    aliases = aliases_of(named)
    known = {name: obj for name, obj in named.items() if name not in aliases and handle_of(_holder(obj)) is not None}
    kinds = ("module", "optimizer")
    return {name: obj for name, obj in known.items() if isinstance(obj, SavedRows) or kind_of_state(obj) in kinds}


def _holder(obj: Any) -> Any:
    return obj.module if isinstance(obj, SavedRows) else obj
