"""A parameter server's part of a save: copy slices between two requests, and write them in a thread."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from raydist.actors.portable_errors import PortableError, pack_error
from raydist.checkpoints.entries import pack_state
from raydist.checkpoints.sharing.reports import SaveReports
from raydist.checkpoints.sharing.shares import Share
from raydist.checkpoints.sharing.slice_orders import SaveOrder, SliceFile, SlicePlace
from raydist.checkpoints.tensor_file import RowRange, TensorFile, write_tensor_file
from raydist.parameter_servers.serving.checkpointing import SliceHolder, SliceSaver

__all__ = ["SliceWriter"]


@final
class SliceWriter(SliceSaver):
    """The saves of one server."""

    def __init__(self) -> None:
        self._reports = SaveReports()
        self._last = ""

    def begin(self, order: SaveOrder, tensors: Sequence[torch.Tensor], held: SliceHolder) -> None:
        if order.token == self._last:  # the worker that asked has died, and another one asks: nothing has changed since
            return
        self._last = order.token
        began = time.perf_counter()
        try:
            copied = _Copied(order, tensors, held)
        except Exception as error:
            self._reports.tell(order.token, error)
            return
        copy_s = time.perf_counter() - began
        self._reports.write(order.token, lambda: Share(copied.write(), copy_s=copy_s, entries=copied.entries))

    def report(self, token: str) -> Share | PortableError | None:
        found = self._reports.of(token)
        return pack_error(found) if isinstance(found, Exception) else found

    def close(self, within_s: float) -> None:
        self._reports.close(within_s)


@final
class _Copied:
    """Copies of the current values that an order asks for."""

    def __init__(self, order: SaveOrder, tensors: Sequence[torch.Tensor], held: SliceHolder) -> None:
        self._new = order.new
        self.entries: dict[str, dict[str, Any]] = {}
        self._files: list[tuple[SliceFile, dict[str, torch.Tensor], dict[str, RowRange]]] = []
        given = iter(tensors)
        for file in order.files:
            found = {key: next(given).clone() for key in file.given}
            rows: dict[str, RowRange] = {}
            for place in file.slices:
                parts = self._values(place, held) if file.optimizer is None else self._state(file, place, held)
                for key, tensor in parts.items():
                    if place.rows is not None and tensor.shape == held.value(place.number).shape:
                        rows[key] = place.rows
                    found[key] = _copy(tensor)
            for entry, handle in file.tables:
                packed = pack_state({entry: dict(held.table_state(handle))}, file.owner)  # copies
                self.entries.setdefault(file.owner, {})[entry] = packed.values[entry]
                found |= {key: torch.as_tensor(tensor) for key, tensor in packed.tensors.items()}
            self._files.append((file, found, rows))

    def _values(self, place: SlicePlace, held: SliceHolder) -> dict[str, torch.Tensor]:
        return {place.key: held.value(place.number)}

    def _state(self, file: SliceFile, place: SlicePlace, held: SliceHolder) -> Mapping[str, torch.Tensor]:
        """Return the optimizer state of a slice; the first slice also carries the state of the parameter as a whole."""
        state = held.state(int(file.optimizer or 0), place.number)
        if not state:
            return {}
        shape = held.value(place.number).shape
        packed = pack_state({place.key: dict(state)}, file.owner)
        tensors = {key: torch.as_tensor(tensor) for key, tensor in packed.tensors.items()}
        if place.is_first:
            self.entries.setdefault(file.owner, {})[place.key] = packed.values[place.key]
            return tensors
        return {key: tensor for key, tensor in tensors.items() if tensor.shape == shape and len(shape)}

    def write(self) -> dict[tuple[str, int], TensorFile]:
        """Write all copies."""
        return {
            (file.owner, file.number): write_tensor_file(self._new, file.name, tensors, rows)
            for file, tensors, rows in self._files
            if tensors
        }


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
