"""Both kinds of memory of a bucket; that of devices with lazy tensors here on the CPU, where both work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from raydist.collectives.reducer.bucket import (
    Bucket,
    BucketMemory,
    LazyBucketMemory,
    ParameterSpec,
    plan_buckets,
)

Kind = Callable[[Bucket, torch.Tensor], BucketMemory]
KINDS: tuple[Kind, ...] = (BucketMemory, LazyBucketMemory)


def memory_of(*parameters: torch.Tensor, kind: Kind, compression: torch.dtype | None = None) -> BucketMemory:
    """One bucket."""
    specs = [ParameterSpec.of(index, parameter) for index, parameter in enumerate(parameters)]
    (bucket,) = plan_buckets(specs, bucket_bytes=1 << 30, compression=compression)
    return kind(bucket, torch.full((bucket.numel + 3,), torch.nan, dtype=bucket.wire))


def reduced(memory: BucketMemory, factor: float = 1.0) -> list[torch.Tensor]:
    """As after a reduction that multiplies."""
    memory.pack()
    memory.flat.mul_(factor)
    memory.unpack()
    return list(memory.gradients())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", [6, 1 << 18])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_go_in_scaled_and_out_in_shape(kind: Kind, numel: int, scale: float, dtype: torch.dtype) -> None:
    gradients = [torch.arange(numel, dtype=dtype).reshape(2, -1), torch.tensor(3.0, dtype=dtype)]
    memory = memory_of(*gradients, kind=kind)
    memory.fill(gradients, scale)
    for value, gradient in zip(reduced(memory, 2.0), gradients, strict=True):
        torch.testing.assert_close(value, gradient * scale * 2.0, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [2, 1 << 17])
def test_missing_gradients_are_zero(kind: Kind, rows: int) -> None:
    memory = memory_of(*[torch.zeros(rows, 2)] * 3, kind=kind)
    memory.fill([torch.full((rows, 2), 3.0), None, torch.ones(rows, 2)], 0.5)
    assert [value.unique().tolist() for value in reduced(memory)] == [[1.5], [0.0], [0.5]]
    assert memory.is_finite()
    memory.fill([None, torch.full((rows, 2), torch.inf), None], 0.5)
    assert not memory.is_finite()


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_gradients_are_rounded_once(kind: Kind) -> None:
    memory = memory_of(torch.zeros(5), kind=kind, compression=torch.bfloat16)
    memory.fill([torch.full((5,), 1.001)], 3.0)
    (value,) = reduced(memory, 2.0)
    assert (value.dtype, value.tolist()) == (torch.float32, [6.0] * 5)


def test_a_gradient_lies_in_memory_as_its_parameter_does() -> None:
    images = torch.zeros(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    gapped, nothing = torch.zeros(4, 6)[:, ::2], torch.zeros(0, 3)
    memory = memory_of(images, gapped, nothing, kind=BucketMemory)
    gradient = torch.randn(4, 3, 2, 2)
    memory.fill([gradient, torch.ones(4, 3), nothing], 1.0)
    values = memory.gradients()
    assert [value.stride() for value in values[:2]] == [images.stride(), (3, 1)]
    assert [value.shape for value in values] == [images.shape, gapped.shape, nothing.shape]
    assert torch.equal(values[0], gradient)


def test_gradients_may_be_detached_in_place() -> None:
    (value,) = memory_of(torch.zeros(3), kind=BucketMemory).gradients()
    assert value.detach_() is value


@pytest.mark.parametrize(
    "derive",
    [
        lambda value: value,
        lambda value: value[:1],
        lambda value: value.detach().view(-1),
        lambda value: value.numpy(),
        lambda value: (value * torch.ones(2, requires_grad=True)).sum(),
        lambda value: [value.data],
    ],
)
def test_memory_is_free_when_nothing_refers_to_it(derive: Callable[[torch.Tensor], object]) -> None:
    memory = memory_of(torch.zeros(2), torch.zeros(3), kind=BucketMemory)
    assert memory.is_free()
    values = list(memory.gradients())
    assert not memory.is_free()
    derived = derive(values[0])
    values.clear()
    assert not memory.is_free()
    del derived
    assert memory.is_free()
