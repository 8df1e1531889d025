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
from torch import nn

from raydist.checkpoints.capture import plain_copy
from raydist.checkpoints.parameter_names import compiled_names, has_compiled, keep_types, plain_names
from raydist.checkpoints.tensor_file import write_safetensors
from raydist.collectives.tensors import flat_bytes
from raydist.core.errors import DataLossError, InvalidArgumentError, NotFoundError, RaydistError
from raydist.parameter_servers.sharded_embedding import SavedRows
from raydist.pipelines.formats.files import local_path, path_text
from raydist.pipelines.stored.directory_files import directory_of_file
from raydist.training.architecture import architecture_of, build_module

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
    return {name: plain_copy(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}


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
    directory, name = directory_of_file(path_text(path), "A model")
    directory.make()
    directory.replace_by(name, lambda file: write_safetensors(file, name, tensors, metadata=header))


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
    directory, name = directory_of_file(text, "A model")
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


MODULE_PREFIX = "module."
OPTIMIZER_PREFIX = "optimizer."


def pack(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, config: Mapping[str, Any] | None
) -> tuple[dict[str, torch.Tensor], ModelManifest]:
    """Return the tensors and manifest that `Model.save` writes. Blocks for dispatched steps."""
    if tables := SavedRows(module).tables():
        raise InvalidArgumentError(
            "A model file has what state_dict() gives, and that has no rows of ShardedEmbeddings, but the module has "
            f"{', '.join(map(repr, tables))}. Save an rd.Checkpoint(model=model.module) instead: it has them."
        )
    state = snapshot(plain_names(module.state_dict()))
    tensors = {MODULE_PREFIX + name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    extra = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
    plain = None if optimizer is None else _pack_optimizer(optimizer, tensors)
    kind = type(module)
    manifest = ModelManifest(
        module_class=f"{kind.__module__}:{kind.__qualname__}",
        config=None if config is None else dict(config),
        extra=extra,
        optimizer=plain,
        sha256=digests(tensors),
        architecture=architecture_of(module),
    )
    return tensors, manifest


def _pack_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    state = optimizer.state_dict()
    values: dict[str, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        for name, value in snapshot(entries).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{OPTIMIZER_PREFIX}{index}.{name}"] = value
            else:
                values.setdefault(str(index), {})[name] = value
    return {"class": type(optimizer).__name__, "values": values, "groups": _plain_groups(state["param_groups"])}


def _plain_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups' settings; a learning rate in a tensor becomes a number."""
    return [
        {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
        for group in groups
    ]


def restore_module(module: nn.Module, tensors: Mapping[str, torch.Tensor], manifest: ModelManifest) -> None:
    """Load the module's state in place."""
    try:
        state = plain_names({**_of_module(tensors), **manifest.extra})
        module.load_state_dict(compiled_names(state, module.state_dict()) if has_compiled(module) else state)
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"The saved state must fit the module, a {type(module).__name__}: {error} "
            f"The file was saved from {manifest.module_class}; pass such a module: Model.load(path, module=...)."
        ) from None


def _of_module(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(MODULE_PREFIX): value for name, value in tensors.items() if name.startswith(MODULE_PREFIX)
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], manifest: ModelManifest
) -> None:
    """Load the optimizer's state in place, including settings such as the learning rate."""
    saved = manifest.optimizer
    kind = None if saved is None else saved.get("class")
    if saved is None or kind != type(optimizer).__name__:
        held = "none" if saved is None else f"that of {kind}"
        raise InvalidArgumentError(
            f"The file must hold the state of the optimizer to be restored, {type(optimizer).__name__}; it holds "
            f"{held}. Leave `optimizer` out, or compile before saving."
        )
    try:
        state: dict[int, dict[str, Any]] = {int(index): dict(entries) for index, entries in saved["values"].items()}
        for key, value in tensors.items():
            if key.startswith(OPTIMIZER_PREFIX):
                index, _, name = key.removeprefix(OPTIMIZER_PREFIX).partition(".")
                state.setdefault(int(index), {})[name] = value
        loaded = {"state": state, "param_groups": saved["groups"]}
        optimizer.load_state_dict(loaded)
        keep_types(optimizer, loaded)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgumentError(
            f"The saved state must fit the optimizer: {error}. Make it over the same parameters in the same groups."
        ) from None


def rebuild(manifest: ModelManifest, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Build the torch.nn module that the file describes. A file never causes other code to be imported or called."""
    architecture = manifest.architecture or _by_config(manifest)
    if architecture is None:
        raise InvalidArgumentError(
            f"Only modules of torch.nn, and its containers of them, are built from what a file says, and this one was "
            f"saved from {manifest.module_class!r:.200}. Pass the module, or what makes it (called with the saved "
            "config): Model.load(path, module=...)."
        )
    return build_module(architecture, _of_module(tensors))


def _by_config(manifest: ModelManifest) -> dict[str, Any] | None:
    """Return the description for files of older versions without one: a single module of torch.nn."""
    place, _, name = str(manifest.module_class).partition(":")
    found = place.startswith("torch.nn.modules.") and manifest.config is not None
    return {"class": name, "arguments": manifest.config} if found else None


def make_module(maker: Any, manifest: ModelManifest) -> nn.Module:
    """Return the user's module, or the result of the user's class or function for the saved config."""
    if isinstance(maker, nn.Module):
        return maker
    if not callable(maker):
        raise InvalidArgumentError(
            f"module must be a torch.nn.Module, or a class or function that makes one, got {maker!r:.200}."
        )
    made = maker(**(manifest.config or {}))
    if not isinstance(made, nn.Module):
        raise InvalidArgumentError(f"module must make a torch.nn.Module, but {maker!r:.200} returned {made!r:.200}.")
    return made
