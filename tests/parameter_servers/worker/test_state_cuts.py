from __future__ import annotations

import torch

from raydist.parameter_servers.slices import ServedSlice
from raydist.parameter_servers.worker.slices import cut_state, joined_state


def part(number: int, begin: int, *shape: int) -> ServedSlice:
    return ServedSlice(number, 1, "v", number, begin, shape, torch.float32)


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
