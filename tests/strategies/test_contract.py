"""Every strategy that `rd` exports keeps the contract; a new one is found here by itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import raydist as rd
from raydist.testing.strategy_contract import CHECKS, check_closing, check_program, check_strategy
from raydist.testing.training_program import MODELS, Program

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


@dataclass(frozen=True)
class Makers:
    """Functions that make the strategies for the checks.

    Attributes:
        shared: The fixture of the session, and the size of the strategy that all checks use.
        new: One that the check closes; None where another file has the check.
    """

    shared: tuple[str, int]
    new: Callable[[], rd.Strategy] | None


MAKERS: dict[type[rd.Strategy], Makers] = {
    rd.CentralStorageStrategy: Makers(
        ("central", 2), lambda: rd.CentralStorageStrategy(1, resources_per_replica={"CPU": 0.01})
    ),
    rd.MirroredStrategy: Makers(("mirrored", 2), lambda: rd.MirroredStrategy(1, resources_per_replica={"CPU": 0.01})),
    # Of one worker: several do not train as a bare loop does, and have more devices than there are replicas in sync.
    rd.ParameterServerStrategy: Makers(("served", 1), None),  # test_parameter_server.py closes one
    # Workers that share a node are replicas as those of the one above; test_multi_worker.py has two nodes.
    rd.MultiWorkerMirroredStrategy: Makers(
        ("workers", 2), lambda: rd.MultiWorkerMirroredStrategy(2, 1, resources_per_replica={"CPU": 0.01})
    ),
}
# Workers that share a node are replicas as those of MirroredStrategy; test_multi_worker.py has two nodes.
LONG = {rd.MultiWorkerMirroredStrategy}
# Below; in test_sharded.py, where not all of it holds; and in test_tpu.py, which has the hosts of a slice.
ELSEWHERE = {rd.MeshStrategy, rd.OneDeviceStrategy, rd.PipelineStrategy, rd.ShardedStrategy, rd.TPUStrategy}


@pytest.mark.parametrize(
    "cls", [pytest.param(cls, marks=pytest.mark.long if cls in LONG else (), id=cls.__name__) for cls in MAKERS]
)
def test_contract(cls: type[rd.Strategy], ray_cluster: None, request: pytest.FixtureRequest) -> None:
    fixture, size = MAKERS[cls].shared
    strategy = request.getfixturevalue(fixture)(size)
    for check in CHECKS:
        check(strategy)
    if (new := MAKERS[cls].new) is not None:
        check_closing(new)


def test_every_exported_strategy_is_checked() -> None:
    public = [getattr(rd, name) for name in rd.__all__]
    classes = {value for value in public if isinstance(value, type) and issubclass(value, rd.Strategy)}
    exported = {cls for cls in classes if not inspect.isabstract(cls)}
    missing = sorted(cls.__name__ for cls in exported - set(MAKERS) - ELSEWHERE)
    assert not missing, f"add how to make {', '.join(missing)} to MAKERS in tests/strategies/test_contract.py"


def test_a_strategy_from_elsewhere_is_checked_in_one_call() -> None:
    check_strategy(rd.OneDeviceStrategy)


@st.composite
def programs(draw: st.DrawFn, model: str) -> Program:
    batch_size = draw(st.integers(1, 5))
    return Program(
        model=model,
        optimizer=draw(st.sampled_from(["sgd", "adamw"])),
        num_rows=draw(st.integers(1, 3 * batch_size + 1)),
        batch_size=batch_size,
        clip=draw(st.booleans()),
        accumulate=draw(st.integers(1, 2)),
        schedule=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize(
    ("fixture", "size"),
    [
        ("mirrored", 3),
        ("central", 2),
        *(pytest.param("mirrored", size, marks=pytest.mark.long) for size in (1, 2, 4)),
        pytest.param("central", 3, marks=pytest.mark.long),
    ],
)
def test_programs_drawn_at_random_train_what_a_bare_loop_trains(
    fixture: str, size: int, ray_cluster: None, request: pytest.FixtureRequest
) -> None:
    strategy: rd.Strategy = request.getfixturevalue(fixture)(size)
    for model in sorted(MODELS):

        @settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
        @given(programs(model))
        def each(program: Program) -> None:
            check_program(program, strategy)

        each()
