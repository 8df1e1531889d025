"""A host of a TPU slice that dies or stops is an error that names it; on hosts without TPUs, as in `test_tpu.py`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

import raydist as rd
from tests.xla_world import IS_REAL, TPU_LIMIT_S

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(TPU_LIMIT_S),
    pytest.mark.skipif(IS_REAL, reason="XLA's CPU devices are one host's, in one process"),
]


def train(strategy: rd.Strategy, step: Callable[[], int]) -> None:
    for _ in range(50):
        strategy.local_results(strategy.run(step))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_is_gone_is_an_error_within_the_limits(tpu_slices: None, how: signal.Signals) -> None:
    limits = rd.Timeouts(start_s=60, collective_s=5, step_s=60, close_s=5)
    strategy = rd.TPUStrategy(accelerator_version="v4", timeouts=limits)
    try:
        with strategy.scope():
            model = nn.Linear(1, 1)

        def step() -> int:
            model(torch.ones(1, 1, device=rd.get_replica_context().device)).sum().backward()
            return os.getpid()

        *_, target = strategy.local_results(strategy.run(step))
        os.kill(target, how)
        start = time.monotonic()
        try:
            with pytest.raises((rd.UnavailableError, rd.DeadlineExceededError), match=r"replica|rank"):
                train(strategy, step)
            assert time.monotonic() - start < 30
        finally:
            if how is signal.SIGSTOP:
                os.kill(target, signal.SIGCONT)
    finally:
        strategy._abort(fetch=False)
