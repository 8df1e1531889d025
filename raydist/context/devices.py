"""Device names: "cpu", "CPU:1", "GPU:0", "cuda:1", a torch.device, or a count."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from raydist.core.errors import InvalidArgumentError

_NAME = re.compile(r"^(?:/?(?:device:)?)?(cpu|gpu|cuda)(?::(\d+))?$", re.IGNORECASE)


@final
@dataclass(frozen=True, slots=True)
class Device:
    """One device of a node.

    >>> str(parse_device("GPU:1")), parse_device("GPU:1").torch_name, str(parse_device("cpu"))
    ('GPU:1', 'cuda:1', 'CPU:0')
    """

    kind: Literal["CPU", "GPU"]
    index: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"

    @property
    def torch_name(self) -> str:
        """The name for `torch.device` in a process that sees every device of the node."""
        return "cpu" if self.kind == "CPU" else f"cuda:{self.index}"


def parse_device(device: Any) -> Device:
    """Return the device for a name or a `torch.device`; raise InvalidArgumentError for anything else."""
    match = _NAME.match(str(device)) if device is not None and not isinstance(device, int) else None
    if match is None:
        raise InvalidArgumentError(
            f'A device must be named like "cpu", "CPU:1", "GPU:0" or "cuda:1" (or be a torch.device), got {device!r}.'
        )
    kind: Literal["CPU", "GPU"] = "CPU" if match[1].lower() == "cpu" else "GPU"
    return Device(kind, int(match[2] or 0))


def parse_devices(devices: int | Sequence[Any] | Any, *, gpus_on_node: int) -> tuple[Device, ...]:
    """Return the devices of a strategy for a count (GPUs if the node has any, else CPUs), one name, or several.

    >>> [str(d) for d in parse_devices(2, gpus_on_node=0)]
    ['CPU:0', 'CPU:1']
    """
    if isinstance(devices, int) and not isinstance(devices, bool):
        if devices < 1:
            raise InvalidArgumentError(f"The number of devices must be >= 1, got {devices}.")
        kind: Literal["CPU", "GPU"] = "GPU" if gpus_on_node else "CPU"
        return tuple(Device(kind, index) for index in range(devices))
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        return (parse_device(devices),)
    parsed = tuple(parse_device(device) for device in devices)
    if not parsed:
        raise InvalidArgumentError(
            f'A strategy needs at least one device, got {devices!r}. Name some, as "CPU:0", "CPU:1", or give a count.'
        )
    if len(set(parsed)) < len(parsed):
        names = ", ".join(map(str, parsed))
        raise InvalidArgumentError(f'Devices must differ, got {names}. Several CPU replicas are "CPU:0", "CPU:1", ...')
    if len({device.kind for device in parsed}) > 1:
        names = ", ".join(map(str, parsed))
        raise InvalidArgumentError(f"All devices of a strategy must be of one kind, got {names}.")
    return parsed
