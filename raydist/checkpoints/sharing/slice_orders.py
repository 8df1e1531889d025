"""Save orders for parameter servers: each server writes its own slices. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from raydist.checkpoints.new_files import NewFiles
from raydist.checkpoints.sharing.shares import ShareRequest
from raydist.checkpoints.tensor_file import MAX_PART_BYTES, RowRange, plan_parts
from raydist.parameter_servers.rows.sharded_embedding import row_entry
from raydist.parameter_servers.slices import ServedSlice

__all__ = ["SaveOrder", "SliceFile", "SliceOrders", "SlicePlace"]


@final
@dataclass(frozen=True, slots=True)
class SlicePlace:
    """A slice on a server, as a part of a saved tensor.

    Attributes:
        key: Name of the tensor; name of the parameter if an optimizer's state is saved.
        number: Number of the slice.
        rows: Rows of the tensor in the slice; None for the whole tensor.
    """

    key: str
    number: int
    rows: RowRange | None = None

    @property
    def is_first(self) -> bool:
        """True for the slice that carries the state of the tensor as a whole."""
        return self.rows is None or self.rows.start == 0


@final
@dataclass(frozen=True, slots=True)
class SliceFile:
    """One file that a server writes.

    Attributes:
        owner: Name of the saved object.
        number: Index among the object's files.
        name: Name of the file.
        slices: Slices in the file.
        optimizer: Handle of the optimizer whose state of these slices is saved, instead of the slices' values.
        given: Names of tensors that are on no server and are sent with the order, in this order.
        tables: Entry name and handle of each embedding table whose rows are saved.
    """

    owner: str
    number: int = 0
    name: str = ""
    slices: tuple[SlicePlace, ...] = ()
    optimizer: int | None = None
    given: tuple[str, ...] = ()
    tables: tuple[tuple[str, int], ...] = ()


@final
@dataclass(frozen=True, slots=True)
class SaveOrder:
    """The part of a save that one server performs.

    Attributes:
        token: Id of the save.
        new: Directory and names of the files.
        files: Files that the server writes.
    """

    token: str
    new: NewFiles
    files: tuple[SliceFile, ...] = ()


@final
class SliceOrders:
    """The orders of one save, built object by object.

    Args:
        request: The save.
        num_servers: Number of servers.
        max_part_bytes: Maximum bytes of tensors in one file.
    """

    def __init__(self, request: ShareRequest, num_servers: int, max_part_bytes: int = MAX_PART_BYTES) -> None:
        self._request = request
        self._most = max_part_bytes
        self._files: list[list[SliceFile]] = [[] for _ in range(num_servers)]
        self._tensors: list[list[torch.Tensor]] = [[] for _ in range(num_servers)]
        self._bytes = [0] * num_servers

    def add(
        self,
        owner: str,
        places: Mapping[str, Sequence[ServedSlice]],
        given: Mapping[str, torch.Tensor],
        *,
        optimizer: int | None = None,
        share: float = 1.0,
    ) -> None:
        """Add an object to the save.

        Args:
            owner: Name of the object.
            places: Slices of the tensors that are on servers, by key.
            given: Tensors that are on no server.
            optimizer: See `SliceFile`.
            share: Saved bytes for each byte of a slice.
        """
        files = self._files_of_slices(SliceFile(owner, optimizer=optimizer), places, share)
        if given:
            server = self._bytes.index(min(self._bytes))
            files.append((server, SliceFile(owner, given=tuple(given))))
            self._tensors[server] += [tensor.detach().to("cpu").contiguous() for tensor in given.values()]
            self._bytes[server] += sum(tensor.nbytes for tensor in given.values())
        self._add_files(owner, files)

    def add_rows(self, owner: str, tables: Mapping[str, int]) -> None:
        """Add the rows of embedding tables, given their handles by path. Each server has some of the rows."""
        files = [
            (
                server,
                SliceFile(owner, tables=tuple((row_entry(path, server), handle) for path, handle in tables.items())),
            )
            for server in range(len(self._files))
        ]
        self._add_files(owner, files)

    def _add_files(self, owner: str, files: Sequence[tuple[int, SliceFile]]) -> None:
        for number, (server, file) in enumerate(files):
            name = self._request.file_name(owner, number, len(files))
            self._files[server].append(replace(file, number=number, name=name))

    def _files_of_slices(
        self, like: SliceFile, places: Mapping[str, Sequence[ServedSlice]], share: float
    ) -> list[tuple[int, SliceFile]]:
        files: list[tuple[int, SliceFile]] = []
        for server in range(len(self._files)):
            mine = {place.key: (place, part) for place, part in _places(places) if part.server == server}
            sizes = {key: int(part.num_bytes * share) for key, (_, part) in mine.items()}
            for keys in plan_parts(sizes, self._most) if mine else []:
                files.append((server, replace(like, slices=tuple(mine[key][0] for key in keys))))
            self._bytes[server] += sum(sizes.values())
        return files

    def of(self, server: int) -> tuple[SaveOrder, list[torch.Tensor]]:
        """Return the order for a server, and the tensors to send with the order."""
        return SaveOrder(self._request.token, self._request.new, tuple(self._files[server])), self._tensors[server]


def _places(places: Mapping[str, Sequence[ServedSlice]]) -> Iterable[tuple[SlicePlace, ServedSlice]]:
    for key, parts in places.items():
        whole = sum(part.shape[0] for part in parts) if parts[0].shape else 0
        for part in parts:
            rows = RowRange(part.begin, part.begin + part.shape[0], whole) if len(parts) > 1 else None
            yield SlicePlace(key, part.number, rows), part
