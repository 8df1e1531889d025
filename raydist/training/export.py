"""The export of a module: a trace with a free number of rows, and the files of a version."""

from __future__ import annotations

import copy
import errno
import functools
import inspect
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from raydist.checkpoints.tensor_file import write_safetensors
from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.nest import Structure, flatten, unflatten
from raydist.feature.columns import EmbeddingColumn, make_parse_example_spec
from raydist.feature.feature_space import FeatureSpace
from raydist.parameter_servers.sharded_embedding import SavedRows
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.stored.file_directory import LocalFiles, sync_directory
from raydist.training.elements import apply_module
from raydist.training.exported_model import (
    FEATURES,
    PROGRAM,
    SIGNATURE,
    WEIGHTS,
    Signature,
    file_digest,
    local_directory,
    versions_in,
    weight_name,
)
from raydist.training.model_losses import call_module

_MOST_ROWS = 32
"""Rows of the examples that are looked at one by one."""


def export_module(
    module: nn.Module,
    directory: str | os.PathLike[str],
    example_inputs: Any,
    feature_space: FeatureSpace | None = None,
    *,
    by_keyword: bool = False,
) -> str:
    """Write a module as the next version in a directory, and return the version's directory; see `Model.export`.

    `by_keyword` calls the module with the items of a dict as keyword arguments.
    """
    if tables := SavedRows(module).tables():
        raise InvalidArgumentError(
            f"An exported module must have all of its state in state_dict(), but {', '.join(map(repr, tables))} have "
            "rows of ShardedEmbeddings. Copy the rows into torch.nn.Embedding."
        )
    parent = local_directory(directory)
    inputs, widths_vary = example_inputs, None
    if feature_space is not None:
        inputs, widths_vary = _transformed(feature_space, example_inputs)
    leaves, structure = _leaves(inputs)
    plain = copy.deepcopy(module).cpu().eval()  # of mirrored parameters the copy has the values
    call = functools.partial(call_module if by_keyword else apply_module, plain)
    noted: list[dict[str, torch.Tensor]] = []
    traced = _Flat(plain, lambda given: call(unflatten(structure, given)), noted.append)
    program = _trace(traced, leaves, widths_vary or [False] * len(leaves))
    if feature_space is None:
        specs = {name: _spec(leaf) for name, leaf in zip(_input_names(module, structure), leaves, strict=True)}
    else:
        specs = _feature_specs(feature_space)
    outputs = {name: _spec(tensor) for name, tensor in noted[-1].items()}
    files = LocalFiles(str(parent / f".{uuid.uuid4().hex}.tmp"))
    files.make()
    try:
        aliases = _write_program(files, program, leaves)
        if feature_space is not None:
            _write_features(files, feature_space)
        digests = {name: file_digest(Path(files.path) / name) for name in files.names()}
        signature = Signature(specs, outputs, aliases, digests).as_json()
        files.write(SIGNATURE, lambda file: file.write(signature))
        files.sync()
        return _rename(files.path, parent)
    except BaseException:
        shutil.rmtree(files.path, ignore_errors=True)
        raise


