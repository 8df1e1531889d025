"""Classes as steps return them: derived from dict, tuple, UserDict and dataclasses, as transformers' are."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Cache", "Encoding", "Frozen", "ModelOutput", "Output", "Pair"]


class Output(OrderedDict[str, Any]):
    """Items, and a property of one of them."""

    @property
    def loss(self) -> Any:
        return self["loss"]


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """Fields, of which those that are not None are items too. It cannot be made of no value at all."""

    loss: Any = None
    logits: Any = None
    cache: Any = None
    text: Any = None

    def __post_init__(self) -> None:
        if all(getattr(self, each.name) is None for each in fields(self)):
            raise ValueError("no value")
        for each in fields(self):
            if getattr(self, each.name) is not None:
                OrderedDict.__setitem__(self, each.name, getattr(self, each.name))

    def __reduce__(self) -> Any:
        return ModelOutput, tuple(getattr(self, each.name) for each in fields(self))


class Cache:
    """A value beside tensors that is no tensor."""

    def __init__(self, size: int) -> None:
        self.size = size


class Encoding(UserDict[str, Any]):
    """A mapping around a dict, with an attribute beside it."""

    def __init__(self, data: dict[str, Any], count: int) -> None:
        super().__init__(data)
        self.count = count

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


class Pair(tuple[Any, ...]):
    """A tuple with a name."""

    @property
    def first(self) -> Any:
        return self[0]


@dataclass(frozen=True)
class Frozen:
    """Has an attribute that is no field, and a constructor that must not run again."""

    loss: Any

    def __post_init__(self) -> None:
        if type(self.loss) is not int:
            object.__setattr__(self, "double", 2 * self.loss)
