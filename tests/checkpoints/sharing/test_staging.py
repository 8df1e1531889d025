"""Copies in memory that was used before."""

from __future__ import annotations

import torch

from raydist.checkpoints.capture import Capture, CapturedObject
from raydist.checkpoints.manifest import SavedObject
from raydist.checkpoints.sharing.staging import StagedShares, StagedStates


def capture(**tensors: torch.Tensor) -> Capture:
    return Capture({"model": CapturedObject(SavedObject("module"), tensors)})


def test_copies_do_not_follow_what_was_copied() -> None:
    weight = torch.ones(3)
    copied = StagedStates().copied(capture(w=weight)).objects["model"].tensors
    weight.zero_()
    assert copied["w"].tolist() == [1, 1, 1]


def test_memory_is_used_again_where_it_fits() -> None:
    staging = StagedStates()
    first = staging.copied(capture(w=torch.ones(3), v=torch.ones(2), gone=torch.ones(1))).objects["model"].tensors
    second = staging.copied(capture(w=torch.zeros(3), v=torch.zeros(2, dtype=torch.int64))).objects["model"].tensors
    assert second["w"].data_ptr() == first["w"].data_ptr()
    assert second["v"].data_ptr() != first["v"].data_ptr()
    assert (second["w"].tolist(), second["v"].tolist()) == ([0, 0, 0], [0, 0])
    assert set(staging._buffers) == {("model", "w"), ("model", "v")}


def test_parameters_are_copied_without_their_history() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    copied = StagedStates().copied(capture(w=parameter)).objects["model"].tensors["w"]
    assert not copied.requires_grad


def test_memory_of_a_share_is_used_again_once_it_is_given_back() -> None:
    staged = StagedShares()
    first = staged.copied("model", "w", torch.ones(3))
    second = staged.copied("model", "w", torch.zeros(3))
    assert second.data_ptr() != first.data_ptr()
    assert first.tolist() == [1, 1, 1], "it is being written"
    staged.give_back({("model", "w"): first})
    assert staged.copied("model", "w", torch.zeros(3)).data_ptr() == first.data_ptr()
    assert staged.copied("model", "w", torch.zeros(3)).data_ptr() != first.data_ptr()


def test_only_the_last_share_keeps_its_memory() -> None:
    staged = StagedShares()
    copies = {name: staged.copied("model", name, torch.ones(3)) for name in ("w", "v")}
    staged.give_back({("model", "w"): copies["w"]})
    staged.give_back({("model", "v"): copies["v"]})
    assert set(staged._free) == {("model", "v")}
    assert staged.copied("model", "v", torch.ones(4)).shape == (4,)
