"""A worker asks every server for what it has; tests/coordinator/test_saving.py has servers that do it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from raydist.checkpoints.new_files import NewFiles
from raydist.checkpoints.sharing.served_share import ServedShares, begin_served_share
from raydist.checkpoints.sharing.shares import Share, ShareRequest
from raydist.checkpoints.sharing.slice_orders import SaveOrder
from raydist.parameter_servers.requests import BeginSave
from raydist.parameter_servers.slices import ServedSlice
from raydist.parameter_servers.worker.client import Ask
from raydist.pipelines.stored.directory_files import LocalFiles


class Servers:
    """Two, the second one has all weights."""

    num_servers = 2

    def __init__(self) -> None:
        self.asked: dict[int, Ask] = {}
        self.read = 0

    def places(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[ServedSlice, ...]]:
        return {
            name: (ServedSlice(5, 1, name, 1, 0, tuple(tensor.shape), tensor.dtype),)
            for name, tensor in tensors.items()
            if name.endswith("weight")
        }

    def handle_of(self, obj: torch.optim.Optimizer | torch.Tensor) -> int:
        return 9

    def read_states(self, optimizer: torch.optim.Optimizer) -> None:
        self.read += 1
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter] = {"momentum_buffer": torch.ones_like(parameter)}

    def exchange(self, asks: Mapping[int, Ask]) -> Any:
        self.asked = dict(asks)

    def order(self, server: int) -> SaveOrder:
        request = self.asked[server].request
        assert isinstance(request, BeginSave)
        order: SaveOrder = request.order
        return order


def begun(small_bytes: int) -> tuple[Servers, Share, torch.optim.Optimizer]:
    servers, model = Servers(), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    stems = {"model": "model", "sgd": "sgd"}
    request = ShareRequest("t", NewFiles(LocalFiles("/tmp/x")), stems, small_bytes=small_bytes)
    told = begin_served_share(ServedShares(servers), request, {"model": model, "sgd": optimizer}, {"model": model})
    share = pickle.loads(told)
    assert isinstance(share, Share)
    return servers, share, optimizer


def test_large_objects_are_asked_for_where_they_are() -> None:
    servers, share, optimizer = begun(0)
    assert set(servers.asked) == {0, 1}  # each is to say that it is done
    model, state = servers.order(1).files
    assert [place.key for place in model.slices] == ["weight"]
    assert (state.optimizer, [place.key for place in state.slices]) == (9, ["weight"])
    assert [file.given for file in servers.order(0).files] == [("bias",)]
    assert servers.read == 0
    assert share.objects["sgd"].values["param_groups"][0]["params"] == ["weight", "bias"]
    assert share.objects["sgd"].class_name == "SGD"
    assert share.objects["model"].values["bias"] == {"$tensor": "bias"}


def test_small_objects_go_to_one_server_each_and_the_worker_forgets_what_it_read() -> None:
    servers, share, optimizer = begun(1 << 20)
    files = [*servers.order(0).files, *servers.order(1).files]
    given = {file.owner: set(file.given) for file in files}
    assert given == {"model": {"weight", "bias"}, "sgd": {"weight.momentum_buffer", "bias.momentum_buffer"}}
    assert sum(len(ask.tensors) for ask in servers.asked.values()) == 4
    assert servers.read == 1
    assert not optimizer.state
    assert "weight" in share.objects["sgd"].values
