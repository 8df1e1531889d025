"""Exported models: a `torch.export` program, its weights and a signature, which need no code of the module.

A version is a directory that appears as a whole: it is written under a temporary name and renamed. `signature.json` has
a checksum of itself and of each other file. Weights are in `model.safetensors` alone; `program.pt2` has the graph, and
constants that are no state of the module.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from raydist.checkpoints.parameter_names import plain_name
from raydist.core.errors import DataLossError, InvalidArgumentError, NotFoundError, RaydistError, SpecError
from raydist.core.nest import flatten
from raydist.feature.feature_space import FeatureSpace
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.formats.files import local_path, path_text

SIGNATURE, PROGRAM, WEIGHTS, FEATURES = "signature.json", "program.pt2", "model.safetensors", "features.json"

_FORMAT, _VERSION = "raydist exported model", 1


@final
@dataclass(frozen=True, slots=True)
class Signature:
    """Content of `signature.json`.

    Attributes:
        inputs: Specs by name, in the order of the program's arguments; with a feature space, specs of features.
        outputs: Specs by name, in the order of the program's results.
        aliases: Names of tensors by names of others that share their memory.
        sha256: Digests of the other files.
    """

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    aliases: Mapping[str, str]
    sha256: Mapping[str, str]

    def as_json(self) -> bytes:
        """Return the content of the file."""
        specs = {
            kind: {name: [spec.shape, dtype_name(spec)] for name, spec in named.items()}
            for kind, named in (("inputs", self.inputs), ("outputs", self.outputs))
        }
        content = {**specs, "aliases": dict(self.aliases), "sha256": dict(self.sha256)}
        document = {"format": _FORMAT, "version": _VERSION, "sha256": _digest(content), "content": content}
        return json.dumps(document, indent=1).encode()

    @classmethod
    def of_json(cls, text: bytes) -> Signature:
        """Return the signature of a file's content. Raises an error of any kind if it is none."""
        document = json.loads(text)
        content = document["content"]
        if document["format"] != _FORMAT or document["sha256"] != _digest(content):
            raise ValueError("the format or the checksum is of another file")
        if document["version"] != _VERSION:
            raise InvalidArgumentError(
                f"The export has format version {document['version']!r:.100}, this raydist reads version {_VERSION}. "
                "Load it with the version of raydist that wrote it."
            )
        inputs, outputs = (
            {name: TensorSpec(shape, dtype) for name, (shape, dtype) in content[kind].items()}
            for kind in ("inputs", "outputs")
        )
        return cls(inputs, outputs, content["aliases"], content["sha256"])


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def dtype_name(spec: TensorSpec) -> str:
    """Return the name of a spec's dtype.

    >>> dtype_name(TensorSpec((), "float32")), dtype_name(TensorSpec((), bytes))
    ('float32', 'bytes')
    """
    return {"S": "bytes", "U": "str"}.get(spec.dtype.kind, spec.dtype.name)


def weight_name(name: str) -> str:
    """Return the name in the module's state of a tensor in the program's state.

    >>> weight_name("module._orig_mod.0.weight")
    '0.weight'
    """
    return plain_name(name.removeprefix("module."))


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def local_directory(directory: str | os.PathLike[str]) -> Path:
    """Return an absolute path. Raises InvalidArgumentError for a URI: only local directories are renamed atomically."""
    path = local_path(path_text(directory))
    if path is None:
        raise InvalidArgumentError(
            f"An export must be in a local or mounted directory, got {path_text(directory)!r}. Copy the version there."
        )
    return Path(path).absolute()


def versions_in(directory: Path) -> list[int]:
    """Return the numbers of the versions in a directory, sorted."""
    names = [entry.name for entry in os.scandir(directory) if entry.is_dir()] if directory.is_dir() else []
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal() and name[0] != "0")


