from __future__ import annotations

from typing import Any

import torch

from raydist.replicas.rules import StrategyHooks, VariablesView
from tests.replicas.rank_variables import on_ranks


def test_rules_do_nothing_more_by_themselves() -> None:
    def body(variables: VariablesView, *_: Any) -> Any:
        rules = StrategyHooks()
        rules.restart()
        rules.after_batch(variables)
        rules.after_run(variables)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        done = rules.step_optimizer(variables, optimizer, lambda *args, **kwargs: (args, kwargs), 1, closure=2)
        rules.close()
        return done

    assert StrategyHooks.exchanges_gradients
    assert on_ranks(1, list, body) == [((1,), {"closure": 2})]
