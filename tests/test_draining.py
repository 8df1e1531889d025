"""Which nodes go away."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raydist.cluster.ray_session import draining_nodes, this_node


def test_without_ray_nothing_is_drained_and_nothing_started() -> None:
    program = (
        "import ray; from raydist.cluster.ray_session import *\n"
        "print([*draining_nodes()], this_node(), ray.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]  False\n"


@pytest.mark.ray
def test_a_cluster_whose_nodes_stay(ray_cluster: None) -> None:
    assert draining_nodes() == frozenset()
    assert len(this_node()) == 56
