"""The error of a step comes out with its type, its message and the user's frames, whatever the program does next."""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

import raydist as rd

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

PACKAGE = f"{Path(rd.__file__).parent}/"
"""The beginning of the file names of raydist's own modules in tracebacks."""


class Refused(Exception):
    """An exception that is not made from its message."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"refused with {code} at {where}")
        self.code = code


REASON = "the real reason"
KINDS: dict[str, tuple[type[BaseException], Callable[[], BaseException]]] = {
    "attribute": (AttributeError, lambda: AttributeError(REASON)),
    "missing": (AttributeError, lambda: getattr(nn.Linear(1, 1), "missing")),  # noqa: B009
    "stop": (StopIteration, lambda: StopIteration(REASON)),
    "key": (KeyError, lambda: KeyError(REASON)),
    "own": (Refused, lambda: Refused(7, where=REASON)),
    "group": (ExceptionGroup, lambda: ExceptionGroup(REASON, [ValueError("one"), KeyError("two")])),
    "exit": (rd.RaydistError, lambda: SystemExit(REASON)),  # it ends no other process
    "interrupt": (rd.RaydistError, lambda: KeyboardInterrupt(REASON)),
    "cancelled": (rd.CancelledError, lambda: rd.CancelledError(REASON)),
    "end": (rd.OutOfRangeError, lambda: rd.OutOfRangeError(REASON)),
}
TYPES = {kind: expected for kind, (expected, _) in KINDS.items()}


def failing(kind: str) -> None:
    """Raise an error of a kind."""
    raise KINDS[kind][1]()


def printed(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def require_reason(error: BaseException, kind: str) -> None:
    """Check type, message, notes and frames."""
    text = printed(error)
    assert type(error) is TYPES[kind], text
    assert "real reason" in str(error) or "missing" in str(error), text
    assert any("In step " in note and "on replica " in note for note in error.__notes__)
    frames = [line for line in text.splitlines() if line.strip(" |").startswith("File ")]
    assert __file__ in frames[0], text
    assert ", in failing" in text
    assert not any(PACKAGE in frame for frame in frames), text


def three_steps(strategy: rd.Strategy, step: Callable[[int], Any]) -> list[Any]:
    """The results of steps, the first of which fails; on one device it fails here."""
    return [strategy.run(step, args=(number,)) for number in range(3)]


class Trained:
    """A small model with all that a program reads after a step."""

    def __init__(self, strategy: rd.Strategy) -> None:
        with strategy.scope():
            self.model = nn.Linear(1, 1)
            self.optimizer = torch.optim.Adam(self.model.parameters())
            self.metric = torchmetrics.MeanMetric()
        self.strategy = strategy

    def run(self, kind: str) -> list[Any]:
        model, optimizer, metric = self.model, self.optimizer, self.metric

        def step(number: int) -> Any:
            loss = model(torch.ones(2, 1)).mean()
            loss.backward()
            optimizer.step()
            metric.update(loss.detach())
            if number == 0:
                time.sleep(0.2)  # the steps behind it are on their way
                failing(kind)
            return loss.detach()

        for number in (-1, -2):  # what it returns is known from then on
            self.strategy.local_results(self.strategy.run(step, args=(number,)))
        return three_steps(self.strategy, step)


READINGS: dict[str, Callable[[Trained, list[Any]], Any]] = {
    "reduce": lambda trained, results: trained.strategy.reduce("MEAN", results[-1]),
    "local_results": lambda trained, results: trained.strategy.local_results(results[0]),
    "values": lambda trained, results: results[1].values,
    "weights": lambda trained, results: results[1].weights,
    "print": lambda trained, results: print(results[-1]),
    "format": lambda trained, results: f"{results[0]}",
    "variable": lambda trained, results: trained.model.weight.sum().item(),
    "state_dict": lambda trained, results: trained.model.state_dict(),
    "optimizer": lambda trained, results: trained.optimizer.state_dict(),
    "metric": lambda trained, results: trained.metric.compute(),
    "stats": lambda trained, results: trained.strategy.stats(),
    "next": lambda trained, results: [trained.strategy.run(lambda: 1) for _ in range(30)],
}


def test_every_way_to_read_tells_the_reason(two: rd.MirroredStrategy) -> None:
    for reading, read in READINGS.items():
        kind = "stop" if reading in ("values", "state_dict", "next") else "attribute"
        trained = Trained(two)
        with pytest.raises(TYPES[kind]) as caught:
            pytest.fail(f"{reading} gave {read(trained, trained.run(kind))!r}")
        require_reason(caught.value, kind)
        assert two.run(lambda: 1).values == (1, 1), reading


def test_every_kind_of_error_is_told(two: rd.MirroredStrategy) -> None:
    for kind, expected in TYPES.items():
        trained = Trained(two)
        with pytest.raises(expected) as caught:
            two.reduce("MEAN", trained.run(kind)[-1])
        require_reason(caught.value, kind)


def test_a_step_that_was_given_up_has_the_first_error_as_its_cause(two: rd.MirroredStrategy) -> None:
    trained = Trained(two)
    first, second, third = trained.run("attribute")
    for result in (first, first):  # as often as it is read
        with pytest.raises(AttributeError, match="the real reason"):
            two.local_results(result)
    for result in (second, third, second):
        with pytest.raises(rd.CancelledError, match=r"because step \d+ failed \(AttributeError: the real") as caught:
            two.local_results(result)
        assert isinstance(caught.value.__cause__, AttributeError)
    assert two.run(lambda: 1).values == (1, 1)
    with pytest.raises(rd.CancelledError, match="AttributeError: the real reason"):  # of another generation by now
        two.local_results(third)


def draw(batches: Any, kind: str) -> int:
    for number, _ in enumerate(batches):
        if number == 1:
            failing(kind)
    return 1


def test_loops_in_the_replicas_tell_the_reason(two: rd.MirroredStrategy) -> None:
    for kind in ("stop", "own"):
        batches = two.distribute_dataset(rd.Dataset.range(16).batch(4))
        with pytest.raises(TYPES[kind]) as caught:
            two.local_results(two.run(draw, args=(iter(batches), kind)))
        require_reason(caught.value, kind)


class Failing(nn.Module):
    """A model that fails on the second batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x >= 4).any()):
            failing(self.kind)
        out: torch.Tensor = self.linear(x)
        return out


