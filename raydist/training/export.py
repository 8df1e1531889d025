"""The export of a module: a trace with a free number of rows, and the files of a version."""

from __future__ import annotations

import copy
import errno
import inspect
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

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
    examples = _Examples.of(inputs, widths_vary)
    plain = copy.deepcopy(module).cpu().eval()  # of mirrored parameters the copy has the values
    traced, outputs, is_single = _trace(plain, examples, call_module if by_keyword else apply_module)
    specs = _input_specs(module, examples) if feature_space is None else _feature_specs(feature_space)
    files = LocalFiles(str(parent / f".{uuid.uuid4().hex}.tmp"))
    files.make()
    try:
        aliases = _write_program(files, traced, examples.leaves)
        if feature_space is not None:
            _write_features(files, feature_space)
        digests = {name: file_digest(Path(files.path) / name) for name in files.names()}
        signature = Signature(specs, outputs, is_single, aliases, digests).as_json()
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


@final
@dataclass(frozen=True, slots=True)
class _Examples:
    """Inputs of a trace.

    Attributes:
        leaves: Tensors with at least two rows: torch.export takes a dimension of 1 for fixed.
        structure: The nest of the leaves.
        widths_vary: For each leaf True if its second dimension is free, too.
    """

    leaves: Sequence[torch.Tensor]
    structure: Structure
    widths_vary: Sequence[bool]

    @classmethod
    def of(cls, inputs: Any, widths_vary: Sequence[bool] | None) -> _Examples:
        """Return the examples of a nest of arrays; without `widths_vary` only the number of rows is free."""
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
        if counts == {1}:
            leaves = [torch.cat([leaf, leaf]) for leaf in leaves]
        return cls(leaves, structure, widths_vary or [False] * len(leaves))


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


def _trace(
    module: nn.Module, examples: _Examples, call: Callable[[nn.Module, Any], Any]
) -> tuple[torch.export.ExportedProgram, dict[str, TensorSpec], bool]:
    """Return the program, the specs of its outputs by name, and True if the module returns one tensor by itself."""
    batch = torch.export.Dim("batch")
    shapes = [{0: batch, 1: torch.export.Dim.AUTO} if varies else {0: batch} for varies in examples.widths_vary]
    results: list[_Outputs] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the tracer about itself
            program = torch.export.export(
                _Flat(module, lambda leaves: call(module, unflatten(examples.structure, leaves)), results.append),
                tuple(examples.leaves),
                dynamic_shapes=(tuple(shapes),),
            )
    except SpecError:
        raise
    except Exception as error:  # any error of the module or of the tracer
        raise InvalidArgumentError(
            f"torch.export cannot trace {type(module).__name__} with any number of rows: {error!s:.2000} Change "
            "forward so that it does not depend on values of tensors or on the number of rows."
        ) from error
    return program, {name: _spec(tensor) for name, tensor in results[-1].named.items()}, results[-1].is_single


@final
@dataclass(frozen=True, slots=True)
class _Outputs:
    """Outputs of a module.

    Attributes:
        named: The tensors by name.
        is_single: True if the module returned one tensor by itself.
    """

    named: Mapping[str, torch.Tensor]
    is_single: bool

    @classmethod
    def of(cls, returned: Any, num_rows: Any) -> _Outputs:
        """Find the tensors, but for scalars. Raises SpecError unless each has a row for each row of the inputs."""
        found = tuple(returned) if isinstance(returned, list) else returned
        tensors, structure = flatten(found, classes=False)
        named = {
            _output_name(path): tensor
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
        return cls(named, isinstance(found, torch.Tensor))


class _Flat(nn.Module):
    """A module as a function from tensors to a list of tensors; `note` gets the outputs, as attributes are restored."""

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[tuple[torch.Tensor, ...]], Any],
        note: Callable[[_Outputs], None],
    ) -> None:
        super().__init__()
        self.module = module
        self._call = call
        self._note = note

    def forward(self, *leaves: torch.Tensor) -> list[torch.Tensor]:
        outputs = _Outputs.of(self._call(leaves), leaves[0].shape[0])
        self._note(outputs)
        return list(outputs.named.values())


def _output_name(path: str) -> str:
    return f"output_{path}" if path[:1].isdecimal() else path or "output"


def _spec(tensor: torch.Tensor) -> TensorSpec:
    shape = (None, *(dim if isinstance(dim, int) else None for dim in tensor.shape[1:]))
    return TensorSpec(shape, tensor.dtype)


def _input_specs(module: nn.Module, examples: _Examples) -> dict[str, TensorSpec]:
    """Return the specs of inputs by name: keys of a dict, or names of the parameters of `forward`."""
    structure = examples.structure
    paths = structure.paths() if structure.kind is dict else _argument_names(module, structure)
    return {path: _spec(leaf) for path, leaf in zip(paths, examples.leaves, strict=True)}


def _argument_names(module: nn.Module, structure: Structure) -> list[str]:
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
