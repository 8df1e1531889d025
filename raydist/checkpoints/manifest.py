"""The manifest of a checkpoint: all values that are not tensors, and the locations of the tensors in files.

The manifest is written last: a checkpoint exists once its manifest does. A checksum of the manifest is verified before
anything else, then the version. Names in a manifest are never used as paths or code.

The tensors of a file are contiguous, so that no tensor can claim more memory than the file has bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import google_crc32c

from raydist.checkpoints.dtypes import stored_dtype
from raydist.checkpoints.tensor_file import FilePlace, TensorFile
from raydist.errors import DataLossError, InvalidArgumentError
from raydist.pipelines.stored.file_directory import is_file_name

__all__ = ["CHECKPOINT_VERSION", "CheckpointManifest", "SavedObject"]

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
    """A checkpoint's entry for one object.

    Attributes:
        kind: "module", "optimizer", "metric" or "other".
        class_name: Class of an optimizer or scheduler, whose state does not fit another class. Only compared.
        values: State of the object, as packed by `pack_state`.
        files: Names of the files with the object's tensors.
        same_as: First name of an object that has several; then the entry holds nothing else.
    """

    kind: str
    class_name: str | None = None
    values: Any = None
    files: tuple[str, ...] = ()
    same_as: str | None = None


@final
@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """The contents of a checkpoint's manifest.

    Attributes:
        objects: Entries by object name.
        files: All files of the checkpoint except the manifest.
        random: States of random generators, as packed by `pack_state`.
        details: Values of the code that saves: a step number, values of metrics.
    """

    objects: Mapping[str, SavedObject]
    files: tuple[TensorFile, ...] = ()
    random: Any = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def tensor_files(self, name: str) -> tuple[TensorFile, ...]:
        """Return the files with the tensors of an object."""
        known = {file.name: file for file in self.files}
        return tuple(known[each] for each in self.objects[name].files)

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON with a checksum.

        Raises:
            InvalidArgumentError: The manifest is too large.
        """
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
            problem = f"The manifest of a checkpoint must be intact, but in {path!r} {_told(error)}"
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


def _told(error: Exception) -> str:
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
