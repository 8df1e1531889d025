from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import raydist as rd
from tests.coordinator.in_process import coordinated
from tests.coordinator.test_coordinator import scheduled


@pytest.mark.parametrize("use", [float, int, bool, lambda x: x + 1, lambda x: 1 - x, torch.exp, lambda x: f"{x:.2f}"])
def test_it_is_no_number(use: Any) -> None:
    with coordinated(1) as (coordinator, _, _):
        value = rd.RemoteValue(coordinator, scheduled(coordinator, lambda: 1.0))
        with pytest.raises(rd.InvalidArgumentError, match=r"strategy\.reduce"):
            use(value)
        coordinator.join()


def test_its_parts_are_values_and_it_prints_as_what_it_is() -> None:
    with coordinated(1) as (coordinator, _, _):
        value = rd.RemoteValue(coordinator, scheduled(coordinator, lambda: {"a": [1, 2]}))
        assert value["a"][1].get() == 2
        assert repr(value) == f"{value}" == "RemoteValue({'a': [1, 2]})"
        assert list(value["a"]) == [1, 2]
        assert value.fetch() is value.get()
        with pytest.raises(AttributeError, match=r"no attribute 'item'\. Use strategy\.reduce"):
            _ = value.item
        with pytest.raises(rd.InvalidArgumentError, match=r"can't be an argument of a closure"):
            pickle.dumps(value)
