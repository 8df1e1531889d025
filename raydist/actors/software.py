"""Whether all nodes run the same program on the devices that were asked for: said before anything runs there."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from raydist.errors import FailedPreconditionError

__all__ = ["Software", "installed_packages", "installed_software", "require_devices", "require_same_software"]


@final
@dataclass(frozen=True, slots=True)
class Software:
    """What one process runs with.

    Attributes:
        versions: Of Python and the packages whose versions must agree, by name.
        num_gpus: GPUs that torch sees there.
    """

    versions: tuple[tuple[str, str], ...]
    num_gpus: int = 0


def installed_packages() -> Software:
    """What this process runs with, torch left out: where only input is made, it is not loaded."""
    package = sys.modules[__name__.partition(".")[0]]  # the one that this code is of, installed or sent along
    return Software((("Python", platform.python_version()), ("raydist", package.__version__)))


def installed_software() -> Software:
    """What this process runs with. Loads torch."""
    import torch

    # Builds of one version (+cpu, +cu128) may meet: the program's node often has no GPU.
    own = ("torch", torch.__version__.partition("+")[0])
    return Software((*installed_packages().versions, own), torch.cuda.device_count())


def require_same_software(own: Software, found: Sequence[Software], names: Sequence[str]) -> None:
    """FailedPreconditionError where a process has another version than this one.

    >>> own, other = Software((("torch", "2.9"),)), Software((("torch", "2.8"),))
    >>> require_same_software(own, [other], ["replica 0"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    raydist.errors.FailedPreconditionError: All nodes must have the versions ... replica 0 has torch 2.8, not 2.9. ...
    """
    expected = dict(own.versions)
    others = [
        f"{name} has {package} {version}, not {expected[package]}"
        for name, software in zip(names, found, strict=True)
        for package, version in software.versions
        if version != expected[package]
    ]
    if others:
        raise FailedPreconditionError(
            f"All nodes must have the versions of the program's node: {'; '.join(others)}. Install the same versions "
            "there."
        )


def require_devices(devices: Sequence[str], found: Sequence[Software], names: Sequence[str]) -> None:
    """FailedPreconditionError where a process has no GPU that its replica is to use.

    Args:
        devices: The `torch.device` name of each replica.
        found: What each process runs with.
        names: Of the replicas.
    """
    without = [
        name
        for name, device, software in zip(names, devices, found, strict=True)
        if device.startswith("cuda") and not software.num_gpus
    ]
    if without:
        raise FailedPreconditionError(
            f"Ray has given a GPU to each replica, but torch sees none on {'; '.join(without)}. Install a build of "
            'torch for the GPUs of that node and check its driver (nvidia-smi), or name CPUs as devices ("CPU:0").'
        )
