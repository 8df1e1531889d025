from __future__ import annotations

from raydist.context.strategy_values import gather, local_results, reduce
from raydist.core.values import PerReplica
from raydist.replicas.batch_rows import MergedValue, value_on


def test_replicas_without_rows_are_passed_over() -> None:
    merged = MergedValue([[1, 2], [3, 4], [1, 2]], [0, 1])
    assert reduce("SUM", merged, 0, 3) == 10
    assert reduce("MEAN", merged, 0, 3) == 2.5
    assert gather(merged, 0).tolist() == [1, 2, 3, 4]
    assert local_results(merged) == ([1, 2], [3, 4])
    assert str(merged) == "PerReplica(0: [1, 2], 1: [3, 4])"


def test_each_replica_gets_its_own_value_back() -> None:
    ranks = [0, 2]
    assert [value_on(MergedValue("abc", ranks), rank, ranks) for rank in range(3)] == ["a", "b", "c"]
    assert [value_on(PerReplica("ac"), rank, ranks) for rank in range(3)] == ["a", "a", "c"]
    assert [value_on(PerReplica("abc"), rank, ranks) for rank in range(3)] == ["a", "b", "c"]
    assert [value_on("all", rank, ranks) for rank in range(3)] == ["all"] * 3
