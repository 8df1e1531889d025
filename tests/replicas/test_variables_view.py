from __future__ import annotations

from typing import Any

import torch

from raydist.replicas.rules import VariablesView
from tests.replicas.rank_variables import on_ranks


def make() -> list[Any]:
    layer = torch.nn.Linear(2, 1)
    return [layer, layer.weight, layer.bias, torch.optim.SGD(layer.parameters(), lr=0.1)]


def test_what_rules_see_of_a_replica() -> None:
    def body(variables: VariablesView, *objects: Any) -> None:
        _, weight, bias, sgd = objects
        assert [*variables.parameters()] == [weight, bias]
        assert [*variables.optimizers()] == [sgd]
        assert (variables.num_replicas, variables.rows) == (2, (1, 1))

    on_ranks(2, make, body)


def test_what_replicas_do_together() -> None:
    def body(variables: VariablesView, *_: Any) -> tuple[Any, ...]:
        mean, first = torch.tensor([2.0 * variables.rank]), torch.tensor([variables.rank + 5])
        variables.all_reduce(mean, "MEAN")
        variables.broadcast(first)
        numbers = variables.gather_numbers("a test", variables.rank, 7)
        return mean.item(), first.item(), numbers, variables.gather_objects({"rank": variables.rank})

    assert on_ranks(2, make, body) == [(1.0, 5, [(0, 7), (1, 7)], [{"rank": 0}, {"rank": 1}])] * 2