X = torch.arange(8.0).unsqueeze(1)
FITTED: dict[str, Callable[[rd.Model], Any]] = {
    "fit": lambda model: model.fit(X, X, batch_size=4, shuffle=False, verbose=False),
    "evaluate": lambda model: model.evaluate(X, X, batch_size=4, verbose=False),
    "predict": lambda model: model.predict(X, batch_size=4, verbose=False),
}


def test_models_tell_the_reason(two: rd.MirroredStrategy) -> None:
    calls = (("fit", "attribute"), ("evaluate", "stop"), ("predict", "attribute"))
    for strategy, (call, kind) in itertools.product((two, rd.OneDeviceStrategy("cpu")), calls):
        with strategy.scope():
            model = rd.Model(Failing(kind))
            model.compile("sgd", "mse")
        with pytest.raises(TYPES[kind]) as caught:
            pytest.fail(f"{call} gave {FITTED[call](model)!r}")
        assert "real reason" in str(caught.value)
        assert ", in failing" in printed(caught.value)
        assert "/raydist/training/" not in printed(caught.value)


def test_one_device_raises_the_error_itself() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    for number, kind in enumerate(TYPES):
        raised = {"exit": SystemExit, "interrupt": KeyboardInterrupt}.get(kind, TYPES[kind])
        with pytest.raises(raised) as caught:
            strategy.run(failing, args=(kind,))
        names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert names[:2] == ["test_one_device_raises_the_error_itself", "failing"]
        assert caught.value.__notes__ == [f"In step {number} on replica 0 (cpu)."]


def leave_unread(foreign: nn.Linear) -> None:
    """Close a strategy with the error of a step that nobody has read, after some that the program was told."""
    with rd.MirroredStrategy(1, resources_per_replica={"CPU": 0.01}) as strategy:
        with pytest.raises(rd.FailedPreconditionError, match=f"belongs to another one than {strategy._name}"):
            strategy.run(lambda: foreign.weight.sum())
        with pytest.raises(ZeroDivisionError):
            strategy.local_results(strategy.run(lambda: 1 / 0))
        strategy.run(failing, args=("attribute",))


def test_closing_tells_the_reason_that_nobody_has_read(two: rd.MirroredStrategy) -> None:
    model = Trained(two).model
    two.local_results(two.run(lambda: model.weight.item()))
    with pytest.raises(AttributeError) as caught:
        leave_unread(model)
    require_reason(caught.value, "attribute")


def odd(kind: str) -> Callable[[Any], Any]:
    def mapped(x: Any) -> Any:
        if x == 5:
            failing(kind)
        return x

    return mapped


def test_input_tells_the_reason(two: rd.MirroredStrategy) -> None:
    alone = rd.OneDeviceStrategy("cpu")
    readings: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("stop", lambda mapped: list(two.distribute_dataset(rd.Dataset.range(8).map(mapped).batch(4)))),
        ("key", lambda mapped: list(two.distribute_dataset(rd.Dataset.range(8).map(mapped).batch(4)))),
        ("attribute", lambda mapped: list(alone.distribute_dataset(rd.Dataset.range(8).map(mapped).batch(4)))),
        ("stop", lambda mapped: list(rd.Dataset.range(8).map(mapped).batch(4))),
        ("attribute", lambda mapped: rd.Dataset.range(5, 8).map(mapped).element_spec),
    )
    for kind, read in readings:
        with pytest.raises((TYPES[kind], RuntimeError)) as caught:
            pytest.fail(f"{kind} gave {read(odd(kind))!r}")
        assert ("StopIteration" if kind == "stop" else "real reason") in printed(caught.value)


def test_a_property_that_raises_is_not_called_missing() -> None:
    class Mine(rd.OneDeviceStrategy):  # type: ignore[misc]  # final
        @property
        def num_replicas_in_sync(self) -> int:
            raise AttributeError("the real reason")

    with pytest.raises(AttributeError, match="the real reason"):
        print(Mine("cpu").num_replicas_in_sync)


def test_frames_of_raydist_are_kept_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDIST_TRACEBACKS", "full")
    with pytest.raises(KeyError) as caught:
        rd.OneDeviceStrategy("cpu").run(failing, args=("key",))
    assert "one_device.py" in printed(caught.value)
