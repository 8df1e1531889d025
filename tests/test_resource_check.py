from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.cluster.resource_check import why_never

Amounts = Mapping[str, float]
AMOUNTS = st.fixed_dictionaries({"CPU": st.sampled_from([0.0, 1.0, 2.0, 3.0])}, optional={"GPU": st.just(1.0)})


def can_be_placed(bundles: Sequence[Amounts], nodes: Sequence[Amounts], strategy: str) -> bool:
    """By trying every way."""
    for places in itertools.product(range(len(nodes)), repeat=len(bundles)):
        if strategy == "STRICT_PACK" and len(set(places)) > 1:
            continue
        if strategy == "STRICT_SPREAD" and len(set(places)) < len(bundles):
            continue
        loads = [[bundle for bundle, place in zip(bundles, places, strict=True) if place == node] for node in range(9)]
        if all(
            sum(one.get(name, 0.0) for one in load) <= node.get(name, 0.0)
            for load, node in zip(loads, nodes, strict=False)
            for name in ("CPU", "GPU")
        ):
            return True
    return False


@given(st.lists(AMOUNTS, min_size=1, max_size=4), st.lists(AMOUNTS, max_size=3))
@pytest.mark.parametrize("strategy", ["STRICT_PACK", "STRICT_SPREAD"])
def test_says_so_exactly_where_no_way_is_left(strategy: str, bundles: list[Amounts], nodes: list[Amounts]) -> None:
    assert (why_never(bundles, nodes, strategy) is None) == can_be_placed(bundles, nodes, strategy)


@given(AMOUNTS, st.integers(1, 4), st.lists(AMOUNTS, max_size=3))
@pytest.mark.parametrize("strategy", ["PACK", "SPREAD"])
def test_is_exact_for_bundles_of_one_kind(strategy: str, bundle: Amounts, count: int, nodes: list[Amounts]) -> None:
    bundles = [bundle] * count
    assert (why_never(bundles, nodes, strategy) is None) == can_be_placed(bundles, nodes, strategy)


@given(st.lists(AMOUNTS, min_size=1, max_size=4), st.lists(AMOUNTS, max_size=3))
def test_never_refuses_what_could_be_placed(bundles: list[Amounts], nodes: list[Amounts]) -> None:
    if can_be_placed(bundles, nodes, "PACK"):
        assert why_never(bundles, nodes, "PACK") is None


def test_names_what_is_lacking() -> None:
    nodes = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 32.0}]
    assert why_never([{"TPU": 4.0}], nodes, "PACK") == "no node has 4 TPU: the most is 0"
    assert why_never([{"CPU": 16.0, "GPU": 1.0}], nodes, "PACK") == (
        "no node has 16 CPU and 1 GPU on one node: the most is 32 and 4"
    )
    assert why_never([{"GPU": 1.0}] * 6, nodes, "PACK") == "all nodes together have room for 4, not 6"
    assert why_never([{"GPU": 2.0}, {"GPU": 1.0}, {"GPU": 4.0}], nodes, "SPREAD") == (
        "all nodes together have 4 GPU, not 7"
    )
    assert why_never([{"CPU": 1.0}], [], "PACK") == "no node has 1 CPU: the most is 0"
