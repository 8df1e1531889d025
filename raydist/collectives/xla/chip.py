"""The chip of one replica, and collectives between all chips, by torch_xla. No other module imports torch_xla.

One process drives all chips of its host with one thread per chip; torch_xla keeps a current chip per thread.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any, final

import torch

from raydist.core.errors import FailedPreconditionError, UnavailableError
from raydist.core.values import ReduceOp

_INSTALL = (
    "Install it on every TPU host: pip install 'torch~=2.9.0' 'torch_xla[tpu]~=2.9.0' "
    "-f https://storage.googleapis.com/libtpu-releases/index.html"
)
# The chips of a host run the same programs, so one thread compiles a program for all. (XLA's CPU device even needs
# this: a collective belongs to one compiled program there, and a second compilation is another program.) Dispatch does
# not block.
_DISPATCH = threading.Lock()


@final
class Chip:
    """One chip of this host, for the threads that work on it.

    Tensors on the chip are lazy: operations are recorded, and run when `launch` is called or a value is read. Programs
    with collectives must be equal on all chips, or the chips wait forever. So call `launch` before a collective to
    compute its inputs, and record no other operation until the collective is launched.

    Args:
        index: Number of the chip on this host.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._xla: Any = None
        self._model: Any = None
        self._runtime: Any = None
        self._ops: dict[ReduceOp, str] = {}

    def open(self) -> Chip:
        """Prepare this thread for the collectives of all chips. May be called again, from any thread.

        Blocking: the first time in a process, until all hosts of the slice have joined, at most libtpu's own limit.

        Raises:
            FailedPreconditionError: No torch_xla is installed that works with this torch.
            UnavailableError: The chip does not exist.
        """
        if self._xla is None:
            self._import()
        try:
            with _DISPATCH:
                devices = self._xla.devices()
                if self.index >= len(devices):
                    raise _no_chip(self.index, f"it has {len(devices)}")
                self._model.set_replication(self.device, [str(device) for device in devices])
        except RuntimeError as error:
            raise _no_chip(self.index, str(error).strip().split("\n")[0]) from error
        return self

    def _import(self) -> None:
        try:
            import torch_xla
            import torch_xla.core.xla_model
            import torch_xla.runtime
        except ImportError as error:
            raise FailedPreconditionError(
                f"Replicas on TPUs need torch_xla, but host {socket.gethostname()} with torch {torch.__version__} "
                f"says: {error}. {_INSTALL}"
            ) from error
        self._xla, self._model, self._runtime = torch_xla, torch_xla.core.xla_model, torch_xla.runtime
        if "PJRT_DEVICE" not in os.environ:
            self._runtime.set_device_type("TPU")  # otherwise torch_xla falls back to the CPU
        self._ops = {
            ReduceOp.SUM: self._model.REDUCE_SUM,
            ReduceOp.MEAN: self._model.REDUCE_SUM,
            ReduceOp.MIN: self._model.REDUCE_MIN,
            ReduceOp.MAX: self._model.REDUCE_MAX,
            ReduceOp.PRODUCT: self._model.REDUCE_MUL,
        }

    @property
    def device(self) -> torch.device:
        device: torch.device = self._xla.device(self.index)
        return device

    @property
    def ordinal(self) -> int:
        """Number of the chip among the chips of all hosts."""
        self._xla.device(self.index)
        return int(self._runtime.global_ordinal())

    @property
    def num_chips(self) -> int:
        return int(self._runtime.global_device_count())

    def seed(self, seed: int) -> None:
        """Set the seed of this chip's random number generator."""
        self._model.set_rng_state(seed, str(self.device))

    def launch(self) -> None:
        """Run the recorded operations. Blocks during compilation, not during execution."""
        self._xla.device(self.index)
        with _DISPATCH:
            self._xla.sync()

    def wait(self) -> None:
        """Block until all launched operations have run."""
        self._model.wait_device_ops([self._xla.real_devices()[self.index]])

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Launch the reduction over all chips, and return the result, which is the sum for MEAN."""
        # XLA's CPU device cannot reduce bfloat16.
        wide = tensor.dtype is torch.bfloat16 and self._runtime.device_type() == "CPU"
        sent = tensor.float() if wide else tensor
        return self._launched(lambda: self._model.all_reduce(self._ops[op], sent).to(tensor.dtype))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Launch an all-gather of the tensors of all chips along a new first dimension, by ordinal."""
        return self._launched(lambda: self._model.all_gather(tensor.unsqueeze(0), dim=0, pin_layout=False))

    def _launched(self, program: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._xla.device(self.index)
        with _DISPATCH:
            result = program()
            self._xla.sync()
        return result


def _no_chip(index: int, found: str) -> UnavailableError:
    return UnavailableError(
        f"A replica must work on chip {index} of host {socket.gethostname()} (PJRT_DEVICE="
        f"{os.environ.get('PJRT_DEVICE')}), but {found}. Check that the topology is the host's, that no other process "
        "uses its chips, and that libtpu is installed (torch_xla[tpu])."
    )
