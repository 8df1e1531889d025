"""Which objects a worker has, under which handles."""

from __future__ import annotations

from typing import Any

import torch

from raydist.replicas.ps.optimizers import KnownObjects
from tests.replicas.ps.ps_workers import Held


def held(*objects: object) -> Any:
    found = Held()  # stands for a VariablesView
    for handle, obj in enumerate(objects, 1):
        found.table.add(handle, obj)
    return found


def test_nothing_is_looked_at_again_before_something_has_come_or_gone() -> None:
    known, variables = KnownObjects(), held(torch.zeros(1))
    assert known.look(variables)
    assert not known.look(variables)
    variables.table.release(1)
    assert known.look(variables)
    assert 1 not in known
    assert known.get(1) is None


def test_members_of_groups_are_told_by_their_handles() -> None:
    weight, stranger = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([{"params": [weight]}, {"params": [stranger]}], lr=1.0)
    known = KnownObjects()
    known.look(held(optimizer, weight))
    assert known.membership(optimizer) == ((2,), (0,))
    assert known.handle_of(stranger) is None
    assert [handle for handle, _ in known.tensors()] == [2]
