from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.run.joined_states import join_states, join_workers, split_state, split_workers

states = st.fixed_dictionaries({"seed": st.integers(0, 1), "at": st.integers(0, 2)}, optional={"dealt": st.just([1])})


@given(st.lists(states, min_size=1, max_size=4))
def test_states_come_apart_as_they_were(parts: list[dict[str, int]]) -> None:
    assert split_state(json.loads(json.dumps(join_states(parts))), len(parts)) == parts


@given(parts=st.lists(states, min_size=6, max_size=6), workers=st.sampled_from([1, 2, 3, 6]))
def test_workers_come_apart_whatever_their_number_of_pipelines(parts: list[dict[str, int]], workers: int) -> None:
    each = len(parts) // workers
    groups = [parts[start : start + each] for start in range(0, len(parts), each)]
    joined = join_workers([{**join_states(group), "step": number} for number, group in enumerate(groups)], 9)
    assert joined["step"] == 9
    found = split_workers(json.loads(json.dumps(joined)), workers, each)
    assert [state["step"] for state in found] == list(range(workers))
    assert [split_state(state, each) for state in found] == [
        [{**part, **({"step": number} if each == 1 else {})} for part in group] for number, group in enumerate(groups)
    ]


def test_pipelines_may_move_to_other_workers() -> None:
    joined = join_workers([{"at": 1, "step": 4}, {"at": 2, "step": 5}], 5)
    (one,) = split_workers(joined, 1, 2)
    assert split_state(one, 2) == [{"at": 1}, {"at": 2}]
    assert one["step"] == 5


def test_what_is_shared_is_said_once() -> None:
    assert join_states([{"seed": 1, "at": 2}] * 50) == {"seed": 1, "at": 2, "inputs": [{}] * 50}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"inputs": [{}, {}]}, "it is of 2, and there are 3 now"),
        ({"at": 1}, "it is of 1, and there are 3 now"),
        ({"inputs": [{}, {}, 3]}, "must be a dict"),
        ({"inputs": "abc"}, "must be a list, got 'abc'"),
        ({"inputs": 3}, "must be a list, got 3"),
        ([], "must be a dict"),
    ],
)
def test_states_that_do_not_fit(state: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        split_workers(state, 3, 1)
