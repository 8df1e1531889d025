"""Each server is asked for the slices that it has, in files that are numbered through; the rest goes to one of them."""

from __future__ import annotations

import torch

from raydist.checkpoints.new_files import NewFiles
from raydist.checkpoints.sharing.shares import ShareRequest
from raydist.checkpoints.sharing.slice_orders import SliceFile, SliceOrders, SlicePlace
from raydist.checkpoints.tensor_file import RowRange
from raydist.parameter_servers.slices import ServedSlice
from raydist.pipelines.stored.directory_files import LocalFiles

REQUEST = ShareRequest("t", NewFiles(LocalFiles("/tmp/x")), {"model": "model", "adam": "adam"})


def part(number: int, server: int, begin: int, *shape: int) -> ServedSlice:
    return ServedSlice(number, 1, "w", server, begin, shape, torch.float32)


WEIGHT = (part(1, 0, 0, 3, 2), part(2, 1, 3, 2, 2))
BIAS = (part(3, 1, 0, 5),)
SCALAR = (part(4, 0, 0),)


def test_files_are_numbered_over_all_servers_and_slices_know_their_rows() -> None:
    orders = SliceOrders(REQUEST, 3)
    orders.add("model", {"w": WEIGHT, "b": BIAS, "s": SCALAR}, {"extra": torch.ones(2, 3).T})
    first, second, third = (orders.of(server) for server in range(3))
    assert first[0].files == (
        SliceFile(
            "model", 0, "model-00001-of-00003.safetensors", (SlicePlace("w", 1, RowRange(0, 3, 5)), SlicePlace("s", 4))
        ),
    )
    assert second[0].files == (
        SliceFile(
            "model", 1, "model-00002-of-00003.safetensors", (SlicePlace("w", 2, RowRange(3, 5, 5)), SlicePlace("b", 3))
        ),
    )
    assert third[0].files == (SliceFile("model", 2, "model-00003-of-00003.safetensors", given=("extra",)),)
    assert [len(each[1]) for each in (first, second, third)] == [0, 0, 1]  # to the one that has least to write
    assert third[1][0].is_contiguous()
    assert all(order.token == "t" for order, _ in (first, second, third))
    assert [place.is_first for place in (first[0].files[0].slices[0], second[0].files[0].slices[0])] == [True, False]


def test_what_optimizers_remember_is_asked_for_by_parameter_and_large_files_are_parted() -> None:
    orders = SliceOrders(REQUEST, 2, max_part_bytes=50)
    orders.add("adam", {"w": WEIGHT, "b": BIAS}, {}, optimizer=7, share=2.0)
    (first,) = orders.of(0)[0].files
    second, third = orders.of(1)[0].files
    assert [file.name for file in (first, second, third)] == [f"adam-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert [[place.key for place in file.slices] for file in (first, second, third)] == [["w"], ["w"], ["b"]]
    assert {file.optimizer for file in (first, second, third)} == {7}


def test_one_file_is_called_as_the_object() -> None:
    orders = SliceOrders(REQUEST, 2)
    orders.add("model", {"b": BIAS}, {})
    orders.add("adam", {}, {})
    assert [file.name for file in orders.of(1)[0].files] == ["model.safetensors"]
    assert orders.of(0)[0].files == ()
