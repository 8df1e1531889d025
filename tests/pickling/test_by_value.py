"""References that lead to a mirrored object."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist.pickling.by_value import ByValuePolicy, global_names, is_installed, is_installed_name, referenced_globals
from raydist.pickling.pickler import dumps, loads
from tests.cases import case
from tests.mirroring.in_process import Mirror


class Target:
    """Stands for a mirrored object."""


TARGET = Target()
OTHER = [1, 2, 3]


def direct() -> object:
    return TARGET


def nested() -> Callable[[], object]:
    return lambda: TARGET


def through() -> object:
    return direct()


def innocent(*_: object) -> object:
    return OTHER


def recursive(n: int) -> object:
    return recursive(n - 1) if n else OTHER


@functools.wraps(direct)
def wrapped() -> object:
    return OTHER


class Holder:
    attribute: Any = None

    def __init__(self, value: object) -> None:
        self.value = value

    def method(self) -> object:
        return self.value


class GlobalMethod:
    def method(self) -> object:
        return TARGET


class Property:
    @property
    def target(self) -> object:
        return TARGET


class Static:
    @staticmethod
    def target() -> object:
        return TARGET


class Inherits(GlobalMethod):
    pass


def closure() -> Callable[[], object]:
    held = {"deep": [(TARGET,)]}
    return lambda: held


def unset_closure() -> Callable[[], object]:
    def inner() -> object:
        return later

    if OTHER:
        return inner
    later = TARGET
    return inner


def default(value: object = TARGET) -> object:
    return value


def keyword(*, value: object = TARGET) -> object:
    return value


@contextlib.contextmanager
def context() -> Iterator[object]:
    yield TARGET


@torch.no_grad()
def without_gradients() -> object:
    return TARGET


class Slots:
    __slots__ = ("held", "unset")

    def __init__(self, held: object) -> None:
        self.held = held


class Surprising:
    """Answers nothing that is asked by way of attributes."""

    def __init__(self, held: object) -> None:
        object.__setattr__(self, "held", held)

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __bool__(self) -> bool:
        raise RuntimeError("asked for its truth")

    __hash__ = None  # type: ignore[assignment]  # as classes that compare by value have it


LOOP: list[Any] = []
LOOP.append(LOOP)


def reach() -> ByValuePolicy:
    return ByValuePolicy(lambda obj: type(obj) is Target)


def test_reaches() -> None:
    reaching: list[Any] = [direct, nested, through, closure(), default, keyword, wrapped]
    reaching += [functools.partial(innocent, TARGET), functools.partial(direct), Holder(TARGET), Holder(TARGET).method]
    reaching += [GlobalMethod, GlobalMethod().method, GlobalMethod(), Property, Property(), Static, Static.target]
    reaching += [Inherits, Inherits(), [{"a": direct}], {TARGET}, context, without_gradients, Slots(TARGET)]
    reaching += [{TARGET: 1}, deque([TARGET]), [TARGET].append, types.SimpleNamespace(a=TARGET), in_class_body]
    reaching += [type("Made", (torch.nn.Module,), {"held": TARGET}), [Surprising(TARGET)]]
    for obj in reaching:
        with case(str(type(obj)) if isinstance(obj, list) else repr(obj)):
            assert reach().reaches(obj)


def test_does_not_reach() -> None:
    innocents: list[Any] = [innocent, recursive, unset_closure(), Holder(1), Holder(1).method, Holder, LOOP]
    innocents += [torch.nn.Linear, torch.relu, len, "text", None, functools.partial(innocent, 1)]
    innocents += [types.SimpleNamespace, Slots(1), torch.ops, functools.cache(innocent), torch.no_grad()(innocent)]
    innocents += [attribute_of_that_name, [Surprising(1)]]
    for number, obj in enumerate(innocents):
        assert not reach().reaches(obj), number
    assert global_names(attribute_of_that_name.__code__)[0] == ()
    one = reach()  # answers do not depend on the order
    answers = [one.reaches(obj) for obj in (innocent, through, direct, recursive, through)]
    assert answers == [False, True, True, False, True]


def test_library_functions_go_by_name() -> None:
    for obj, by_value in ((torch.nn.functional.relu, False), (functools.partial, False), (direct, True)):
        assert reach().by_value(obj) is by_value  # type: ignore[arg-type]
    assert not reach().by_value(innocent)  # type: ignore[arg-type]
    assert referenced_globals(nested) == {"TARGET": TARGET}  # type: ignore[arg-type]
    module = types.ModuleType("someones_code")
    vars(module).update(target=TARGET, number=1, function=direct, torch=torch)
    assert set(reach().module_values(module)) == {"target", "function"}
    assert reach().module_values(torch) == {}


def attribute_of_that_name(x: Any) -> object:
    return x.TARGET


def in_class_body() -> object:
    class Inner:
        held = TARGET

    return Inner


PACKAGE = """
import contextlib
import functools
import torch

silu = torch.nn.SiLU()

def activation(x):
    return silu(x)

@contextlib.contextmanager
def quiet():
    yield

class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    @quiet()
    def forward(self, x):
        return activation(self.linear(x))

class Twice(torch.nn.Module):
    def forward(self, x):
        return 2 * silu(x)

@functools.cache
def cached(x):
    return activation(x)

def scaled_by(scale):
    return lambda x: silu(x) * scale(x)

