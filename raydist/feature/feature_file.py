"""Columns as JSON: one file, versioned, with a checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from raydist.core.errors import DataLossError, InvalidArgumentError, RaydistError
from raydist.feature.categorical import CrossedColumn, HashedColumn, IdentityColumn, VocabularyColumn, WeightedColumn
from raydist.feature.columns import (
    BucketizedColumn,
    EmbeddingColumn,
    FeatureColumn,
    IndicatorColumn,
    NumericColumn,
    distinct_columns,
)
from raydist.feature.settings import AdaptedBoundaries, AdaptedVocabulary, Normalization
from raydist.pipelines.formats.files import path_text, read_file, shown_uri
from raydist.pipelines.stored.directory_files import directory_of_file

_FORMAT, _VERSION = "raydist FeatureSpace", 1
_COLUMNS: dict[str, type] = {
    each.__name__: each
    for each in (
        *(NumericColumn, BucketizedColumn, HashedColumn, VocabularyColumn, IdentityColumn, WeightedColumn),
        *(CrossedColumn, IndicatorColumn, EmbeddingColumn),
    )
}
_SETTINGS: dict[str, type] = {each.__name__: each for each in (Normalization, AdaptedBoundaries, AdaptedVocabulary)}


def write_columns(path: Any, columns: Iterable[FeatureColumn]) -> None:
    """Write a file, atomically and durably."""
    columns = tuple(columns)
    every = distinct_columns(columns)
    numbers = {id(column): number for number, column in enumerate(every)}
    content = {
        "every_column": [_encoded_column(column, numbers) for column in every],
        "columns": [numbers[id(column)] for column in columns],
    }
    document = {"format": _FORMAT, "version": _VERSION, "sha256": _digest(content), "content": content}
    directory, name = directory_of_file(path_text(path), "A feature space")
    directory.make()
    directory.replace(name, json.dumps(document).encode())


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _encoded_column(column: FeatureColumn, numbers: Mapping[int, int]) -> dict[str, Any]:
    def encoded(value: Any) -> Any:
        if isinstance(value, tuple):
            return list(map(encoded, value))
        if isinstance(value, FeatureColumn):
            return {"column": numbers[id(value)]}
        if type(value) in _SETTINGS.values():
            return {"class": type(value).__name__, **asdict(value)}
        return {"function": getattr(value, "__name__", repr(value)), "of": column.name} if callable(value) else value

    values = {each.name: encoded(getattr(column, each.name)) for each in fields(column)}  # type: ignore[arg-type]  # a dataclass
    return {"class": type(column).__name__, **values}


def columns_of_file(path: Any, custom_objects: Mapping[str, Any]) -> tuple[FeatureColumn, ...]:
    """Return the columns of a file; see FeatureSpace.load."""
    shown = shown_uri(path_text(path))
    try:
        document = json.loads(read_file(path))
        if document["format"] != _FORMAT:
            raise ValueError(f"the format is {document['format']!r:.100}")
        if document["version"] == _VERSION and document["sha256"] != _digest(document["content"]):
            raise ValueError("the checksum is of other content")
        if document["version"] != _VERSION:
            raise InvalidArgumentError(
                f"{shown!r} has format version {document['version']!r:.100}, this raydist reads version {_VERSION}. "
                "Load it with the version of raydist that wrote it."
            )
        return _Decoder(custom_objects).columns(document["content"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        if isinstance(error, RaydistError):
            raise
        raise DataLossError(
            f"{shown!r} is no whole file of a feature space ({error!r:.200}). It is damaged, or another: use a copy.",
            path=shown,
        ) from error


class _Decoder:
    def __init__(self, custom_objects: Mapping[str, Any]) -> None:
        self._custom_objects = custom_objects
        self._made: list[FeatureColumn] = []

    def columns(self, content: Any) -> tuple[FeatureColumn, ...]:
        for entry in content["every_column"]:
            values = {name: self._value(value) for name, value in entry.items() if name != "class"}
            self._made.append(_COLUMNS[entry["class"]](**values))
        return tuple(self._made[number] for number in content["columns"])

    def _value(self, value: Any) -> Any:
        match value:
            case list():
                return tuple(map(self._value, value))
            case {"column": number}:
                return self._made[number]
            case {"function": function, "of": column}:
                if column not in self._custom_objects:
                    raise InvalidArgumentError(
                        f"custom_objects must have the function of the column {column!r}, saved as {function!r:.100}. "
                        "Give it: load(path, custom_objects={...})."
                    )
                return self._custom_objects[column]
            case {"class": name, **settings}:
                return _SETTINGS[name](**{str(each): self._value(setting) for each, setting in settings.items()})
        return value
