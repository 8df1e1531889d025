"""One replica's chip, and the collectives of all chips, by torch_xla. The only module that imports it.

One process drives all chips of its host, one thread each: torch_xla keeps the chip that a thread works on.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any, final

import torch

from raydist.errors import FailedPreconditionError, UnavailableError
from raydist.values import ReduceOp

__all__ = ["Chip"]

_INSTALL = (
    "Install it on every TPU host: pip install 'torch~=2.9.0' 'torch_xla[tpu]~=2.9.0' "
    "-f https://storage.googleapis.com/libtpu-releases/index.html"
)
# The chips of a host run the same programs: the thread that compiles one does it for all. (XLA's CPU device even needs
# it: there a collective is known by the program that it is in, and two compilations of one are two.) Dispatch does not
# wait.
_DISPATCH = threading.Lock()


@final
class Chip:
    """One chip of this host, for the threads that work on it.

    Tensors on it are lazy: operations are noted, and run when `launch` is called or a value is read. Collectives must
    be launched in programs that are equal on all chips, or they wait for each other for ever: so what they take must be
    data already (`launch` before), and nothing else may be noted until they are launched.

    Args:
        index: Its number among the chips of this host.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._xla: Any = None
        self._model: Any = None
        self._runtime: Any = None
        self._ops: dict[ReduceOp, str] = {}

    def open(self) -> Chip:
        """Take part in the collectives of all chips, from this thread on. May be called again, from any thread.

        Blocking: the first time in a process until all hosts of the slice have come, as long as libtpu waits.

        Raises:
            FailedPreconditionError: There is no torch_xla that works with this torch.
            UnavailableError: There is no such chip.
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
            self._runtime.set_device_type("TPU")  # by itself torch_xla takes the CPU where it finds no TPU
        self._ops = {
            ReduceOp.SUM: self._model.REDUCE_SUM,
            ReduceOp.MEAN: self._model.REDUCE_SUM,
            ReduceOp.MIN: self._model.REDUCE_MIN,
            ReduceOp.MAX: self._model.REDUCE_MAX,
            ReduceOp.PRODUCT: self._model.REDUCE_MUL,
        }

    @property
    def device(self) -> torch.device:
        """The device of its tensors; this thread works on it from now on."""
        device: torch.device = self._xla.device(self.index)
        return device

    @property
    def ordinal(self) -> int:
        """Its number among the chips of all hosts."""
        self._xla.device(self.index)
        return int(self._runtime.global_ordinal())

    @property
    def num_chips(self) -> int:
        """The chips of all hosts."""
        return int(self._runtime.global_device_count())

    def seed(self, seed: int) -> None:
        """Random numbers of this chip follow from `seed` now."""
        self._model.set_rng_state(seed, str(self.device))

    def launch(self) -> None:
        """Run what has been noted. Blocking: while it is compiled, not while it runs."""
        self._xla.device(self.index)
        with _DISPATCH:
            self._xla.sync()

    def wait(self) -> None:
        """Blocking: until all that was launched has run."""
        self._model.wait_device_ops([self._xla.real_devices()[self.index]])

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Launch the reduction over all chips; MEAN is the sum."""
        # XLA's CPU device cannot reduce bfloat16.
        wide = tensor.dtype is torch.bfloat16 and self._runtime.device_type() == "CPU"
        sent = tensor.float() if wide else tensor
        return self._launched(lambda: self._model.all_reduce(self._ops[op], sent).to(tensor.dtype))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Launch the exchange of the tensors of all chips, along a new first dimension, by ordinal."""
        return self._launched(lambda: self._model.all_gather(tensor.unsqueeze(0), dim=0, pin_layout=False))

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """Launch an exchange: `parts` are this chip's for each chip, the result is theirs for this one, by ordinal."""
        return self._launched(lambda: self._model.all_to_all(parts, 0, 0, len(parts)))

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
