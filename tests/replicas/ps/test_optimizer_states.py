"""States of optimizers within a closure."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.parameter_servers.consistency import SyncWithBackups
from raydist.parameter_servers.slices import FixedShardsPartitioner
from raydist.replicas.ps.optimizer_states import PsOptimizerState
from tests.replicas.ps.ps_workers import servers
from tests.replicas.ps.test_variables import close, make, train, values

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


def test_whoever_looks_first_sees_what_there_is() -> None:
    for number, look in enumerate(LOOKS):
        state = PsOptimizerState()
        state["old"] = {}
        state.shut(functools.partial(state.update, a={"step": 1}))
        assert look(state), f"look {number}"


def test_what_is_shut_asks_again_or_nobody() -> None:
    state, asked = PsOptimizerState(), []
    state.shut(lambda: asked.append(1))
    assert (len(state), len(state), asked) == (0, 0, [1])
    state.shut(lambda: asked.append(2))
    state.shut(None)
    assert (len(state), asked) == (0, [1])
    assert type(copy.deepcopy(state)) is not PsOptimizerState  # what is sent elsewhere is torch's own


Step = Callable[[Any, Any], Any]
seen: list[Any] = []


def momentum() -> Sequence[Any]:
    return make("momentum")


def note(optimizer: Any) -> None:
    seen.append([state["momentum_buffer"].clone() for state in optimizer.state.values()])


def reads(model: Any, optimizer: Any) -> None:
    note(optimizer)
    train(model, optimizer, number=0)
    note(optimizer)
    held = optimizer.state[model[0].weight]
    buffer = held["momentum_buffer"]
    train(model, optimizer, number=1)
    seen.append([buffer.clone(), held["momentum_buffer"].clone()])


def clears(model: Any, optimizer: Any) -> None:
    optimizer.state.clear()
    train(model, optimizer, number=2)


def clears_at_the_end(model: Any, optimizer: Any) -> None:
    train(model, optimizer, number=2)
    optimizer.state.pop(model[2].bias)


def halves(model: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"].mul_(0.5)
    train(model, optimizer, number=3)
    optimizer.state[model[2].weight]["momentum_buffer"].data.zero_()


def loads(model: Any, optimizer: Any) -> None:
    kept = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, number=4)
    optimizer.load_state_dict(kept)
    note(optimizer)
    train(model, optimizer, number=5)
    note(optimizer)


def fails(model: Any, optimizer: Any) -> None:
    optimizer.state.clear()
    raise KeyError("bad")


def told(steps: Sequence[Step], run: Callable[[Step], Any], objects: Sequence[Any]) -> list[list[torch.Tensor]]:
    """Return the states that the steps noted, and the parameters after each step."""
    seen.clear()
    for step in steps:
        run(step)
        seen.append(values(objects[0]))
    return list(seen)


def test_a_closure_reads_and_changes_states_as_on_one_device() -> None:
    def check(step: Step) -> None:
        steps: list[Step] = [
            lambda *objects: train(*objects, number=7),
            step,
            lambda *objects: train(*objects, number=8),
            step,
        ]
        bare = momentum()
        expected = told(steps, lambda each: each(*bare), bare)
        with servers(2) as made:
            worker = made.worker(momentum, partitioner=FixedShardsPartitioner(2))
            found = told(steps, worker.run, worker.objects)
            assert list(map(len, found)) == list(map(len, expected)), step
            assert all(map(close, found, expected)), step
            assert not worker.objects[1].state  # nothing lies here between closures

    for step in (reads, clears, clears_at_the_end, halves, loads):
        check(step)


def test_what_a_failed_closure_did_to_states_counts() -> None:
    with servers() as made:
        worker, bare = made.worker(momentum), momentum()
        for run in (worker.run, lambda step: step(*bare)):
            run(lambda *objects: train(*objects, number=0))
            with pytest.raises(KeyError):
                run(fails)
            run(lambda *objects: train(*objects, number=1))
        assert close(values(worker.objects[0]), values(bare[0]))


def test_states_of_others_stay_and_a_closure_that_runs_again_writes_once() -> None:
    def zero(model: Any, optimizer: Any) -> None:
        optimizer.state[model[0].weight]["momentum_buffer"].zero_()

    def bias(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model[2].bias.sum().backward()
        optimizer.step()

    with servers() as made:
        one, two = made.worker(momentum), made.worker(momentum)
        one.run(lambda *objects: train(*objects, number=0))

        def zero_while_another_trains(model: Any, optimizer: Any) -> None:
            zero(model, optimizer)
            two.run(bias)

        one.run(zero_while_another_trains, closure=50)
        two.run(lambda *objects: train(*objects, number=1))
        two.run(zero, closure=50)
        bare = momentum()
        for step in (0, zero, bias, 1):
            train(*bare, number=step) if isinstance(step, int) else step(*bare)
        two.run(lambda *objects: note(objects[1]))
        assert close(seen[-1], [state["momentum_buffer"] for state in bare[1].state.values()])


def test_states_under_steps_of_several() -> None:
    bare = momentum()
    expected = told([clears, reads], lambda each: each(*bare), bare)
    with servers(2, SyncWithBackups(0)) as made:
        worker = made.worker(momentum)
        assert all(map(close, told([clears, reads], worker.run, worker.objects), expected))


def test_what_belongs_to_no_parameter_is_refused_not_dropped() -> None:
    with servers(2) as made:
        worker, bare = made.worker(momentum), momentum()
        for key in ("x", torch.ones(2)):
            with pytest.raises(
                rd.InvalidArgumentError, match=r"must belong to a parameter.* was given the key ('x'|a tens)"
            ):
                worker.run(lambda model, optimizer, key=key: optimizer.state.update({key: {"a": 1}}))
            train(*bare, number=0)
            worker.run(lambda *objects: train(*objects, number=0))
        assert close(values(worker.objects[0]), values(bare[0]))
