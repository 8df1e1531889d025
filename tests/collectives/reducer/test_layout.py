from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.collectives.reducer.bucket import BucketLayout, ParameterSpec, plan_buckets

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def specs_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[ParameterSpec]:
    return [ParameterSpec(index, shape, dtype, CPU) for index, shape in enumerate(shapes)]


def indices(layout: BucketLayout) -> list[list[int]]:
    return [[slot.spec.index for slot in bucket.slots] for bucket in layout.buckets]


def test_reverse_order_with_a_small_first_bucket() -> None:
    layout = plan_buckets(specs_of((4,), (4,), (4,), (4,), (4,)), bucket_bytes=32, first_bucket_bytes=16)
    assert indices(layout) == [[4], [3, 2], [1, 0]]


def test_the_first_bucket_is_sent_with_the_gradient_that_fills_it() -> None:
    shapes = specs_of((4,), (4,), (100,), (1,), (2,))  # as in a network whose last layer is small
    assert indices(plan_buckets(shapes, bucket_bytes=1000, first_bucket_bytes=40)) == [[4, 3, 2], [1, 0]]
    assert indices(plan_buckets(shapes, bucket_bytes=400, first_bucket_bytes=40)) == [[4, 3], [2], [1, 0]]
    assert indices(plan_buckets(shapes, bucket_bytes=1000, first_bucket_bytes=1000)) == [[4, 3, 2, 1, 0]]


def test_a_large_parameter_has_a_bucket_for_itself() -> None:
    assert indices(plan_buckets(specs_of((2,), (100, 100), (2,)), bucket_bytes=64)) == [[2], [1], [0]]


def test_one_dtype_per_bucket() -> None:
    specs = [ParameterSpec(index, (2,), DTYPES[index % 2], CPU) for index in range(4)]
    layout = plan_buckets(specs, bucket_bytes=1000)
    assert sorted(indices(layout)) == [[2, 0], [3, 1]]
    assert all(slot.spec.dtype == bucket.dtype for bucket in layout.buckets for slot in bucket.slots)


def test_nothing_to_train() -> None:
    assert plan_buckets([], bucket_bytes=1).buckets == ()


def test_fingerprints_tell_layouts_apart() -> None:
    layouts = [
        plan_buckets(specs_of((4, 2)), bucket_bytes=100),
        plan_buckets(specs_of((2, 4)), bucket_bytes=100),
        plan_buckets(specs_of((4, 2), dtype=torch.float64), bucket_bytes=100),
        plan_buckets(specs_of((4, 2), (1,)), bucket_bytes=100),
        plan_buckets(specs_of((4, 2), (1,)), bucket_bytes=1),
        plan_buckets([ParameterSpec.of(0, torch.zeros(2, 4).t())], bucket_bytes=100),
    ]
    assert len({layout.fingerprint for layout in layouts}) == len(layouts)
    # Fixed for all time and processes: Python's own hash would not be.
    assert layouts[0].fingerprint == plan_buckets(specs_of((4, 2)), bucket_bytes=100).fingerprint < 2**63


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), max_size=12),
    st.integers(1, 400),
)
def test_every_parameter_has_one_place(parameters: list[tuple[int, torch.dtype]], bucket_bytes: int) -> None:
    specs = [ParameterSpec(index, (numel,), dtype, CPU) for index, (numel, dtype) in enumerate(parameters)]
    layout = plan_buckets(specs, bucket_bytes=bucket_bytes)
    assert sorted(index for bucket in indices(layout) for index in bucket) == list(range(len(specs)))
    for bucket in layout.buckets:
        ends = [slot.offset + slot.spec.numel for slot in bucket.slots]
        assert [slot.offset for slot in bucket.slots] == [0, *ends[:-1]]
        assert bucket.numel == ends[-1]
        assert len(bucket.slots) == 1 or bucket.numel * bucket.dtype.itemsize <= bucket_bytes
    for index, (number, position) in layout.places.items():
        assert layout.buckets[number].slots[position].spec.index == index
