from __future__ import annotations

import torch

from raydist.parameter_servers.slices import PsSlice
from raydist.parameter_servers.worker.slices import (
    ReadVersions,
    SliceTable,
    cut_gradients,
    cut_state,
    form_of,
    joined_state,
    rows_and_values,
)


def part_of(number: int, handle: int, begin: int) -> PsSlice:
    return PsSlice(number, handle, "v", 0, begin, (2,), torch.float32)


def test_slices_come_in_the_order_of_their_rows_and_once() -> None:
    table = SliceTable()
    assert table.add([part_of(3, 7, 2), part_of(4, 7, 0), part_of(5, 8, 0)]) == [7, 8]
    assert [each.number for each in table.of(7)] == [4, 3]
    assert table.add([part_of(9, 7, 0)]) == []
    assert (7 in table, 9 in table, table.handles()) == (True, False, [7, 8])
    assert [each.number for each in table.forget(8)] == [5]
    assert table.forget(8) == ()


def test_a_change_of_ones_own_leaves_all_else_as_new_as_it_was() -> None:
    read = ReadVersions()
    read.add([1, 2, 3])
    assert read.older_than(0) == [1, 2, 3]
    read.note([1, 2, 3], 5)
    read.note_change([1], 6)
    assert read.older_than(6) == []
    read.note_change([1], 8)  # somebody else made version 7
    assert (read.older_than(8), read.newest) == ([2, 3], 8)
    assert (read.oldest([1]), read.oldest([1, 2]), read.oldest([])) == (8, 6, 8)
    read.forget()
    assert read.older_than(0) == [1, 2, 3]
    read.drop([1, 2])
    assert read.older_than(0) == [3]
    assert read.newest == 8


def test_what_was_older_does_not_become_newer() -> None:
    read = ReadVersions()
    read.note([1], 5)
    read.note([2], 7)
    read.note_change([2], 8)
    assert read.older_than(8) == [1]


def test_some_are_forgotten_and_a_version_is_asked_for() -> None:
    read = ReadVersions()
    read.note([1, 2], 5)
    read.forget([2, 3])
    assert (read.older_than(5), read.newest) == ([2, 3], 5)
    assert (read.is_of(1, 5), read.is_of(1, 4), read.is_of(2, 5), read.is_of(9, 5)) == (True, False, False, False)


def part_on(number: int, server: int, begin: int, *shape: int) -> PsSlice:
    return PsSlice(number, 1, "v", server, begin, shape, torch.float32)


WHOLE = (part_on(0, 1, 0),)
SPLIT = (part_on(1, 0, 0, 2, 3), part_on(2, 1, 2, 2, 3))


def test_each_server_gets_its_rows() -> None:
    scalar, matrix = torch.tensor(5.0), torch.arange(12.0).view(4, 3)
    cuts = cut_gradients([WHOLE, SPLIT], ["dense", "dense"])
    assert {server: cut.slices for server, cut in cuts.items()} == {1: (0, 2), 0: (1,)}
    assert [each.tolist() for each in cuts[1].tensors([scalar, matrix])] == [5, matrix[2:].tolist()]
    assert cuts[0].forms == ("dense",)


def test_rows_are_counted_from_the_slice_and_there_may_be_none() -> None:
    values = torch.tensor([[1.0] * 3, [2.0] * 3, [4.0] * 3])
    sparse = torch.sparse_coo_tensor(torch.tensor([[3, 2, 3]]), values, (4, 3), check_invariants=True)
    assert form_of(sparse) == "rows"
    cuts = cut_gradients([SPLIT], ["rows"])
    gradients = [rows_and_values(sparse)]
    rows, values = cuts[1].tensors(gradients)
    assert (rows.tolist(), values.tolist()) == ([0, 1], [[2.0] * 3, [5.0] * 3])
    rows, values = cuts[0].tensors(gradients)
    assert (rows.shape, values.shape) == ((0,), (0, 3))


def test_what_is_sparse_in_another_way_is_sent_whole() -> None:
    odd = torch.eye(3).to_sparse()
    assert form_of(odd) == "dense"
    whole = rows_and_values(odd)
    assert isinstance(whole, torch.Tensor)
    assert torch.equal(whole, torch.eye(3))
    dense = torch.ones(2, requires_grad=True)
    kept = rows_and_values(dense)
    assert isinstance(kept, torch.Tensor)
    assert kept.data_ptr() == dense.data_ptr()
    assert not kept.requires_grad


def part(number: int, begin: int, *shape: int) -> PsSlice:
    return PsSlice(number, 1, "v", number, begin, shape, torch.float32)


def test_what_was_cut_is_joined_again() -> None:
    slices = part(4, 0, 3, 2), part(5, 3, 1, 2)
    state = {"step": torch.tensor(3.0), "momentum": torch.arange(8.0).view(4, 2), "list": [1], "none": None}
    cut = cut_state(state, (4, 2), slices)
    assert cut[5]["momentum"].tolist() == [[6, 7]]
    assert cut[4]["momentum"].data_ptr() != state["momentum"].data_ptr()  # type: ignore[attr-defined]
    joined = joined_state(cut, (4, 2), slices)
    assert torch.equal(joined["momentum"], state["momentum"])  # type: ignore[arg-type]
    assert (joined["step"].item(), joined["list"], joined["none"]) == (3, [1], None)


def test_slices_share_nothing_that_can_change() -> None:
    slices = part(4, 0, 3, 2), part(5, 3, 1, 2)
    cut = cut_state({"history": [0.0]}, (4, 2), slices)
    cut[4]["history"].append(1.0)
    assert cut[5]["history"] == [0.0]
    joined = joined_state(cut, (4, 2), slices)
    joined["history"].clear()
    assert cut[4]["history"] == [0.0, 1.0]


def test_scalars_and_nothing() -> None:
    only = (part(1, 0),)
    state = {"step": torch.tensor(2.0), "square": torch.tensor(4.0)}
    assert joined_state(cut_state(state, (), only), (), only) == state
    assert joined_state({}, (), only) == {}
    assert joined_state({1: {}}, (), only) == {}


def test_momentum_of_rows_is_cut_too() -> None:
    dense = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [3.0, 4.0]])
    slices = part(4, 0, 3, 2), part(5, 3, 1, 2)
    for mine in (slices, (part(6, 0, 4, 2),)):
        momentum = dense.to_sparse(1)
        joined = joined_state(cut_state({"momentum": momentum}, (4, 2), mine), (4, 2), mine)["momentum"]
        assert joined.layout is torch.sparse_coo
        assert torch.equal(joined.to_dense(), dense)
        momentum._values().zero_()
        assert torch.equal(joined.to_dense(), dense)
