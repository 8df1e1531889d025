"""Modes and settings of torch that steps take over from the program."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from raydist.compat.torch_internals import num_writes
from raydist.core.errors import DeadlineExceededError
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
    *(
        (settings.applied, TorchModes(settings=settings))
        for settings in (
            TorchSettings(dtype=torch.float64),
            TorchSettings(deterministic="error"),
            TorchSettings(deterministic="warn"),
            TorchSettings(matmul_precision="high"),
            TorchSettings(finds_anomalies=True),
            TorchSettings(torch.float16, "warn", "medium", True),
        )
    ),
]


def test_what_a_program_says_is_found_and_applied_where_it_travelled() -> None:
    for block, modes in BLOCKS:
        with block():
            assert TorchModes.here() == modes
        assert TorchModes.here() is None
        there = pickle.loads(pickle.dumps(modes))
        for applied in (there.applied(), there.applied_among(SharedSettings(), 1.0)):
            with applied:
                assert TorchModes.here() == modes
            assert TorchModes.here() is None


def test_tensors_made_outside_of_inference_mode_count_writes() -> None:
    with torch.inference_mode():
        inside, usual = torch.zeros(1), outside_inference_mode(torch.zeros)(1)
        usual.add_(1)
        inside.add_(1)
    assert (num_writes(inside), num_writes(usual)) == (-1, 1)
    assert num_writes(usual.add_(1)) == 2


DOUBLE = TorchSettings(torch.float64)


@pytest.fixture(autouse=True)
def as_torch_has_it() -> Iterator[None]:
    yield
    assert TorchSettings.here() == TorchSettings()


def test_settings_that_are_not_said_are_left_alone() -> None:
    with TorchSettings(torch.float16, "warn", "medium").applied(), DOUBLE.applied():
        assert TorchSettings.here() == TorchSettings(torch.float64, "warn", "medium")


def test_threads_that_want_the_same_run_together() -> None:
    shared, together = SharedSettings(), threading.Barrier(3, timeout=20)

    def run(_: int) -> TorchSettings:
        with shared.applied(DOUBLE, 20.0):
            together.wait()
            return TorchSettings.here()

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(run, range(3))) == [DOUBLE] * 3


def test_who_wants_others_waits_until_all_have_left() -> None:
    shared, inside, go_on = SharedSettings(), threading.Event(), threading.Event()
    seen = []

    def run_double() -> None:
        with shared.applied(DOUBLE, 20.0):
            inside.set()
            assert go_on.wait(20)
            seen.append(TorchSettings.here())

    def run_usual() -> None:
        with shared.applied(TorchSettings(), 20.0):
            seen.append(TorchSettings.here())

    with ThreadPoolExecutor(2) as threads:
        double = threads.submit(run_double)
        assert inside.wait(20)
        usual = threads.submit(run_usual)
        go_on.set()
        double.result(20)
        usual.result(20)
    assert seen == [DOUBLE, TorchSettings()]


def test_a_wait_has_a_limit() -> None:
    shared = SharedSettings()
    with shared.applied(DOUBLE, 1.0), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(shared.applied(TorchSettings(), 0.01).__enter__)
        with pytest.raises(DeadlineExceededError, match=r"1 ran with .*float64.* for 0.01 s, .*Timeouts.collective_s"):
            waiting.result(20)
