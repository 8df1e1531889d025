from __future__ import annotations

import pytest

import raydist as rd


@pytest.mark.parametrize(
    ("older", "name"),
    [
        ("experimental_distribute_dataset", "distribute_dataset"),
        ("experimental_run_v2", "run"),
        ("experimental_local_results", "local_results"),
        ("experimental_make_numpy_dataset", "make_numpy_dataset"),
    ],
)
def test_older_spellings_are_the_same_methods(older: str, name: str) -> None:
    strategy = rd.OneDeviceStrategy()
    assert getattr(strategy, older) == getattr(strategy, name)


def test_a_misspelled_method_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'distribute_datset'"):
        _ = rd.OneDeviceStrategy().distribute_datset


def test_leaving_with_closes() -> None:
    with rd.OneDeviceStrategy() as strategy:
        pass
    with pytest.raises(rd.FailedPreconditionError, match="can't enter the scope"), strategy.scope():
        pass


def test_an_error_leaves_with_unchanged() -> None:
    with pytest.raises(KeyError, match="mine"), rd.OneDeviceStrategy():
        raise KeyError("mine")
