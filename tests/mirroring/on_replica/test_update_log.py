from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.on_replica.update_log import UpdateLog


def test_rates_of_every_group_of_every_optimizer() -> None:
    table = ReplicaTable()
    log = UpdateLog(table)
    assert log.rates() == ()
    weight, bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    groups: list[dict[str, Any]] = [{"params": [weight], "lr": 0.5}, {"params": [bias]}]
    table.add(0, torch.optim.SGD(groups, lr=0.25))
    table.add(1, weight)
    adam = torch.optim.Adam([bias], lr=torch.tensor(2.0))
    table.add(2, adam)
    assert log.rates() == (0.5, 0.25, 2.0)
    adam.param_groups[0]["lr"] = 3.0
    assert log.rates() == (0.5, 0.25, 3.0)


def test_counts_from_the_last_restart() -> None:
    log = UpdateLog(ReplicaTable())
    log.note()
    log.note()
    assert log.count == 2
    log.restart()
    log.note()
    assert log.count == 1
