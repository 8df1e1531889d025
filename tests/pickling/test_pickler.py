"""Step functions through a pickle: mirrored objects that they reach are the replica's own; errors name the way."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from raydist.core.errors import FailedPreconditionError
from raydist.core.values import PerReplica
from raydist.mirroring.step_pickler import pickle_error_path
from raydist.pickling.pickler import dumps, loads
from tests.mirroring.in_process import Mirror, linear

MODULE = """
import functools
import torch

model = None
weights = []
scale = 10

def helper(x):
    return model(x) * scale

def step(x):
    return helper(x).item(), id(model)

def untouched(x):
    return x + 1

def default(x, layer=None):
    return layer(x).item()

def list_step():
    return [id(w) for w in weights]

def logged(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*args)
    return wrapper

@logged
def decorated(x):
    return id(model)

class Trainer:
    def __init__(self, layer):
        self.layer = layer
        self.calls = 0
    def step(self, x):
        self.calls += 1
        return self.layer(x).item(), id(self.layer)
    def global_step(self, x):
        return id(model)
    @classmethod
    def class_step(cls, x):
        return id(model)
    @staticmethod
    def static_step(x):
        return id(model)
    def __call__(self, x):
        return id(self.layer)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An importable module of the user's."""
    (tmp_path / "user_library.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("user_library")
    del sys.modules["user_library"]


def ids(mirror: Mirror, layer: nn.Module) -> list[int]:
    """Identity of the layer on each replica."""
    return mirror.run(lambda: id(layer))


ONES = torch.ones(2)


def test_every_way_to_reach_a_model(mirror: Mirror, layer: nn.Linear) -> None:
    own = ids(mirror, layer)

    def default(model: nn.Module = layer) -> int:
        return id(model)

    def keyword(*, model: nn.Module = layer) -> int:
        return id(model)

    def identity(model: nn.Module) -> int:
        return id(model)

    class Trainer:
        def __init__(self) -> None:
            self.layers = {"a": layer}

        def step(self) -> int:
            return id(self.layers["a"])

        __call__ = step

    for fn in (default, keyword, functools.partial(identity, layer), Trainer().step, Trainer()):
        assert mirror.run(fn) == own, fn
    assert mirror.run(identity, layer) == own
    assert mirror.run(identity, model=layer) == own
    assert mirror.run(lambda nest: id(nest["models"][0]), {"models": [layer]}) == own
    assert id(layer) not in own
    for method in (layer.forward, layer):
        assert [value.item() for value in mirror.run(method, ONES)] == [3.0, 3.0]


def test_imported_functions_and_classes_that_reach_a_model(library: Any, mirror: Mirror) -> None:
    library.model = layer = linear(mirror)
    library.weights = list(layer.parameters())
    own = ids(mirror, layer)
    assert mirror.run(library.step, ONES) == [(30.0, own[0]), (30.0, own[1])]
    trainer, from_import = library.Trainer(layer), library.step
    assert mirror.run(trainer.step, ONES) == [(3.0, own[0]), (3.0, own[1])]
    steps = [library.decorated, lambda x: library.step(x)[1], lambda x: from_import(x)[1], trainer]
    steps += [trainer.global_step, library.Trainer.class_step, library.Trainer.static_step]
    steps += [lambda x: trainer.global_step(x)]
    for step in steps:
        assert mirror.run(step, ONES) == own, step
    seen = mirror.run(library.list_step)
    assert seen == [[id(replica.parameters()[0])] for replica in mirror.replicas]
    assert mirror.run(lambda: library.untouched) == [library.untouched] * 2
    mirror.run(library.untouched, 1)  # without mirrored objects functions are pickled by name
    assert mirror.bytes_of_last["function"] < 150


def test_other_objects_are_copied_to_replicas(mirror: Mirror, layer: nn.Linear) -> None:
    mirror.run(lambda: layer.training)
    log: list[int] = []

    def step() -> int:
        log.append(1)
        return len(log)

    assert mirror.run(step) == [1, 1]
    assert mirror.run(step) == [2, 2]
    assert log == []
    base = torch.arange(6, dtype=torch.bfloat16)
    view, leaf, alias = base[::2], torch.ones(2, requires_grad=True), layer.weight.detach()
    views = lambda: (view.tolist(), view.data_ptr() == base.data_ptr(), view.dtype, leaf.requires_grad)  # noqa: E731
    assert mirror.run(views) == [([0.0, 2.0, 4.0], True, torch.bfloat16, True)] * 2
    mirror.run(lambda: layer.weight.data.add_(1).sum())
    assert mirror.run(lambda: alias.tolist()) == [[[2.0, 3.0]]] * 2
    for _ in range(2):  # more functions than are kept
        for number in range(70):
            assert mirror.run(lambda n=number: n) == [number] * 2
    assert len(mirror.replicas[0]._functions._functions) == 64


def test_per_replica_arguments(mirror: Mirror) -> None:
    images, labels = PerReplica([torch.zeros(2), torch.ones(2)]), PerReplica([3, 4])
    step = lambda batch, scale: (batch[0].sum().item() * scale, batch[1])  # noqa: E731
    assert mirror.run(step, (images, labels), scale=2) == [(0.0, 3), (4.0, 4)]
    assert mirror.run(lambda pair: pair[0] is pair[1], [images, images]) == [True, True]
    assert len(mirror.payloads[-1].per_replica) == 1
    values = PerReplica([1, 2])
    assert mirror.run(lambda: values) == [1, 2]
    values = PerReplica([5, 6])
    assert mirror.run(lambda: values) == [5, 6]


def test_injected(mirror: Mirror) -> None:
    strategy = types.SimpleNamespace(name="driver", lock=threading.Lock())
    payload = mirror.driver.prepare(lambda: strategy, injected={"strategy": strategy})
    mirror.driver.dispatched()
    replica = mirror.replicas[0]
    replica.injected.drop("strategy")
    replica.injected.add("strategy", lambda: "the replica's")
    function, args, kwargs = replica.apply(payload, ())
    assert function(*args, **kwargs) == "the replica's"


def test_errors_name_the_path_to_an_unpicklable_object(mirror: Mirror, layer: nn.Linear) -> None:
    lock = threading.Lock()
    with pytest.raises(FailedPreconditionError, match="closure variable 'lock' of <lambda>: _thread.lock"):
        mirror.run(lambda: lock)
    with pytest.raises(FailedPreconditionError, match=r"arguments of run, .* \[0\], \['a'\]: _thread.lock"):
        mirror.run(lambda x: x, {"a": lock})
    layer.lock = lock  # type: ignore[assignment]
    with pytest.raises(FailedPreconditionError, match="attribute 'lock' of Linear: _thread.lock"):
        mirror.run(lambda: layer.training)


def test_modules_of_their_own_classes_are_imported_by_name() -> None:
    def uses() -> tuple[object, bool]:
        return torch.ops.aten, torch.backends.cudnn.enabled

    found = loads(dumps((uses, torch.ops, torch.backends.mkldnn), lambda obj: None), lambda pid: None)
    assert found[0]() == uses()
    assert found[1:] == (torch.ops, torch.backends.mkldnn)


def test_submodules_that_were_imported_later_travel_with_the_function() -> None:
    """As with cloudpickle: a module whose import the function does not name itself is imported where it arrives."""
    here: dict[str, Any] = {"xml": importlib.import_module("xml"), "__name__": "__main__"}
    exec("def parse(): return xml.sax.handler", here)

    def submodules() -> list[str]:
        data = dumps(here["parse"], lambda obj: None)
        return sorted(name for name in ("xml.sax", "xml.sax.handler") if name.encode() in data)

    for name in [name for name in sys.modules if name.startswith("xml.sax")]:
        del sys.modules[name]
    assert submodules() == submodules() == []
    importlib.import_module("xml.sax.handler")
    assert submodules() == submodules() == ["xml.sax", "xml.sax.handler"]


LOCK = threading.Lock()


def can_pickle(obj: Any) -> bool:
    try:
        cloudpickle.dumps(obj)
    except TypeError:
        return False
    return True


class Holder:
    def __init__(self) -> None:
        self.inner = {"lock": LOCK}

    def method(self) -> None:
        return None


@dataclasses.dataclass(slots=True)
class Slotted:
    lock: Any


def closure() -> Callable[[], object]:
    lock = LOCK
    return lambda: lock


def test_way() -> None:
    loop: list[Any] = [LOCK]
    loop.insert(0, loop)
    table: list[tuple[Any, str]] = [
        (closure(), "closure variable 'lock' of <lambda>: _thread.lock"),
        (lambda x=LOCK: x, "a default of <lambda>: _thread.lock"),
        (lambda *, x=LOCK: x, "default of 'x' of <lambda>: _thread.lock"),
        (Holder(), "attribute 'inner' of Holder, ['lock']: _thread.lock"),
        (Holder().method, "self of Holder.method, attribute 'inner' of Holder, ['lock']: _thread.lock"),
        (functools.partial(len, [LOCK]), "arguments of a partial, [0], [0]: _thread.lock"),
        ([Slotted(LOCK)], "[0], attribute 'lock' of Slotted: _thread.lock"),
        (loop, "[1]: _thread.lock"),
        (LOCK, "the object itself: _thread.lock"),
    ]
    for obj, message in table:
        assert pickle_error_path(obj, can_pickle) == message
    assert pickle_error_path(lambda: LOCK, lambda obj: obj is not LOCK) == "global 'LOCK' of <lambda>: _thread.lock"
