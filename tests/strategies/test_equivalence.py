"""I2: N replicas with global batch G train to the parameters of a bare PyTorch loop, whatever divides or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import raydist as rd
from tests.strategies.equivalence import MODELS, Program, train_alone, train_distributed

TOLERANCE = 1e-9


@st.composite
def programs(draw: st.DrawFn, model: str) -> Program:
    batch_size = draw(st.integers(1, 5))
    return Program(
        model=model,
        optimizer=draw(st.sampled_from(["sgd", "adamw"])),
        num_rows=draw(st.integers(1, 3 * batch_size + 1)),
        batch_size=batch_size,
        clip=draw(st.booleans()),
        accumulate=draw(st.integers(1, 2)),
        schedule=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


def check(program: Program, strategy: rd.Strategy) -> None:
    expected = train_alone(program)
    before, after = train_distributed(program, strategy)
    for name, value in expected.items():
        torch.testing.assert_close(after[name], value, rtol=TOLERANCE, atol=1e-12, msg=f"{name} differs")
    assert any(not torch.equal(before[name], after[name]) for name in before), "nothing was trained"


@pytest.mark.ray
@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_parameters_equal_those_of_a_bare_loop(
    model: str, num_replicas: int, mirrored: Callable[[int], rd.MirroredStrategy]
) -> None:
    strategy = mirrored(num_replicas)

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(programs(model))
    def each(program: Program) -> None:
        check(program, strategy)

    each()


@pytest.mark.parametrize("model", sorted(MODELS))
def test_one_device_is_the_bare_loop(model: str) -> None:
    program = Program(model, "adamw", num_rows=11, batch_size=4, clip=True, accumulate=2, schedule=True, seed=3)
    check(program, rd.OneDeviceStrategy("cpu"))
