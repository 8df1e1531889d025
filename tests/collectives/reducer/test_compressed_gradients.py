"""Gradients that travel in fewer bits."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from raydist.collectives.base import Work
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.values import ReduceOp
from tests.collectives.gradient_steps import (
    ONCE_A_SEGMENT,
    STEPS,
    gradients_of,
)
from tests.collectives.local_group import LocalGroup
from tests.collectives.models import (
    FEATURES,
    MODELS,
    assert_equal_parameters,
    build,
    rows,
    train_alone,
    train_together,
)
from tests.collectives.threads import run_ranks

ROUNDING = {"fp16": 2.0**-11, "bf16": 2.0**-8}


Compression = Literal["fp16", "bf16"]


def compressed(
    start: nn.Module, compression: Compression | None, backward: Callable[[nn.Module, int], None], world_size: int = 3
) -> list[tuple[nn.Module, int]]:
    """Replicas after two steps, of which the second one's traffic is counted."""
    replicas = [copy.deepcopy(start) for _ in range(world_size)]

    def main(group: LocalGroup) -> tuple[nn.Module, int]:
        model, sent, all_reduce = replicas[group.rank], [0], group.all_reduce

        def counted(tensor: torch.Tensor, op: ReduceOp) -> Work:
            sent.append(tensor.nbytes)
            return all_reduce(tensor, op)

        group.all_reduce = counted  # type: ignore[method-assign]  # the reducer is given bytes to send here alone
        reducer = GradientReducer(group, bucket_bytes=1 << 10, first_bucket_bytes=256, compression=compression)
        reducer.attach(tuple(model.parameters()))
        for _ in range(2):
            sent.clear()
            model.zero_grad()
            with reducer.step(weight=1 / world_size):
                backward(model, group.rank)
        return model, sum(sent)

    return run_ranks(world_size, main)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_gradients_are_rounded_equal_and_half_as_large(compression: Compression) -> None:
    start = nn.Sequential(nn.Linear(FEATURES, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 1))

    def backward(model: nn.Module, rank: int) -> None:
        features, targets = rows(4, seed=rank)
        nn.functional.mse_loss(model(features.float()), targets.float()).backward()

    plain, plain_bytes = compressed(start, None, backward)[0]
    own = []
    for rank in range(3):
        alone = copy.deepcopy(start)
        backward(alone, rank)
        own.append([torch.zeros(()) if p.grad is None else p.grad for p in alone.parameters()])
    replicas = compressed(start, compression, backward)
    for replica, num_bytes in replicas:
        assert num_bytes * 2 == plain_bytes
        for number, (parameter, expected) in enumerate(zip(replica.parameters(), plain.parameters(), strict=True)):
            assert parameter.grad is not None
            assert expected.grad is not None
            assert parameter.grad.dtype is torch.float32
            # Each replica's share is rounded once, their sum once more; below 2**-24 float16 has no finer steps.
            size = sum(gradients[number].abs() for gradients in own) / 3
            bound = 2.01 * ROUNDING[compression] * size + 3 * 2.0**-25
            assert bool(((parameter.grad - expected.grad).abs() <= bound).all())
            assert not torch.equal(parameter.grad, expected.grad)
        mine, first = gradients_of(replica), gradients_of(replicas[0][0])
        assert all(torch.equal(a, b) for a, b in zip(mine, first, strict=True) if a is not None and b is not None)


def test_only_float32_is_compressed() -> None:
    def backward(model: nn.Module, rank: int) -> None:
        torch.stack([(p * (1 + 2.0**-12)).double().sum() for p in model.parameters()]).sum().backward()

    dtypes = (torch.float64, torch.bfloat16, torch.float32)
    start = nn.ParameterList([torch.ones(5, dtype=dtype) for dtype in dtypes])
    (replica, _), *_ = compressed(start, "fp16", backward, world_size=2)
    double, half, single = (p.grad for p in replica.parameters())
    assert double is not None
    assert half is not None
    assert single is not None
    assert double.tolist() == [1 + 2.0**-12] * 5
    assert half.dtype is torch.bfloat16
    assert single.tolist() == [1.0] * 5


def test_what_does_not_fit_into_float16_is_infinite_everywhere() -> None:
    def backward(model: nn.Module, rank: int) -> None:
        (next(model.parameters()) * (3e5 if rank else 1.0)).sum().backward()

    for compression, expected in (("fp16", torch.inf), ("bf16", 2e5)):
        for replica, _ in compressed(nn.Linear(2, 1, bias=False), compression, backward):  # type: ignore[arg-type]
            (gradient,) = gradients_of(replica)
            assert gradient is not None
            torch.testing.assert_close(gradient, torch.full_like(gradient, expected), rtol=1e-2, atol=0)


@settings(max_examples=15)
@given(
    name=st.sampled_from(sorted(MODELS)),
    step=st.sampled_from(sorted(STEPS)),
    world_size=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    bucket_bytes=st.sampled_from([1, 64, 300, 1 << 20]),
    compression=st.sampled_from(["fp16", "bf16"]),
)
def test_compression_works_with_all_ways_to_use_gradients(
    name: str, step: str, world_size: int, sizes: list[int], bucket_bytes: int, compression: Compression
) -> None:
    """In float64 nothing is rounded; in float32 all replicas hold the same bits, near those of one process."""
    assume((name, STEPS[step]) not in ONCE_A_SEGMENT)
    start = build(name)
    batches = [rows(size, seed=number) for number, size in enumerate(sizes)]
    together = functools.partial(train_together, world_size=world_size, bucket_bytes=bucket_bytes)
    expected = train_alone(copy.deepcopy(start), batches, STEPS[step])
    assert_equal_parameters(expected, together(start, batches, STEPS[step], compression=compression), start=start)
    narrow = [(features.float(), targets.float()) for features, targets in batches]
    rounded = together(copy.deepcopy(start).float(), narrow, STEPS[step], compression=compression)
    for (key, value), reference in zip(rounded[0].state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(value, reference.float(), rtol=0.1, atol=0.1)
        assert all(torch.equal(replica.state_dict()[key], value) for replica in rounded)
