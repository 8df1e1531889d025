from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from raydist.compat.torch_internals import num_writes
from raydist.utils.torch_modes import SharedSettings, TorchModes, TorchSettings, outside_inference_mode

Block = Callable[[], AbstractContextManager[Any]]

BLOCKS: list[tuple[Block, TorchModes]] = [
    (torch.no_grad, TorchModes(grad=False)),
    (torch.inference_mode, TorchModes(grad=False, inference=True)),
    (lambda: torch.autocast("cpu"), TorchModes(autocast=(("cpu", torch.bfloat16),))),
    (
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
        TorchModes(autocast=(("cpu", torch.float16),), caches_casts=False),
    ),
    (TorchSettings(torch.float64).applied, TorchModes(settings=TorchSettings(torch.float64))),
]


@pytest.mark.parametrize(("block", "modes"), BLOCKS)
def test_what_a_program_says_is_found(block: Block, modes: TorchModes) -> None:
    with block():
        assert TorchModes.here() == modes
    assert TorchModes.here() is None


@pytest.mark.parametrize("modes", [modes for _, modes in BLOCKS])
def test_what_travelled_is_applied(modes: TorchModes) -> None:
    there = pickle.loads(pickle.dumps(modes))
    for applied in (there.applied(), there.applied_among(SharedSettings(), 1.0)):
        with applied:
            assert TorchModes.here() == modes
        assert TorchModes.here() is None


def test_blocks_within_blocks() -> None:
    with torch.no_grad(), torch.enable_grad():
        assert TorchModes.here() is None
    with torch.autocast("cpu"), torch.autocast("cpu", enabled=False):
        assert TorchModes.here() is None


def test_tensors_made_outside_of_inference_mode_count_writes() -> None:
    with torch.inference_mode():
        inside, usual = torch.zeros(1), outside_inference_mode(torch.zeros)(1)
        usual.add_(1)
        inside.add_(1)
    assert (num_writes(inside), num_writes(usual)) == (-1, 1)
    assert num_writes(usual.add_(1)) == 2
