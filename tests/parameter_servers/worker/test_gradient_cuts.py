from __future__ import annotations

import torch

from raydist.parameter_servers.slices import ServedSlice
from raydist.parameter_servers.worker.slices import cut_gradients, form_of, rows_and_values


def part(number: int, server: int, begin: int, *shape: int) -> ServedSlice:
    return ServedSlice(number, 1, "v", server, begin, shape, torch.float32)


WHOLE = (part(0, 1, 0),)
SPLIT = (part(1, 0, 0, 2, 3), part(2, 1, 2, 2, 3))


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
