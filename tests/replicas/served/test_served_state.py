from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from raydist.replicas.served.served_state import ServedState

LOOKS: list[Callable[[Any], Any]] = [
    lambda state: len(state) == 1,
    lambda state: bool(state),
    lambda state: list(state) == ["a"],
    lambda state: "a" in state,
    lambda state: dict(state) == {"a": {"step": 1}},
    lambda state: {**state} == {"a": {"step": 1}},
    lambda state: state == {"a": {"step": 1}},
    lambda state: state["a"] == {"step": 1},
    lambda state: state["new"] == {} and len(state) == 2,
    lambda state: state.get("a") == {"step": 1},
    lambda state: [*state.items(), *state.values(), *state.keys()][1:] == [{"step": 1}, "a"],
    lambda state: state.pop("a") == {"step": 1} and not state,
    lambda state: state.setdefault("a", {}) == {"step": 1},
    lambda state: state | {} == {"a": {"step": 1}},
    lambda state: copy.copy(state) == copy.deepcopy(state) == state.copy() == {"a": {"step": 1}},
    lambda state: pickle.loads(pickle.dumps(state)) == {"a": {"step": 1}},
    lambda state: "step" in repr(state),
]


@pytest.mark.parametrize("look", LOOKS, ids=range(len(LOOKS)))
def test_whoever_looks_first_sees_what_there_is(look: Callable[[Any], Any]) -> None:
    state = ServedState()
    state["old"] = {}
    state.shut(lambda: state.update(a={"step": 1}))
    assert look(state)


def test_what_is_shut_asks_again_or_nobody() -> None:
    state, asked = ServedState(), []
    state.shut(lambda: asked.append(1))
    assert (len(state), len(state), asked) == (0, 0, [1])
    state.shut(lambda: asked.append(2))
    state.shut(None)
    assert (len(state), asked) == (0, [1])
    assert type(copy.deepcopy(state)) is not ServedState  # what is sent elsewhere is torch's own
