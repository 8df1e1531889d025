from __future__ import annotations

from raydist.context.strategy_values import ValueContext


def test_value_context() -> None:
    context = ValueContext(1, 3)
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (1, 3)
