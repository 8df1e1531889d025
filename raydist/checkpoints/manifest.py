"""The manifest of a checkpoint: all values that are not tensors, and the locations of the tensors in files.

The manifest is written last: a checkpoint exists once its manifest does. A checksum of the manifest is verified before
anything else, then the version. Names in a manifest are never used as paths or code.

The tensors of a file are contiguous, so that no tensor can claim more memory than the file has bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import google_crc32c
import torch

from raydist.checkpoints.entries import stored_dtype, unpack_state
from raydist.checkpoints.parameter_names import plain_names
from raydist.checkpoints.read_tensors import read_tensors
from raydist.checkpoints.tensor_file import MANIFEST_NAME, FilePlace, TensorFile
from raydist.core.errors import DataLossError, InvalidArgumentError, NotFoundError, RaydistError
from raydist.pipelines.formats.files import file_errors
from raydist.pipelines.stored.directory_files import DirectoryFiles
from raydist.pipelines.stored.file_directory import is_file_name

_MOST_DIMENSIONS = 64  # of a torch tensor
_MOST_NUMBERS = 1 << 60  # also for shapes with a length of 0: strides are products


def file_places(file: str, content: Any, header_bytes: int, num_bytes: int) -> dict[str, FilePlace]:
    """Parse the tensors of a file from JSON. Raise ValueError for impossible values."""
    places = {str(key): _place(key, entry) for key, entry in content.items()}
    at = header_bytes
    for key, place in places.items():
        if place.begin != at or place.end < at:
            raise ValueError(f"tensor {key!r:.100} of {file!r} must begin at byte {at}, got {place.begin}")
        at = place.end
    if at != num_bytes:
        raise ValueError(f"the parts of {file!r} make {at} bytes, but it is said to have {num_bytes}")
    return places


def _place(key: Any, entry: Any) -> FilePlace:
    dtype, shape, begin, end, crc, *more = entry
    rows = _lengths(more[0], 2) if more else None
    _lengths([begin, end, crc], 3)
    place = FilePlace(str(dtype), _lengths(shape, _MOST_DIMENSIONS), begin, end, crc, rows)
    if rows is not None and not (place.shape and rows[0] <= rows[1] <= place.shape[0]):
        raise ValueError(f"rows {rows} of tensor {key!r:.100} cannot be: its shape is {place.shape}")
    if math.prod(max(1, length) for length in place.shape) > _MOST_NUMBERS:
        raise ValueError(f"tensor {key!r:.100} is too large: its shape is {place.shape}")
    if end - begin != math.prod(place.slice_shape) * stored_dtype(place.dtype).itemsize:
        raise ValueError(f"tensor {key!r:.100}, {dtype} of shape {place.slice_shape}, cannot be {end - begin} bytes")
    return place


def _lengths(numbers: Any, most: int) -> Any:
    if not isinstance(numbers, list) or len(numbers) > most:
        raise ValueError(f"at most {most} numbers must stand there, got {numbers!r:.100}")
    if any(type(number) is not int or not 0 <= number <= _MOST_NUMBERS for number in numbers):
        raise ValueError(f"numbers from 0 to {_MOST_NUMBERS} must stand there, got {numbers!r:.100}")
    return tuple(numbers)


def require_whole(owner: str, files: Iterable[TensorFile]) -> None:
    """Raise ValueError unless each tensor of an object exists once, whole or in slices that cover it exactly."""
    found: dict[str, list[FilePlace]] = {}
    for file in files:
        for key, place in file.tensors.items():
            found.setdefault(key, []).append(place)
    for key, places in found.items():
        whole = places[0]
        if any((place.dtype, place.shape) != (whole.dtype, whole.shape) for place in places):
            raise ValueError(f"slices of tensor {key!r:.100} of {owner!r:.100} are of different kinds")
        at = 0
        for start, stop in sorted(place.rows or (0, (*whole.shape, 1)[0]) for place in places):
            if start != at:
                raise ValueError(
                    f"rows {min(start, at)} to {max(start, at)} of tensor {key!r:.100} are there twice or not"
                )
            at = stop
        if at != (*whole.shape, 1)[0]:
            raise ValueError(f"rows of tensor {key!r:.100} of {owner!r:.100} are missing from {at} on")


CHECKPOINT_VERSION = 1

_HEAD = re.compile(rb'\{"crc32c": ([0-9]{1,10}), "saved": ')  # the same in every version
_MOST_BYTES = 1 << 28


@final
@dataclass(frozen=True, slots=True)
class SavedObject:
    """A checkpoint's entry for one object."""

    kind: str  # "module", "optimizer", "metric" or "other"
    # class of an optimizer or scheduler, whose state does not fit another class. Only compared.
    class_name: str | None = None
    values: Any = None  # state of the object, as packed by `pack_state`
    files: tuple[str, ...] = ()  # names of the files with the object's tensors
    same_as: str | None = None  # first name of an object that has several; then the entry holds nothing else


