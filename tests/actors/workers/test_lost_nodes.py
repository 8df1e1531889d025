"""Nodes that hold stored results are killed: the elements and their order stay the same."""

from __future__ import annotations

import pytest

from tests.actors.workers.lost_nodes import lose_nodes
from tests.several_nodes import several_nodes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def test_blocks_of_lost_nodes_are_made_again() -> None:
    with several_nodes(cpus=()) as nodes:
        assert nodes.run(lose_nodes, 1, 2) == 2
