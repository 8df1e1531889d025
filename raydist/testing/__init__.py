"""What raydist's own parts are tested with, for those who write parts of their own. Nothing else here needs pytest.

`check_strategy(make)` is everything that a strategy promises.
"""

from raydist.testing.strategy_contract import CHECKS, check_closing, check_program, check_strategy, checks_of

__all__ = ["CHECKS", "check_closing", "check_program", "check_strategy", "checks_of"]
