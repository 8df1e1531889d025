"""Faults on purpose, and contract tests for authors of their own strategies.

`FaultPlan` kills processes of a strategy at chosen steps. `check_strategy(make)` checks everything that a strategy
promises, as raydist's own strategies do it; this needs pytest.
"""

from raydist.testing.faults import Fault, FaultPlan
from raydist.testing.strategy_contract import CHECKS, check_closing, check_program, check_strategy, checks_of

__all__ = ["CHECKS", "Fault", "FaultPlan", "check_closing", "check_program", "check_strategy", "checks_of"]
