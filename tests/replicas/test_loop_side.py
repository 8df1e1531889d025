"""What a run that draws batches itself needs of its replica; the rest is tested by tests/checkpoints/loops."""

from __future__ import annotations

from raydist.actors.readers.replica_iterator import ReplicaIterator
from raydist.checkpoints.loops.replica_loop import ReplicaSide
from raydist.replicas.function_calls import LoopSide


def test_it_is_the_side_of_a_run() -> None:
    side: type[ReplicaSide] = LoopSide
    assert side is LoopSide
    assert ReplicaIterator(None).has_ended