def _rename(temporary: str, parent: Path) -> str:
    while True:
        path = parent / str(max(versions_in(parent), default=0) + 1)
        try:
            os.rename(temporary, path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another program took this number meanwhile
                raise
        else:
            sync_directory(str(parent))
            return str(path)


def _leaves(inputs: Any) -> tuple[list[torch.Tensor], Structure]:
    """Return the tensors of a nest, with at least two rows: torch.export takes a dimension of 1 for fixed."""
    found, structure = flatten(inputs, classes=False)
    try:
        leaves = [torch.as_tensor(leaf).detach().cpu() for leaf in found]
    except (TypeError, ValueError, RuntimeError) as error:
        raise SpecError(f"example_inputs must be tensors, or a tuple or dict of tensors: {error!s:.200}.") from None
    counts = {len(leaf) if leaf.ndim else 0 for leaf in leaves}
    if len(counts) != 1 or 0 in counts:
        raise InvalidArgumentError(
            f"example_inputs must be tensors with one number of rows, at least 1, got {sorted(counts)} rows."
        )
    return [torch.cat([leaf, leaf]) if counts == {1} else leaf for leaf in leaves], structure


def _transformed(space: FeatureSpace, features: Any) -> tuple[Any, list[bool]]:
    """Return the module's inputs, and for each leaf True if its width differs from row to row."""
    if not isinstance(features, Mapping):
        raise InvalidArgumentError(f"With a feature space, example_inputs must be a dict, got {features!r:.200}.")
    inputs = space.transform(features, batched=True)
    leaves = flatten(inputs)[0]
    rows = range(min(len(leaves[0]), _MOST_ROWS))
    keys = [*make_parse_example_spec(space.columns)]
    singles = [
        flatten(space.transform({key: features[key][row : row + 1] for key in keys}, batched=True))[0] for row in rows
    ]
    return inputs, [len({np.shape(single[place])[1:] for single in singles}) > 1 for place in range(len(leaves))]


def _trace(traced: _Flat, leaves: Sequence[torch.Tensor], widths_vary: Sequence[bool]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch")
    shapes = tuple({0: batch, 1: torch.export.Dim.AUTO} if varies else {0: batch} for varies in widths_vary)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the tracer about itself
            return torch.export.export(traced, tuple(leaves), dynamic_shapes=(shapes,))
    except SpecError:
        raise
    except Exception as error:  # any error of the module or of the tracer
        raise InvalidArgumentError(
            f"torch.export cannot trace {type(traced.module).__name__} with any number of rows: {error!s:.2000} Change "
            "forward so that it does not depend on values of tensors or on the number of rows."
        ) from error


class _Flat(nn.Module):
    """A module as a function from tensors to a list of tensors; `note` gets these by name, as attributes are undone."""

    def __init__(
        self, module: nn.Module, call: Callable[[Any], Any], note: Callable[[dict[str, torch.Tensor]], None]
    ) -> None:
        super().__init__()
        self.module = module
        self._call = call
        self._note = note

    def forward(self, *leaves: torch.Tensor) -> list[torch.Tensor]:
        named = _named_outputs(self._call(leaves), leaves[0].shape[0])
        self._note(named)
        return list(named.values())


def _named_outputs(returned: Any, num_rows: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a result, but for scalars. Raises SpecError unless each has as many rows as the inputs."""
    tensors, structure = flatten(tuple(returned) if isinstance(returned, list) else returned, classes=False)
    named = {
        f"output_{path}" if path[:1].isdecimal() else path or "output": tensor
        for path, tensor in zip(structure.paths(), tensors, strict=True)
        if isinstance(tensor, torch.Tensor) and tensor.ndim
    }
    # The number of rows is a symbol, and comparing it by == would fix it.
    wrong = [f"{name!r} {tuple(each.shape)}" for name, each in named.items() if str(each.shape[0]) != str(num_rows)]
    if wrong or not named:
        raise SpecError(
            "Outputs must be tensors with a row for each row of the inputs, got "
            f"{', '.join(wrong) or 'none'}. Return others in training only: if self.training."
        )
    return named


def _spec(tensor: torch.Tensor) -> TensorSpec:
    shape = (None, *(dim if isinstance(dim, int) else None for dim in tensor.shape[1:]))
    return TensorSpec(shape, tensor.dtype)


def _input_names(module: nn.Module, structure: Structure) -> list[str]:
    """Return the names of inputs: keys of a dict, or names of the parameters of `forward`."""
    if structure.kind is dict:
        return structure.paths()
    parameters = inspect.signature(module.forward).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    arguments = structure.children if structure.kind is tuple else (structure,)
    names += [f"input_{number}" for number in range(len(names), len(arguments))]
    return [path for name, each in zip(names, arguments, strict=False) for path in each.paths(name)]


def _feature_specs(space: FeatureSpace) -> dict[str, TensorSpec]:
    """Return the specs of features as `rd.parse_example` reads them; categorical ones have any number of values."""
    features = make_parse_example_spec(space.columns)
    return {key: TensorSpec((None, *getattr(each, "shape", (None,))), each.dtype) for key, each in features.items()}


def _write_program(
    files: LocalFiles, program: torch.export.ExportedProgram, examples: Sequence[torch.Tensor]
) -> dict[str, str]:
    """Write weights, and the program without them. Return names of tensors by names that share their memory."""
    weights: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in list(program.state_dict.items()):
        plain, values = weight_name(name), tensor.detach()
        place = (values.data_ptr(), values.dtype, values.shape, values.stride()) if values.numel() else name
        if place in first:
            aliases[plain] = first[place]
        else:
            first[place] = plain
            weights[plain] = values
        empty = torch.zeros((), dtype=values.dtype).expand(values.shape)  # a file of one number
        program.state_dict[name] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
    program.example_inputs = (tuple(torch.zeros_like(leaf[:2]) for leaf in examples), {})
    files.write(WEIGHTS, lambda file: write_safetensors(file, WEIGHTS, weights))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no tensor fills its memory
        files.write(PROGRAM, lambda file: torch.export.save(program, file))
    return aliases


def _write_features(files: LocalFiles, space: FeatureSpace) -> None:
    columns = [replace(each, initializer=None) if isinstance(each, EmbeddingColumn) else each for each in space.columns]
    path = os.path.join(files.path, FEATURES)
    FeatureSpace(columns).save(path)
    try:
        FeatureSpace.load(path)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"A feature space must have no functions of its own to be exported, but {error} Use "
            "rd.feature.Normalization, or transform the feature before."
        ) from None