def made():
    return type("Made", (Plain,), {"forward": lambda self, x: activation(x)})

def __getattr__(name):
    raise AttributeError(f"a lazy module would import {name}")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package in a folder for installed ones, with a module among its globals."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "installed_package.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("installed_package")
    del sys.modules["installed_package"]


def test_installed_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = ("torch.nn", "torch.ops", "math", "json", "numpy.random", "raydist.core.values", "builtins")
    assert all(map(is_installed, installed))
    assert not any(map(is_installed, (__name__, "__main__", "raydist.testing.strategy_contract", "nowhere", None)))
    # As `pip install --target` does; a module of the program beside it is none.
    for name, text in {
        "put_there-1.0.dist-info/RECORD": "put_there/__init__.py,sha256=1,0\n",
        "put_there/__init__.py": PACKAGE,
        "put_beside.py": PACKAGE,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("put_there", "put_beside"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.import_module(name)
    assert is_installed("put_there")
    assert not is_installed("put_beside")


def test_installed_packages_are_pickled_by_name_and_objects_that_they_create_are_searched(package: Any) -> None:
    looked_at: list[Any] = []
    found = ByValuePolicy(lambda obj: looked_at.append(obj) or isinstance(obj, torch.nn.Module))  # type: ignore[func-returns-value]
    for obj in (package.activation, package.quiet, package.Plain, package.Plain.forward):
        assert is_installed_name(obj)
        assert not found.by_value(obj)
    assert looked_at == []
    assert not found.reaches([package, package.activation, package.Plain])
    assert package.silu not in looked_at
    assert reach().by_value(package.scaled_by(direct))
    assert not reach().by_value(package.scaled_by(innocent))
    assert reach().by_value(type("Mine", (package.Plain,), {"__module__": __name__, "held": TARGET}))
    made: Any = loads(dumps([package.scaled_by(torch.abs), package.made()], lambda obj: None), lambda pid: None)
    assert made[0].__globals__ is vars(package)
    assert made[1].forward.__globals__ is vars(package)
    assert made[1].__bases__ == (package.Plain,)
    assert made[0](torch.tensor(-2.0)) == package.silu(torch.tensor(-2.0)) * 2


@pytest.mark.parametrize("name", ["installed_package.generated", "generated"])
def test_modules_that_cannot_be_imported_are_pickled_by_value(
    name: str, package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch_geometric makes one for each kind of layer, from a temporary file."""
    file = tmp_path / "generated_x.py"
    file.write_text("class Size(tuple): pass\ndef propagate(self, x): return Size([x, x])\n")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(package.Plain, "propagate", module.propagate, raising=False)
    data = dumps([package.Plain, module.propagate, module.Size], lambda obj: None, policy=reach())
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(package.Plain, "propagate")
    loaded: Any = loads(data, lambda pid: None)
    plain, propagate, size = loaded
    assert plain is package.Plain
    assert [type(plain.propagate(None, 1)), type(propagate(None, 2))] == [size, size]
    assert not reach().by_value(Holder)  # an import finds this module


def test_a_function_that_replaces_an_installed_one_is_pickled_by_value(package: Any) -> None:
    original = package.activation

    @functools.wraps(original)
    def activation(x: Any) -> Any:
        return original(x) + 1

    package.activation = activation
    assert reach().by_value(activation)  # type: ignore[arg-type]  # wraps hides that it is a function
    assert not reach().by_value(original)


def test_a_model_of_an_installed_class_is_of_that_class_on_replicas(package: Any, mirror: Mirror) -> None:
    with mirror.scope():
        model = package.Plain()
    assert mirror.run(lambda: type(model) is package.Plain) == [True, True]
    assert b"silu" not in mirror.payloads[0].bundle


@functools.lru_cache(maxsize=2)
def cached() -> object:
    return TARGET


class CachedProperty:
    @functools.cached_property
    def target(self) -> object:
        return TARGET


def here(obj: Any) -> Any:
    """As an object arrives; what counts as mirrored is `TARGET` there as well."""
    data = dumps(obj, lambda found: ("target",) if found is TARGET else None, policy=reach())
    return loads(data, lambda pid: "the replica's")


def test_cached_functions_and_properties_that_use_a_mirrored_object_are_pickled_by_value(package: Any) -> None:
    arrived = here(cached)
    assert arrived() == "the replica's"
    assert arrived.cache_parameters() == {"maxsize": 2, "typed": False}
    assert here(CachedProperty)().target == "the replica's"
    assert here(functools.lru_cache(innocent))() is OTHER  # one that is not found under its name
    assert here(package.cached) is package.cached
    held = Holder(1)
    arrived = here([held, weakref.ref(held)])
    assert arrived[1]() is arrived[0]


def test_a_replaced_method_of_an_installed_class_is_sent(package: Any) -> None:
    original = package.Twice.forward
    package.Twice.forward = lambda self, x: original(self, x) + 1
    data = dumps([package.Twice, package.Twice()], lambda obj: None, policy=reach())
    package.Twice.forward = original  # as another process imports it
    cls, model = loads(data, lambda pid: None)
    assert cls is package.Twice
    assert cls.forward is not original
    assert torch.equal(model(torch.ones(1, 1)), original(model, torch.ones(1, 1)) + 1)
    assert b"forward" not in dumps(torch.nn.Linear, lambda obj: None, policy=reach())