@final
class ExportedModel:
    """A module as `Model.export` wrote it, in evaluation mode. Made by `rd.load_exported`; several threads may call it.

    Args:
        path: The version's directory; as an attribute, text.
        signature: Specs of inputs and outputs.
        program: Module with a list of tensors as its result.
        device: Device of the program.
        space: Feature space in front of the program; None without one.

    Attributes:
        inputs: Specs of inputs by name, or of features if there is a feature space; None stands for any number of rows.
        outputs: Specs of outputs by name; "output" if the module returns one tensor.

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> _ = rd.Model(torch.nn.Linear(3, 2)).export(folder, torch.zeros(1, 3))
    >>> exported = rd.load_exported(folder)
    >>> exported.inputs, exported.outputs
    ({'input': TensorSpec(shape=(None, 3), dtype=float32)}, {'output': TensorSpec(shape=(None, 2), dtype=float32)})

    Source: tf.saved_model.load.
    """

    def __init__(
        self, path: Path, signature: Signature, program: nn.Module, device: torch.device, space: FeatureSpace | None
    ) -> None:
        self.path = str(path)
        self.inputs = dict(signature.inputs)
        self.outputs = dict(signature.outputs)
        self._program = program
        self._device = device
        self._space = space

    def __call__(self, *inputs: Any) -> Any:
        """Return the module's outputs for a batch.

        Args:
            *inputs: Arguments of the module, or one dict of inputs by name: tensors, arrays or lists. With a feature
                space, a dict of features.

        Returns:
            A tensor if its name in `outputs` is "output", and there is no other; else a dict of tensors by these names.

        Raises:
            SpecError: An input does not fit its spec.
            InvalidArgumentError: An input or a feature is missing, or their numbers of rows differ.
        """
        outputs = self.run(self.prepare(*inputs))
        return outputs[0] if [*self.outputs] == ["output"] else dict(zip(self.outputs, outputs, strict=True))

    def prepare(self, *inputs: Any) -> list[torch.Tensor]:
        """Return the program's arguments for a batch.

        Args:
            *inputs: As for a call; the errors are the same.
        """
        if self._space is not None and len(inputs) == 1:
            features = self._space.transform(inputs[0], batched=True)
            return [torch.as_tensor(leaf) for leaf in flatten(features)[0]]
        by_name = len(inputs) == 1 and isinstance(inputs[0], Mapping)
        found, structure = flatten(inputs[0] if by_name else inputs)
        names = structure.paths() if by_name else list(self.inputs)[: len(found)]
        if len(names) != len(found) or {*names} != {*self.inputs}:
            raise InvalidArgumentError(f"Inputs must be {[*self.inputs]}, got {len(found)}: {names}.")
        leaves = dict(zip(names, found, strict=True))
        tensors = [_as_tensor(leaves[name], name, spec) for name, spec in self.inputs.items()]
        if len(counts := {len(tensor) for tensor in tensors}) > 1:
            raise InvalidArgumentError(f"All inputs must have one number of rows, got {sorted(counts)}.")
        return tensors

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the program's results, in the order of `outputs`, on the program's device.

        Args:
            tensors: The result of `prepare`, or of several calls of it, concatenated by rows.
        """
        with torch.no_grad():
            return list(self._program(*[tensor.to(self._device) for tensor in tensors]))


def _as_tensor(leaf: Any, name: str, spec: TensorSpec) -> torch.Tensor:
    """Return an input as a tensor of its spec. Types change as in an assignment: integers become floats, not back."""
    try:
        tensor = leaf if isinstance(leaf, torch.Tensor) else torch.as_tensor(np.asarray(leaf))
    except (TypeError, ValueError) as error:
        raise SpecError(f"{name!r} must be an array of numbers, got another value: {error!s:.200}.") from None
    shape, dtype = spec.shape or (), getattr(torch, spec.dtype.name)
    if tensor.ndim != len(shape) or tensor.shape[1:] != shape[1:]:
        raise SpecError(f"{name!r} must have the shape {shape}, None for any number, got {tuple(tensor.shape)}.")
    if not torch.can_cast(tensor.dtype, dtype):
        raise SpecError(f"{name!r} must be of {dtype_name(spec)}, got {tensor.dtype}. Convert it.")
    return tensor.detach().to(dtype)


def load_exported(directory: str | os.PathLike[str], device: str | torch.device = "cpu") -> ExportedModel:
    """Return the newest version of a model that `Model.export` wrote. Needs no code of the module.

    Load exports only of people whom you trust, as with `torch.export.load`, which may unpickle constants.

    Args:
        directory: The directory with the versions, or one version's directory.
        device: Device of the program.

    Raises:
        NotFoundError: There is no version.
        DataLossError: A file is damaged or missing.
        InvalidArgumentError: A newer raydist wrote the version.

    >>> import tempfile, torch
    >>> folder, model, x = tempfile.mkdtemp(), rd.Model(torch.nn.Linear(3, 2)), torch.rand(5, 3)
    >>> _ = model.export(folder, x)
    >>> torch.equal(rd.load_exported(folder)(x), model(x))
    True

    Source: tf.saved_model.load.
    """
    path = local_directory(directory)
    if not (path / SIGNATURE).exists():
        if not (numbers := versions_in(path)):
            raise NotFoundError(f"An export must exist to be loaded, found none in {str(path)!r}. See Model.export.")
        path /= str(numbers[-1])
    try:
        signature = Signature.of_json((path / SIGNATURE).read_bytes())
        for name, digest in signature.sha256.items():
            if file_digest(path / name) != digest:
                raise ValueError(f"{name!r} has another checksum")
        program = _program(path, signature, torch.device(device))
        space = FeatureSpace.load(str(path / FEATURES)) if FEATURES in signature.sha256 else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        if isinstance(error, RaydistError):
            raise
        raise DataLossError(
            f"{str(path)!r} is no whole export ({error!r:.200}). Use a copy.", path=str(path)
        ) from error
    return ExportedModel(path, signature, program, torch.device(device), space)


def _program(path: Path, signature: Signature, device: torch.device) -> nn.Module:
    """Return the program with its weights, after a first call, which takes longer than others."""
    from torch.export.passes import move_to_device_pass

    program = torch.export.load(path / PROGRAM)
    weights = load_file(path / WEIGHTS)
    for name, empty in list(program.state_dict.items()):
        plain = weight_name(name)
        values = weights[signature.aliases.get(plain, plain)]
        program.state_dict[name] = nn.Parameter(values, False) if isinstance(empty, nn.Parameter) else values
    if device.type != "cpu":
        program = move_to_device_pass(program, device)
    module = program.module(check_guards=False)
    with torch.no_grad():
        module(*(tensor.to(device) for tensor in program.example_inputs[0]))
    return module
