"""The buffer of devices with lazy tensors does what the other one does; here on the CPU, where both work."""

from __future__ import annotations

import pytest
import torch

from raydist.collectives.buckets.buffer import BucketBuffer
from raydist.collectives.buckets.layout import ParameterSpec, plan_buckets
from raydist.collectives.buckets.lazy_buffer import LazyBuffer

SHAPES = ((2, 3), (), (4,), (0, 2))


def both() -> tuple[LazyBuffer, BucketBuffer]:
    specs = [ParameterSpec.of(index, torch.zeros(shape)) for index, shape in enumerate(SHAPES)]
    (bucket,) = plan_buckets(specs, bucket_bytes=1 << 20).buckets
    size = BucketBuffer.numel(bucket, 2)
    return (
        LazyBuffer(bucket, torch.zeros(size), rank=1, world_size=2),
        BucketBuffer(bucket, torch.zeros(size), rank=1, world_size=2),
    )


def gradients(buffer: LazyBuffer | BucketBuffer) -> list[torch.Tensor]:
    return [torch.full(slot.spec.shape, 1.0 + slot.spec.index) for slot in buffer.bucket.slots]


def test_what_is_filled_in_lies_at_the_same_places() -> None:
    lazy, plain = both()
    for buffer in (lazy, plain):
        buffer.fill(gradients(buffer), 0.5)
        buffer.add(1, torch.ones(buffer.bucket.slots[1].spec.shape))
        buffer.pack()
        buffer.tail.write(bytes([1] * 20), late=False, details=None)
    assert torch.equal(lazy.flat, plain.flat)
    for buffer in (lazy, plain):
        buffer.flat.mul_(2.0)  # the sum of two that are alike
        buffer.unpack()
    for mine, others in zip(lazy.lend(), plain.lend(), strict=True):
        assert torch.equal(mine, others)
    assert lazy.is_finite()
    lazy.add(0, torch.full(lazy.bucket.slots[0].spec.shape, float("inf")))
    assert lazy.is_finite() is (lazy.bucket.slots[0].spec.numel == 0)


def test_missing_and_sparse_gradients() -> None:
    lazy, plain = both()
    for buffer in (lazy, plain):
        some: list[torch.Tensor | None] = list(gradients(buffer))
        some[0] = None
        some[-1] = torch.full(buffer.bucket.slots[-1].spec.shape, 2.0).to_sparse()
        buffer.fill_some(some, 2.0)
        buffer.pack()
    assert torch.equal(lazy.flat, plain.flat)


def test_what_is_lent_stays_as_it_is() -> None:
    lazy, _ = both()
    lazy.fill(gradients(lazy), 1.0)
    lent = lazy.lend()
    kept = [value.clone() for value in lent]
    assert lazy.num_lent == 0
    lazy.take_back(lent)
    lazy.fill(gradients(lazy), 3.0)
    assert all(torch.equal(value, before) for value, before in zip(lent, kept, strict=True))


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_a_parameter_that_lies_otherwise(layout: torch.memory_format) -> None:
    parameter = torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=layout)
    (bucket,) = plan_buckets([ParameterSpec.of(0, parameter)], bucket_bytes=1 << 20).buckets
    buffer = LazyBuffer(bucket, torch.zeros(BucketBuffer.numel(bucket, 1)), rank=0, world_size=1)
    buffer.fill([parameter], 1.0)
    assert torch.equal(buffer.lend()[0], parameter)


def test_compressed_gradients_are_rounded_as_the_other_one_rounds_them() -> None:
    specs = [ParameterSpec.of(index, torch.zeros(shape)) for index, shape in enumerate(SHAPES)]
    (bucket,) = plan_buckets(specs, bucket_bytes=1 << 20, compression=torch.bfloat16).buckets
    lent = []
    for make in (LazyBuffer, BucketBuffer):
        flat = torch.zeros(BucketBuffer.numel(bucket, 2), dtype=torch.bfloat16)
        buffer = make(bucket, flat, rank=1, world_size=2)
        buffer.fill([torch.full(slot.spec.shape, 1.001) for slot in bucket.slots], 3.0)
        buffer.pack()
        buffer.flat.mul_(2)  # the reduction
        buffer.unpack()
        lent.append([*buffer.lend()])
    torch.testing.assert_close(lent[0], lent[1], rtol=0, atol=0)
    assert lent[0][0].dtype is torch.float32
    assert lent[0][0].unique().tolist() in ([], [6.0])
