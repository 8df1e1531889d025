"""List the checkpoints in a directory, in the order of their saves."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from raydist.checkpoints.retention import KeptCheckpoint
from raydist.checkpoints.saved_checkpoint import SavedCheckpoint, open_checkpoint
from raydist.errors import DataLossError, InvalidArgumentError, NotFoundError
from raydist.pipelines.formats.files import local_path
from raydist.pipelines.stored.directory_files import DirectoryFiles

__all__ = ["DETAILS", "FoundCheckpoint", "as_found", "as_metrics", "checkpoint_path", "find_checkpoints", "folders_of"]

DETAILS = "manager"
"""Key of a manager's own entries in a manifest's details."""

_NAME = re.compile(r"(.+)-([0-9]{1,18})")


@final
@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint found in a directory.

    Attributes:
        kept: Description for the retention policy.
        details: Entries of the manager that saved the checkpoint.
        damage: Error that restoring would raise, as far as the manifest shows.
    """

    kept: KeptCheckpoint
    details: dict[str, Any]
    damage: Exception | None = None


def checkpoint_path(directory: str, name: str) -> str:
    """Return the path of a checkpoint in a directory.

    >>> checkpoint_path("runs/a", "ckpt-1"), checkpoint_path("s3://bucket/a?x=1", "ckpt-1")
    ('runs/a/ckpt-1', 's3://bucket/a/ckpt-1?x=1')
    """
    if local_path(directory) is not None:
        return os.path.join(directory, name)
    uri, mark, query = directory.partition("?")
    return f"{uri.rstrip('/')}/{name}{mark}{query}"


def find_checkpoints(files: DirectoryFiles, name: str | None = None) -> list[FoundCheckpoint]:
    """Return all checkpoints, oldest first by the order of saves, independent of clocks and step numbers.

    Checkpoints with a damaged manifest are placed by their number. A directory without a manifest is no checkpoint.

    Args:
        files: Files of the directory.
        name: Prefix of the names, before the number; None for any.
    """
    found = [each for folder, number in _folders(files, name) if (each := _look_at(files, folder, number)) is not None]
    intact = sorted((each for each in found if each.damage is None), key=lambda each: each.kept.generation)
    for each in sorted((each for each in found if each.damage is not None), key=lambda each: each.kept.number):
        behind = next(
            (place for place, other in enumerate(intact) if other.kept.number > each.kept.number), len(intact)
        )
        intact.insert(behind, each)
    return intact


def _folders(files: DirectoryFiles, name: str | None) -> Iterator[tuple[str, int]]:
    for folder in files.folders():
        match = _NAME.fullmatch(folder)
        if match is not None and name in (None, match[1]):
            yield folder, int(match[2])


def _look_at(files: DirectoryFiles, folder: str, number: int) -> FoundCheckpoint | None:
    try:
        return as_found(folder, number, open_checkpoint(files.inside(folder)))
    except NotFoundError:
        return None
    except (DataLossError, InvalidArgumentError) as error:
        return FoundCheckpoint(KeptCheckpoint(folder, number, generation=-1), {}, error)


def as_found(folder: str, number: int, saved: SavedCheckpoint) -> FoundCheckpoint:
    """Return a checkpoint's description from its manifest. One that no manager wrote counts as the oldest."""
    details = saved.manifest.details.get(DETAILS)
    if not isinstance(details, dict):
        return FoundCheckpoint(KeptCheckpoint(folder, number, generation=0), {})
    try:
        metrics = {str(name): float(value) for name, value in dict(details.get("metrics", {})).items()}
        kept = KeptCheckpoint(folder, number, int(details["generation"]), float(details["saved_at"]), metrics)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        damage = saved.loss(f"what its manager kept in it is not what it writes ({error!r:.200})")
        return FoundCheckpoint(KeptCheckpoint(folder, number, generation=-1), {}, damage)
    return FoundCheckpoint(kept, details)


def folders_of(files: DirectoryFiles, name: str) -> list[str]:
    """Return the directories of checkpoints with this name, complete or not."""
    return [folder for folder, _ in _folders(files, name)]


def as_metrics(metrics: Any) -> dict[str, float]:
    """Return metrics as floats, also from tensors. NaN and infinities, which JSON lacks, are dropped.

    >>> import torch
    >>> as_metrics({"loss": torch.tensor(0.5), "accuracy": 1, "bad": float("nan")})
    {'loss': 0.5, 'accuracy': 1.0}
    """
    try:
        values = {str(name): float(value) for name, value in dict(metrics or {}).items()}
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"metrics must be a dict of names and numbers, got {metrics!r:.200}: {error!s:.200}."
        ) from error
    return {name: value for name, value in values.items() if math.isfinite(value)}
