"""In the place of torch_xla, which needs an older torch: chips that are threads on the CPU, and exchange files.

It has what raydist calls. Tensors are plain ones and are computed at once. Chips are found as libtpu finds them, by
variables of the host; their numbers are not in the order of hosts, as they need not be there.

Variables:
    TPU_WORKER_ID, TPU_WORKER_HOSTNAMES: As on a TPU host; one host where they are missing.
    XLA_STAND_IN_CHIPS: Of each host.
    XLA_STAND_IN_FOLDER: Where all processes of the slice exchange files.
"""

from __future__ import annotations

import torch

from torch_xla import world


def devices() -> list[torch.device]:
    return [torch.device("cpu")] * world.chips_per_host()


def real_devices() -> list[str]:
    return [f"TPU:{index}" for index in range(world.chips_per_host())]


def device(index: int | None = None) -> torch.device:
    if index is not None:
        if index >= world.chips_per_host():
            raise IndexError(f"Device index {index} out of range")
        world.HERE.index = index
    return torch.device("cpu")


def sync(wait: bool = False) -> None:
    """Nothing is left to do."""
