from __future__ import annotations

import pytest
import torch

from raydist.collectives.buckets.buffer import BucketBuffer
from raydist.collectives.buckets.layout import ParameterSpec, plan_buckets

CPU = torch.device("cpu")


def buffer_of(*parameters: torch.Tensor) -> BucketBuffer:
    """One bucket; slots are in the reverse order of the parameters."""
    specs = [ParameterSpec.of(index, parameter) for index, parameter in enumerate(parameters)]
    (bucket,) = plan_buckets(specs, bucket_bytes=1 << 30).buckets
    flat = torch.full((BucketBuffer.numel(bucket, 1),), torch.nan, dtype=bucket.dtype)
    return BucketBuffer(bucket, flat, rank=0, world_size=1)


@pytest.mark.parametrize("numel", [6, 1 << 18])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_go_in_scaled_and_out_in_shape(numel: int, scale: float, dtype: torch.dtype) -> None:
    gradients = [torch.arange(numel, dtype=dtype).reshape(2, -1), torch.tensor(3.0, dtype=dtype)]
    buffer = buffer_of(*reversed(gradients))
    buffer.fill(gradients, scale)
    for lent, gradient in zip(buffer.lend(), gradients, strict=True):
        torch.testing.assert_close(lent, gradient * scale, rtol=0, atol=0)


def test_missing_and_sparse_gradients() -> None:
    buffer = buffer_of(*[torch.zeros(2, 2)] * 3)
    sparse = torch.eye(2).to_sparse()
    buffer.fill_some([sparse, None, torch.ones(2, 2)], 0.5)
    buffer.add(1, torch.full((2, 2), 7.0))
    assert [lent.tolist() for lent in buffer.lend()] == [[[0.5, 0], [0, 0.5]], [[7.0] * 2] * 2, [[0.5] * 2] * 2]


def test_a_gradient_lies_in_memory_as_its_parameter_does() -> None:
    images = torch.zeros(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    gapped, nothing = torch.zeros(4, 6)[:, ::2], torch.zeros(0, 3)
    buffer = buffer_of(nothing, gapped, images)
    gradient = torch.randn(4, 3, 2, 2)
    buffer.fill([gradient, torch.ones(4, 3), nothing], 1.0)
    lent = buffer.lend()
    assert [tensor.stride() for tensor in lent[:2]] == [images.stride(), (3, 1)]
    assert [tensor.shape for tensor in lent] == [images.shape, gapped.shape, nothing.shape]
    assert torch.equal(lent[0], gradient)


def test_what_is_lent_may_be_detached_in_place() -> None:
    (lent,) = buffer_of(torch.zeros(3)).lend()
    assert lent.detach_() is lent


def test_whoever_shares_the_memory_is_counted() -> None:
    buffer = buffer_of(torch.zeros(3), torch.zeros(2))
    assert buffer.num_lent == 0
    lent = list(buffer.lend())
    assert buffer.num_lent == 2
    shown, derived = lent[0].numpy(), (lent[0] * torch.ones(2, requires_grad=True)).sum()
    assert buffer.num_lent > 2
    del shown, derived
    alias = lent.pop()[:1]
    assert buffer.num_lent == 3, "itself, and the tensor that it is a view of"
    del alias
    assert buffer.num_lent == 1


def test_gradients_that_stay_move_out() -> None:
    buffer = buffer_of(torch.zeros(3), torch.zeros(2))
    buffer.fill([torch.full((2,), 1.0), torch.full((3,), 2.0)], 1.0)
    lent = buffer.lend()
    other = torch.zeros(5)
    buffer.take_back([other, *lent])
    assert buffer.num_lent == 0
    buffer.fill([torch.zeros(2), torch.zeros(3)], 1.0)
    assert [tensor.tolist() for tensor in lent] == [[1.0] * 2, [2.0] * 3]


def test_gradients_that_somebody_else_sees_stay_in_place() -> None:
    buffer = buffer_of(torch.zeros(3), torch.zeros(2))
    lent = buffer.lend()
    alias = lent[0].view(-1)
    buffer.take_back(lent)
    assert buffer.num_lent == 3
    assert alias.data_ptr() == lent[0].data_ptr()
