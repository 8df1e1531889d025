"""Snapshots of a checkpoint's objects: taken at one point in time, written later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from raydist.checkpoints.entries import pack_state
from raydist.checkpoints.manifest import CheckpointManifest, SavedObject
from raydist.checkpoints.new_files import NewFiles, new_files
from raydist.checkpoints.saved_checkpoint import named_files
from raydist.checkpoints.tensor_file import MAX_PART_BYTES, TensorFile, write_tensors
from raydist.errors import InvalidArgumentError
from raydist.pipelines.stored.directory_files import DirectoryFiles

__all__ = ["Capture", "CapturedObject", "captured_object", "commit", "file_stems", "save_capture", "write_capture"]


@final
@dataclass(frozen=True, slots=True)
class CapturedObject:
    """The state of one object.

    Attributes:
        saved: The object's entry in the manifest, without files.
        tensors: Tensors by name, on the CPU.
    """

    saved: SavedObject
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Capture:
    """A consistent snapshot of the states of all objects.

    Attributes:
        objects: States by object name.
        random: States of random generators, packed.
        details: See :attr:`CheckpointManifest.details`.
    """

    objects: Mapping[str, CapturedObject]
    random: Any = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Total size of the tensors."""
        return sum(tensor.nbytes for each in self.objects.values() for tensor in each.tensors.values())


def captured_object(name: str, kind: str, class_name: str | None, state: Any, copy: bool) -> CapturedObject:
    """Return the state of one object in the form that a capture holds.

    Args:
        name: Name of the object, for messages.
        kind: Kind of the object.
        class_name: Class of the object, if a checkpoint records it.
        state: State of the object.
        copy: Copy tensors, so that training may continue.

    Raises:
        InvalidArgumentError: An entry cannot be stored; the message names the entry.
    """
    packed = pack_state(state, name)
    for key, value in packed.tensors.items():
        _require_values(f"{name}.{key}", value)
    tensors = {key: _on_cpu(value, copy) for key, value in packed.tensors.items()}
    return CapturedObject(SavedObject(kind, class_name, packed.values), tensors)


def _require_values(name: str, value: torch.Tensor | np.ndarray[Any, Any]) -> None:
    if isinstance(value, torch.Tensor) and (is_lazy(value) or value.is_meta):
        why = "is made by its module's first forward" if is_lazy(value) else "is on the device 'meta'"
        raise InvalidArgumentError(
            f"A checkpoint holds tensors that have values, but {name!r} has none yet: it {why}. Save after that has "
            "been filled."
        )


def _on_cpu(value: torch.Tensor | np.ndarray[Any, Any], copy: bool) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        plain = value.flags.writeable and value.flags.c_contiguous
        return torch.from_numpy(value if plain and not copy else value.copy())
    if not copy and type(value) in (torch.Tensor, torch.nn.Parameter):
        return value.detach().resolve_conj().resolve_neg()
    # Not clone(): a strategy's variable may be a subclass of Tensor, and its clone would be one as well.
    with torch.no_grad():
        return torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value)


def file_stems(names: Mapping[str, Any], new: NewFiles) -> dict[str, str]:
    """Return the file name stem of each object. Stems differ even on case-insensitive file systems.

    >>> from raydist.pipelines.stored.directory_files import LocalFiles
    >>> file_stems({"a b": 1, "a/b": 2, "A_B": 3}, NewFiles(LocalFiles("/tmp/x")))
    {'a b': 'a b', 'a/b': 'a/b~2', 'A_B': 'A_B~3'}
    """
    stems: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        stem, number = name, 1
        while new.named(stem, "").lower() in taken:
            number += 1
            stem = f"{name[:100]}~{number}"
        taken.add(new.named(stem, "").lower())
        stems[name] = stem
    return stems


def write_capture(
    capture: Capture,
    new: NewFiles,
    max_part_bytes: int = MAX_PART_BYTES,
    stems: Mapping[str, str] | None = None,
) -> CheckpointManifest:
    """Write the tensors of a capture; return the manifest for `NewFiles.commit`."""
    stems = file_stems(capture.objects, new) if stems is None else stems
    objects: dict[str, SavedObject] = {}
    files: list[TensorFile] = []
    for name, each in capture.objects.items():
        written: tuple[TensorFile, ...] = ()
        if each.tensors:
            written = write_tensors(new, stems[name], each.tensors, max_part_bytes)
        files += written
        objects[name] = replace(each.saved, files=tuple(file.name for file in written))
    return CheckpointManifest(objects, tuple(files), capture.random, capture.details)


def commit(new: NewFiles, manifest: CheckpointManifest) -> None:
    """Commit a checkpoint whose files are written, replacing the previous checkpoint of the directory."""
    before = named_files(new.files) if new.tag else ()
    new.commit(manifest.to_bytes(), [file.name for file in manifest.files], before)


def save_capture(
    capture: Capture, directory: DirectoryFiles, max_part_bytes: int = MAX_PART_BYTES
) -> CheckpointManifest:
    """Write and commit a checkpoint. The previous checkpoint of the directory stays until the commit, then is removed.

    Raises:
        FailedPreconditionError: The directory must not be written to.
        OSError: The file system failed, for example because it is full. The written files are removed.
    """
    new = new_files(directory)
    try:
        manifest = write_capture(capture, new, max_part_bytes)
        commit(new, manifest)
    except BaseException:
        new.abandon()
        raise
    return manifest
