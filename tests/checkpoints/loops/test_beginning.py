"""Which runs have two halves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import raydist as rd
from raydist.checkpoints.loops.beginning import begin_loop
from raydist.distributed_dataset import DistributedIterator
from raydist.preemption.boundaries import undivided_run
from tests.checkpoints.loops.in_process import Host


def distributed_iterator() -> DistributedIterator:
    """One that has not begun, and needs nobody."""
    job: Any = SimpleNamespace(state=None, label="nothing")
    nobody: Any = None
    return DistributedIterator(nobody, job, find_spec=lambda: None, drain=lambda: None)


def test_only_runs_that_are_given_iterators_while_somebody_watches(tmp_path: Path) -> None:
    host, iterator = Host(1, dict, []), distributed_iterator()
    assert begin_loop(((iterator,), {}), host) is None
    with rd.CheckpointManager(rd.Checkpoint(state=rd.State()), tmp_path, 1) as manager:
        manager.watch()
        assert begin_loop(((1, "text"), {}), host) is None
        with undivided_run():
            assert begin_loop(((iterator,), {}), host) is None
        loop = begin_loop(((1, {"nested": iterator}), {}), host)
        assert loop is not None
        assert [each.directory for each in loop.order().managers] == [str(tmp_path)]
    host.close()
