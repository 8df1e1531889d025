"""Model files: one safetensors file with a JSON manifest in its header. No pickle, so that loading runs no code.

Tensors are named "module.<name>" and "optimizer.<parameter index>.<name>". The manifest has all other values and a
SHA-256 of every tensor: a damaged file is rejected, not loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open

from raydist.checkpoints.tensor_file import write_safetensors
from raydist.collectives.flat_bytes import flat_bytes
from raydist.errors import DataLossError, InvalidArgumentError, NotFoundError, RaydistError
from raydist.pipelines.formats.files import local_path, path_text, shown_uri
from raydist.pipelines.stored.directory_files import DirectoryFiles, directory_files

__all__ = ["ModelManifest", "read_model_file", "snapshot", "write_model_file"]

_CHUNK_BYTES = 8 << 20

FORMAT_VERSION = 1
MANIFEST_KEY = "raydist.model"
DIGEST_KEY = "raydist.sha256"  # of the manifest's text


@final
@dataclass(frozen=True, slots=True)
class ModelManifest:
    """The values of a model file that are not tensors.

    Attributes:
        module_class: "package.module:QualifiedName" of the module's class.
        config: Keyword arguments of the module's constructor; None if the user gave none.
        extra: Entries of the module's state that are not tensors.
        optimizer: Groups and plain values of the optimizer's state; None without an optimizer.
        sha256: Digest of each tensor.
        version: Format version of the file.
        architecture: Description from which the module can be built, if it has one; see `architecture.py`.
    """

    module_class: str
    config: dict[str, Any] | None
    extra: dict[str, Any]
    optimizer: dict[str, Any] | None
    sha256: dict[str, str]
    version: int = FORMAT_VERSION
    architecture: dict[str, Any] | None = None


def snapshot(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with every tensor copied into a plain CPU tensor with memory of its own."""
    return {name: _plain(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _plain(value: torch.Tensor) -> torch.Tensor:
    # Not clone(): a strategy's variable may be a subclass of Tensor, and its clone would be one as well.
    with torch.no_grad():
        return torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value)


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the SHA-256 of each tensor's type, shape and bytes."""
    return {name: _digest(f"{tensor.dtype}{list(tensor.shape)}", _bytes(tensor)) for name, tensor in tensors.items()}


def _digest(text: str, data: memoryview | bytes = b"") -> str:
    digest = hashlib.sha256(text.encode())
    digest.update(data)
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat: Any = flat_bytes(tensor).numpy()
    return memoryview(flat)


def write_model_file(path: str | os.PathLike[str], tensors: dict[str, torch.Tensor], manifest: ModelManifest) -> None:
    """Write a file, by its path or URI, atomically: readers find the old or the new file, also after a crash."""
    text = _as_json(manifest)
    header = {MANIFEST_KEY: text, DIGEST_KEY: _digest(text)}
    directory, name = _place(path_text(path))
    directory.make()
    directory.replace_by(name, lambda file: write_safetensors(file, name, tensors, metadata=header))


def _place(path: str) -> tuple[DirectoryFiles, str]:
    local = local_path(path)
    plain, mark, query = (path if local is None else os.path.abspath(local)).partition("?" if local is None else "\0")
    parent, _, name = plain.rpartition("/")
    if not name:
        raise InvalidArgumentError(f"A model is saved in a file, but {shown_uri(path)!r} names none.")
    return directory_files(f"{parent}{mark}{query}" if parent else "/"), name


def _as_json(manifest: ModelManifest) -> str:
    try:
        return json.dumps(asdict(manifest))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"A model file holds tensors and JSON values only: {error}. Give JSON-able constructor arguments as config "
            "(numbers, strings, lists, dicts), and keep other objects out of state_dict()."
        ) from None


def read_model_file(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], ModelManifest]:
    """Return the tensors (on the CPU) and the manifest of a file.

    Raises:
        NotFoundError: The file does not exist.
        DataLossError: The file is truncated, damaged, or not a model file.
    """
    text = path_text(path)
    local = local_path(text)
    if local is not None:
        return _read(Path(local))
    directory, name = _place(text)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / name
        if directory.exists(name):
            with contextlib.closing(directory.open(name).file) as source, copy.open("wb") as target:
                while chunk := source.read(_CHUNK_BYTES):
                    target.write(chunk)
        return _read(copy, f"{directory.shown}/{name}")


def _read(file: Path, shown: str = "") -> tuple[dict[str, torch.Tensor], ModelManifest]:
    shown = shown or str(file)
    if not file.is_file():
        raise NotFoundError(f"A model file must exist to be loaded, found none at {shown!r}.")
    try:
        with safe_open(file, framework="pt") as content:
            manifest = _parse(content.metadata() or {}, shown)
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise DataLossError(
            f"{shown!r} is no whole model file ({error}): it is truncated, damaged or of another kind. Use a copy.",
            path=shown,
        ) from None
    _verify(tensors, manifest, shown)
    return tensors, manifest


def _parse(header: Mapping[str, str], path: str) -> ModelManifest:
    if MANIFEST_KEY not in header:
        raise DataLossError(
            f"{path!r} has no raydist manifest: it was not written by Model.save. "
            "Read it with safetensors.torch.load_file and module.load_state_dict.",
            path=path,
        )
    text = header[MANIFEST_KEY]
    if header.get(DIGEST_KEY) != _digest(text):
        raise DataLossError(f"The manifest of {path!r} is damaged. Use a copy of the file.", path=path)
    try:
        return _manifest(json.loads(text), path)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, RaydistError):
            raise
        raise DataLossError(f"The manifest of {path!r} is none: {error!r:.300}. Use a copy.", path=path) from error


def _manifest(found: Any, path: str) -> ModelManifest:
    if found["version"] == FORMAT_VERSION:
        values = {field.name: found[field.name] for field in fields(ModelManifest) if field.name in found}
        manifest = ModelManifest(**values)
        if not all(isinstance(part, dict) for part in (manifest.extra, manifest.sha256, manifest.config or {})):
            raise TypeError("its parts must be objects")
        return manifest
    raise InvalidArgumentError(
        f"{path!r} has format version {found['version']}, this raydist reads version {FORMAT_VERSION}. "
        "Load it with the version of raydist that wrote it."
    )


def _verify(tensors: Mapping[str, torch.Tensor], manifest: ModelManifest, path: str) -> None:
    found = digests(tensors)
    damaged = sorted(name for name in {*found, *manifest.sha256} if found.get(name) != manifest.sha256.get(name))
    if damaged:
        raise DataLossError(
            f"{path!r} is damaged: {len(damaged)} tensors differ from what was saved, the first is {damaged[0]!r}. "
            "Use a copy of the file.",
            path=path,
        )
