"""Rows of each replica's own."""

from __future__ import annotations

import torch

import raydist as rd


def rows(strategy: rd.Strategy, values: list[list[float]]) -> rd.PerReplica:
    made = strategy.distribute_values_from_function(
        lambda ctx: torch.tensor(values[ctx.replica_id_in_sync_group], dtype=torch.float64)
    )
    assert isinstance(made, rd.PerReplica)
    return made
