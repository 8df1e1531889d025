"""Every strategy that `rd` exports keeps the contract; a new one is found here by itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import raydist as rd
from tests.contracts.strategy import CHECKS, check_closing, check_program, check_strategy
from tests.contracts.training_program import MODELS, Program

OnReplicas = Callable[[int], rd.MirroredStrategy]


@dataclass(frozen=True)
class Makers:
    """How the checks come by a strategy.

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


MAKERS: dict[type[rd.Strategy], Makers] = {
    rd.OneDeviceStrategy: Makers(shared=lambda _: rd.OneDeviceStrategy("cpu"), new=rd.OneDeviceStrategy),
    rd.MirroredStrategy: Makers(
        shared=_two_mirrored,
        new=lambda: rd.MirroredStrategy(2, resources_per_replica={"CPU": 0.01}),
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


@pytest.mark.ray
@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_parameters_equal_those_of_a_bare_loop(model: str, num_replicas: int, mirrored: OnReplicas) -> None:
    strategy = mirrored(num_replicas)

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(programs(model))
    def each(program: Program) -> None:
        check_program(program, strategy)

    each()
