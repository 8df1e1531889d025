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
from tests.shared_strategies import few_workers
from tests.xla_world import TPU_LIMIT_S

OnReplicas = Callable[[int], rd.MirroredStrategy]


@dataclass(frozen=True)
class Makers:
    """Functions that make the strategies for the checks.

    Attributes:
        shared: One that all checks use, from the fixtures of the session.
        new: One that the check closes.
        marks: Of the tests that do.
    """

    shared: Callable[[pytest.FixtureRequest], rd.Strategy]
    new: Callable[[], rd.Strategy]
    marks: tuple[pytest.MarkDecorator, ...] = ()


def _two_mirrored(request: pytest.FixtureRequest) -> rd.Strategy:
    on_replicas: OnReplicas = request.getfixturevalue("mirrored")
    return on_replicas(2)


def _two_workers(request: pytest.FixtureRequest) -> rd.Strategy:
    strategy: rd.Strategy = request.getfixturevalue("two_workers")
    return strategy


def _tpu(request: pytest.FixtureRequest) -> rd.Strategy:
    strategy: rd.Strategy = request.getfixturevalue("tpu")
    return strategy


MAKERS: dict[type[rd.Strategy], Makers] = {
    rd.OneDeviceStrategy: Makers(shared=lambda _: rd.OneDeviceStrategy("cpu"), new=rd.OneDeviceStrategy),
    rd.CentralStorageStrategy: Makers(
        shared=lambda request: request.getfixturevalue("central")(2),
        new=lambda: rd.CentralStorageStrategy(2, resources_per_replica={"CPU": 0.01}),
        marks=(pytest.mark.ray, pytest.mark.timeout(120)),
    ),
    rd.MirroredStrategy: Makers(
        shared=_two_mirrored,
        new=lambda: rd.MirroredStrategy(2, resources_per_replica={"CPU": 0.01}),
        marks=(pytest.mark.ray, pytest.mark.timeout(120)),
    ),
    rd.TPUStrategy: Makers(
        shared=_tpu,
        new=lambda: rd.TPUStrategy(accelerator_version="v5litepod"),
        marks=(pytest.mark.ray, pytest.mark.timeout(TPU_LIMIT_S)),
    ),
    # Of one worker: several do not train as a bare loop does, and have more devices than there are replicas in sync.
    rd.ParameterServerStrategy: Makers(
        shared=lambda request: request.getfixturevalue("served")(1),
        new=lambda: few_workers(1),
        marks=(pytest.mark.ray, pytest.mark.timeout(120)),
    ),
    rd.MultiWorkerMirroredStrategy: Makers(
        shared=_two_workers,
        new=lambda: rd.MultiWorkerMirroredStrategy(2, 1, resources_per_replica={"CPU": 0.01}),
        marks=(pytest.mark.ray, pytest.mark.timeout(120)),
    ),
}
EACH = [pytest.param(cls, marks=makers.marks, id=cls.__name__) for cls, makers in MAKERS.items()]


@pytest.fixture(scope="module", params=EACH)
def each(request: pytest.FixtureRequest) -> tuple[rd.Strategy, Callable[[], rd.Strategy]]:
    """A strategy to share, and how to make a new one. Of the module, so that Ray is up before a test begins."""
    makers = MAKERS[request.param]
    return makers.shared(request), makers.new


def exported_strategies() -> set[type[rd.Strategy]]:
    """The strategies that a user can make."""
    public = [getattr(rd, name) for name in rd.__all__]
    classes = [value for value in public if isinstance(value, type) and issubclass(value, rd.Strategy)]
    return {cls for cls in classes if not inspect.isabstract(cls)}


def test_every_exported_strategy_is_checked() -> None:
    missing = sorted(cls.__name__ for cls in exported_strategies() - set(MAKERS))
    assert not missing, f"add how to make {', '.join(missing)} to MAKERS in tests/strategies/test_contract.py"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: str(check.__name__))
def test_contract(check: Callable[[rd.Strategy], None], each: tuple[rd.Strategy, Callable[[], rd.Strategy]]) -> None:
    check(each[0])


def test_closing(each: tuple[rd.Strategy, Callable[[], rd.Strategy]]) -> None:
    check_closing(each[1])


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


def check_programs(model: str, strategy: rd.Strategy, *, num_examples: int) -> None:
    """Programs drawn at random train what a bare loop trains."""

    @settings(max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(programs(model))
    def each(program: Program) -> None:
        check_program(program, strategy)

    each()


@pytest.mark.ray
@pytest.mark.timeout(240)
@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize(
    "num_replicas",  # the outer loop: strategies of four sizes are not kept
    [3, *(pytest.param(count, marks=pytest.mark.long) for count in (1, 2, 4))],
)
def test_parameters_equal_those_of_a_bare_loop(model: str, num_replicas: int, mirrored: OnReplicas) -> None:
    check_programs(model, mirrored(num_replicas), num_examples=4)


@pytest.mark.ray
@pytest.mark.timeout(240)
@pytest.mark.parametrize("model", sorted(MODELS))
def test_one_copy_trains_what_a_bare_loop_trains(
    model: str, central: Callable[[int], rd.CentralStorageStrategy]
) -> None:
    check_programs(model, central(3), num_examples=3)
