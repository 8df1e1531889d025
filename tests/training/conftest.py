"""Shared by the tests of training."""

from __future__ import annotations

import pytest

import raydist as rd


@pytest.fixture(params=["one", pytest.param("three", marks=pytest.mark.ray)])
def strategy(request: pytest.FixtureRequest) -> rd.Strategy:
    """One device, and three replicas."""
    if request.param == "one":
        return rd.OneDeviceStrategy("cpu")
    made: rd.Strategy = request.getfixturevalue("mirrored")(3)
    return made
