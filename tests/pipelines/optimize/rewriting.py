"""Looking at what rewrites do."""

from __future__ import annotations

from typing import Any

from raydist.dataset import Dataset
from raydist.options import OptimizationOptions, Options
from raydist.pipelines.engine.build import Plan, walk
from raydist.pipelines.run.plan import make_plan
from tests.contracts.op import collect, is_error, iterate, same


def optimised_names(dataset: Dataset, **flags: bool) -> list[str]:
    """The operations of the graph that is run, inputs first; without a prefetch unless it is asked for."""
    return [node.name for node in walk(plan_of(dataset, flags).optimised)]


def rewrites_of(dataset: Dataset, **flags: bool) -> tuple[str, ...]:
    """The settings that have changed the graph."""
    return plan_of(dataset, flags).rewrites


def plan_of(dataset: Dataset, flags: dict[str, bool]) -> Plan:
    """The plan with these settings."""
    chosen = {"inject_prefetch": False, **flags}
    return make_plan(dataset._op, Options(optimization=OptimizationOptions(**chosen)))


def assert_same(dataset: Dataset, flag: str) -> list[Any]:
    """Elements and errors, spec and cardinality are the same with `flag` on and off. Returns the elements."""
    both = [dataset.with_options(Options(optimization=OptimizationOptions(**{flag: on}))) for on in (True, False)]
    on, off = [collect(iterate(one), 200) for one in both]
    assert same(on, off), f"{flag} changes {off} to {on}"
    assert both[0].cardinality() == both[1].cardinality()
    if not all(map(is_error, on)):
        assert both[0].element_spec == both[1].element_spec
    return on
