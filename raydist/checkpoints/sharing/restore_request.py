"""Messages between the driver and replicas about a restore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from raydist.checkpoints.differences import Difference
from raydist.checkpoints.saved_checkpoint import SavedCheckpoint
from raydist.checkpoints.tensor_file import TensorFile

__all__ = ["PreparedShare", "RestoreRequest"]


@final
@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """A restore that replicas take part in.

    Attributes:
        token: Unique id of the restore.
        checkpoint: The checkpoint, reduced to the objects of the replicas.
        saved: Name in the checkpoint, by name of the object.
        strict: Require that all entries exist, and no others.
    """

    token: str
    checkpoint: SavedCheckpoint
    saved: Mapping[str, str]
    strict: bool

    def files(self) -> dict[str, tuple[TensorFile, ...]]:
        """Return the tensor files by name of the object."""
        return {name: self.checkpoint.files(saved) for name, saved in self.saved.items()}


@final
@dataclass(frozen=True, slots=True)
class PreparedShare:
    """A replica's report before anything is changed.

    Attributes:
        differences: Differences by name of the object, for all objects that are restored.
        sees_files: True if the replica could open its files. Otherwise (for example on another machine) the driver
            reads them.
    """

    differences: Mapping[str, tuple[Difference, ...]] = field(default_factory=dict)
    sees_files: bool = True
