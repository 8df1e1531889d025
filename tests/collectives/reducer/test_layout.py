from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.collectives.base import Membership
from raydist.collectives.reducer.bucket import Bucket, ParameterSpec, plan_buckets
from raydist.collectives.reducer.buckets import BucketPlan
from tests.collectives.local_group import LocalGroup, LocalHub

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def specs_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[ParameterSpec]:
    return [ParameterSpec(index, shape, dtype, CPU) for index, shape in enumerate(shapes)]


def indices(layout: Sequence[Bucket]) -> list[list[int]]:
    return [list(bucket.indices) for bucket in layout]


def test_order_of_gradients_with_a_small_first_bucket() -> None:
    layout = plan_buckets(specs_of((4,), (4,), (4,), (4,), (4,)), bucket_bytes=32, first_bucket_bytes=16)
    assert indices(layout) == [[0], [1, 2], [3, 4]]


def test_the_first_bucket_is_sent_with_the_gradient_that_fills_it() -> None:
    shapes = specs_of((2,), (1,), (100,), (4,), (4,))  # as in a network whose last layer is small
    assert indices(plan_buckets(shapes, bucket_bytes=1000, first_bucket_bytes=40)) == [[0, 1, 2], [3, 4]]
    assert indices(plan_buckets(shapes, bucket_bytes=400, first_bucket_bytes=40)) == [[0, 1], [2], [3, 4]]
    assert indices(plan_buckets(shapes, bucket_bytes=1000, first_bucket_bytes=1000)) == [[0, 1, 2, 3, 4]]


def test_a_large_parameter_has_a_bucket_for_itself() -> None:
    assert indices(plan_buckets(specs_of((2,), (100, 100), (2,)), bucket_bytes=64)) == [[0], [1], [2]]


def test_one_dtype_per_bucket() -> None:
    specs = [ParameterSpec(index, (2,), DTYPES[index % 2], CPU) for index in range(4)]
    layout = plan_buckets(specs, bucket_bytes=1000)
    assert sorted(indices(layout)) == [[0, 2], [1, 3]]
    assert all(spec.dtype == bucket.dtype for bucket in layout for spec in bucket.specs)


def test_nothing_to_train() -> None:
    assert plan_buckets([], bucket_bytes=1) == ()


def test_fingerprints_tell_parameters_apart() -> None:
    group = LocalGroup(LocalHub(), Membership("g", 0, 0, 1), timeout_s=5.0).start()

    def fingerprint(specs: Sequence[ParameterSpec]) -> int:
        return BucketPlan(group, {spec.index: spec for spec in specs}, (), lambda _: ()).fingerprint

    found = {
        fingerprint(specs_of((4, 2))),
        fingerprint(specs_of((2, 4))),
        fingerprint(specs_of((4, 2), dtype=torch.float64)),
        fingerprint(specs_of((4, 2), (1,))),
        fingerprint([ParameterSpec.of(0, torch.zeros(2, 4).t())]),
    }
    assert len(found) == 5
    # Fixed for all time and processes: Python's own hash would not be.
    assert fingerprint(specs_of((4, 2))) in found
    assert max(found) < 2**63


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), max_size=12),
    st.integers(1, 400),
)
def test_every_parameter_has_one_place(parameters: list[tuple[int, torch.dtype]], bucket_bytes: int) -> None:
    specs = [ParameterSpec(index, (numel,), dtype, CPU) for index, (numel, dtype) in enumerate(parameters)]
    layout = plan_buckets(specs, bucket_bytes=bucket_bytes)
    assert sorted(index for bucket in indices(layout) for index in bucket) == list(range(len(specs)))
    for bucket in layout:
        ends = [offset + spec.numel for offset, spec in zip(bucket.offsets, bucket.specs, strict=True)]
        assert list(bucket.offsets) == [0, *ends[:-1]]
        assert bucket.numel == ends[-1]
        assert len(bucket.specs) == 1 or bucket.numel * bucket.dtype.itemsize <= bucket_bytes
