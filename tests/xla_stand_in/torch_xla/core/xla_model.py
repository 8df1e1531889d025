"""torch_xla.core.xla_model."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from torch_xla import world

REDUCE_SUM, REDUCE_MUL, REDUCE_MIN, REDUCE_MAX = "sum", "mul", "min", "max"
_COMBINE = {"sum": torch.add, "mul": torch.mul, "min": torch.minimum, "max": torch.maximum}


def set_replication(device: torch.device, devices: Sequence[str]) -> None:
    if len(devices) != world.chips_per_host():
        raise RuntimeError("Cannot replicate if number of devices is different")


def set_rng_state(seed: int, device: str | None = None) -> None:
    """The CPU's generator is the process' own."""


def wait_device_ops(devices: Sequence[str]) -> None:
    for device in devices:
        world.HERE.index = int(device.partition(":")[2])
        world.wait(world.ordinal())


def all_reduce(reduce_type: str, inputs: torch.Tensor) -> torch.Tensor:
    program = f"{reduce_type} of {inputs.dtype} {tuple(inputs.shape)}"
    return world.launch(
        program, inputs, lambda parts: functools.reduce(_COMBINE[reduce_type], parts), torch.empty_like(inputs)
    )


def all_gather(value: torch.Tensor, dim: int = 0, *, pin_layout: bool = True) -> torch.Tensor:
    program = f"gather of {value.dtype} {tuple(value.shape)}"
    result = torch.cat([torch.empty_like(value)] * world.num_chips(), dim)
    return world.launch(program, value, lambda parts: torch.cat(parts, dim), result)


def all_to_all(value: torch.Tensor, split_dimension: int, concat_dimension: int, split_count: int) -> torch.Tensor:
    program, mine = f"swap of {value.dtype} {tuple(value.shape)}", world.ordinal()
    return world.launch(
        program,
        value,
        lambda parts: torch.cat([part.chunk(split_count, split_dimension)[mine] for part in parts], concat_dimension),
        torch.empty_like(value),
    )
