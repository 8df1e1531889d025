"""What replicas are told of a restore, and what they answer before anything is changed."""

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
    """What replicas are told of a restore.

    Attributes:
        token: Tells it from others.
        checkpoint: What concerns them of it.
        saved: By name of an object, the name that the checkpoint has for it.
        strict: Whether all entries must be there, and no others.
    """

    token: str
    checkpoint: SavedCheckpoint
    saved: Mapping[str, str]
    strict: bool

    def files(self) -> dict[str, tuple[TensorFile, ...]]:
        """By name of an object, those with its tensors."""
        return {name: self.checkpoint.files(saved) for name, saved in self.saved.items()}


@final
@dataclass(frozen=True, slots=True)
class PreparedShare:
    """What one replica says before anything is changed.

    Attributes:
        differences: By name of an object, what does not fit; all objects that are restored are there.
        sees_files: Whether it could open the files that it was to read. Who cannot is on another machine, say, and has
            the driver read them.
    """

    differences: Mapping[str, tuple[Difference, ...]] = field(default_factory=dict)
    sees_files: bool = True
