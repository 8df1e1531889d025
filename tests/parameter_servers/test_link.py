from __future__ import annotations

import pytest
import torch

import raydist as rd
from raydist.parameter_servers.closure_requests import Finish
from raydist.parameter_servers.link import fill, gone, pulled_by, too_late
from raydist.parameter_servers.requests import Pull, Push, PushKey, Sender


def test_what_is_pulled() -> None:
    assert pulled_by(Pull((1, 2))) == (1, 2)
    assert pulled_by(Push(Sender(0, 0), PushKey(0, 0), 0, (3,), ("dense",), pull=(3,))) == (3,)
    assert pulled_by(Finish()) == ()


def test_values_go_where_they_are_wanted() -> None:
    targets = {1: torch.nn.Parameter(torch.zeros(2)), 2: torch.zeros(3)}
    fill(targets, (2, 1), [])
    fill(targets, (2, 1), [torch.ones(3), torch.full((2,), 2.0)])
    assert (targets[1].tolist(), targets[2].tolist()) == ([2, 2], [1, 1, 1])
    with pytest.raises(rd.InvalidArgumentError, match="raydist bug: an answer must have the values of 2 slices, got 1"):
        fill(targets, (2, 1), [torch.ones(3)])


def test_errors_name_the_server() -> None:
    assert "parameter server 3" in str(too_late("parameter server 3", 1.5))
    assert gone("parameter server 3").actor == "parameter server 3"
