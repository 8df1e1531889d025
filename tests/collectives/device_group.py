"""A group that behaves as one of GPUs does: the host runs ahead, and every wait of the host is noted.

The tensors are on the CPU. A wait that a GPU's stream would do happens at once, and is no wait of the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode

from raydist.collectives.base import Work
from raydist.collectives.delegating import DelegatingCommunicator
from raydist.values import ReduceOp
from tests.collectives.local_group import LocalGroup

_BLOCKING = {
    getattr(torch.Tensor, name): name
    for name in (
        *("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__len__"),
        *("__contains__", "unique", "is_nonzero", "equal"),
    )
    if name != "__len__"
} | {torch.nonzero: "nonzero", torch.equal: "equal", torch.unique: "unique"}
_ON_THE_HOST = ("received", "flags", "check")
"""Functions of `trailer.py` that read numbers which have been copied to the host."""


@final
class DeviceGroup(DelegatingCommunicator):
    """A rank of a group of threads, as a GPU's.

    Args:
        group: Does the work.

    Attributes:
        waits: The waits of the host: what waited, and where.
        exchanges: What was exchanged on the host.
    """

    def __init__(self, group: LocalGroup) -> None:
        super().__init__(group)
        self.host_runs_ahead = True
        self.waits: list[str] = []
        self.exchanges: list[str] = []
        self.num_started = 0

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        copied, started = tensor.detach().clone(), self.num_started

        def read() -> torch.Tensor:
            if self.num_started == started:  # nothing has followed it: the device is still at it
                self.waits.append("a copy to the host of the pass at hand")
            return copied

        return read

    def exchange_on_host(self, data: bytes, what: str) -> list[bytes]:
        self.exchanges.append(what)
        with torch._C.DisableTorchFunction():  # the store of a GPU's group exchanges bytes
            return self._inner.exchange_on_host(data, what)

    def _begun(self, work: Work) -> Work:
        self.num_started += 1
        return _DeviceWork(self, work)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        return self._begun(self._inner.all_reduce(tensor, op))

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        return self._begun(self._inner.all_gather(outputs, tensor))

    def all_gather_rows(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        return self._begun(self._inner.all_gather_rows(outputs, tensor))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return self._begun(self._inner.broadcast(tensor, root))

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        return [torch.empty(numel, dtype=dtype) for numel, dtype in sizes]

    def barrier(self) -> None:
        self.waits.append("barrier")
        self._inner.barrier()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Note what the code of raydist that this thread runs inside the block reads of tensors."""
        with _Reads(self.waits):
            yield


@final
class _DeviceWork(Work):
    def __init__(self, group: DeviceGroup, work: Work) -> None:
        self._group, self._work = group, work

    def wait(self, timeout_s: float | None = None) -> None:
        if timeout_s is not None:
            self._group.waits.append("a wait with a limit")
        with torch._C.DisableTorchFunction():
            self._work.wait()

    def is_completed(self) -> bool:
        self._group.waits.append("is_completed")
        return True


@final
class _Reads(TorchFunctionMode):
    """Notes where raydist's code reads a tensor on the host; torch's own waits are torch's."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _BLOCKING:
            frame = sys._getframe(1)
            name = frame.f_globals.get("__name__", "")
            if name.startswith("raydist.") and frame.f_code.co_name not in _ON_THE_HOST:
                self._waits.append(f"{_BLOCKING[func]} in {name}.{frame.f_code.co_name}")
        return func(*args, **(kwargs or {}))
