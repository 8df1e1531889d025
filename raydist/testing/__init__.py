"""Contract tests for authors of their own strategies; raydist's strategies pass the same tests. Needs pytest.

`check_strategy(make)` checks everything that a strategy promises.
"""

from raydist.testing.strategy_contract import CHECKS, check_closing, check_program, check_strategy, checks_of

__all__ = ["CHECKS", "check_closing", "check_program", "check_strategy", "checks_of"]
