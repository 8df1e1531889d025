"""Dataset.from_huggingface: the rows of a `datasets.Dataset`, or of a directory written by its `save_to_disk`.

Objects are recognised by the names of their classes, and directories are read without the `datasets` package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from raydist.core.errors import InvalidArgumentError, NotFoundError, SpecError
from raydist.pipelines.elements.arrow_fields import Conversion, null_error
from raydist.pipelines.elements.arrow_rows import RowSchema
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.spec import as_dtype
from raydist.pipelines.engine.random_access import RandomAccess
from raydist.pipelines.formats.arrow_file import map_stream
from raydist.pipelines.formats.files import data_loss, local_path, path_text, read_file
from raydist.pipelines.sources.memory import IndexedSourceOp, TableRows

_MapNumber = Callable[[pa.DataType], pa.DataType]
_TENSOR_FORMATS = ("torch", "numpy", "tensorflow", "jax")
# Features that are stored as structs of bytes and path, one of which may be null.
_ENCODED = ("Image", "Audio", "Video", "Pdf", "Nifti")
_MAX_SENT_ROWS = 1 << 13  # an index mapping with fewer rows may be sent to every worker


def hub_op(source: Any, conversion: Conversion) -> HubDatasetOp:
    """Return the operation for the argument of `from_huggingface`."""
    if isinstance(source, str | bytes | os.PathLike):
        local = local_path(path_text(source))
        if local is None:
            raise InvalidArgumentError(
                f"from_huggingface maps files into memory and needs a local directory, got {source!r}. Copy "
                "the directory to a local disk."
            )
        stored, features, table_format = _files_in(os.path.abspath(local))
        return _make_op(stored, None, features, table_format, conversion)
    kinds = {kind.__name__ for kind in type(source).__mro__ if kind.__module__.partition(".")[0] == "datasets"}
    if kinds & {"DatasetDict", "IterableDatasetDict"}:
        raise SpecError(
            f"from_huggingface needs one split, got a {type(source).__name__} of {', '.join(map(repr, source))}. Give "
            f"dataset[{next(iter(source), 'train')!r}]."
        )
    if "IterableDataset" in kinds:
        raise SpecError(
            "from_huggingface reads rows by index, and a datasets.IterableDataset has no row indices. Use "
            "rd.Dataset.from_torch(dataset), which iterates it."
        )
    if "Dataset" not in kinds:
        raise SpecError(
            "from_huggingface needs a datasets.Dataset or the path of a directory that its save_to_disk wrote, got "
            f"{source!r:.100} ({type(source).__name__})."
        )
    mapping = None if source._indices is None else _StoredTable.of(source._indices)
    return _make_op(_StoredTable.of(source.data), mapping, source.features.to_dict(), source.format, conversion)


@dataclass(frozen=True, eq=False)
class _StoredFiles:
    """A table in Arrow files of a saved directory. Every process that reads the table maps the files into memory."""

    paths: tuple[str, ...]
    portable: bool = True

    def load(self) -> TableRows:
        files = [map_stream(path) for path in self.paths]
        schema = files[0].table.schema
        for file in files:
            if not file.table.schema.equals(schema):
                raise SpecError(
                    f"All files of a dataset must have the columns {schema.to_string():.500}, but {file.path!r} has "
                    f"{file.table.schema.to_string():.500}."
                )
        checks = [(file.batch, number) for file in files for number in range(len(file.table.to_batches()))]
        batches = [batch for file in files for batch in file.table.to_batches()]
        return TableRows(schema, batches, lambda number: checks[number][0](checks[number][1]))


@dataclass(frozen=True, eq=False)
class _StoredTable:
    """A table of a `datasets.Dataset`."""

    table: Any  # a mapped table of `datasets`, which pickles as file names; otherwise an Arrow table
    portable: bool  # True if the table is mapped, or small

    @classmethod
    def of(cls, table: Any) -> _StoredTable:
        """Wrap a table of the `datasets` package."""
        if _is_mapped(table):
            return cls(table, portable=True)
        plain: pa.Table = table.table
        return cls(plain, portable=plain.num_columns == 1 and plain.num_rows < _MAX_SENT_ROWS)

    def load(self) -> TableRows:
        plain = self.table if isinstance(self.table, pa.Table) else self.table.table
        return TableRows(plain.schema, plain.to_batches())


def _is_mapped(table: Any) -> bool:
    """Return True if all parts of a table of `datasets` are mapped files."""
    blocks = getattr(table, "blocks", None)
    if blocks is None:
        return type(table).__name__ == "MemoryMappedTable"
    return all(_is_mapped(block) for row in blocks for block in row)


def _files_in(path: str) -> tuple[_StoredFiles, Mapping[str, Any], Mapping[str, Any]]:
    """Return the files, features and format of a saved dataset."""
    if os.path.exists(os.path.join(path, "dataset_dict.json")):
        splits = _read_json(os.path.join(path, "dataset_dict.json")).get("splits", [])
        raise InvalidArgumentError(
            f"from_huggingface needs the directory of one split, but {path!r} holds {', '.join(map(repr, splits))}. "
            f"Give {os.path.join(path, str(next(iter(splits), 'train')))!r}."
        )
    state_path = os.path.join(path, "state.json")
    state, info = _read_json(state_path), _read_json(os.path.join(path, "dataset_info.json"))
    try:
        names = [str(file["filename"]) for file in state["_data_files"]]
        table_format = {
            "type": state.get("_format_type"),
            "columns": state.get("_format_columns"),
            "format_kwargs": state.get("_format_kwargs") or {},
            "output_all_columns": bool(state.get("_output_all_columns")),
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise data_loss(state_path, 0, f"The file must name the files of a dataset, got {state!r:.200}") from error
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise InvalidArgumentError(
            f"A saved dataset must hold its rows in order, but {path!r} has an index mapping, which early versions of "
            "datasets wrote. Load the dataset with datasets.load_from_disk and save it again."
        )
    for name in names:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise InvalidArgumentError(
                f"The files of a saved dataset must lie in its directory, but {state_path!r} names {name!r}."
            )
    if not names:
        raise data_loss(state_path, 0, "A saved dataset must have files, but this file names none")
    features = info.get("features")
    return _StoredFiles(tuple(os.path.join(path, name) for name in names)), features or {}, table_format


def saved_splits(path: str) -> dict[str, str]:
    """Return the directory of each split that a `save_to_disk` wrote to `path`; "train" if it wrote a single one.

    Raises:
        DataLossError: The list of the splits is damaged.
        InvalidArgumentError: It names a directory elsewhere.
    """
    listed = os.path.join(path, "dataset_dict.json")
    if not os.path.exists(listed):
        return {"train": path}
    splits = _read_json(listed).get("splits")
    if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
        raise data_loss(listed, 0, f"The file must list the splits of a dataset, got {splits!r:.200}")
    for split in splits:
        if os.path.basename(split) != split or split in ("", ".", ".."):
            raise InvalidArgumentError(f"The splits of {path!r} must lie in it, but {listed!r} names {split!r}.")
    return {split: os.path.join(path, split) for split in splits}


def _read_json(path: str) -> dict[str, Any]:
    try:
        found = json.loads(read_file(path))
    except NotFoundError as error:
        error.add_note(
            "A directory that datasets.Dataset.save_to_disk wrote has state.json, dataset_info.json and *.arrow."
        )
        raise
    except (ValueError, RecursionError) as error:
        raise data_loss(path, 0, f"The file must be JSON, but reading it fails: {error}") from error
    if not isinstance(found, dict):
        raise data_loss(path, 0, f"The file must hold an object, got {found!r:.100}")
    return found


def _make_op(
    stored: _StoredFiles | _StoredTable,
    mapping: _StoredTable | None,
    features: Mapping[str, Any],
    table_format: Mapping[str, Any],
    conversion: Conversion,
) -> HubDatasetOp:
    kind = table_format.get("type")
    if kind == "custom":
        raise InvalidArgumentError(
            "from_huggingface cannot call the function of set_transform or with_transform, and this dataset has one. "
            "Pass dataset.with_format(None), and call the function with .map(...)."
        )
    schema = stored.load().schema
    columns = None if table_format.get("output_all_columns") else table_format.get("columns")
    names = schema.names if columns is None else [name for name in schema.names if name in columns]
    map_number = _number_type(kind, table_format.get("format_kwargs") or {})
    kept = [schema.field(name) for name in names]
    typed = [field.with_type(_read_type(field.type, features.get(field.name), map_number)) for field in kept]
    encoded = {name: {"bytes": b"", "path": ""} for name in names if _is_encoded(features.get(name))}
    access = HubAccess(stored, mapping, pa.schema(typed), replace(conversion, by_default=encoded))
    access.conversion.check(access.schema)
    return HubDatasetOp(access)


@dataclass(frozen=True, eq=False)
class HubDatasetOp(IndexedSourceOp):
    """The rows of a dataset, read through `access`, which all passes share."""

    access: HubAccess
    name = "from_huggingface"
    gives_rows = True

    @property
    def label(self) -> str:
        return f"from_huggingface({', '.join(self.access.schema.names):.60})"

    def element_spec(self) -> Any:
        return RowSchema(self.access.schema, self.access.conversion).spec

    def random_access(self) -> RandomAccess:
        return self.access


@dataclass(frozen=True, eq=False)
class HubAccess(RandomAccess):
    """Random access to the rows of a dataset. Its pickle contains only the fields below, and no loaded table."""

    stored: _StoredFiles | _StoredTable  # the table of rows
    mapping: _StoredTable | None  # a table of row indices into `stored`, in order; None for all rows
    schema: pa.Schema  # columns to read, with their types after conversion
    conversion: Conversion  # options for nulls and decimals

    @property
    def portable(self) -> bool:  # type: ignore[override]  # a class variable in the base class
        return self.stored.portable and (self.mapping is None or self.mapping.portable)

    def __len__(self) -> int:
        return self._rows.num_rows if self._order is None else len(self._order)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("stored", "mapping", "schema", "conversion")}

    @cached_property
    def _rows(self) -> TableRows:
        return self.stored.load()

    @cached_property
    def _order(self) -> Any:
        if self.mapping is None:
            return None
        table = pa.Table.from_batches(self.mapping.load().batches)
        return table.column(0).to_numpy().astype(np.int64)

    @cached_property
    def _schema(self) -> RowSchema:
        return RowSchema(self.schema, self.conversion)

    def gather(self, indices: Any) -> Block:
        batch = self._rows.gather(np.asarray(indices) if self._order is None else self._order[indices])
        arrays = [_cast(batch.column(field.name), field.type) for field in self.schema]
        block, nulls = self._schema.block(pa.RecordBatch.from_arrays(arrays, schema=self.schema))
        if nulls:
            row, column = min(nulls.items())
            raise null_error(column, f"row {indices[row]}", "leave the rows out with ignore_errors()")
        return block


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type == kind:
        return array
    return (array.storage if isinstance(array, pa.ExtensionArray) else array).cast(kind)


def _number_type(format_type: str | None, arguments: Mapping[str, Any]) -> _MapNumber:
    """Return the function that maps number types. Tensor formats use their dtype, or else int64 and float32."""
    if format_type not in _TENSOR_FORMATS:
        return lambda kind: kind
    if arguments.get("dtype") is not None:
        chosen = pa.from_numpy_dtype(as_dtype(arguments["dtype"]))
        return lambda kind: chosen
    return lambda kind: pa.float32() if pa.types.is_floating(kind) else pa.int64()


def _read_type(kind: Any, feature: Any, map_number: _MapNumber) -> Any:
    """Return the type in which to read a column: arrays get their shape, and numbers the type from `map_number`."""
    if isinstance(kind, pa.BaseExtensionType) and type(kind).__module__.partition(".")[0] == "datasets":
        kind = kind.storage_type
    if isinstance(feature, Mapping) and str(feature.get("_type", "")).startswith("Array") and "shape" in feature:
        return _array_type(kind, feature["shape"], map_number)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return map_number(kind)
    inner = _feature_of_items(feature)
    if pa.types.is_struct(kind):
        found = [kind.field(place) for place in range(kind.num_fields)]
        return pa.struct(
            [one.with_type(_read_type(one.type, _feature_of_field(feature, one.name), map_number)) for one in found]
        )
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_read_type(kind.value_type, inner, map_number)), kind.list_size)
    for is_kind, make in ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list)):
        if is_kind(kind):
            return make(kind.value_field.with_type(_read_type(kind.value_type, inner, map_number)))
    return kind


def _feature_of_items(feature: Any) -> Any:
    if isinstance(feature, Sequence) and not isinstance(feature, str):
        return feature[0] if feature else None
    return feature.get("feature") if isinstance(feature, Mapping) else None


def _feature_of_field(feature: Any, name: str) -> Any:
    """Return the feature of a field of a struct. `datasets` stores a sequence of structs as a struct of lists."""
    if not isinstance(feature, Mapping):
        return None
    inner = feature.get("feature") if "_type" in feature else None
    if isinstance(inner, Mapping):
        return {"_type": "List", "feature": inner.get(name)}
    return feature.get(name)


def _array_type(kind: Any, shape: Sequence[int | None], map_number: _MapNumber) -> pa.DataType:
    """Return the type of nested lists with this shape. A dimension of None may have any size."""
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    found = map_number(kind) if pa.types.is_integer(kind) or pa.types.is_floating(kind) else kind
    for size in reversed(shape):
        found = pa.list_(found) if size is None else pa.list_(found, size)
    return found


def _is_encoded(feature: Any) -> bool:
    """Return True if a feature is a struct of bytes and a path, or lists of such structs."""
    if isinstance(feature, Mapping) and feature.get("_type") in _ENCODED:
        return True
    inner = _feature_of_items(feature)
    return inner is not None and _is_encoded(inner)
