"""A mirrored object is told apart by its class alone, and hardly by that."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from torch import nn

from raydist.mirroring.objects import MirroredClasses, is_mirrored_class
from tests.mirroring.in_process import Mirror


class Recorder:
    """An owner that writes down what is announced."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def before_read(self, obj: Any, name: str) -> None:
        self.seen.append(("read", name))

    def before_write(self, obj: Any, name: str) -> None:
        self.seen.append(("write", name))


class Thing:
    """Something with state."""

    def __init__(self) -> None:
        self.value = 1

    def double(self) -> int:
        return 2 * self.value


def test_accesses_are_announced() -> None:
    owner, thing = Recorder(), Thing()
    MirroredClasses(owner).mirror(thing)
    assert thing.double() == 2
    thing.value = 3
    del thing.value
    assert owner.seen == [("read", "double"), ("read", "value"), ("write", "value"), ("write", "value")]


@pytest.mark.parametrize("make", [lambda: nn.Linear(1, 1), Thing])  # a module has a `__getattr__` of its own
def test_an_attribute_error_of_the_owner_is_raised_as_it_is(make: Any) -> None:
    class Broken(Recorder):
        def before_read(self, obj: Any, name: str) -> None:
            if name == "weight":
                raise AttributeError("of the user's step")

    thing = make()
    MirroredClasses(Broken()).mirror(thing)
    for _ in range(2):
        with pytest.raises(AttributeError, match="of the user's step"):
            _ = thing.weight
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = thing.other


def test_class_looks_like_the_original() -> None:
    thing = Thing()
    classes = MirroredClasses(Recorder())
    classes.mirror(thing)
    assert isinstance(thing, Thing)
    assert thing.__class__ is Thing
    assert classes.original(thing) is Thing
    assert (type(thing).__name__, type(thing).__qualname__, type(thing).__module__) == ("Thing", "Thing", __name__)
    assert type(thing).__doc__ == Thing.__doc__
    assert is_mirrored_class(type(thing))
    assert not is_mirrored_class(Thing)
    for twin in (copy.copy(thing), copy.deepcopy(thing), pickle.loads(pickle.dumps(thing))):  # copies are plain
        assert type(twin) is Thing
        assert twin.value == 1
    assert type(thing) is not Thing


def test_class_equals_the_original() -> None:
    """As in `if type(module) == nn.Linear`, which torch's own documentation writes, and in tables of classes."""
    layer, other = nn.Linear(2, 1), nn.Linear(2, 1)
    linear: list[type] = [nn.Linear]
    MirroredClasses(Recorder()).mirror(layer)
    MirroredClasses(Recorder()).mirror(other)
    assert [type(layer)] == linear == [type(layer)] == [type(other)]
    assert [type(layer)] != [*map(type, [nn.ReLU()])]
    assert {nn.Linear: "linear"}[type(layer)] == "linear"
    assert type(layer) in (nn.Conv1d, nn.Linear)
    assert isinstance(nn.Linear(2, 1), type(layer))
    assert isinstance(other, type(layer))
    assert not isinstance(nn.ReLU(), type(layer))


def test_objects_that_the_program_makes_of_the_class_and_classes_that_it_derives_are_plain() -> None:
    layer: Any = nn.Linear(2, 1)
    MirroredClasses(Recorder()).mirror(layer)
    assert type(type(layer)(4, 3, bias=False)) is nn.Linear
    derived = type("Derived", (type(layer),), {})
    assert derived != nn.Linear
    assert isinstance(derived(3, 1), derived)
    assert derived(3, 1).in_features == 3
    assert not isinstance(nn.Linear(3, 1), derived)


def test_metaclass_of_the_program() -> None:
    class Counted(type):
        made = 0

        def __call__(cls, *args: Any) -> Any:
            Counted.made += 1
            return super().__call__(*args)

    class Own(metaclass=Counted):
        pass

    own = Own()
    MirroredClasses(Recorder()).mirror(own)
    assert type(type(own)()) is Own
    assert Counted.made == 2
    assert isinstance(type(own), Counted)


class Derived(nn.Linear):
    @property
    def width(self) -> int:
        return self.in_features

    def __getattr__(self, name: str) -> Any:
        return 42 if name == "magic" else super().__getattr__(name)


def test_properties_and_getattr(mirror: Mirror) -> None:
    with mirror.scope():
        model = Derived(2, 1)
    assert mirror.run(lambda: (model.width, model.magic)) == [(2, 42)] * 2
    assert (model.width, model.magic) == (2, 42)
    with pytest.raises(AttributeError, match="'Derived' object has no attribute 'nothing'"):
        _ = model.nothing
    assert repr(model).startswith("Derived(")


def test_init_subclass_runs_for_classes_of_the_program_only() -> None:
    told: list[str] = []

    class Base:
        def __init_subclass__(cls, *, kind: str) -> None:
            told.append(kind)

    class Convolution(Base, kind="c"):
        def __init_subclass__(cls, **kinds: str) -> None:
            super().__init_subclass__(kind="d")

    for cls in (Base, Convolution):
        thing = cls()
        MirroredClasses(Recorder()).mirror(thing)
        assert is_mirrored_class(type(thing))
    assert told == ["c"]

    class Deeper(Convolution):
        pass

    class Other(Base, kind="o"):
        pass

    assert told == ["c", "d", "o"]
