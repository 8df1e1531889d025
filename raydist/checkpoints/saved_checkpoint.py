"""An existing checkpoint: its manifest, and the states in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from raydist.checkpoints.compiled_names import plain_names
from raydist.checkpoints.entries import unpack_state
from raydist.checkpoints.manifest import CheckpointManifest, SavedObject
from raydist.checkpoints.new_files import MANIFEST_NAME
from raydist.checkpoints.read_tensors import read_tensors
from raydist.checkpoints.tensor_file import FilePlace, TensorFile
from raydist.errors import DataLossError, NotFoundError, RaydistError
from raydist.pipelines.formats.files import file_errors
from raydist.pipelines.stored.directory_files import DirectoryFiles

__all__ = ["SavedCheckpoint", "named_files", "open_checkpoint"]

_MOST_BYTES = (1 << 28) + (1 << 10)  # of a manifest
_READ_BYTES = 1 << 20


@final
@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint in a directory.

    Attributes:
        directory: Files of the directory.
        manifest: The manifest.
    """

    directory: DirectoryFiles
    manifest: CheckpointManifest

    def saved(self, name: str) -> SavedObject:
        """Return the entry of an object; for a further name of an object, the entry of the first name.

        Checkpoints of version 0.1 contain the parameter names of `torch.compile`; they are replaced by plain names.
        """
        saved = self.manifest.objects[self._home(name)]
        named = saved.kind in ("module", "optimizer") or name.startswith("gradients.")
        return replace(saved, values=plain_names(saved.values)) if named else saved

    def places(self, name: str) -> Mapping[str, FilePlace]:
        """Return the locations of an object's tensors; for a tensor in slices, of any slice."""
        return {key: place for file in self.files(name) for key, place in file.tensors.items()}

    def files(self, name: str) -> tuple[TensorFile, ...]:
        """Return the files with the tensors of an object."""
        return self.manifest.tensor_files(self._home(name))

    def part(self, names: Collection[str]) -> SavedCheckpoint:
        """Return the checkpoint reduced to some objects, which keeps messages about them small."""
        objects = {name: self.manifest.objects[name] for each in names for name in (each, self._home(each))}
        files = {file.name: file for name in names for file in self.files(name)}
        return replace(self, manifest=CheckpointManifest(objects, tuple(files.values())))

    def state(self, name: str) -> Any:
        """Return the state of an object. Raise DataLossError if it is damaged."""
        return self.state_of(name, read_tensors(self.directory, self.files(name)))

    def require_state(self, name: str) -> None:
        """Raise DataLossError if the entry of an object cannot be a state, whatever its tensors contain."""
        self.state_of(name, dict.fromkeys(self.places(name), torch.empty(0)))

    def state_of(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return the state of an object from its tensors. Raise DataLossError if the entry is not a state."""
        try:
            return unpack_state(self.saved(name).values, tensors)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self.loss(f"the state of {name!r} is none: {error!s:.300}") from error

    def loss(self, problem: str) -> DataLossError:
        """Return the error for an impossible entry of the checkpoint."""
        path = self.directory.shown
        return DataLossError(f"The checkpoint {path!r} must be whole, but {problem}. Use another one.", path=path)

    def _home(self, name: str) -> str:
        return self.manifest.objects[name].same_as or name


def open_checkpoint(directory: DirectoryFiles) -> SavedCheckpoint:
    """Return the checkpoint in a directory.

    Raises:
        NotFoundError: The directory has no manifest, so there is no checkpoint.
        DataLossError: The manifest is damaged.
        InvalidArgumentError: The manifest has a newer format version.
    """
    path = f"{directory.shown}/{MANIFEST_NAME}"
    try:
        opened = directory.open(MANIFEST_NAME)
    except NotFoundError:
        raise NotFoundError(
            f"A checkpoint must be in {directory.shown!r}, but there is no {MANIFEST_NAME}: none was saved there, or "
            "the save did not come to its end. Give the directory of a whole one."
        ) from None
    content = []
    size = 0
    try:
        with file_errors(path):
            while size < _MOST_BYTES and (piece := opened.file.read(_READ_BYTES)):
                content.append(bytes(piece))
                size += len(piece)
    finally:
        opened.file.close()
    return SavedCheckpoint(directory, CheckpointManifest.of_bytes(b"".join(content), path))


def named_files(directory: DirectoryFiles) -> frozenset[str]:
    """Return the tensor files of the checkpoint in a directory; empty if there is none or its manifest is damaged."""
    try:
        return frozenset(file.name for file in open_checkpoint(directory).manifest.files)
    except RaydistError:
        return frozenset()
