from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raydist.replicas.central.central_copy import CentralCopy, CopiedVariables


def trained() -> CopiedVariables:
    """A parameter of a page, another, and an optimizer that remembers something of both."""
    parameters = [torch.nn.Parameter(torch.ones(1024)), torch.nn.Parameter(torch.full((3,), 2.0))]
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.5)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return CopiedVariables(parameters, [optimizer])


def two(*, map_parameters: bool) -> tuple[tuple[CentralCopy, CopiedVariables], tuple[CentralCopy, CopiedVariables]]:
    """Two replicas that show one copy; the second is written by nobody."""
    one, other = ((CentralCopy(map_parameters=map_parameters), trained()) for _ in range(2))
    share(one, other)
    return one, other


def share(one: tuple[CentralCopy, CopiedVariables], other: tuple[CentralCopy, CopiedVariables]) -> tuple[float, float]:
    image = one[0].offer(one[1])
    farthest = one[0].take(image, one[1])[0], other[0].take(image, other[1])[0]
    one[0].settled()
    return farthest


EITHER = pytest.mark.parametrize("map_parameters", [True, False])


@EITHER
def test_replicas_show_one_copy(map_parameters: bool) -> None:
    (one, mine), (other, theirs) = two(map_parameters=map_parameters)
    assert one.covers(mine)
    assert other.covers(theirs)
    (sgd,) = mine.optimizers
    with one.updating(sgd):
        sgd.step()
    one.fetch_copies()
    other.fetch_copies()
    assert mine.parameters[0][0] == theirs.parameters[0][0] == -1.5
    buffers = [each.optimizers[0].state[each.parameters[1]]["momentum_buffer"] for each in (mine, theirs)]
    assert buffers[0].tolist() == buffers[1].tolist() == [1.5] * 3
    assert one.written() == other.written() == 0


@EITHER
def test_what_is_written_by_hand_is_seen_and_published(map_parameters: bool) -> None:
    (one, mine), (other, theirs) = two(map_parameters=map_parameters)
    mine.parameters[1].data.fill_(9.0)
    theirs.parameters[1].data.fill_(9.0)
    assert one.written() == other.written() != 0
    assert theirs.parameters[0][0] == 0.0
    one.publish()
    assert other.farthest()[0] == 0.0
    one.fetch()
    other.fetch()
    assert one.written() == other.written() == 0
    assert theirs.parameters[1].tolist() == [9.0] * 3


@EITHER
def test_numbers_that_change_places_are_written(map_parameters: bool) -> None:
    (one, mine), (_, _) = two(map_parameters=map_parameters)
    with torch.no_grad():
        mine.parameters[1].copy_(torch.tensor([1.0, 2.0, 3.0]))
    one.publish()
    one.fetch()
    assert one.written() == 0
    mine.parameters[1].data.copy_(torch.tensor([3.0, 2.0, 1.0]))
    assert one.written() != 0


@EITHER
def test_other_values_are_told_from_those_published(map_parameters: bool) -> None:
    (one, mine), (other, theirs) = two(map_parameters=map_parameters)
    mine.parameters[1].data.fill_(8.0)
    theirs.parameters[1].data.fill_(4.0)
    one.publish()
    distance, tensor = other.farthest()
    assert distance == 0.5
    assert tensor is theirs.parameters[1]
    other.fetch()
    assert theirs.parameters[1].tolist() == [8.0] * 3


@EITHER
def test_new_tensors_are_placed_and_nothing_else_moves(map_parameters: bool) -> None:
    one, other = two(map_parameters=map_parameters)
    for _, held in (one, other):
        held.parameters[0].data = torch.full((1024,), 5.0)
    assert not one[0].covers(one[1])
    shard = one[0]._shard
    assert share(one, other) == (0.0, 0.0)
    assert one[0]._shard is shard, "there is room in it"
    assert other[0].covers(other[1])
    for _, held in (one, other):
        held.parameters[0].data = torch.full((7,), 6.0)
    assert share(one, other) == (0.0, 0.0)
    assert one[0]._shard is not shard
    assert other[1].parameters[0].tolist() == [6.0] * 7
    assert other[1].parameters[1].tolist() == [1.0] * 3


def test_values_that_differ_where_they_are_placed_are_measured() -> None:
    one, other = two(map_parameters=True)
    one[1].parameters[1].data = torch.full((3,), 4.0)
    other[1].parameters[1].data = torch.full((3,), 3.0)
    assert share(one, other) == (0.0, 0.25)


@EITHER
def test_an_update_that_fails_leaves_every_tensor_in_its_place(map_parameters: bool) -> None:
    (one, mine), _ = two(map_parameters=map_parameters)
    (sgd,) = mine.optimizers
    with pytest.raises(KeyError), one.updating(sgd):
        raise KeyError
    assert one.covers(mine)


def test_what_is_forgotten_keeps_its_values() -> None:
    (one, mine), _ = two(map_parameters=True)
    one.forget()
    assert mine.parameters[0][0] == 0.0
    assert not one.covers(mine)


def test_the_file_goes_also_where_nobody_takes_the_offer() -> None:
    copy = CentralCopy()
    image = copy.offer(trained())
    assert image.address is not None
    path = Path("/dev/shm") / image.address.name  # where it must not stay
    assert path.exists()
    copy.forget()
    assert not path.exists()


def test_what_was_written_by_hand_is_kept_where_others_move() -> None:
    one, other = two(map_parameters=True)
    for _, held in (one, other):
        held.parameters[0].data = torch.full((1024,), 5.0)
        held.parameters[1].data.fill_(7.0)
    assert share(one, other) == (0.0, 0.0)
    assert one[0].written() == other[0].written() == 0
    assert [held.parameters[1].tolist() for _, held in (one, other)] == [[7.0] * 3] * 2
