"""Which tensors of a state are variables, and where these lie."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raydist.parameter_servers.requests import Sender
from raydist.parameter_servers.slices import ServedSlice
from raydist.parameter_servers.worker.client import HeldSlices, ServerClient
from raydist.parameter_servers.worker.slices import SliceTable


def test_variables_are_known_by_their_memory() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects: dict[int, Any] = {1: model, 2: model.weight, 3: model.bias, 4: optimizer}
    table = SliceTable()
    slices = [ServedSlice(number, 2, "weight", number, number, (1, 4), torch.float32) for number in range(2)]
    table.add(
        [*slices, ServedSlice(2, 3, "bias", 0, 0, (2,), torch.float32), ServedSlice(3, 5, "x", 0, 0, (), torch.float32)]
    )
    read: list[list[torch.optim.Optimizer]] = []
    client = ServerClient((), Sender(0, 0), timeout_s=1.0)
    handles = {id(obj): handle for handle, obj in objects.items()}
    held = HeldSlices(client, table, objects.get, lambda obj: handles.get(id(obj)), read.append)
    found = held.places(
        {
            **model.state_dict(),
            "copy": model.weight.detach().clone(),
            "row": model.weight.detach()[0],
            "turned": model.weight.detach().T,
            "none": torch.empty(0),
        }
    )
    assert found == {"weight": tuple(slices), "bias": table.of(3)}
    assert held.handle_of(optimizer) == 4
    held.read_states(optimizer)
    assert read == [[optimizer]]
    assert held.num_servers == 0
