"""What steers torch for a block or a process: a step computes as the program that calls `run` would."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn

import raydist as rd
from raydist.testing.strategy_calls import batches_of, on_all

__all__ = ["check_inference_mode", "check_modes"]

Found = tuple[bool, bool, str, str, bool, str, bool]


def _modes() -> Found:
    product = torch.ones(2, 2, dtype=torch.float32) @ torch.ones(2, 2, dtype=torch.float32)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        str(product.dtype),
        str(torch.ones(1).dtype),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_anomaly_enabled(),
    )


@contextlib.contextmanager
def _globally() -> Iterator[None]:
    """Another default dtype, deterministic algorithms, and products of less precision."""
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")


_BLOCKS: tuple[Callable[[], AbstractContextManager[object]], ...] = (
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu", torch.bfloat16),
    lambda: torch.autograd.set_detect_anomaly(True),
    _globally,
)


def check_modes(strategy: rd.Strategy) -> None:
    """Steps see `no_grad`, `autocast`, the default dtype and the like as they where `run` is called; then no more."""
    usual = _modes()
    for block in _BLOCKS:
        with block():
            here = _modes()
            assert on_all(strategy, _modes) == [here] * strategy.num_replicas_in_sync
        assert here != usual
        assert on_all(strategy, _modes) == [usual] * strategy.num_replicas_in_sync


def check_inference_mode(strategy: rd.Strategy) -> None:
    """All that is done within it: steps, values and states that are read there are usual ones for later steps."""
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch.float()[:, None]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for batch in batches_of(strategy):
        strategy.run(train, args=(batch,))
        with torch.inference_mode():
            outputs = strategy.gather(strategy.run(lambda batch: model(batch.float()[:, None]), args=(batch,)))
            rows = strategy.gather(batch).float()[:, None]
            torch.testing.assert_close(outputs, model(rows).to(outputs))
            assert model.weight.grad is not None
            assert optimizer.state_dict()["state"]
            state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state)
    assert not model.weight.is_inference()
