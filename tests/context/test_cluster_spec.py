from __future__ import annotations

from typing import Any

import pytest

import raydist as rd
from raydist.errors import InvalidArgumentError


def test_is_what_it_was_given() -> None:
    given = {"chief": ["a:1"], "worker": ("b:1", "c:1")}
    spec = rd.ClusterSpec(given)
    assert spec.as_dict() == {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    assert (spec.jobs, spec.num_tasks("worker"), spec.task_address("worker", 1)) == (["chief", "worker"], 2, "c:1")
    assert spec == rd.ClusterSpec(spec)
    assert hash(spec) == hash(rd.ClusterSpec(spec))
    assert spec != rd.ClusterSpec({})
    assert bool(spec)
    assert not rd.ClusterSpec({})


def test_what_it_tells_changes_nothing() -> None:
    spec = rd.ClusterSpec({"worker": ["a:1"]})
    spec.as_dict()["worker"].append("b:1")
    spec.job_tasks("worker").append("b:1")
    assert spec.num_tasks("worker") == 1


@pytest.mark.parametrize("given", [None, ["a:1"], {"worker": "a:1"}, {"worker": [1]}, {1: ["a:1"]}, {"worker": None}])
def test_anything_else_is_an_error(given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="is a dict of lists of addresses"):
        rd.ClusterSpec(given)


def test_tasks_that_are_not_there_are_errors() -> None:
    spec = rd.ClusterSpec({"worker": ["a:1"]})
    with pytest.raises(InvalidArgumentError, match=r"one of \['worker'\], got 'chief'"):
        spec.job_tasks("chief")
    for index in (-1, 1):
        with pytest.raises(InvalidArgumentError, match=rf"one of 0 \.\. 0, got {index}"):
            spec.task_address("worker", index)
