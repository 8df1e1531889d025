from __future__ import annotations

from raydist.summaries.said_once import GraphShown, Hyperparameters, Text


def test_the_first_replica_speaks_for_all() -> None:
    assert Text(("a",)).joined([Text(("b",))]) == Text(("a",))
    assert Hyperparameters({"lr": 0.1}).joined([Hyperparameters({})]) == Hyperparameters({"lr": 0.1})
    assert GraphShown(b"one").joined([GraphShown(b"two")]) == GraphShown(b"one")


def test_sizes_are_known() -> None:
    assert Text(("a" * 1000,)).num_bytes > 1000
    assert GraphShown(b"g" * 1000).num_bytes > 1000
