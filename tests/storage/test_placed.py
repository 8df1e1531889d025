from __future__ import annotations

import pytest
import torch

from raydist.storage.placed import PlacedTensor, can_be_placed, distance_of, places_of, storage_bytes
from raydist.storage.shard import VariableShard


def place(tensors: list[torch.Tensor], *, mapped: bool = True) -> list[PlacedTensor]:
    """The tensors in a new shard, with the values that they have."""
    places, firsts = places_of(tensors)
    shard = VariableShard.create([len(storage_bytes(first)) for first in firsts])
    shard.unlink()
    for number, first in enumerate(firsts):
        shard.shared(number).copy_(storage_bytes(first))
    return [
        PlacedTensor.bind(tensor, where, shard, mapped=mapped) for tensor, where in zip(tensors, places, strict=True)
    ]


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6, dtype=torch.int16).reshape(2, 3).t(),
        torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.arange(10.0)[3:7],
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.tensor([True, False, True]),
    ],
    ids=["plain", "transposed", "channels last", "a part", "bfloat16", "bool"],
)
def test_values_and_strides_are_kept(tensor: torch.Tensor, mapped: bool) -> None:
    before = tensor.clone()
    stride = tensor.stride()
    (placed,) = place([tensor], mapped=mapped)
    assert torch.equal(tensor, before)
    assert tensor.stride() == stride
    assert placed.in_place
    assert distance_of(tensor, placed.shared) == 0


def test_tensors_that_share_memory_go_on_sharing_it() -> None:
    whole = torch.arange(6.0)
    part = whole[2:4]
    place([whole, part, torch.zeros(2)])
    part.fill_(9.0)
    assert whole.tolist() == [0.0, 1.0, 9.0, 9.0, 4.0, 5.0]


def test_a_parameter_shows_the_one_copy_and_its_own_again() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    (placed,) = place([parameter])
    version = parameter._version
    placed.show_shared()
    with torch.no_grad():
        parameter.mul_(2.0)
    placed.show_own()
    assert placed.shared.tolist() == parameter.tolist() == [2.0] * 4
    assert parameter._version > version
    parameter.data.mul_(5.0)
    assert placed.shared.tolist() == [2.0] * 4
    assert distance_of(parameter, placed.shared) == 4.0


def test_a_copy_elsewhere_is_fetched() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    (placed,) = place([parameter], mapped=False)
    placed.shared.fill_(3.0)
    assert parameter.tolist() == [1.0] * 4
    placed.fetch()
    assert parameter.tolist() == [3.0] * 4


def test_new_memory_is_seen() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    (placed,) = place([parameter])
    parameter.data = parameter.data.t()
    assert not placed.in_place
    placed.show_own()
    assert placed.in_place
    parameter.data = parameter.data.clone()
    assert not placed.in_place


def test_what_differs_is_measured() -> None:
    weights, counts = torch.tensor([1.0, 4.0]), torch.tensor([1, 2])
    placed = place([weights, counts])
    weights[0] += 2.0
    counts[0] = 3
    assert [distance_of(each.own, each.shared) for each in placed] == [0.5, torch.inf]
    weights[0] = torch.nan
    assert distance_of(weights, placed[0].shared) == torch.inf


def test_what_can_be_placed() -> None:
    assert can_be_placed(torch.zeros(1))
    assert not can_be_placed(3.0)
    assert not can_be_placed(torch.zeros(0))
    assert not can_be_placed(torch.zeros(2, 2).to_sparse())
    assert not can_be_placed(torch.zeros(1, device="meta"))


def test_other_shapes_and_dtypes_are_far_apart() -> None:
    assert distance_of(torch.zeros(2), torch.zeros(3)) == torch.inf
    assert distance_of(torch.zeros(2), torch.zeros(2, dtype=torch.float64)) == torch.inf
