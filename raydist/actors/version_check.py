"""Check that all nodes run the same versions and have the requested devices, before anything else runs there."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from raydist.core.errors import FailedPreconditionError


@final
@dataclass(frozen=True, slots=True)
class Software:
    """The versions and devices of one process.

    Attributes:
        versions: Versions of Python and of the packages that must agree, by name.
        num_gpus: Number of GPUs that torch sees in the process.
    """

    versions: tuple[tuple[str, str], ...]
    num_gpus: int = 0


def installed_packages() -> Software:
    """Return the versions of this process without torch, which input workers do not load."""
    package = sys.modules[__name__.partition(".")[0]]  # the package of this module, installed or shipped with the job
    return Software((("Python", platform.python_version()), ("raydist", package.__version__)))


def installed_software() -> Software:
    """Return the versions and devices of this process. Imports torch."""
    import torch

    # Builds of one version (+cpu, +cu128) may be mixed: the program's node often has no GPU.
    own = ("torch", torch.__version__.partition("+")[0])
    return Software((*installed_packages().versions, own), torch.cuda.device_count())


def require_same_software(own: Software, found: Sequence[Software], names: Sequence[str]) -> None:
    """Raise FailedPreconditionError if a process has other versions than this one.

    >>> own, other = Software((("torch", "2.9"),)), Software((("torch", "2.8"),))
    >>> require_same_software(own, [other], ["replica 0"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    raydist.core.errors.FailedPreconditionError: All nodes must ... replica 0 has torch 2.8, not 2.9. ...
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
    """Raise FailedPreconditionError if a process sees no GPU although its replica is to use one.

    Args:
        devices: The `torch.device` name of each replica.
        found: Versions and devices of each process.
        names: Names of the replicas.
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
