"""The state of a replica that exists nowhere else: its generators, its share of buffers, its metrics.

It is read up to three times in a step, so what has not changed is not packed again, and all buffers are one copy.
"""

from __future__ import annotations

import ctypes
import math
import pickle
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch

from raydist.mirroring.messages import overwrite
from raydist.mirroring.replica import MirrorReplica
from raydist.parameter_servers.local_rows import is_table

Seed = tuple[int, int]
"""The driver's torch seed, and how often it was set."""

_MT19937_BYTES = 625 * 4  # 624 words and the position


@final
class HostGenerators:
    """The generators of Python, NumPy and torch in this process."""

    def __init__(self) -> None:
        self._python: Any = None
        self._python_packed = b""
        self._numpy = b""
        self._numpy_packed = b""

    def pack(self) -> tuple[bytes, bytes, bytes]:
        """Return the states of the generators of torch, Python and NumPy."""
        return torch.get_rng_state().numpy().tobytes(), self._pack_python(), self._pack_numpy()

    def _pack_python(self) -> bytes:
        state = random.getstate()
        _, words, gauss = state
        mark = words[:4], words[-1], gauss  # each draw changes the position, and a new seed the words
        if mark != self._python:
            self._python, self._python_packed = mark, pickle.dumps(state, pickle.HIGHEST_PROTOCOL)
        return self._python_packed

    def _pack_numpy(self) -> bytes:
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy's stubs leave it out
        raw = b""
        if isinstance(generator, np.random.MT19937):  # `get_state` takes 160 us
            raw = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if not raw or raw != self._numpy:
            state = np.random.get_state(legacy=False)
            holds_a_number = bool(state["has_gauss"])  # which the next draw takes, without a change of the rest
            self._numpy, self._numpy_packed = b"" if holds_a_number else raw, pickle.dumps(state)
        return self._numpy_packed


def restore_generators(packed: tuple[bytes, bytes, bytes]) -> None:
    """Set the generators to the result of `HostGenerators.pack`."""
    of_torch, of_python, of_numpy = packed
    torch.set_rng_state(_as_tensor(of_torch))
    random.setstate(pickle.loads(of_python))
    np.random.set_state(pickle.loads(of_numpy))


@final
@dataclass(frozen=True, slots=True)
class PackedTensors:
    """Copies of tensors, by handle: the bytes of all strided ones together, and the others."""

    layout: tuple[tuple[int, torch.Size, torch.dtype], ...]
    content: bytes
    others: Mapping[int, torch.Tensor]

    @staticmethod
    def of(tensors: Mapping[int, torch.Tensor]) -> PackedTensors:
        """Copy tensors. On a GPU this waits for the device."""
        strided = {handle: each.detach() for handle, each in tensors.items() if each.layout is torch.strided}
        layout = tuple((handle, each.shape, each.dtype) for handle, each in strided.items())
        flat = [_as_bytes(each) for each in strided.values()]
        content = torch.cat(flat).cpu().numpy().tobytes() if flat else b""
        others = {handle: each.detach().clone() for handle, each in tensors.items() if handle not in strided}
        return PackedTensors(layout, content, others)

    def unpack(self) -> dict[int, torch.Tensor]:
        """Return the tensors, on the CPU."""
        found, start = dict(self.others), 0
        for handle, shape, dtype in self.layout:
            end = start + math.prod(shape) * dtype.itemsize
            found[handle] = _as_tensor(self.content[start:end]).view(dtype).reshape(shape)
            start = end
        return found


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:  # a column of one row, which counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


@final
@dataclass(frozen=True, slots=True)
class OwnState:
    """The state of a replica that exists nowhere else.

    Attributes:
        seed: The driver's seed that the generators were last set by; None before.
        host: States of the generators of torch, Python and NumPy.
        device: State of the generator of the GPU; empty without one.
        buffers: Values of buffers that replicas compute from their own rows.
        metrics: States of metrics, by handle.
        generators: States of the mirrored generators, by handle.
        rows: Rows of embedding tables that this replica holds, by handle of the table's parameter.
    """

    seed: Seed | None
    host: tuple[bytes, bytes, bytes]
    device: bytes
    buffers: PackedTensors
    metrics: Mapping[int, Mapping[str, Any]]
    generators: Mapping[int, Any]
    rows: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    def restore(self, mirror: MirrorReplica, device: torch.device) -> None:
        """Set everything to these values; objects that the replica does not have any more are left out."""
        restore_generators(self.host)
        if self.device:
            torch.cuda.set_rng_state(_as_tensor(self.device), device)
        for handle, value in self.buffers.unpack().items():
            if mirror.has(handle):
                overwrite(mirror.object_of(handle), value)
        mirror.restore_metrics({handle: dict(each) for handle, each in self.metrics.items() if mirror.has(handle)})
        for handle, state in self.generators.items():
            if mirror.has(handle):
                mirror.object_of(handle).set_state(state)
        for handle, states in self.rows.items():
            if mirror.has(handle):
                mirror.import_rows(handle, states)


@final
class OwnStateReader:
    """Reads the own state of one replica."""

    def __init__(self, mirror: MirrorReplica, device: torch.device) -> None:
        self._mirror = mirror
        self._device = device
        self._host = HostGenerators()
        self._listed_at = -1
        self._generators: list[tuple[int, torch.Generator]] = []

    def read(self, seed: Seed | None, *, all_buffers: bool = False, rows: bool = False) -> OwnState:
        """Return copies of the present values.

        Args:
            all_buffers: Include buffers that are the same on all replicas.
            rows: Include the rows of embedding tables, which may be many.
        """
        mirror = self._mirror
        if self._listed_at != mirror.changes:
            self._listed_at = mirror.changes
            self._generators = [(handle, obj) for handle, obj in mirror.items() if isinstance(obj, torch.Generator)]
        on_gpu = self._device.type == "cuda"
        return OwnState(
            seed,
            self._host.pack(),
            torch.cuda.get_rng_state(self._device).numpy().tobytes() if on_gpu else b"",
            PackedTensors.of(mirror.buffers() if all_buffers else mirror.own_buffers()),
            mirror.hold_metrics(),
            {handle: each.get_state() for handle, each in self._generators},
            {handle: mirror.export_rows(handle) for handle, obj in mirror.items() if is_table(obj)} if rows else {},
        )
