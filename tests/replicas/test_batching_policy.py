from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.actors.class_tracking import cloudpickle
from raydist.replicas.dispatched_steps import BatchingPolicy
from raydist.replicas.results import pack_result
from raydist.replicas.step_message import GroupResult


def test_a_function_that_is_not_known_goes_alone() -> None:
    policy = BatchingPolicy()
    policy.learn(b"", seconds=1e-6, num_bytes=0)
    assert policy.group_size([b"f"]) == 1
    assert policy.group_size([b""]) == 1
    assert policy.window([b"f"]) == 8


@pytest.mark.parametrize(
    ("seconds", "num_bytes", "size"),
    [(1e-6, 8, 16), (0.02, 8, 10), (0.045, 8, 4), (0.25, 8, 1), (1e-6, 20_000, 3), (1e-6, 10**9, 1)],
)
def test_groups_are_short_in_time_and_small_in_results(seconds: float, num_bytes: int, size: int) -> None:
    policy = BatchingPolicy()
    policy.learn(b"f", seconds=seconds, num_bytes=num_bytes)
    assert policy.group_size([b"f", b"f"]) == size


@pytest.mark.parametrize(("seconds", "steps"), [(1e-6, 48), (0.1, 8), (0.2, 5), (0.25, 4), (0.4, 3), (60.0, 3)])
def test_what_waits_for_long_steps_waits_for_few(seconds: float, steps: int) -> None:
    policy = BatchingPolicy()
    policy.learn(b"f", seconds=seconds, num_bytes=8)
    assert policy.window([b"f"]) == steps
    assert policy.window([b"f", b"new"]) <= max(min(steps, 8), 3)


def test_of_several_functions_the_slowest_counts() -> None:
    policy = BatchingPolicy()
    policy.learn(b"quick", seconds=1e-4, num_bytes=8)
    policy.learn(b"epoch", seconds=60.0, num_bytes=8)
    assert policy.group_size([b"quick"]) > 1
    assert policy.group_size([b"quick", b"epoch"]) == 1
    assert policy.group_size([b"quick", b"new"]) == 1


@given(st.lists(st.tuples(st.binary(max_size=2), st.floats(0, 10), st.integers(0, 10**7)), max_size=400))
def test_a_window_holds_three_groups_and_functions_are_forgotten(known: list[tuple[bytes, float, int]]) -> None:
    policy = BatchingPolicy()
    for key, seconds, num_bytes in known:
        policy.learn(key, seconds=seconds, num_bytes=num_bytes)
        assert 1 <= policy.group_size([key]) <= 16
        in_a_second = min(8, math.ceil(1 / max(seconds, 0.01))) if key else 8
        assert policy.window([key]) >= max(in_a_second, 3, 2 * policy.group_size([key]))
    keys = [bytes([number % 256, number // 256]) for number in range(1000)]
    for key in keys:
        policy.learn(key, seconds=1e-3, num_bytes=8)
    assert sum(policy.group_size([key]) > 1 for key in keys) == 256


@pytest.mark.parametrize("num_values", [1, 100, 1_000, 3_000, 7_000])
def test_the_answer_of_a_group_of_small_results_comes_with_the_call(num_values: int) -> None:
    """Ray returns up to 100 KB inline; larger answers go to the object store."""
    result = pack_result({"loss": torch.tensor(0.5), "row": torch.rand(num_values)}, absent=False, rows=4)
    policy = BatchingPolicy()
    policy.learn(b"f", seconds=1e-4, num_bytes=result.num_bytes)
    answer = GroupResult((result,) * policy.group_size([b"f"]), 0.1)
    assert len(cloudpickle.dumps(answer)) < 100_000
