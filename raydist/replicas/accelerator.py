"""What a replica's device needs of its thread: to be chosen, seeded, and told where a step ends."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import ClassVar, final

import torch

from raydist.collectives.xla.chip import Chip
from raydist.errors import FailedPreconditionError
from raydist.torch_modes import TorchModes
from raydist.torch_settings import SharedSettings

__all__ = ["Accelerator", "accelerator_for", "take_gpu"]


class Accelerator(ABC):
    """A replica's device, for the threads that run its steps.

    Attributes:
        device: Where its tensors are.
        defers: Whether operations are noted and run together, so that it must be told where a step begins and ends.
    """

    device: torch.device
    defers: ClassVar[bool]

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Let the random numbers of steps follow from `seed`."""

    @abstractmethod
    def enter(self) -> None:
        """A step begins in this thread."""

    @abstractmethod
    def leave(self) -> None:
        """The step has ended: what it noted for later runs now."""

    @abstractmethod
    def working(self, modes: TorchModes | None, limit_s: float) -> AbstractContextManager[None]:
        """Within it torch works so in this thread; None: as it does by itself.

        Blocking: where threads of one process run steps, while others want other settings, at most `limit_s`.
        """


@final
class _TorchDevice(Accelerator):
    """A CPU or a GPU, which torch looks after by itself."""

    defers = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed % 2**63)

    def enter(self) -> None:
        """Nothing."""

    def leave(self) -> None:
        """Nothing."""

    def working(self, modes: TorchModes | None, limit_s: float) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if modes is None else modes.applied()


@final
class _XlaDevice(Accelerator):
    """A TPU chip, where operations are noted and run together."""

    defers = True

    def __init__(self, chip: Chip) -> None:
        self._chip = chip
        self.device = chip.open().device

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed % 2**63)
        self._chip.seed(seed % 2**63)

    def enter(self) -> None:
        self._chip.open()

    def leave(self) -> None:
        self._chip.launch()

    def working(self, modes: TorchModes | None, limit_s: float) -> AbstractContextManager[None]:
        return (modes or _AS_TORCH_HAS_IT).applied_among(_OF_ALL_CHIPS, limit_s)


_AS_TORCH_HAS_IT = TorchModes()
_OF_ALL_CHIPS = SharedSettings()  # those of a host are driven by threads of one process


def take_gpu(device: torch.device, rank: int) -> None:
    """Let this process use its GPU by default.

    Raises:
        FailedPreconditionError: Its torch sees none.
    """
    if not torch.cuda.is_available():
        raise FailedPreconditionError(
            f"Replica {rank} was given a GPU by Ray and must be able to use it, but its torch {torch.__version__} sees "
            "none. Install a build of torch for CUDA and a driver on that node, or name CPUs as devices."
        )
    torch.cuda.set_device(device)


def accelerator_for(device: str) -> Accelerator:
    """The device of this name, chosen for this thread.

    Raises:
        FailedPreconditionError: It is a TPU's, and there is no torch_xla.
        UnavailableError: There is no such TPU chip.
    """
    named = torch.device(device)
    return _XlaDevice(Chip(named.index or 0)) if named.type == "xla" else _TorchDevice(named)
