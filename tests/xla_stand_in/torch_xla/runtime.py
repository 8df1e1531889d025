"""torch_xla.runtime."""

from __future__ import annotations

import os

from torch_xla import world


def set_device_type(kind: str) -> None:
    os.environ["PJRT_DEVICE"] = kind


def device_type() -> str:
    return os.environ["PJRT_DEVICE"]


def global_device_count() -> int:
    return int(world.num_chips())


def global_ordinal() -> int:
    return int(world.ordinal())
