"""The rows of a module's embedding tables as an object with a state: `state_dict()` of the module lacks them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, final

from torch import nn

from raydist.compat.torch_internals import module_table
from raydist.errors import InvalidArgumentError
from raydist.parameter_servers.rows.sharded_embedding import ShardedEmbedding

__all__ = ["SavedRows", "parts_by_table", "require_known", "row_entry"]


def row_entry(path: str, part: int) -> str:
    """Return the name of the entry of a table's rows on one server.

    >>> row_entry("words", 0)
    'words/0'
    """
    return f"{path}/{part}"


def parts_by_table(state: Mapping[str, Any], paths: Iterable[str]) -> dict[str, list[Any]]:
    """Return, by path of a table, a state's parts: one for each server that had rows.

    >>> parts_by_table({"words/0": 1, "words/1": 2, "tags/0": 3}, ["words", "more"])
    {'words': [1, 2], 'more': []}
    """
    return {path: [part for entry, part in state.items() if _path_of(entry) == path] for path in paths}


def require_known(state: Mapping[str, Any], paths: Collection[str]) -> None:
    """Raise InvalidArgumentError if a state has rows of tables with other paths."""
    strange = next((path for path in map(_path_of, state) if path not in paths), None)
    if strange is not None:
        raise InvalidArgumentError(
            f"Saved rows must be of the module's embeddings, which are {', '.join(paths)}, got {strange!r:.100}. "
            "Restore into a module like the one that was saved."
        )


def _path_of(entry: str) -> str:
    return entry.rpartition("/")[0]


@final
class SavedRows:
    """The `ShardedEmbedding`s of a module, with all touched rows.

    Args:
        module: The module.

    >>> import torch
    >>> model = torch.nn.ModuleDict({"words": ShardedEmbedding(100, 2, seed=1)})
    >>> _ = model["words"](torch.tensor([7]))
    >>> list(SavedRows(model).state_dict())
    ['words/0']
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __bool__(self) -> bool:
        return bool(self.tables())

    def tables(self) -> dict[str, ShardedEmbedding]:
        """Return the embeddings by path, each once. Never blocks: reads no attribute of a mirrored object."""
        first: dict[int, str] = {}
        return {path: each for path, each in _embeddings(self.module, "") if first.setdefault(id(each), path) == path}

    def state_dict(self) -> dict[str, Any]:
        """Return the rows of each table on each server."""
        return {
            row_entry(path, part): state
            for path, table in self.tables().items()
            for part, state in enumerate(table.export_rows())
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all rows by these, on any number of servers.

        Raises:
            InvalidArgumentError: The state has rows of other tables.
        """
        tables = self.tables()
        require_known(state, tables)
        found = parts_by_table(state, tables)
        for path, table in tables.items():
            table.import_rows(found[path])


def _embeddings(module: Any, path: str) -> Iterator[tuple[str, ShardedEmbedding]]:
    if isinstance(module, ShardedEmbedding):
        yield path, module
    for name, child in module_table(module).items():
        if child is not None:
            yield from _embeddings(child, f"{path}.{name}" if path else name)
