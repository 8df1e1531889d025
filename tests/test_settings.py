from __future__ import annotations

import pickle

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.options.settings import SettingsGroup, count, group, one_of, optional_count, typed


class Inner(SettingsGroup):
    __slots__ = ()
    flag = typed(True, bool)
    limit = optional_count(None, 1)


class Outer(SettingsGroup):
    __slots__ = ()
    mode = one_of("a", "a", "b")
    size = count(3, 0)
    inner = group(Inner)


def test_defaults_and_values() -> None:
    outer = Outer(size=5)
    outer.inner.limit = 7
    assert (outer.mode, outer.size, outer.inner.flag, outer.inner.limit) == ("a", 5, True, 7)
    assert repr(outer) == "Outer(size=5, inner=Inner(limit=7))"


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no setting 'sise'. It has mode, size, inner"):
        Outer(sise=1)
    with pytest.raises(AttributeError, match="sise"):
        Outer().sise = 1  # type: ignore[attr-defined]  # the point of this test
    with pytest.raises(AttributeError, match="merge"):
        Outer(merge=1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mode", "c", "Outer.mode must be one of 'a', 'b', got 'c'"),
        ("size", -1, "Outer.size must be an int >= 0, got -1"),
        ("size", True, "must be an int >= 0, got True"),
        ("size", None, "must be an int >= 0, got None"),
        ("inner", {}, "Outer.inner must be a Inner, got {}"),
    ],
)
def test_wrong_types_are_type_errors(name: str, value: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        setattr(Outer(), name, value)
    with pytest.raises(TypeError, match="must be a bool, got 1"):
        Outer(inner=Inner(flag=1))


def test_only_what_was_given_is_merged() -> None:
    merged = Outer(size=1, inner=Inner(limit=2)).merge(Outer(mode="b", inner=Inner(flag=False)))
    assert merged == Outer(size=1, mode="b", inner=Inner(limit=2, flag=False))
    assert merged != Outer()


def test_merging_copies() -> None:
    first = Outer(inner=Inner(limit=2))
    merged = Outer().merge(first)
    merged.inner.limit = 9
    assert first.inner.limit == 2


def test_frozen_settings_cannot_be_changed_at_any_depth() -> None:
    frozen = Outer(size=1).frozen()
    with pytest.raises(InvalidArgumentError, match="cannot be changed"):
        frozen.size = 2
    with pytest.raises(InvalidArgumentError, match="cannot be changed"):
        frozen.inner.limit = 2
    assert frozen.merge(Outer(size=4)).size == 4


def test_they_can_be_sent() -> None:
    outer = Outer(size=1, inner=Inner(flag=False))
    assert pickle.loads(pickle.dumps(outer.frozen())) == outer
