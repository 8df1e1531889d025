"""Combination of the states of several input pipelines into one, and back. A single pipeline keeps its state.

Entries that are equal in all states (seed, epoch, version) are stored once, so that the result stays small.
"""

from __future__ import annotations

from collections.abc import Sequence

from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.elements.saved_state import require_pipelines, require_state

_OWN = ("inputs", "steps", "step")


def join_states(states: Sequence[IteratorState]) -> IteratorState:
    """Return the states of several pipelines as one; the state of a single pipeline unchanged.

    >>> join_states([{"seed": 3, "skip": 1}, {"seed": 3, "skip": 0}])
    {'seed': 3, 'inputs': [{'skip': 1}, {'skip': 0}]}
    """
    if len(states) == 1:
        return states[0]
    return _joined(states)


def _joined(states: Sequence[IteratorState], leave_out: str = "") -> IteratorState:
    first, *others = states
    shared = {
        key: value
        for key, value in first.items()
        if key != leave_out and all(key in other and other[key] == value for other in others)
    }
    own = [{key: state[key] for key in state if key not in shared and key != leave_out} for state in states]
    return {**shared, "inputs": own}


def split_state(state: IteratorState, num_pipelines: int) -> list[IteratorState]:
    """Return the state of each of several pipelines from the result of `join_states`.

    Raises:
        InvalidArgumentError: `state` is invalid, or has another number of pipelines.

    >>> split_state({"seed": 3, "inputs": [{"skip": 1}, {"skip": 0}]}, 2)
    [{'seed': 3, 'skip': 1}, {'seed': 3, 'skip': 0}]
    """
    require_pipelines(require_state(state), num_pipelines)
    if not all(isinstance(part, dict) for part in state.get("inputs", [])):
        raise InvalidArgumentError(f"Each part of a state of several pipelines must be a dict, got {state!r:.200}.")
    return _parts(state)


def _parts(state: IteratorState) -> list[IteratorState]:
    if "inputs" not in state:
        return [state]
    shared = {key: value for key, value in state.items() if key not in _OWN}
    return [{**shared, **part} for part in state["inputs"]]


def join_workers(states: Sequence[IteratorState], step: int) -> IteratorState:
    """Return the states of the workers' step sources as one; each may cover several pipelines.

    >>> join_workers([{"skip": 1, "step": 4}, {"skip": 0, "step": 5}], 5)
    {'inputs': [{'skip': 1}, {'skip': 0}], 'steps': [4, 5], 'step': 5}
    """
    parts = [part for state in states for part in _parts(state)]
    return {**_joined(parts, "step"), "steps": [state.get("step", 0) for state in states], "step": step}


def split_workers(state: IteratorState, num_workers: int, num_pipelines: int) -> list[IteratorState]:
    """Return the state of each worker's step source from the result of `join_workers`.

    Raises:
        InvalidArgumentError: `state` is invalid, or has another number of pipelines.

    >>> split_workers({"inputs": [{"skip": 1}, {"skip": 0}], "steps": [4, 5], "step": 5}, 2, 1)
    [{'skip': 1, 'step': 4}, {'skip': 0, 'step': 5}]
    """
    parts = split_state(state, num_workers * num_pipelines)
    steps = state.get("steps", [])
    if not isinstance(steps, list) or len(steps) != num_workers:  # saved with another number of workers
        steps = [state.get("step", 0)] * num_workers
    of_workers = [parts[worker * num_pipelines : (worker + 1) * num_pipelines] for worker in range(num_workers)]
    return [{**join_states(of_one), "step": step} for of_one, step in zip(of_workers, steps, strict=True)]
