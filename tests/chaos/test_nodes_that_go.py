"""Nodes are lost, or drained, and others come: training goes on."""

from __future__ import annotations

import pytest

from tests.chaos.extent import how_many
from tests.several_nodes import several_nodes
from tests.strategies.test_multi_worker import check_training_while_nodes_go

ROUNDS = how_many(1, 10)

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(100 + 100 * ROUNDS)]


@pytest.mark.parametrize("how", ["lost", "drained"])
def test_nodes_are_lost_or_drained_again_and_again(how: str) -> None:
    with several_nodes((4, 4)) as nodes:
        for _ in range(ROUNDS):
            check_training_while_nodes_go(nodes, how)
