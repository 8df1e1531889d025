"""What every strategy must keep, whatever runs underneath; `check_strategy` is all of it.

A check is given a strategy that others have used before and will use again, and leaves it usable; `check_closing` is
given a function that makes a new one.
"""

from __future__ import annotations

from collections.abc import Callable

import raydist as rd
from raydist.strategies.synchronous import SynchronousStrategy
from raydist.testing.error_checks import check_bad_steps, check_closing, check_copies, check_errors, check_two_at_once
from raydist.testing.gradient_checks import (
    check_gradient_reduction,
    check_local_updates,
    check_orders,
    check_program,
    check_training,
)
from raydist.testing.mode_checks import check_inference_mode, check_modes
from raydist.testing.value_checks import check_batches, check_collectives, check_numbers, check_scope, check_values
from raydist.testing.variable_checks import (
    check_aggregation,
    check_late_parameters,
    check_metrics,
    check_origin,
    check_state_dict,
)

__all__ = ["CHECKS", "check_closing", "check_program", "check_strategy", "checks_of"]

CHECKS: tuple[Callable[[rd.Strategy], None], ...] = (
    check_numbers,
    check_values,
    check_batches,
    check_collectives,
    check_scope,
    check_gradient_reduction,
    check_orders,
    check_modes,
    check_inference_mode,
    check_copies,
    check_state_dict,
    check_aggregation,
    check_metrics,
    check_late_parameters,
    check_origin,
    check_errors,
    check_bad_steps,
    check_two_at_once,
    check_training,
)


# Those of strategies whose replicas train on gradients of their own in the place of those that need global ones.
_NEED_GLOBAL_GRADIENTS = (
    check_gradient_reduction,
    check_orders,
    check_state_dict,
    check_inference_mode,  # compares what all replicas compute with what the driver does
    check_training,
)


def checks_of(strategy: rd.Strategy) -> tuple[Callable[[rd.Strategy], None], ...]:
    """The checks for what a strategy declares: all, or those for local updates."""
    if not isinstance(strategy, SynchronousStrategy) or strategy.replica_rules().exchanges_gradients:
        return CHECKS
    return (*(check for check in CHECKS if check not in _NEED_GLOBAL_GRADIENTS), check_local_updates)


def check_strategy(make: Callable[[], rd.Strategy]) -> None:
    """Everything that a strategy promises, for one from outside of this project as well.

    Args:
        make: Makes a new strategy: called several times, each is closed.

    Raises:
        AssertionError: A promise is not kept.
    """
    check_closing(make)
    with make() as strategy:
        for check in checks_of(strategy):
            check(strategy)