@final
@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """The contents of a checkpoint's manifest."""

    objects: Mapping[str, SavedObject]  # entries by object name
    files: tuple[TensorFile, ...] = ()  # all files of the checkpoint except the manifest
    random: Any = None  # states of random generators, as packed by `pack_state`
    # values of the code that saves: a step number, values of metrics
    details: Mapping[str, Any] = field(default_factory=dict)

    def tensor_files(self, name: str) -> tuple[TensorFile, ...]:
        """Return the files with the tensors of an object."""
        known = {file.name: file for file in self.files}
        return tuple(known[each] for each in self.objects[name].files)

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON with a checksum. Raise InvalidArgumentError if it is too large."""
        content = {
            "version": CHECKPOINT_VERSION,
            "objects": {name: _object_as_json(each) for name, each in self.objects.items()},
            "files": [_file_as_json(file) for file in self.files],
            "random": self.random,
            "details": dict(self.details),
        }
        saved = json.dumps(content, allow_nan=False).encode()
        if len(saved) > _MOST_BYTES:
            raise InvalidArgumentError(
                f"All that is no tensor must fit into {_MOST_BYTES} bytes of JSON, but it takes {len(saved)}. Keep "
                "large values in tensors or arrays."
            )
        return b'{"crc32c": %d, "saved": %b}' % (google_crc32c.value(saved), saved)

    @classmethod
    def of_bytes(cls, data: bytes, path: str) -> CheckpointManifest:
        """Parse the manifest that `to_bytes` wrote into the file at `path`.

        Raises:
            DataLossError: The manifest is damaged.
            InvalidArgumentError: The manifest has a newer format version.
        """
        try:
            content = json.loads(_checked(data))
            version = content["version"]
            if version == CHECKPOINT_VERSION:
                return cls._of_content(content)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
            problem = f"The manifest of a checkpoint must be intact, but in {path!r} {_problem_of(error)}"
            raise DataLossError(f"{problem}. Use another checkpoint or a copy.", path=path) from error
        raise InvalidArgumentError(
            f"The checkpoint {path!r} has format version {version!r:.50}, this raydist reads version "
            f"{CHECKPOINT_VERSION}. Restore it with the version of raydist that wrote it, or a newer one."
        )

    @classmethod
    def _of_content(cls, content: Any) -> CheckpointManifest:
        files = tuple(map(_file_of_json, content["files"]))
        objects = {str(name): _object_of_json(each) for name, each in content["objects"].items()}
        if len({file.name for file in files}) < len(files):
            raise ValueError("it names a file twice")
        manifest = cls(objects, files, content["random"], dict(content["details"]))
        for name, each in objects.items():
            if each.same_as is not None and objects[each.same_as].same_as is not None:
                raise ValueError(f"{name!r:.100} is said to be the same as {each.same_as!r:.100}, which is another's")
            require_whole(name, manifest.tensor_files(name))
        return manifest


def _checked(data: bytes) -> bytes:
    head = _HEAD.match(data)
    if head is None or not data.endswith(b"}"):
        raise ValueError("what must be there is not: it may be cut off")
    saved = data[head.end() : -1]
    if (found := google_crc32c.value(saved)) != int(head[1]):
        raise ValueError(f"the checksum must be {found}, but {int(head[1])} is written there")
    return saved


def _problem_of(error: Exception) -> str:
    return str(error)[:300] if type(error) is ValueError else f"there is {error!r:.300}"


def _object_as_json(saved: SavedObject) -> dict[str, Any]:
    if saved.same_as is not None:
        return {"kind": saved.kind, "same_as": saved.same_as}
    return {"kind": saved.kind, "class": saved.class_name, "files": list(saved.files), "values": saved.values}


def _object_of_json(content: Any) -> SavedObject:
    if "same_as" in content:
        return SavedObject(str(content["kind"]), same_as=str(content["same_as"]))
    files = content["files"]
    if not isinstance(files, list) or len(set(files)) < len(files):
        raise ValueError(f"its files must be a list of different names, got {files!r:.100}")
    class_name = content["class"]
    if not isinstance(class_name, str | None):
        raise ValueError(f"the name of a class must be text, got {class_name!r:.100}")
    return SavedObject(str(content["kind"]), class_name, content["values"], tuple(files))


def _file_as_json(file: TensorFile) -> dict[str, Any]:
    return {
        "name": file.name,
        "num_bytes": file.num_bytes,
        "crc32c": file.crc32c,
        "header": [file.header_bytes, file.header_crc32c],
        "tensors": {
            key: [place.dtype, place.shape, place.begin, place.end, place.crc32c, *([place.rows] if place.rows else [])]
            for key, place in file.tensors.items()
        },
    }


def _file_of_json(content: Any) -> TensorFile:
    name = content["name"]
    if not is_file_name(name):
        raise ValueError(f"it names {name!r:.100}, which is no file in its directory")
    num_bytes, crc, (header_bytes, header_crc) = content["num_bytes"], content["crc32c"], content["header"]
    for number in (num_bytes, crc, header_bytes, header_crc):
        if type(number) is not int or number < 0:
            raise ValueError(f"sizes and checksums must be numbers >= 0, {name!r} has {number!r:.50}")
    places = file_places(name, content["tensors"], header_bytes, num_bytes)
    return TensorFile(name, num_bytes, crc, header_bytes, header_crc, places)


_MAX_READ_BYTES = (1 << 28) + (1 << 10)  # of a manifest
_READ_BYTES = 1 << 20


@final
@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint in a directory."""

    directory: DirectoryFiles  # files of the directory
    manifest: CheckpointManifest  # the manifest

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
            raise self.loss(f"the state of {name!r} is invalid: {error!s:.300}") from error

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
            while size < _MAX_READ_BYTES and (piece := opened.file.read(_READ_BYTES)):
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
